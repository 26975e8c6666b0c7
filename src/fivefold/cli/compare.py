"""`fivefold compare`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Debug, Html, Json
from fivefold.core.errors import UserError

if TYPE_CHECKING:
    from fivefold.comparison.report import CompareReport


def compare(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN.yaml ... key=value",
            help="Run files (none: the demo's), and keys to set in all of them.",
            show_default=False,
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="The run file once more, with this set. Repeat it.", show_default=False),
    ] = None,
    nproc: Annotated[
        str, typer.Option(metavar="N,N", help="Numbers of devices, such as 1,2,4.", show_default="as fivefold train")
    ] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each, each with another seed.")] = 3,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run.", show_default="the run file's")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Steps after a start that are not timed.")] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the runs.", show_default="runs/compare-...")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(metavar="LOG", help="Another trainer's log, or a run folder. Repeat it.", show_default=False),
    ] = None,
    json: Json = None,
    html: Html = None,
    debug: Debug = False,
) -> None:
    """Train configurations by turns: a table of throughput, scaling and loss.

    Example: fivefold compare run.yaml --vary precision.fp8=rowwise --nproc 1,2 --steps 50
    """
    from fivefold.comparison.configurations import words
    from fivefold.comparison.launch import Request, main
    from fivefold.report.table import write_with_page

    given = arguments or []
    files = [word for word in given if "=" not in word or Path(word).exists()]

    def publish(report: "CompareReport") -> None:
        write_with_page(report, json=json, html=html)

    request = Request(
        paths=[Path(file) for file in files], overrides=[word for word in given if word not in files],
        vary=[words(text) for text in vary or ()], nproc=_counts(nproc), repeats=repeats, steps=steps, warmup=warmup,
        out=out, against=against or [],
    )  # fmt: skip
    if not main(request, publish, quiet=json == "-").ok:
        raise typer.Exit(1)


def _counts(text: str) -> list[int]:
    """Parse `1,2,4` to sorted, distinct numbers. Raises `UserError`."""
    try:
        counts = sorted({int(word) for word in text.split(",")} if text else ())
        if counts and counts[0] < 1:
            raise ValueError
    except ValueError:
        raise UserError(f"--nproc {text} is no list of numbers of devices", fix="--nproc 1,2,4") from None
    return counts
