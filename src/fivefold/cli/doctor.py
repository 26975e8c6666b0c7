"""`fivefold doctor`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fivefold.cli.options import Debug, Json

if TYPE_CHECKING:
    from fivefold.report.table import Report


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="A model instead: how tp would split it.", show_default=False),
    ] = None,
    tp: Annotated[int, typer.Option(min=2, help="With MODEL: tensor parallel ranks.")] = 2,
    layout: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="With MODEL: the plan of a layout, such as shard64.tp8.", show_default=False),
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="With --layout: of which rank.")] = 0,
    seq_length: Annotated[int, typer.Option(min=1, help="With --layout: tokens of a row.")] = 4096,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Look at this machine, at a model, or at one rank of a layout.

    Example: fivefold doctor llama-3.1-8b --tp 8
    Example: fivefold doctor llama-3.1-8b --layout shard4.tp2 --rank 5
    """
    from fivefold.core.errors import UserError
    from fivefold.report.table import write

    if model is None and layout is not None:
        raise UserError("--layout needs a model", fix=f"fivefold doctor demo --layout {layout}, for example")
    if model is None:
        from fivefold.doctor.machine import examine

        report: Report[Any] = examine()
    elif layout is not None:
        from fivefold.doctor.plan import examine as examine_plan

        report = examine_plan(model, layout=layout, rank=rank, seq_length=seq_length)
    else:
        from fivefold.doctor.roles import examine as examine_model

        report = examine_model(model, tp=tp)
    write(report, json=json)
    if not report.ok:
        raise typer.Exit(1)
