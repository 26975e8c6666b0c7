"""What `memory.py` counts, held against numbers by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.core.layout import Layout
from fivefold.core.schedule import SchedulePlan, Slot
from fivefold.parallel.memory import FIRST, MOMENTS, Units, resting_bytes, under_way


def test_inputs_of_linears_wait_for_the_gradients_of_weights() -> None:
    order = [Slot(0, "F", 0), Slot(0, "F", 1), Slot(0, "I", 0), Slot(0, "F", 2), Slot(0, "W", 0), Slot(0, "B", 1)]
    assert under_way(order, [4]).most[0] == 3


@pytest.mark.parametrize(
    ("zero", "gathered", "waiting"),
    [(1, [65, 65, 65, 65], [260, 26 + 260, 86 + 260, 130 + 260]), (2, [65, 65, 65, 65], [0, 26, 86, 130]),
     (3, [25, 40, 40, 25], [0, 26, 86, 130])],
)  # fmt: skip
def test_units_are_gathered_and_wait_by_zero_stage(zero: int, gathered: list[int], waiting: list[int]) -> None:
    """A layer of 20 numbers, 5 of them of experts, 8 of the others in one matrix, an embedding of 10, the model's own
    unit of 5, 65 in all, in bf16, reduced in fp32."""
    shape: Any = SimpleNamespace(compute_bytes=2, reduce_bytes=4, micro_batches=1)
    units = Units(layer=(20, 20), own=(15, 15), embedding=(10, 10), root=(5, 5), total=(65, 65), matrix=8, ahead=15)
    found = resting_bytes({"parameters": 7, "gradients": 9}, units, zero, shape, root_waits=False)
    moments = [found[moment] for moment in MOMENTS[:4]]
    assert [each["parameters"] for each in moments] == [7, 7, 7, 7]
    assert [each["gradients"] for each in moments] == [9 if zero > 1 else 0] * 4
    assert [each["gathered parameters"] for each in moments] == [2 * numbers for numbers in gathered]
    assert [each["unreduced gradients"] for each in moments] == waiting
    for first, later in FIRST.items():
        summed = 65 * 4 if zero == 1 else 0
        without = {"gradients": 0, "unreduced gradients": found[later]["unreduced gradients"] - summed}
        assert found[first] == found[later] | without


def test_gradients_come_with_the_first_backward() -> None:
    """gpipe has all micro batches under way without gradients, and all but one with them; its losses come before. 1F1B
    has as many under way with gradients as without, where there are enough."""
    gpipe, few, many = (
        SchedulePlan.of(Layout.parse(text), count).orders for text, count in (("pp2+gpipe", 4), ("pp2", 2), ("pp2", 4))
    )
    last = under_way(gpipe[1], (1, 1))
    assert (last.most, last.at_loss, last.later, last.later_at_loss) == ({1: 4}, {1: 4}, {1: 3}, {1: 0})
    assert [(each.most[0], each.later[0]) for each in (under_way(few[0], (1, 1)), under_way(many[0], (1, 1)))] == [
        (2, 1), (2, 2),
    ]  # fmt: skip
