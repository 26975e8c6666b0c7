"""Model families as data: what a model's own tensor parallel plan does not say.

A family is one file in this folder that holds one `FAMILY`. Nothing else names it: files are discovered.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """Facts about the model classes of one family.

    `query` and `key_value` are the last names of the column projections that make query heads, and key or value
    heads (`q_proj`). `residual_norms` are module name patterns, from the base model on and with `*` for a layer
    index, of the norms that read the residual stream directly. `sequence_parallel_refusal` says why activations
    between blocks cannot be split over the sequence, or is None where they can.
    """

    name: str
    model_classes: tuple[str, ...]
    query: tuple[str, ...]
    key_value: tuple[str, ...]
    residual_norms: tuple[str, ...]
    sequence_parallel_refusal: str | None = None


def families() -> Iterator[Family]:
    """Every family in this folder."""
    for module in pkgutil.iter_modules(__path__):
        yield importlib.import_module(f"{__name__}.{module.name}").FAMILY


def family_of(model_class: str) -> Family | None:
    """The family that lists this class of `transformers`, or None."""
    return next((family for family in families() if model_class in family.model_classes), None)
