"""Muon: torch's own update of every matrix, whatever the layout; what is sent for it; and runs that use it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.config import load_config
from fivefold.core.errors import UserError
from tests.parallel.test_parity import run
from tests.parity import Case, gathered, gradient_error, on_rank
from tests.pool import run_ranks
from tests.tiers import every, put_off
from tests.training import ranks
from tests.training.bodies import Stopped, column, run_file, same, state, train

LAYOUTS = ("single", "shard2", "shard4+zero1", "dp2.shard2", "tp2", "tp4", "dp2.tp2", "shard2.tp2")


@pytest.mark.full
@pytest.mark.parametrize("layout", every(reversed(LAYOUTS), 8))
def test_steps_are_those_of_torch_in_one_process(layout: str) -> None:
    """The gradients are a model's, and differ by rounding: 1e-14 seen. Its two kv heads are copied under tp4."""
    found, expected, per_rank = run(Case(f"{layout}+mb2+fp64", optimizer="muon"))
    assert gradient_error(found, expected)[0] <= 1e-10
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    for name, weights in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=1e-10, err_msg=name)
    for result in per_rank:
        assert result["ran"] == result["declared"]
    assert exchanged(per_rank) == in_theory(layout, expected.gradients)


def exchanged(per_rank: list[dict[str, Any]]) -> tuple[set[int], int]:
    """The all-to-alls of a rank, the same on each, and the bytes that all ranks sent in them."""
    found = [[each for each in result["ran"] if each.kind == "all_to_all"] for result in per_rank]
    return {sum(each.count for each in own) for own in found}, sum(each.bytes for own in found for each in own)


def in_theory(layout: str, gradients: dict[str, np.ndarray]) -> tuple[set[int], int]:
    """21 matrices in rounds; every element of fp64 is sent once to its owner, and from there to all who keep it."""
    parsed = Case(layout).parsed
    if parsed.world == 1:
        return {0}, 0
    elements = 0
    for name, gradient in gradients.items():
        shared = 2 if parsed.tp == 4 and name.endswith(("k_proj.weight", "v_proj.weight")) else 1
        if ".layers." in name and gradient.ndim == 2:
            elements += gradient.size * (1 + shared * parsed.dp_replicate)
    return {2 * -(-21 // parsed.world)}, 8 * elements


@pytest.mark.full
def test_it_is_not_adamw() -> None:
    """The test above would not see it otherwise."""
    cases = (Case("single+fp64", optimizer=name, steps=3) for name in ("muon", "adamw"))
    muon, adamw = (run_ranks(1, on_rank, case)[0]["losses"] for case in cases)
    assert muon[0] == adamw[0] and abs(muon[2] - adamw[2]) > 1e-3


@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "layouts"),
    [("", ("tp2", "shard2.tp2")), *(put_off(precision, LAYOUTS[1:]) for precision in ("", "+fp32", "+fp64"))],
)
def test_equal_gradients_give_equal_bits_under_every_layout(precision: str, layouts: tuple[str, ...]) -> None:
    """Of Muon's matrices (fused AdamW rounds an element by its place in memory). In bf16, torch's bits too: the master
    weights are in fp32 and the iteration in bf16."""
    truth = whole_of("single", precision)
    if not precision:
        (expected,) = run_ranks(1, ranks.updated_by_torch, Case("single", optimizer="muon"), 3)
        assert len(truth["momentum"]) == 21
        for name, values in truth["weights"].items():
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
    for layout in layouts:
        for kind, tensors in whole_of(layout, precision).items():
            for name, values in tensors.items():
                np.testing.assert_array_equal(values, truth[kind][name], err_msg=f"{layout} {kind} {name}")


def whole_of(layout: str, precision: str) -> dict[str, dict[str, np.ndarray]]:
    """Weights and momentum after three steps with gradients that are made up, put together from the ranks."""
    case = Case(f"{layout}{precision}", optimizer="muon")
    per_rank = run_ranks(case.parsed.world, ranks.updated, case, 3)
    found: dict[str, dict[str, np.ndarray]] = {}
    for kind in ("weights", "momentum"):
        held = [rank[kind] for rank in per_rank]
        shapes = {name: tuple(stop for _, stop in region) for name, region, _ in held[0]}
        for name, region, _ in (piece for pieces in held for piece in pieces):
            edges = shapes.get(name, (0,) * len(region))
            shapes[name] = tuple(max(edge, stop) for edge, (_, stop) in zip(edges, region, strict=True))
        found[kind] = gathered(held, shapes)
    found["weights"] = {name: found["weights"][name] for name in found["momentum"]}
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("dp2.shard2"), "shard2.tp2"])
def test_the_mesh_knows_where_every_rank_stands(layout: str) -> None:
    assert run_ranks(4, ranks.places, Case(layout)) == [True] * 4


@pytest.mark.full
def test_a_matrix_without_a_gradient_stays_and_nobody_waits() -> None:
    case = Case("shard2+fp32", optimizer="muon")
    assert run_ranks(2, ranks.without_gradients, case, (0, 1)) == [[True, False, True]] * 2


# ---- runs ------------------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "optimizer__name": "muon", "train__max_steps": 7, "checkpoint__every": 3, "log__to": ["jsonl"],
}  # fmt: skip


@pytest.mark.full
def test_a_run_learns_stops_and_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    alone, stopped = (run_file(tmp_path, **OPTIONS, run__name=name) for name in ("alone", "stopped"))
    assert train(alone).error is None
    assert column(alone, "train/loss")[-1] < column(alone, "train/loss")[0] - 0.5
    assert isinstance(train(stopped, stop_at=6).error, Stopped)
    assert train(stopped).error is None
    assert column(stopped, "train/loss") == column(alone, "train/loss")
    assert same(state(stopped, 7), state(alone, 7))
    assert {name.split("/")[0] for name in state(alone, 7)} == {"weight", "exp_avg", "exp_avg_sq", "momentum_buffer"}


@pytest.mark.full
def test_a_step_that_is_skipped_leaves_the_momentum(tmp_path: Path) -> None:
    tree = run_file(tmp_path, **{**OPTIONS, "checkpoint__every": 1, "train__max_steps": 4})
    assert train(tree, inf_gradient=(3,)).error is None
    assert [same(state(tree, step), state(tree, step + 1)) for step in (1, 2, 3)] == [False, True, False]


@pytest.mark.full
def test_another_optimizer_does_not_go_on(tmp_path: Path) -> None:
    tree = run_file(tmp_path, **OPTIONS)
    assert isinstance(train(tree, stop_at=5).error, Stopped)
    tree["optimizer"]["name"] = "adamw"
    error = train(tree).error
    assert type(error) is UserError and error.what.startswith("optimizer.name is adamw")


# ---- the run file ----------------------------------------------------------------------------------------------------


def test_keys_of_muon() -> None:
    options = load_config(None, ["optimizer.name=muon", "optimizer.ns_steps=6"]).optimizer
    assert (options.momentum, options.ns_steps) == (0.95, 6)
    plain = load_config(None, ["optimizer.name=adamw"]).optimizer
    assert (plain.name, plain.momentum, plain.ns_steps) == ("adamw", None, None)


@pytest.mark.parametrize("key", ["momentum=0.9", "ns_steps=5"])
def test_keys_of_muon_are_refused_for_adamw(key: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, ["optimizer.name=adamw", f"optimizer.{key}"])
    assert f"{key.split('=')[0]} is set, which only muon has; set name: muon, or leave it out" in caught.value.what
