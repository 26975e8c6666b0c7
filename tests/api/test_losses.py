"""A loss of the user's own under every parallelism equals plain `transformers`, the function and autograd in one
process: losses, norms, every gradient and weight, to 1e-10 in fp64."""

from functools import cache

import pytest

from fivefold.parallel.layout import Layout
from tests.api.loop import Outcome
from tests.api.losses import LOSSES, assert_close, reference, refusals_on_rank, train_on_rank
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full

LAYOUTS = ["single", "shard2", "tp2", "pp2", "cp2", "shard2.ep2", "shard2.tp2", "pp2+zb"]
# In every run all losses where the vocabulary is split, and one with columns or two where it is whole.
OFTEN = {"shard2": ["margin"], "tp2": [*LOSSES], "pp2+zb": ["label_smoothing"]}


@cache
def expected(name: str, loss: str) -> Outcome:
    return reference(name, loss)


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        (layout, loss) if loss in OFTEN.get(layout, ()) else put_off(layout, loss)
        for layout in LAYOUTS
        for loss in LOSSES
    ],
)
def test_equals_one_process(layout: str, loss: str) -> None:
    name = "moe" if "ep2" in layout else "llama"
    for found, evaluated in run_ranks(Layout.parse(layout).world, train_on_rank, layout, name, loss):
        assert_close(found, expected(name, loss))
        assert evaluated < expected(name, loss).losses[0]


def test_what_cannot_be_right_is_refused_on_every_rank() -> None:
    """A rank that raised alone would leave the others waiting for it."""
    first, _ = ranks = run_ranks(2, refusals_on_rank, "shard2")
    for refused in ranks:
        assert "depends on the other tokens" in refused["mean"] and "test_losses.py" not in refused["mean"]
        assert "has shape [7], input_ids [" in refused["column"]
        assert "losses.py:" in refused["on one rank"] and "ZeroDivisionError" in refused["on one rank"]
        assert "the batch has 'weight'" in refused["without a loss"]
        assert first["targets"] in refused["not finite"]
