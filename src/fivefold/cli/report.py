"""`fivefold report`."""

from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.core.terminal import say


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Default: RUN/report.html.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write one offline HTML page of a run: curves, who holds what, what is sent.

    Says what fivefold plan expected of a step, beside what was measured.

    Example: fivefold report runs/demo
    """
    from fivefold.planner.of_run import expected
    from fivefold.report.run import main

    path = main(run, out, expect=expected, tell=say)
    say(f"{path}: {path.stat().st_size / 1000:.0f} kB, one file that opens anywhere and fetches nothing")
