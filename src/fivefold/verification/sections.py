"""What a page says of one layout: its verdict, why, every comparison by name, and where its slices are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fivefold.report.slices import SliceMap, places, slice_map
from fivefold.verification.report import Group, first_wrong, groups, number, sentence
from fivefold.verification.results import WORDS, LayoutResult, Row

MODULES = (WORDS["output"], WORDS["backward"])
PARAMETERS = tuple(word for word in WORDS.values() if word not in MODULES)
CONTROL = "control"  # begins what is planted to be found: its error is meant


@dataclass(frozen=True)
class Matrix:
    """Comparisons by name: a column for each kind, None where a name has none."""

    kinds: tuple[str, ...]
    allowed: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Row | None, ...]], ...]


@dataclass(frozen=True, kw_only=True)
class Section:
    """What the page says of one layout."""

    id: str
    found: LayoutResult
    verdict: str
    says: str
    groups: Sequence[Group] = ()
    numbers: Sequence[Row] = ()
    matrices: Mapping[str, Matrix] = field(default_factory=dict)
    slices: SliceMap | None = None
    places: Sequence[str] = ()  # of each rank, in the mesh

    @property
    def not_told(self) -> Sequence[str]:
        """What its precision is too coarse for."""
        return tuple(self.found.not_told)

    @property
    def ran(self) -> bool:
        """There is something to show."""
        return bool(self.found.rows)


def section(found: LayoutResult, index: int) -> Section:
    named = [row for row in found.rows if row.what in WORDS.values()]
    matrices = {
        "Parameters": _matrix(found, [row for row in named if row.what in PARAMETERS]),
        "Modules, in order of execution": _matrix(found, [row for row in named if row.what in MODULES]),
    }
    slices = slice_map(found.holds)
    return Section(
        id=f"layout-{index}", found=found, verdict=verdict(found), says=_says(found), groups=groups(found.rows),
        numbers=[row for row in found.rows if row.what not in WORDS.values()],
        matrices={title: each for title, each in matrices.items() if each.rows}, slices=slices,
        places=places(found.layout, len(slices.shares) if slices else 0),
    )  # fmt: skip


def _says(found: LayoutResult) -> str:
    """The sentence beside a verdict."""
    row = first_wrong(found)
    if found.refused or not found.rows:
        why = found.refused or "nothing came back from it"
        return f"{why}; before that, it {sentence(row)}" if row else why
    if row:
        return sentence(row)
    measured = [each for each in found.rows if each.tolerance and not each.what.startswith(CONTROL)]
    if not measured or not any(each.error for each in measured):
        return "no difference at all"
    nearest = max(measured, key=lambda each: each.error / each.tolerance)
    of = f" of {nearest.where}" if nearest.where else ""
    return f"closest to its limit: {nearest.what}{of}, {number(nearest.error)} of {number(nearest.tolerance)} allowed"


def _matrix(found: LayoutResult, rows: Iterable[Row]) -> Matrix:
    listed = list(rows)
    kinds = tuple(word for word in WORDS.values() if any(row.what == word for row in listed))
    cells = {(name_of(row), row.what): row for row in listed}
    names = in_model_order(dict.fromkeys(name for name, _ in cells), found)
    allowed = tuple(_range([row.tolerance for row in listed if row.what == kind]) for kind in kinds)
    return Matrix(kinds, allowed, tuple((name, tuple(cells.get((name, kind)) for kind in kinds)) for name in names))


def name_of(row: Row) -> str:
    """The module or parameter of a row, without what is said of it."""
    return row.where.partition(" (")[0].partition(": ")[0]


def in_model_order(names: Iterable[str], found: LayoutResult) -> list[str]:
    """Parameters in the model's order; what is not known there as it comes."""
    order = {name: place for place, name in enumerate(found.holds)}
    if not order:
        order = {name_of(row): place for place, row in enumerate(found.rows) if row.what == WORDS["weight"]}
    return sorted(names, key=lambda name: order.get(name, len(order)))


def _range(values: Sequence[float]) -> str:
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} … {high}"


def verdict(found: LayoutResult) -> str:
    """PROVED, WRONG or NOT RUN."""
    if found.refused or not found.rows:
        return "NOT RUN"
    return "PROVED" if found.ok else "WRONG"
