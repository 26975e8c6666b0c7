"""The request of `fivefold verify`, and the rows of a proof: what was compared, its error, its tolerance, and where the
worst error is. Loads no torch: the process that starts the workers reads their rows."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fivefold.core.optimizers import state_words
from fivefold.parallel.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 10.0  # ratio of tolerances to measured floors
LEAST = {"fp64": 1e-10, "fp32": 1e-6, "bf16": 1e-2}  # tolerances are never smaller
SMALL = 1e-6  # the norm in a relative error is at least this part of the whole's (a key's bias has zero gradient)

# Displayed names of the kinds of keys.
WORDS = {
    "weight": "weight", "output": "output", "backward": "gradient of output", "raw": "gradient, raw",
    "gradient": "gradient, reduced", "load": "load of experts", "clipped": "gradient, clipped", "update": "update",
    **state_words(), "second": "gradient, second step", "last": "weight, last step",
    "preference": "preference", "teacher": "teacher", "objective": "gradient of the objective",
}  # fmt: skip
# Kinds with tolerance 0.
BITWISE = ("weight",)
CONTROL = "control: a planted fault"  # its error is intended
# Comparisons that every proof makes, whatever its reference recorded.
ALWAYS = (
    "shards", "micro batches", "types", "rerun", CONTROL, "counts of a step", "gradients left after the step",
    "collectives", "replicas",
)  # fmt: skip


@dataclass
class Distance:
    """Sums over one rank's values of a key, from which its distance from the expected values follows."""

    squares: float = 0.0  # of the differences
    expected: float = 0.0  # squares of the expected values
    product: float = 0.0  # of found and expected
    differing: int = 0  # elements that are not equal
    elements: int = 0

    def add(self, found: "Tensor", expected: "Tensor") -> "Distance":
        """Add a piece. A NaN or infinity counts as an infinite difference."""
        found, expected = found.detach().cpu().double(), expected.cpu().double()
        difference = found - expected
        squares = float(difference.square().sum())
        self.squares += squares if math.isfinite(squares) else math.inf
        self.expected += float(expected.square().sum())
        self.product += float((found * expected).sum())
        self.differing += int((found != expected).sum())
        self.elements += expected.numel()
        return self

    @property
    def scale(self) -> float | None:
        """The factor between found and expected values, if they differ by a factor alone; else None."""
        if not self.expected or self.squares == math.inf:
            return None
        factor = self.product / self.expected
        rest = self.squares - (factor - 1) ** 2 * self.expected
        return factor if rest <= 1e-6 * self.squares else None


@dataclass(frozen=True)
class ComparisonRow:
    """One comparison. `error` and `tolerance` are relative to the norm of the compared tensor, unless `what` says
    otherwise. `where`: a module, a parameter or a step; and the ranks that are wrong, if only some are."""

    what: str
    error: float
    tolerance: float
    ok: bool
    where: str = ""

    @property
    def name(self) -> str:
        """The module or parameter of `where`: `a.b` of `a.b: 0.5 times the reference's (tp rank 1)`."""
        return self.where.partition(" (")[0].partition(": ")[0]

    @property
    def difference(self) -> str:
        """A text about a failed comparison, for people."""
        where = f" of {self.where}" if self.where else ""
        return f"first differs at {self.what}{where}: {number(self.error)} off, {number(self.tolerance)} allowed"


def number(value: float) -> str:
    """Format an error or a tolerance."""
    return "0" if value == 0 else f"{value:.1e}"


