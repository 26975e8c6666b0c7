"""`fivefold data`."""

from typing import Annotated

import typer

from fivefold.cli.options import Debug, Json
from fivefold.cli.train import split_arguments


def data(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml key=value", help="A run file (none: the demo's), and keys to set.", show_default=False
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Rows to show, in the order of training.")] = 2,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Show rows as the model will see them, and which tokens are trained.

    The run finds these tokens in the cache.

    Example: fivefold data run.yaml data.train.path=chat.jsonl --rows 3
    """
    path, overrides = split_arguments(arguments or [])
    from fivefold.config import load_config
    from fivefold.data import prepare
    from fivefold.data.shown import examine
    from fivefold.report.table import write

    write(examine(prepare(load_config(path, overrides)), rows), json=json)
