"""Report of a command: rows of one kind, a flag whether all is well, and two output formats.

A `Report` is typed by its rows, frozen dataclasses whose field names are the columns.
"""

import json as json_format
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fivefold.core.files import put
from fivefold.core.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console

Row = TypeVar("Row")

# Colours of cells that state a result.
COLOURS = {"ok": "green", "help": "yellow", "missing": "red", "failed": "red"}


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Row]):
    """Report of a command: `title`, the rows in order, `ok` if the examined thing is fine, a closing sentence for
    people, and `details`, which only JSON shows."""

    title: str
    rows: tuple[Row, ...]
    ok: bool
    closing: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the rows' fields."""
        return tuple(each.name for each in fields(self.rows[0])) if self.rows else ()  # type: ignore[arg-type]

    def to_json(self) -> str:
        """One JSON object: title, ok, the rows as objects, and the details."""
        rows = [asdict(row) for row in self.rows]  # type: ignore[call-overload]
        values = {"title": self.title, "ok": self.ok, "rows": rows, **self.details}
        return json_format.dumps(values, indent=2, ensure_ascii=False)

    def show(self, console: "Console") -> None:
        """Print a table for people."""
        from rich.table import Table
        from rich.text import Text

        title = Text(shown(self.title))
        table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
        for number, column in enumerate(self.columns):
            table.add_column(column, overflow="fold", no_wrap=number == 0)
        for row in self.rows:
            cells: Mapping[str, Any] = asdict(row)  # type: ignore[call-overload]
            table.add_row(*(Text(shown(str(cell)), style=COLOURS.get(str(cell), "")) for cell in cells.values()))
        console.print(table)
        if self.closing:
            console.print(shown(self.closing), highlight=False, markup=False)


class Findings(Protocol):
    """Results of a command that can be shown in two formats."""

    def to_json(self) -> str: ...
    def show(self, console: "Console") -> None: ...


def write(report: Findings, *, json: str | None) -> None:
    """Show `report` on the terminal; `json` names a file to write as well, `-` prints JSON alone."""
    if json == "-":
        print(report.to_json())
        return
    if json:
        put(Path(json), f"{report.to_json()}\n".encode(), instead="name another file: --json FILE")
    from rich.console import Console

    report.show(Console())
