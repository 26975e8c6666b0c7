"""The findings of a command, as one record: tables, facts, notes and drawings in sections.

`to_text` shows it on a terminal, `to_html` as one HTML file. JSON is each report's own schema.
"""

import json as json_format
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from fivefold.core.files import put
from fivefold.core.system import versions
from fivefold.core.text import folded, shown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    from fivefold.report.curves import Drawing
    from fivefold.report.figures import Figure
    from fivefold.report.slices import SliceMap

LEAST = 12  # columns of the terminal that a folded name gets
# How the terminal shows a tone; the page has a CSS class for each.
STYLES = {"good": "green", "wrong": "bold red", "bad": "red", "warn": "yellow", "soft": "dim", "head": "bold"}


class On(Enum):
    """The place where a part is shown."""

    BOTH = "both"
    TERMINAL = "terminal"
    PAGE = "page"


@dataclass(frozen=True)
class Cell:
    """A text of a table or a line. `tone`: a key of `STYLES`, `zero`, or on the page a `chip`. Only the page shows
    `detail` (below the text), `hint` (under the pointer) and `link` (the `name` of a `Fold`)."""

    text: str
    tone: str = ""
    detail: str = ""
    hint: str = ""
    link: str = ""


@dataclass(frozen=True)
class Column:
    """A column. `kind`: `n` for numbers, `name` for long names, `says` for sentences. `on_page`: a longer heading.
    `folds`: on a terminal, a long name is folded before one of these characters, at `most` columns, or where the other
    columns leave no room. `tone`: of its cells on a terminal."""

    name: str
    kind: str = ""
    on_page: str = ""
    on: On = On.BOTH
    folds: str = ""
    most: int = 0
    tone: str = ""
    is_whole: bool = False  # a terminal does not wrap it

    @property
    def heading(self) -> str:
        return self.on_page or self.name


@dataclass(frozen=True)
class Row:
    """The cells of a row, one per column. `tone` `wrong` marks it."""

    cells: Sequence[Cell]
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under columns. A row that is only a text is the heading of those after it. `is_narrow`: a terminal leaves
    one space between columns. `look`: a CSS class of the page."""

    shape: ClassVar[str] = "table"
    columns: Sequence[Column]
    rows: Sequence[Row | str]
    caption: str = ""
    is_narrow: bool = False
    look: str = "stack"

    @classmethod
    def of_texts(cls, names: Sequence[str], rows: Sequence[Sequence[object]], tones: Mapping[str, str]) -> "Table":
        """A table of plain texts; a cell whose text is a key of `tones` has that tone."""
        columns = [
            Column(
                name,
                kind={"where": "name", "line": "name", "why": "says", "of": "says"}.get(name, ""),
                is_whole=not number,
            )
            for number, name in enumerate(names)
        ]
        return cls(columns, [Row([Cell(str(cell), tones.get(str(cell), "")) for cell in row]) for row in rows])

    def shown_on(self, where: On) -> list[tuple[Column, int]]:
        return [(column, number) for number, column in enumerate(self.columns) if column.on in (On.BOTH, where)]


@dataclass(frozen=True)
class Notes:
    """Lines of text: paragraphs, or a list. `tone`: see `STYLES`."""

    shape: ClassVar[str] = "notes"
    lines: Sequence[str]
    tone: str = ""
    is_list: bool = False
    indent: str = ""  # on a terminal


@dataclass(frozen=True)
class Facts:
    shape: ClassVar[str] = "facts"
    values: Mapping[str, str]


@dataclass(frozen=True)
class Plot:
    """A drawing for the page, and a text about it. `lines`: what stands for them on a terminal."""

    shape: ClassVar[str] = "plot"
    drawing: "Figure | Drawing | SliceMap"
    says: str = ""
    lines: Sequence[str] = ()

    @property
    def kind(self) -> str:
        """Name of the class of its drawing, by which the template draws it."""
        return type(self.drawing).__name__


@dataclass(frozen=True)
class Fold:
    """Parts under a line that opens them on the page. `name`: its anchor."""

    shape: ClassVar[str] = "fold"
    line: Sequence[Cell]
    parts: Sequence["Part"]
    name: str = ""
    is_open: bool = False


Part = Table | Notes | Facts | Plot | Fold


@dataclass(frozen=True)
class Section:
    """Parts under a title. `title` may be a line of cells."""

    parts: Sequence[Part]
    title: str = ""
    on: On = On.BOTH
    line: Sequence[Cell] = ()  # in place of the title on a terminal


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The findings of a command. `headline` and `ok` head the page; `ok` is None if nothing was judged."""

    command: str
    headline: str
    ok: bool | None = None
    sections: Sequence[Section] = field(default_factory=tuple)

    def shown_on(self, where: On) -> list[Section]:
        return [section for section in self.sections if section.on in (On.BOTH, where)]