@dataclass
class LayoutResult:
    """The results of one layout. `refused`: why it did not run."""

    layout: str
    rows: list[ComparisonRow] = field(default_factory=list)
    refused: str = ""
    not_told: list[str] = field(default_factory=list)  # comparisons for which the precision is too coarse
    not_shown: list[str] = field(default_factory=list)  # modules whose values on a rank could not be located
    losses: list[float] = field(default_factory=list)
    holds: dict[str, Any] = field(default_factory=dict)  # parameter -> shape and the regions of each rank
    seconds: float = 0.0
    precision: str = "fp64"

    def add(self, row: ComparisonRow) -> None:
        """Add a row. If its tolerance is 1 or more, everything would pass: it goes to the `not_told` list instead."""
        if row.tolerance >= 1.0 and not row.what.startswith("logits"):
            self.not_told += [row.what] if row.what not in self.not_told else []
        else:
            self.rows.append(row)

    @property
    def ok(self) -> bool:
        """True if the layout ran and all rows are within their tolerance."""
        return not self.refused and bool(self.rows) and all(row.ok for row in self.rows)

    @property
    def verdict(self) -> str:
        """The verdict: PROVED, WRONG or NOT RUN."""
        if self.refused or not self.rows:
            return "NOT RUN"
        return "PROVED" if self.ok else "WRONG"

    @property
    def first_wrong(self) -> ComparisonRow | None:
        """The first failed comparison, in the order in which a step computes."""
        return next((row for row in self.rows if not row.ok), None)

    @property
    def why(self) -> str:
        """The reason why the layout is not proved, for people."""
        if self.first_wrong is None or self.refused:
            return f"not run: {self.refused or 'it left no result'}"
        return self.first_wrong.difference

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data."""
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> "LayoutResult":
        """Read the output of `to_json`."""
        return LayoutResult(**{**values, "rows": [ComparisonRow(**row) for row in values["rows"]]})


class Tolerances:
    """Tolerances by key: ten times the reference's distance from itself if sums are reassociated or inputs perturbed by
    one ulp. A distance counts as at least the median of its kind; a tolerance is at least that in `LEAST`."""

    def __init__(self, precision: str, floors: Mapping[str, float]) -> None:
        self._least, self._floors = LEAST[precision], floors
        kinds: dict[str, list[float]] = {}
        for key, floor in floors.items():
            kinds.setdefault(kind_of(key), []).append(floor)
        self._usual = {kind: median(values) for kind, values in kinds.items()}

    def of(self, key: str) -> float:
        """The tolerance of a key."""
        if key.startswith(BITWISE):
            return 0.0
        key = key.replace("raw/", "gradient/", 1) if key.startswith("raw/") else key
        floor = max(self._floors.get(key, 0.0), self._usual.get(kind_of(key), 0.0))
        return max(self._least, FACTOR * floor)


def kind_of(key: str) -> str:
    """The kind of a key: `output` for `output/model.norm`; a key without a name is its own kind."""
    return key.partition("/")[0]


def relative(distance: Distance, norm: float, floor: float) -> float:
    """The error of a rank's pieces relative to the whole tensor's norm."""
    scale = max(norm, floor)
    return distance.squares**0.5 / scale if scale else float(distance.squares > 0)


def relative_number(found: float, expected: float) -> float:
    """|found - expected| / |expected|; infinite if that is not finite."""
    error = abs(found - expected) / max(abs(expected), 1e-300)
    return error if math.isfinite(error) else math.inf


def judge(
    key: str, per_rank: Sequence[Distance | None], norm: float, floor: float, tolerance: float, layout: Layout
) -> ComparisonRow:
    """Make the row of a key from the distances on each rank."""
    kind, _, name = key.partition("/")
    errors = [0.0 if distance is None else relative(distance, norm, floor) for distance in per_rank]
    if kind in BITWISE:
        errors = [0.0 if distance is None else distance.differing / max(distance.elements, 1) for distance in per_rank]
    error = max(errors)
    bad = [rank for rank, error in enumerate(errors) if not error <= tolerance]
    where = name
    if bad:
        scales = [per_rank[rank].scale for rank in bad if per_rank[rank] is not None]  # type: ignore[union-attr]
        where += _times(scales) + _ranks(
            bad, [i for i, distance in enumerate(per_rank) if distance is not None], layout
        )
    return ComparisonRow(WORDS.get(kind, kind), error, tolerance, not bad, where)


def _times(scales: Sequence[float | None]) -> str:
    """A text such as `: 0.5 times the reference's`, if all wrong ranks are wrong by one factor; else ""."""
    known = [scale for scale in scales if scale is not None]
    if len(known) != len(scales) or not known or max(known) - min(known) > 1e-3:
        return ""
    return f": {known[0]:.3g} times the reference's"


def _ranks(bad: Sequence[int], seen: Sequence[int], layout: Layout) -> str:
    """A text such as ` (tp rank 1)` if one coordinate identifies the wrong ranks, else their numbers; "" for all."""
    if len(bad) == len(seen) or layout.world == 1:
        return ""
    places = {rank: layout.coordinates(rank) for rank in seen}
    for axis in places[seen[0]]:
        values = {places[rank][axis] for rank in bad}
        if set(bad) == {rank for rank in seen if places[rank][axis] in values}:
            return f" ({axis} rank{'s' * (len(values) > 1)} {', '.join(map(str, sorted(values)))})"
    return f" (rank{'s' * (len(bad) > 1)} {', '.join(map(str, bad))})"


# ---- the request, and the scratch folder of its proof ------------------------------------------------------------

QUICK_STEPS, STEPS = 5, 20
SUBJECT = "subject.json"
MORE = "fivefold docs howto/verify"


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The layouts to prove, and how. `layouts`: name -> text; `thin`: on a narrow model; `seq_length` None: short rows;
    `scratch`: an empty folder that all ranks see. Plain data: workers read it as JSON.
    """

    config: str  # a run file
    layouts: dict[str, str]
    thin: bool = False
    steps: int = STEPS
    seq_length: int | None = None
    seed: int = 1234
    quiet: bool = False
    scratch: str = ""

    @property
    def parsed(self) -> dict[str, Layout]:
        """The layouts by name."""
        return {name: Layout.parse(text) for name, text in self.layouts.items()}

    @property
    def folder(self) -> Path:
        """`scratch` as a path."""
        return Path(self.scratch)


def reference_file(asked: VerifyRequest, layout: Layout) -> Path:
    """The file of the reference that computes in the types of `layout`; its metadata has the same name with `.json`."""
    return asked.folder / f"reference-{re.sub('[, ]+', '-', layout.numerics)}.safetensors"


def write_found(asked: VerifyRequest, number: int, found: LayoutResult) -> None:
    """Write the results of layout `number`."""
    (asked.folder / f"found-{number}.json").write_text(json.dumps(found.to_json()))


def read_found(asked: VerifyRequest) -> dict[str, LayoutResult]:
    """Read the results of each layout, by name."""
    every = {}
    for number, name in enumerate(asked.layouts):
        file = asked.folder / f"found-{number}.json"
        found = every[name] = LayoutResult.of(json.loads(file.read_text())) if file.exists() else LayoutResult(name)
        broken = sorted(asked.folder.glob(f"broken-{number}-*.txt"), key=lambda path: path.stat().st_mtime_ns)
        if broken:
            found.refused = broken[0].read_text()
    return every
