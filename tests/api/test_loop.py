"""A loop of one's own under every parallelism equals one process of plain `transformers`."""

from functools import cache

import pytest

from tests.api.loop import Outcome, assert_equal, reference, train_on_rank
from tests.pool import run_ranks

pytestmark = pytest.mark.full

LAYOUTS = [
    ("shard2", "llama"), ("dp2", "llama"), ("tp2", "llama"), ("cp2", "llama"), ("pp2", "llama"), ("shard2.ep2", "moe"),
    ("tp2", "tied"), ("pp2", "tied"), ("tp2", "moe"), ("shard2+zero1", "llama"),
]  # fmt: skip


@cache
def expected(name: str, optimizer: str) -> Outcome:
    return reference(name, optimizer)


@pytest.mark.parametrize(("layout", "name"), LAYOUTS)
def test_own_loop_equals_one_process(layout: str, name: str) -> None:
    """Backward, clipping, the user's own optimizer and scheduler: losses, norms, every gradient, weights."""
    for found in run_ranks(2, train_on_rank, layout, name, "adamw", True):
        assert found.gradients
        assert_equal(found, expected(name, "adamw"))


@pytest.mark.parametrize(("layout", "name"), LAYOUTS[:6])
def test_train_step_equals_one_process(layout: str, name: str) -> None:
    for found in run_ranks(2, train_on_rank, layout, name, "sgd"):
        assert_equal(found, expected(name, "sgd"))


def test_what_looks_at_whole_tensors_is_right_in_a_pipeline() -> None:
    """LAMB, which is refused where a rank has parts."""
    for found in run_ranks(2, train_on_rank, "pp2", "tied", "lamb", True):
        assert_equal(found, expected("tied", "lamb"))
