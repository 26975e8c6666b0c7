"""Rows of a proof from what the ranks hold: each compares its own part, and all of them hear what every rank found."""

import math
from collections.abc import Mapping
from dataclasses import asdict

from torch import Tensor

from fivefold.parallel.dtensor import local
from fivefold.parallel.plain import everywhere
from fivefold.parallel.state import ParallelState
from fivefold.verification.observer import Distances
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import SMALL, Distance, LayoutResult, Row, Tolerances, judge, kind_of


class Comparison:
    """Adds to `found`, on every rank alike, what this layout computes against `reference`."""

    def __init__(self, found: LayoutResult, reference: ReferenceTensors, state: ParallelState) -> None:
        self.found, self._reference, self._state = found, reference, state
        self._tolerances = Tolerances(state.plan.layout.precision, reference.about["floors"])

    def allowed(self, key: str) -> float:
        """The tolerance of a key."""
        return self._tolerances.of(key)

    def pieces(
        self, kind: str, tensors: Mapping[str, Tensor | None], names: list[str] | None = None, *, must: bool = True
    ) -> None:
        """Compare this rank's part of each tensor with that region of the reference. `must`: none may lack."""
        distances: Distances = {}
        for name, tensor in tensors.items():
            key = f"{kind}/{name}"
            if tensor is None or key not in self._reference:
                continue
            distance = distances.setdefault(key, Distance())
            for region, place in self._state.plan.regions(name):
                distance.add(local(tensor)[place], self._reference.read(key, region))
        held = [name for name in self._reference.names(kind) if must and self._state.plan.holds(name)]
        lacking = {name: name for name in held if f"{kind}/{name}" not in distances}
        self.count(f"{kind} without values", lacking, say=False)
        self.in_order(kind, distances, names)

    def in_order(self, kind: str, distances: Distances, names: list[str] | None = None) -> None:
        """Add the rows of `judged`."""
        for row in self.judged(kind, distances, names):
            self.found.add(row)

    def judged(self, kind: str, distances: Distances, names: list[str] | None = None) -> list[Row]:
        """A row for each key of a kind, in the order of the reference's execution, or of `names`."""
        everyone = [
            {key: Distance(**each) for key, each in told.items()}
            for told in everywhere({key: asdict(each) for key, each in distances.items() if kind_of(key) == kind})
        ]
        source = "gradient" if kind == "raw" else kind
        norms = {name: self._reference.norm(f"{source}/{name}") for name in self._reference.names(source)}
        floor = SMALL * math.hypot(*norms.values())
        rows = []
        for name in names or norms:
            key = f"{kind}/{name}"
            per_rank = [each.get(key) for each in everyone]
            if any(each is not None for each in per_rank):
                rows.append(judge(key, per_rank, norms[name], floor, self.allowed(key), self._state.plan.layout))
        return rows

    def numbers(self, mine: Mapping[str, float]) -> None:
        """A row for each number, a key: the largest of all ranks. What is not a number is larger than all."""
        everyone = everywhere(dict(mine))
        for what in mine:
            error = max((each[what] for each in everyone), key=lambda each: math.inf if math.isnan(each) else each)
            self.found.add(Row(what, error, self.allowed(what), error <= self.allowed(what)))

    def count(self, what: str, wrong: Mapping[str, str], *, say: bool = True) -> None:
        """A row that counts what is wrong on any rank (`say`: also when nothing is)."""
        everyone: dict[str, str] = {}
        for each in everywhere(dict(wrong)):
            everyone.update(each)
        if everyone or say:
            first = next(iter(everyone.values()), "")
            self.found.add(Row(what, float(len(everyone)), 0.0, not everyone, first))


def relative_number(found: float, expected: float) -> float:
    """|found - expected| / |expected|; infinite for what is not a number."""
    error = abs(found - expected) / max(abs(expected), 1e-300)
    return error if math.isfinite(error) else math.inf
