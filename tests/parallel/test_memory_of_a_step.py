"""What `memory.py` counts, held against numbers by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.core.schedule import Slot
from fivefold.parallel.memory import under_way, unit_bytes


def test_inputs_of_linears_wait_for_the_gradients_of_weights() -> None:
    order = [Slot(0, "F", 0), Slot(0, "F", 1), Slot(0, "I", 0), Slot(0, "F", 2), Slot(0, "W", 0), Slot(0, "B", 1)]
    assert under_way(order)[0] == 3


@pytest.mark.parametrize(("zero", "gathered", "waiting"), [(1, 65, 65 * 4), (2, 65, 30 * 2), (3, 5 + 20 + 30, 30 * 2)])
def test_units_are_gathered_and_wait_by_zero_stage(zero: int, gathered: int, waiting: int) -> None:
    shape: Any = SimpleNamespace(compute_bytes=2, reduce_bytes=4)
    sizes = [(10, 10), (20, 20), (30, 30), (5, 5)]  # the last one is the model's own unit
    assert unit_bytes(sizes, zero, shape) == (gathered * 2, waiting)
