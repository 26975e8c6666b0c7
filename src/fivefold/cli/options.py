"""Options that several verbs have."""

from typing import Annotated

import typer

# Read by `fivefold.cli.main`, which prints every error; the verbs only list it in their help.
Debug = Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")]

Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write one offline page.", show_default=False)]
