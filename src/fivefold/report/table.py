"""Report of a command: rows of one kind, a flag whether all is well, and two output formats.

A `Report` is typed by its rows, frozen dataclasses whose field names are the columns.
"""

import json as json_format
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fivefold.core.files import put
from fivefold.report.findings import Findings, Notes, Section, Table, to_text

if TYPE_CHECKING:
    from rich.console import Console

Row = TypeVar("Row")

# Tones of cells that state a result.
TONES = {"ok": "good", "help": "warn", "missing": "bad", "failed": "bad"}


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
        return tuple(column.name for column in fields(self.rows[0])) if self.rows else ()  # type: ignore[arg-type]

    def to_json(self) -> str:
        """One JSON object: title, ok, the rows as objects, and the details."""
        rows = [asdict(row) for row in self.rows]  # type: ignore[call-overload]
        values = {"title": self.title, "ok": self.ok, "rows": rows, **self.details}
        return json_format.dumps(values, indent=2, ensure_ascii=False)

    @property
    def table(self) -> Table:
        """Its rows as a table."""
        values = [tuple(getattr(row, name) for name in self.columns) for row in self.rows]
        return Table.of_texts(self.columns, values, TONES)

    def findings(self) -> Findings:
        """The table under its title, and the closing sentence."""
        parts = (self.table, *((Notes([self.closing]),) if self.closing else ()))
        return Findings(command=self.title, headline="", ok=self.ok, sections=[Section(parts, self.title)])

    def show(self, console: "Console") -> None:
        """Print for people."""
        to_text(self.findings(), console)


class Shown(Protocol):
    """Results of a command that can be shown in two formats."""

    def to_json(self) -> str: ...
    def show(self, console: "Console") -> None: ...


class Paged(Shown, Protocol):
    """Results of a command that are also a page."""

    def findings(self) -> Findings: ...


def write(report: Shown, *, json: str | None, page: Callable[[], object] | None = None) -> None:
    """Show `report` on the terminal; `json` names a file to write as well, `-` prints JSON alone. `page` writes another
    file.

    The files are written first, because a closed pipe (`| head`) ends the command while it prints. The report is shown
    even if a file cannot be written: it may be the result of hours.
    """
    try:
        if json and json != "-":
            put(Path(json), f"{report.to_json()}\n".encode(), instead="name another file: --json FILE")
        if page:
            page()
    finally:
        if json == "-":
            print(report.to_json())
        else:
            from rich.console import Console

            report.show(Console())


def write_with_page(report: Paged, *, json: str | None, html: str | None) -> None:
    """Do as `write`; `html` names a page to write as well."""

    def page() -> None:
        from fivefold.report.render import write_page

        write_page(report.findings(), html or "")

    write(report, json=json, page=page if html else None)