def parts_of(parts: Sequence[Part]) -> Iterator[Part]:
    """All parts, those of folds included."""
    for part in parts:
        yield part
        if isinstance(part, Fold):
            yield from parts_of(part.parts)


# ---- on a terminal ---------------------------------------------------------------------------------------------------


def to_text(findings: Findings, console: "Console") -> None:
    """Print for people: the sections with an empty line between them."""
    from rich.text import Text  # not before something is shown

    for number, section in enumerate(findings.shown_on(On.TERMINAL)):
        if number:
            console.print()
        line = section.line or ([Cell(section.title, "head")] if section.title else ())
        if line:
            console.print(Text("  ").join(_text(cell) for cell in line))
        for part in section.parts:
            _print(part, console)


def _print(part: Part, console: "Console") -> None:
    match part:
        case Table():
            console.print(_grid(part, console.width))
        case Notes(lines=lines, tone=tone, indent=indent, is_list=is_list):
            for line in lines:
                line = f"- {line}" if is_list else line
                console.print(shown(f"{indent}{line}"), highlight=False, markup=False, style=STYLES.get(tone, ""))
        case Facts(values):
            widest = max(map(len, values), default=0)
            for name, value in values.items():
                line = shown(f"  {name:<{widest}}  {value}")
                console.print(line, highlight=False, markup=False, soft_wrap=True)
        case Plot(lines=lines):
            for line in lines:
                console.print(line, highlight=False, markup=False, no_wrap=True, overflow="ellipsis")
        case Fold(parts=parts):
            for inner in parts:
                _print(inner, console)


def _grid(table: Table, width: int) -> "Grid":
    from rich.table import Table as Grid  # as in `to_text`
    from rich.text import Text

    padding = (0, 1, 0, 0) if table.is_narrow else (0, 1)
    grid = Grid(box=None, header_style="dim", pad_edge=not table.is_narrow, padding=padding)
    shown_here = [(column, _texts(table, number)) for column, number in table.shown_on(On.TERMINAL)]
    widths = [max(map(len, "\n".join((column.name, *texts)).splitlines())) for column, texts in shown_here]
    columns = []
    for (column, texts), own in zip(shown_here, widths, strict=True):
        room = column.most or max(LEAST, width - sum(widths) + own - len(widths))
        lines = [_folded(text, column.folds, room) for text in texts] if column.folds else texts
        least = min(room, max(map(len, "\n".join(lines).splitlines()), default=0)) if column.folds else None
        is_number = column.kind == "n"
        grid.add_column(
            Text(shown(column.name)), justify="right" if is_number else "left", no_wrap=is_number or column.is_whole,
            overflow="fold", style=STYLES.get(column.tone, ""),
            min_width=least,
        )  # fmt: skip
        columns.append(lines)
    numbers = [number for _, number in table.shown_on(On.TERMINAL)]
    for at, row in enumerate(table.rows):
        if isinstance(row, str):
            grid.add_row(Text(shown(row), "bold"))
        else:
            tones = [STYLES.get(row.cells[number].tone or row.tone, "") for number in numbers]
            grid.add_row(*(Text(lines[at], tone) for lines, tone in zip(columns, tones, strict=True)))
    return grid


def _texts(table: Table, number: int) -> list[str]:
    """Texts of a column, "" in rows that are headings; a first column stands further in where there are any."""
    indent = "  " if number == 0 and any(isinstance(row, str) for row in table.rows) else ""
    return ["" if isinstance(row, str) else f"{indent}{shown(row.cells[number].text)}" for row in table.rows]


