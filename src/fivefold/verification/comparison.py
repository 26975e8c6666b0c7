"""Rows of a proof from what the ranks hold: each compares its own part, and all of them hear what every rank found."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from fivefold.ops import nf4
from fivefold.parallel.dtensor import local
from fivefold.parallel.fsdp.runtime import COMPUTE_DTYPES
from fivefold.parallel.plain import everywhere
from fivefold.parallel.state import ParallelState
from fivefold.verification.observer import Distances
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import (
    ALWAYS,
    SMALL,
    WORDS,
    Distance,
    LayoutResult,
    Row,
    Tolerances,
    judge,
    kind_of,
)


class Comparison:
    """Adds to `found`, on every rank alike, what this layout computes against `reference`."""

    def __init__(self, found: LayoutResult, reference: ReferenceTensors, state: ParallelState) -> None:
        self.found, self._reference, self._state = found, reference, state
        self._tolerances = Tolerances(state.plan.layout.precision, reference.about["floors"])
        self._whole: set[str] = set()  # keys of which all values were compared

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
            distance, values = distances.setdefault(key, Distance()), local(tensor)
            if values.dtype == torch.uint8:  # at rest in four bits
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
        for key in dict.fromkeys(key for each in everyone for key in each):
            values = sum(each[key].elements for each in everyone if key in each)
            if values >= self._reference.values(_recorded_as(key)):
                self._whole.add(key)

    def judged(self, kind: str, distances: Distances) -> list[Row]:
        """The rows that `in_order` adds."""
        return self._rows(kind, _of_all_ranks(kind, distances), None)

    def _rows(self, kind: str, everyone: Sequence[Distances], names: list[str] | None) -> list[Row]:
        source = _recorded_as(kind)
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

    def coverage(self, not_shown: Collection[str]) -> None:
        """Everything that the reference recorded was compared, every value of it. Of each kind that lacks some it is
        said how many were. `not_shown`: modules of which this rank does not know what it has."""
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
        """Every key that a proof compares, under the word for its kind."""
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
    mine = {key: asdict(each) for key, each in distances.items() if kind_of(key) == kind}
    return [{key: Distance(**each) for key, each in told.items()} for told in everywhere(mine)]


def _recorded_as(key: str) -> str:
    """A raw gradient is held to the reduced one."""
    return key.replace("raw", "gradient", 1) if kind_of(key) == "raw" else key
