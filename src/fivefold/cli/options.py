"""Options that several verbs have."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.core.errors import UserError
from fivefold.core.files import check_place


def place(context: typer.Context, option: typer.CallbackParam, path: str | None) -> str | None:
    """A file that a verb will write, looked at before the verb begins. Raises `UserError` where none can be there."""
    instead = f"name {'another' if path else 'a'} file: {option.opts[0]} FILE"
    if path == "":
        raise UserError(f"{option.opts[0]} names no file", fix=instead)
    if path is not None and path != "-" and not context.resilient_parsing:
        check_place(Path(path), instead=instead)
    return path


# Read by `fivefold.cli.main`, which prints every error; the verbs only list it in their help.
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

Html = Annotated[
    str | None, typer.Option(metavar="FILE", help="Write one offline page.", show_default=False, callback=place)
]
Json = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="Write all of it as JSON; - prints JSON alone.", show_default=False, callback=place
    ),
]
