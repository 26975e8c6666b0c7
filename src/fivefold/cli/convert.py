"""`fivefold convert`."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.core.terminal import say


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A config of axolotl, LLaMA-Factory or TRL.")],
    devices: Annotated[
        int, typer.Option(min=1, help="What the config was written for: batches are of all of them.")
    ] = 1,
    debug: Debug = False,
) -> None:
    """Print a config of axolotl, LLaMA-Factory or TRL as a run file.

    What is changed is said beside its line, what has no counterpart at the head; what cannot be kept is refused.

    Example: fivefold convert axolotl.yml --devices 8 > run.yaml
    """
    from fivefold.convert import convert as converted

    say(str(converted(file, devices=devices)).rstrip("\n"))
