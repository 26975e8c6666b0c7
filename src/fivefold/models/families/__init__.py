"""Model families that are proved: the classes of `transformers` whose derived partition the tests hold against them.

A family is one file in this folder that holds one `FAMILY`. Nothing else names it: files are discovered. A class that
no file lists is partitioned in the same way, and checked by a parity run before it is trusted.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family. `tiny`: keys of a config.json, beside the sizes that all share, of a small model that hides nothing
    (the tests and `docs/models.md` are made with it). `notes`: what is special, for the table of the docs.
    """

    name: str
    model_classes: tuple[str, ...]
    tiny: Mapping[str, Any] = field(default_factory=dict)
    notes: str = ""


def families() -> Iterator[Family]:
    """Every family in this folder."""
    for module in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{module.name}").FAMILY


def family_of(model_class: str) -> Family | None:
    """The family that lists this class of `transformers`, or None."""
    return next((family for family in families() if model_class in family.model_classes), None)
