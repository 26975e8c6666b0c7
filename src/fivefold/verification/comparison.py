"""Rows of a proof: each rank compares its own part with the reference, and all ranks share the results."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from fivefold.parallel.adapters import nf4
from fivefold.parallel.dtensor import local
from fivefold.parallel.dtypes import COMPUTE_DTYPES
from fivefold.parallel.plain import everywhere
from fivefold.parallel.state import ParallelState
from fivefold.verification.observer import Distances
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import (
    ALWAYS,
    SMALL,
    WORDS,
    ComparisonRow,
    Distance,
    LayoutResult,
    Tolerances,
    judge,
    kind_of,
)


class Comparison:
    """Compares a layout with `reference`, and adds the rows to `found`, the same on every rank."""

    def __init__(self, found: LayoutResult, reference: ReferenceTensors, state: ParallelState) -> None:
        self.found, self._reference, self._state = found, reference, state
        self._tolerances = Tolerances(state.plan.layout.precision, reference.about["floors"])
        self._whole: set[str] = set()  # keys with all their values compared

    def allowed(self, key: str) -> float:
        """The tolerance of a key."""
        return self._tolerances.of(key)

    def pieces(
        self, kind: str, tensors: Mapping[str, Tensor | None], names: list[str] | None = None, *, must: bool = True
    ) -> None:
        """Compare this rank's part of each tensor with that region of the reference. `must`: report missing tensors."""
        distances: Distances = {}
        for name, tensor in tensors.items():
            key = f"{kind}/{name}"
            if tensor is None or key not in self._reference:
                continue
            distance, values = distances.setdefault(key, Distance()), local(tensor)
            if values.dtype == torch.uint8:  # stored in four bits
                values = nf4.restored(values, COMPUTE_DTYPES[self._state.plan.layout.precision])
            for region, place in self._state.plan.placement.regions(name):
                distance.add(values[place], self._reference.read(key, region))
        held = [name for name in self._reference.names(kind) if must and self._state.plan.placement.holds(name)]
        lacking = {name: name for name in held if f"{kind}/{name}" not in distances}
        self.count(f"{kind} without values", lacking, say=False)
        self.in_order(kind, distances, names)

    def in_order(self, kind: str, distances: Distances, names: list[str] | None = None) -> None:
        """Add a row for each key of a kind, in the order of the reference's execution, or of `names`."""
        everyone = _of_all_ranks(kind, distances)
        for row in self._rows(kind, everyone, names):
            self.found.add(row)
        for key in dict.fromkeys(key for distances in everyone for key in distances):
            values = sum(distances[key].elements for distances in everyone if key in distances)
            if values >= self._reference.values(_recorded_as(key)):
                self._whole.add(key)

    def judged(self, kind: str, distances: Distances) -> list[ComparisonRow]:
        """The rows that `in_order` would add."""
        return self._rows(kind, _of_all_ranks(kind, distances), None)

    def _rows(self, kind: str, everyone: Sequence[Distances], names: list[str] | None) -> list[ComparisonRow]:
        source = _recorded_as(kind)
        norms = {name: self._reference.norm(f"{source}/{name}") for name in self._reference.names(source)}
        floor = SMALL * math.hypot(*norms.values())
        rows = []
        for name in names or norms:
            key = f"{kind}/{name}"
            per_rank = [distances.get(key) for distances in everyone]
            if any(distance is not None for distance in per_rank):
                rows.append(judge(key, per_rank, norms[name], floor, self.allowed(key), self._state.plan.layout))
        return rows

    def numbers(self, mine: Mapping[str, float]) -> None:
        """Add a row for each number under its key: the maximum over ranks, with NaN as the largest."""
        everyone = everywhere(dict(mine))
        for what in mine:
            error = max((times[what] for times in everyone), key=lambda time: math.inf if math.isnan(time) else time)
            self.found.add(ComparisonRow(what, error, self.allowed(what), error <= self.allowed(what)))

    def count(self, what: str, wrong: Mapping[str, str], *, say: bool = True) -> None:
        """Add a row that counts what is wrong on any rank; without `say` only if something is."""
        everyone: dict[str, str] = {}
        for wrong_ in everywhere(dict(wrong)):
            everyone.update(wrong_)
        if everyone or say:
            first = next(iter(everyone.values()), "")
            self.found.add(ComparisonRow(what, float(len(everyone)), 0.0, not everyone, first))

    def coverage(self, not_shown: Collection[str]) -> None:
        """Check that every value recorded by the reference was compared. Incomplete kinds are reported with counts.
        `not_shown`: modules whose values this rank could not locate."""
        somewhere = {name for rank in everywhere([*not_shown]) for name in rank}
        names = {name for name in somewhere if f"output/{name}" not in self._whole}
        self.found.not_shown = sorted(names)
        wrong = {}
        for word, keys in self._asked().items():
            lacking = [key for key in keys if key not in self._whole and key.partition("/")[2] not in names]
            if lacking:
                first = lacking[0].partition("/")[2]
                done = f"{word}: {len(keys) - len(lacking)} of {len(keys)} compared in full"
                wrong[word] = f"{done}; the first that is not: {first}" if first else done
        self.count("coverage", wrong)

    def _asked(self) -> dict[str, list[str]]:
        """Every key that a proof compares, grouped by the displayed name of its kind."""
        asked: dict[str, list[str]] = {}
        for key in self._reference.recorded():
            kind = kind_of(key)
            is_input = kind == "output" and key.endswith(" input")
            asked.setdefault("input" if is_input else WORDS.get(kind, kind), []).append(key)
        said = {row.what for row in self.found.rows} | {*self.found.not_told}
        numbers = [*ALWAYS, *self._reference.numbers()]
        return asked | {what: [what] for what in numbers if what not in said}


def _of_all_ranks(kind: str, distances: Distances) -> list[Distances]:
    """The distances of a kind, rank by rank."""
    mine = {key: asdict(distance) for key, distance in distances.items() if kind_of(key) == kind}
    return [{key: Distance(**distance) for key, distance in told.items()} for told in everywhere(mine)]


def _recorded_as(key: str) -> str:
    """The reference's key for a key; a raw gradient is compared with the reduced one."""
    return key.replace("raw", "gradient", 1) if kind_of(key) == "raw" else key
