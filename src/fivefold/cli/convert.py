"""`fivefold convert`."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.core.terminal import say


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A config of axolotl, LLaMA-Factory or TRL.")],
    devices: Annotated[int, typer.Option(min=1, help="Devices of the config: batches are of all of them.")] = 1,
    debug: Debug = False,
) -> None:
    """Print a config of axolotl, LLaMA-Factory or TRL as a run file.

    Comments name changed keys beside their lines, and keys without a counterpart at the head. Others are refused.

    Example: fivefold convert axolotl.yml --devices 8 > run.yaml
    """
    from fivefold.convert import convert as converted

    say(str(converted(file, devices=devices)).rstrip("\n"))
