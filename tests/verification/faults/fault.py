"""What a planted fault is, and how one is written down."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from fivefold.verification.results import ComparisonRow

Plant = Callable[[], AbstractContextManager[Any]]
Kind = Literal["step", "load", "run"]
Expected = tuple[str, str]  # patterns of the first failing row: all of its `what`, and a part of its `where`


@dataclass(frozen=True)
class Model:
    """The model in which a fault bites; `family` is a key of `tests.parity.FAMILIES`. `capacity`: the factor of its
    experts. `objective`: on pairs of answers, which is then proved too. `adapter`: it is beside a frozen model,
    whose linears rest as `quantize` says; `of_experts`: beside the experts too."""

    family: str = "llama"
    tied: bool = False
    kv_heads: int = 2
    optimizer: str = "adamw"
    changes: tuple[tuple[str, Any], ...] = ()  # of its config
    capacity: float | None = None
    objective: str = "sft"
    adapter: bool = False
    quantize: str = "none"
    of_experts: bool = False
    dropout: float = 0.0  # of the adapter
    neftune: float | None = None
    is_chunked: bool = True  # the loss, in three chunks of the tokens
    balanced: bool = False  # rows are shared out by their cost

    def __str__(self) -> str:
        marks = {"tied": self.tied, "muon": self.optimizer == "muon", "class": self.optimizer == "python"}
        marks |= {"capacity": self.capacity is not None}
        marks |= {self.objective: self.objective != "sft", "lora": self.adapter, self.quantize: self.quantize != "none"}
        marks |= {"experts": self.of_experts, "drops": self.dropout > 0, "unchunked": not self.is_chunked}
        marks |= {"neftune": self.neftune is not None, "balanced": self.balanced}
        return "-".join([self.family, *(mark for mark, is_on in marks.items() if is_on)])


@dataclass(frozen=True)
class Fault:
    """A silent bug as a patch of the running program.

    `bug`: what is wrong, for people. `known`: a public issue of it, or what makes it. `layout`: the
    smallest in which it bites. `plant` gives the context in which the program has the bug, on every rank. `expects`:
    what the first failing comparison has to be for the bug to count as rightly named. `kind`: where it is looked for,
    in the proof of a layout, in one that loads what another layout saved, or in a run with its standing checks.
    """

    name: str
    bug: str
    known: str
    layout: str
    plant: Plant
    expects: tuple[Expected, ...]
    model: Model
    kind: Kind = "step"

    def names(self, row: ComparisonRow) -> bool:
        """Whether an engineer who reads this row first looks in the right place."""
        return any(re.fullmatch(what, row.what) and re.search(where, row.where) for what, where in self.expects)


FAULTS: dict[str, Fault] = {}


def fault(
    bug: str, *, known: str, layout: str, expects: Iterable[Expected], model: Model | None = None, kind: Kind = "step"
) -> Callable[[Plant], Plant]:
    """Put a plant into the catalogue under its function's name."""

    def add(plant: Plant) -> Plant:
        name = plant.__name__
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, bug, known, layout, plant, tuple(expects), model or Model(), kind)
        return plant

    return add