def _folded(text: str, before: str, room: int) -> str:
    indent = "    " if text.startswith("  ") else " "
    return folded(text, room, before=before, indent=indent)


def _text(cell: Cell) -> "Text":
    from rich.text import Text  # as in `to_text`

    return Text(shown(cell.text), STYLES.get(cell.tone, ""))


# ---- on a page, one self-contained HTML file -------------------------------------------------------------------------

SCRIPT = Path(__file__).with_name("curves.js")


def to_html(findings: Findings) -> str:
    parts = (part for section in findings.shown_on(On.PAGE) for part in parts_of(section.parts))
    plots = [part for part in parts if isinstance(part, Plot)]
    maps = [plot.drawing for plot in plots if plot.kind == "SliceMap"]
    has_curves = any(plot.kind == "Drawing" for plot in plots)
    return render("findings.html.j2", maps, script=SCRIPT if has_curves else None, findings=findings, page=On.PAGE)


def render(template: str, maps: Iterable[Any], *, script: Path | None = None, **values: Any) -> str:
    """Render `template` with `values`; control characters are written out as on a terminal. `maps`: the slice maps on
    the page. `script`: the only script that the page's policy allows, by its hash."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not before a page is written
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("fivefold.report", "."),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters["pixels"] = lambda value: f"{value:.1f}".removesuffix(".0")
    stripes = sorted({fill for slices in maps for fill in slices.fills if fill.startswith("ranks-")})
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    text = script.read_text(encoding="utf-8") if script else ""
    page = environment.get_template(template).render(
        stripes=stripes,
        versions=list(versions().items()),
        when=when,
        script=Markup(text),
        policy=_policy(text),
        **values,
    )
    return shown(page)


def _policy(script: str) -> str:
    """Security policy: nothing is fetched, and only `script` runs, if any."""
    allowed = f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'; " if script else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:"


# ---- reports of rows of one kind -------------------------------------------------------------------------------------

Result = TypeVar("Result")  # a frozen dataclass, whose field names are the columns

# Tones of cells that state a result.
TONES = {"ok": "good", "help": "warn", "missing": "bad", "failed": "bad"}


@dataclass(frozen=True, kw_only=True)
class Report(Generic[Result]):
    """Report of a command: `title`, the rows in order, `ok` if the examined thing is fine, a closing sentence for
    people, and `details`, which only JSON shows."""

    title: str
    rows: tuple[Result, ...]
    ok: bool
    closing: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(column.name for column in fields(self.rows[0])) if self.rows else ()  # type: ignore[arg-type]

    def to_json(self) -> str:
        """One JSON object: title, ok, the rows as objects, and the details."""
        rows = [asdict(row) for row in self.rows]  # type: ignore[call-overload]
        values = {"title": self.title, "ok": self.ok, "rows": rows, **self.details}
        return json_format.dumps(values, indent=2, ensure_ascii=False)

    @property
    def table(self) -> Table:
        values = [tuple(getattr(row, name) for name in self.columns) for row in self.rows]
        return Table.of_texts(self.columns, values, TONES)

    def findings(self) -> Findings:
        """The table under its title, and the closing sentence."""
        parts = (self.table, *((Notes([self.closing]),) if self.closing else ()))
        return Findings(command=self.title, headline="", ok=self.ok, sections=[Section(parts, self.title)])

    def show(self, console: "Console") -> None:
        to_text(self.findings(), console)


class Shown(Protocol):
    """Results of a command; those with a page also have `findings()`."""

    def to_json(self) -> str: ...
    def show(self, console: "Console") -> None: ...


def write(report: Shown, *, json: str | None, html: str | None = None) -> None:
    """Show `report` on the terminal; `json` names a file to write as well, `-` prints JSON alone; `html` names a page.

    The files are written first, because a closed pipe (`| head`) ends the command while it prints. The report is shown
    even if a file cannot be written: it may be the result of hours.
    """
    try:
        if json and json != "-":
            put(Path(json), f"{report.to_json()}\n".encode(), instead="name another file: --json FILE")
        if html:
            page = to_html(report.findings())  # type: ignore[attr-defined]
            put(Path(html), page.encode(), instead="name another file: --html FILE")
    finally:
        if json == "-":
            print(report.to_json())
        else:
            from rich.console import Console

            report.show(Console())
