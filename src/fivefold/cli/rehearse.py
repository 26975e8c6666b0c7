"""`fivefold rehearse`."""

from enum import StrEnum
from typing import Annotated

import typer

from fivefold.cli.options import Debug, Html, Json
from fivefold.cli.train import split_arguments
from fivefold.core.errors import UserError


class Ranks(StrEnum):
    """Sets of ranks to rehearse, instead of one by its number."""

    ALL_KINDS = "all-kinds"


def rehearse(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml key=value", help="A run file (none: the demo's), and keys to set.", show_default=False
        ),
    ] = None,
    cluster: Annotated[
        str, typer.Option(metavar="TEXT", help="Cluster that it would run on, such as 16x8xH100.", show_default=False)
    ] = "",
    rank: Annotated[int | None, typer.Option(min=0, help="Rank to rehearse.", show_default="0")] = None,
    ranks: Annotated[
        Ranks | None, typer.Option(help="One of each kind: first, middle and last of a pipeline.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 2,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Random documents in place of data.train, and no tokenizer.")
    ] = False,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Run the real step of any rank of a cluster, without its devices: does it fit?

    Example: fivefold rehearse run.yaml --cluster 16x8xH100 --ranks all-kinds
    """
    if not cluster:
        raise UserError("rehearse needs a cluster", fix="fivefold rehearse RUN.yaml --cluster 8xH100")
    if rank is not None and ranks is not None:
        raise UserError("--rank and --ranks exclude each other", fix="leave one of them out")
    path, overrides = split_arguments(arguments or [])
    from fivefold.rehearsal.launch import rehearse as run
    from fivefold.report.table import write_with_page

    found = run(
        path, overrides, cluster=cluster, rank=rank, all_kinds=ranks is not None, steps=steps, synthetic=synthetic,
        quiet=not debug,
    )  # fmt: skip
    write_with_page(found, json=json, html=html)
    if not found.ok:
        raise typer.Exit(1)
