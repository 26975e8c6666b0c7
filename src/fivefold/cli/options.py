"""Options shared by several verbs."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fivefold.core.errors import UserError
from fivefold.core.files import check_place

PLACES = "fivefold.places"  # key in a command's context: file -> the option that writes it


def place(context: typer.Context, option: typer.CallbackParam, path: str | None) -> str | None:
    """Check a file that a verb will write, before the verb begins. Raises `UserError` if it cannot be written, or if
    another option writes the same one."""
    name = option.opts[0]
    instead = f"name {'another' if path else 'a'} file: {name} FILE"
    if path == "":
        raise UserError(f"{name} names no file", fix=instead)
    if path is None or context.resilient_parsing or (path == "-" and name == "--json"):
        return path
    if path == "-":
        raise UserError(f"{name} - names no file: --json alone writes to standard output", fix=instead)
    check_place(Path(path), instead=instead)
    if Path(path).is_file() or not Path(path).exists():  # several options may write to a device
        other = context.meta.setdefault(PLACES, {}).setdefault(Path(path).resolve(), name)
        if other != name:
            raise UserError(f"{path} is written by {other} and by {name}", fix=instead)
    return path


class Device(StrEnum):
    """The kind of device to compute on."""

    AUTO, CPU, CUDA = "auto", "cpu", "cuda"


# `fivefold.cli.main`, which prints every error, reads it; the verbs only list it in their help.
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write one offline page.", callback=place)]
Json = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write all of it as JSON; - prints JSON alone.", callback=place)
]

RunArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="RUN.yaml key=value", help="A run file (none: the demo's), and keys to set."),
]
RunOrModel = Annotated[
    str,
    typer.Argument(metavar="RUN_OR_MODEL", help="A run folder or its s3:// copy, a Hugging Face folder or a hub id."),
]
Step = Annotated[int | None, typer.Option(help="Step of the checkpoint of a run.", show_default="the newest")]
