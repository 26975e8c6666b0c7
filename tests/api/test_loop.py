"""A loop of one's own under every parallelism equals one process of plain `transformers`."""

from functools import cache
from typing import Any

import pytest

from tests.api.loop import Outcome, assert_equal, reference, train_on_rank
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full

# Each of the first six by one of the two loops in every run, and by both in a campaign.
LAYOUTS = [
    ("shard2", "llama"), ("dp2", "llama"), ("tp2", "llama"), ("cp2", "llama"), ("pp2", "llama"), ("shard2.ep2", "moe"),
]  # fmt: skip
MORE = [put_off("tp2", "tied"), ("pp2", "tied"), put_off("tp2", "moe"), ("shard2+zero1", "llama")]
BY_BACKWARD = ("dp2", "cp2")


def by_turns(chosen: bool) -> list[Any]:
    """The layouts, those of the other loop for a campaign."""
    return [each if (each[0] in BY_BACKWARD) == chosen else put_off(*each) for each in LAYOUTS]


@cache
def expected(name: str, optimizer: str) -> Outcome:
    return reference(name, optimizer)


@pytest.mark.parametrize(("layout", "name"), [*by_turns(True), *MORE])
def test_own_loop_equals_one_process(layout: str, name: str) -> None:
    """Backward, clipping, the user's own optimizer and scheduler: losses, norms, every gradient, weights."""
    for found in run_ranks(2, train_on_rank, layout, name, "adamw", True):
        assert found.gradients
        assert_equal(found, expected(name, "adamw"))


@pytest.mark.parametrize(("layout", "name"), by_turns(False))
def test_train_step_equals_one_process(layout: str, name: str) -> None:
    for found in run_ranks(2, train_on_rank, layout, name, "sgd"):
        assert_equal(found, expected(name, "sgd"))


def test_what_looks_at_whole_tensors_is_right_in_a_pipeline() -> None:
    """LAMB, which is refused where a rank has parts."""
    for found in run_ranks(2, train_on_rank, "pp2", "tied", "lamb", True):
        assert_equal(found, expected("tied", "lamb"))
