"""`fivefold verify`."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Debug, Html, Json
from fivefold.cli.train import split_arguments

if TYPE_CHECKING:
    from fivefold.verification.report import VerifyReport


class Precision(StrEnum):
    """The precision of a layout whose text does not state one."""

    FP64, FP32, BF16, RUN = "fp64", "fp32", "bf16", "run"


def verify(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml key=value", help="A run file (none: the demo's), and keys to set.", show_default=False
        ),
    ] = None,
    layouts: Annotated[
        str, typer.Option(help="Layouts to prove, such as tp2,shard2.tp2+zero1.", show_default=False)
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A thin model and few steps: seconds.")] = False,
    thin: Annotated[bool, typer.Option("--thin", help="A layer of each kind, and narrow ones.")] = False,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps to train.", show_default="20; quick: 5")] = None,
    precision: Annotated[Precision, typer.Option(help="fp64 proves; run: as the run file says.")] = Precision.FP64,
    seq_length: Annotated[int | None, typer.Option(min=8, help="Tokens per row.", show_default="61")] = None,
    seed: Annotated[int, typer.Option(help="Fixes weights and documents.")] = 1234,
    rows: Annotated[bool, typer.Option("--rows", help="Show each kind of comparison.")] = False,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Prove that layouts compute what one process computes, or name what differs.

    Example: fivefold verify --quick --layouts tp2,shard2,shard2.tp2
    """
    path, overrides = split_arguments(arguments or [])
    from dataclasses import replace

    from fivefold.report.table import write_with_page
    from fivefold.verification import main

    def publish(report: "VerifyReport") -> None:
        write_with_page(replace(report, shows_all=rows), json=json, html=html)

    report = main(
        path, overrides, layouts=[text.strip() for text in layouts.split(",") if text.strip()], thin=thin, quick=quick,
        steps=steps, precision=precision.value, seq_length=seq_length, seed=seed, quiet=json == "-", publish=publish,
    )  # fmt: skip
    if not report.ok:
        raise typer.Exit(1)
