"""`fivefold export`."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.terminal import say


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo, or its copy: s3://bucket/runs/demo.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Which checkpoint. Default: the newest.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run's model as a plain Hugging Face folder.

    Example: fivefold export runs/demo my-model
    """
    from fivefold.checkpoint.export import export as export_run

    export_run(run, out, step=step)
    say(f"{out} is a Hugging Face folder: transformers.AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it")
