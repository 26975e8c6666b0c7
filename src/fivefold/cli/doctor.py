"""`fivefold doctor`."""

from typing import Annotated

import typer

from fivefold.cli.options import Debug


def doctor(
    json: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Write the findings as JSON; - prints JSON alone.", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Look at this machine: what is here, what is missing, what would help."""
    from fivefold.doctor import examine
    from fivefold.report import write

    report = examine()
    write(report, json=json)
    if not report.ok:
        raise typer.Exit(1)
