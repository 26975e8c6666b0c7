"""The sweep over all classes, on a rank of the tests' pool, which does not know the benchmarks' folder."""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from fivefold.models import attention

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")


def module(name: str) -> Any:
    """A module of the benchmarks."""
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)
    return importlib.import_module(name)


def on_rank(
    model_class: str, layout: str = "single", changed: Mapping[str, Any] = MappingProxyType({}), plant: str = ""
) -> dict[str, Any]:
    """What this rank finds out about a tiny model of a class. `plant`: what is made wrong in it."""
    held_against, tiny_configs = module("held_against"), module("tiny_configs")
    model_type = tiny_configs.causal_classes()[model_class]
    values, why = held_against.tiny_on_rank(model_type)
    assert values is not None, why
    tried = held_against.Tried(model_class, model_type, {**values, **changed}, layout, steps=1)
    with planted(plant):
        found: dict[str, Any] = held_against.on_rank(tried)
    return found


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """Inside, attention is wrong: its scores are 1 % too large, or it fails."""
    right = attention.attention_forward

    def too_sharp(layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        return right(layer, query * 1.01, *args, **kwargs)

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise IndexError("index 7 is out of bounds")

    faults = {"": right, "scale": too_sharp, "crash": failing}
    with patch.object(attention, "attention_forward", faults[fault]):
        yield
