"""What a planted fault is, and how one is written down."""

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from fivefold.verify.rows import Row

Plant = Callable[[], AbstractContextManager[Any]]
Expected = tuple[str, str]  # patterns of the first failing row: all of its `what`, and a part of its `where`


@dataclass(frozen=True)
class Model:
    """The model in which a fault bites; `family` is a key of `tests.parity.FAMILIES`."""

    family: str = "llama"
    tied: bool = False
    kv_heads: int = 2
    optimizer: str = "adamw"
    changes: tuple[tuple[str, Any], ...] = ()  # of its config

    def __str__(self) -> str:
        return "-".join([self.family, *["tied"] * self.tied, *["muon"] * (self.optimizer == "muon")])


@dataclass(frozen=True)
class Fault:
    """A silent bug as a patch of the running program.

    `bug`: what is wrong, for people. `known`: where it shipped, or the row of the catalogue it is of. `layout`: the
    smallest in which it bites. `plant` gives the context in which the program has the bug, on every rank. `expects`:
    what the first failing comparison has to be for the bug to count as rightly named. `reload`: it is one of loading,
    seen by what another layout saved.
    """

    name: str
    bug: str
    known: str
    layout: str
    plant: Plant
    expects: tuple[Expected, ...]
    model: Model
    reload: bool = False

    def names(self, row: Row) -> bool:
        """Whether an engineer who reads this row first looks in the right place."""
        return any(re.fullmatch(what, row.what) and re.search(where, row.where) for what, where in self.expects)


FAULTS: dict[str, Fault] = {}


def fault(
    bug: str, *, known: str, layout: str, expects: Iterable[Expected], model: Model | None = None, reload: bool = False
) -> Callable[[Plant], Plant]:
    """Put a plant into the catalogue under its function's name."""

    def add(plant: Plant) -> Plant:
        name = plant.__name__
        assert name not in FAULTS, name
        FAULTS[name] = Fault(name, bug, known, layout, plant, tuple(expects), model or Model(), reload)
        return plant

    return add
