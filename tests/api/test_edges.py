"""Accumulation, frozen parameters, skipped steps, rates."""

from typing import Any

import numpy as np
import pytest
import torch

from fivefold.verification.by_hand import exact
from tests.api import edges
from tests.api.loop import build, reference
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("layout", "name"), [("tp2", "llama"), ("pp2", "tied"), put_off("shard2", "llama"), put_off("dp2", "llama")]
)
def test_backward_passes_add_up(layout: str, name: str) -> None:
    """What is summed over ranks after a pass is not summed again after the next."""
    for found in run_ranks(2, edges.accumulated, layout, name):
        assert_close(found, edges.accumulated_in_one_process(name, 2 if layout[:2] in ("sh", "dp") else 1))


@pytest.mark.parametrize(
    ("layout", "what", "late"),
    [
        ("tp2", "the first half", False), ("pp2+zb", "the first half", False), ("shard2", "but the head", True),
        put_off("shard2", "the first half", True), put_off("shard2", "but the head", False),
        put_off("pp2", "but the head", True), put_off("pp2", "the first half", False),
    ],
)  # fmt: skip
def test_frozen_parameters_stay(layout: str, what: str, late: bool) -> None:
    norm, gradients, weights = edges.frozen_in_one_process(what)
    for found_norm, found_gradients, found_weights, odd in run_ranks(2, edges.frozen, layout, what, late):
        assert found_norm == pytest.approx(norm, rel=1e-10)
        assert_close(found_gradients, gradients)
        assert_close(found_weights, weights)
        assert not odd, "frozen, and has a gradient"


@pytest.mark.parametrize("layout", ["shard2", *map(put_off, ("tp2", "dp2", "shard2+zero1", "tp2+nosp"))])
def test_a_layer_that_was_frozen_is_trained_later(layout: str) -> None:
    assert all(run_ranks(2, edges.unfrozen, layout))


@pytest.mark.parametrize("layout", ["cp2", *map(put_off, ("pp2", "shard2", "tp2"))])
def test_an_evaluation_has_the_loss_of_a_step_and_leaves_the_mode(layout: str) -> None:
    for evaluated, trained, modes in run_ranks(2, edges.evaluated, layout):
        assert evaluated == pytest.approx(trained, rel=1e-5)
        assert modes == [False, True]


@pytest.mark.parametrize(
    ("layout", "call"),
    [
        (layout, call) if layout in often else put_off(layout, call)
        for call, often in (
            ("evaluate", ["pp2"]), ("logits", []), ("generate", ["cp2"]), ("a plain forward", ["shard2"]),
            ("parallelize", ["tp2"]),
        )
        for layout in ("shard2", "cp2", "tp2", "pp2")
    ],
)  # fmt: skip
def test_a_first_call_in_inference_mode_leaves_a_model_that_trains(layout: str, call: str) -> None:
    assert all(run_ranks(2, edges.inferred, layout, call))


@pytest.mark.parametrize("layout", [put_off("shard2"), "tp2"])
def test_a_step_without_targets_or_with_infinities_changes_nothing(layout: str) -> None:
    assert all(run_ranks(2, edges.skipped, layout))


def test_each_group_keeps_its_rate_unless_one_is_given() -> None:
    assert run_ranks(1, edges.rates, "single") == [[0.5, 0.25, 0.125, 0.125]]


@pytest.mark.parametrize("layout", ["dp2", put_off("pp2")])
def test_optimizers_of_whole_tensors_run_where_tensors_are_whole(layout: str) -> None:
    assert all(run_ranks(2, edges.layouts_of_whole_tensors, layout))


@pytest.mark.parametrize("layout", [put_off("shard2+zero1"), "tp2"])
def test_a_plain_forward_sees_the_weights_as_they_are(layout: str) -> None:
    expected = edges.looked_at_in_one_process(1)
    for found in run_ranks(2, edges.looked_at_between, layout):
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layout", ["tp2", "cp2"])
def test_a_plain_forward_keeps_packed_documents_apart(layout: str) -> None:
    model = build("llama")
    with torch.no_grad(), exact():
        expected = model(**edges.packed_rows(), use_cache=False).logits.numpy()
    for found in run_ranks(2, edges.packed_forward, layout):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-10)


OPT = {"model_type": "opt", "ffn_dim": 53, "word_embed_proj_dim": 32, "dropout": 0.0}


@pytest.mark.parametrize(("family", "changes"), [("gpt2", ()), ("none", tuple(OPT.items()))], ids=["gpt2", "opt"])
def test_documents_are_apart_however_a_model_calls_its_base(family: str, changes: tuple[tuple[str, Any], ...]) -> None:
    """GPT-2 passes its ids without a name, OPT calls the decoder of its base."""
    run_ranks(1, edges.packed_apart, family, changes)


def test_the_loss_of_uneven_experts_is_that_of_the_rows_however_they_are_dealt() -> None:
    """Unequal micro batches, an empty one among them, and padding change nothing; the coefficient is the config's."""
    (norm, load, z, counts), *_ = run_ranks(1, edges.routed, "single", True)
    for found in (*run_ranks(2, edges.routed, "shard2", False), *run_ranks(2, edges.routed, "shard2.ep2", False)):
        assert found[:3] == pytest.approx((norm, load, z), rel=1e-10)
        assert found[3] == counts
    assert norm != pytest.approx(expected_norm("moe"), rel=1e-3)


def expected_norm(name: str) -> float:
    """Of the cross entropy alone."""
    return reference(name).norms[0]


def assert_close(found: edges.Arrays, expected: edges.Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-10 * max(1, np.abs(values).max()), err_msg=name)
