"""Saved under one layout, loaded under another: the same bits, and the same training from there on."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.checkpoint import Checkpoint, newest
from tests.checkpoint.ranks import State, elements_read, load_and_train, train_and_save
from tests.parity import Case, gathered
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full

# 4 query heads, 2 key/value heads (copied under tp4); vocabulary 101 and intermediate size 53 are prime.
LAYOUTS = tuple(
    f"{layout}+fp64"
    for layout in (
        "single", "dp4", "shard2+zero1", "shard4+zero2", "dp2.shard2+zero1", "tp4", "dp2.tp2", "shard2.tp2", "pp2",
        "pp2.tp2",
    )
)  # fmt: skip
CASE = Case("single+fp64")
# In every test run a chain of layouts is in the matrix (test_matrix.py), and here one goes on as if never stopped.
FEW = tuple(f"{layout}+fp64" for layout in ("shard4+zero2", "pp2.tp2"))
SQUARES = [
    *((layout, FEW) if "pp" in layout else put_off((layout, FEW)) for layout in FEW),
    *(put_off((layout, LAYOUTS)) for layout in LAYOUTS),
]
Saved = Callable[[str], tuple[Path, dict[str, np.ndarray], list[float]]]


def whole(states: list[State]) -> dict[str, np.ndarray]:
    """Every tensor of every kind, put together from the ranks; copies must agree."""
    found = {}
    for kind in states[0].pieces:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, region, _ in (piece for state in states for piece in state.pieces[kind]):
            old = shapes.get(name, (0,) * len(region))
            shapes[name] = tuple(max(size, stop) for size, (_, stop) in zip(old, region, strict=True))
        tensors = gathered([state.pieces[kind] for state in states], shapes)
        found |= {f"{kind} {name}": values for name, values in tensors.items()}
    return found


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """layout -> (checkpoint after two steps, what it should hold, losses of the next two steps)."""

    @cache
    def save(layout: str) -> Any:
        directory = tmp_path_factory.mktemp("checkpoints")
        case = CASE.with_layout(layout)
        states = run_ranks(case.parsed.world, train_and_save, case, directory, 2, 2)
        folder = newest(directory)
        assert folder is not None
        return folder, whole(states), states[0].losses

    return save


def test_scales_of_fp8_go_on_under_another_layout(tmp_path: Path) -> None:
    """They follow from the steps before the save, of linears that tp cuts."""
    case = Case("single+fp64+fp8_delayed", packing=False)
    (alone,) = run_ranks(1, train_and_save, case, tmp_path, 2, 2)
    for layout in ("single", "tp2"):
        other = case.with_layout(f"{layout}+fp64+fp8_delayed")
        (found,) = run_ranks(other.parsed.world, load_and_train, other, [newest(tmp_path)], 2)[0]
        np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-10, err_msg=layout)


@pytest.mark.parametrize("square", SQUARES, ids=lambda square: f"{square[0]}-of-{len(square[1])}")
def test_every_layout_reads_every_other(saved: Saved, square: tuple[str, tuple[str, ...]]) -> None:
    layout, writers = square
    case = CASE.with_layout(layout)
    folders = [saved(wrote)[0] for wrote in writers]
    ranks = run_ranks(case.parsed.world, load_and_train, case, folders, 2)
    for wrote, states in zip(writers, zip(*ranks, strict=True), strict=True):
        _, expected, losses = saved(wrote)
        assert equal(whole(list(states)), expected), wrote
        assert all(state.steps == {2.0} for state in states)
        if wrote == layout:  # as if it had not been stopped
            assert states[0].losses == losses
        np.testing.assert_allclose(states[0].losses, losses, rtol=1e-10, err_msg=wrote)


@pytest.mark.parametrize("layout", [put_off("shard4+zero2+fp64"), "dp2.tp2+fp64"])
def test_every_element_is_written_once(saved: Saved, layout: str) -> None:
    folder, _, _ = saved(layout)
    manifest = Checkpoint.open(folder).manifest
    for records in manifest.tensors.values():
        for name, record in records.items():
            count = np.zeros(record.shape, int)
            for one in record.slices:
                count[tuple(slice(*edge) for edge in one.box)] += 1
            assert (count == 1).all(), name


@pytest.mark.parametrize("layout", [put_off("shard4+fp64"), "shard2.tp2+fp64"])
def test_no_rank_reads_more_than_it_keeps(saved: Saved, layout: str) -> None:
    folder, _, _ = saved("dp2.tp2+fp64")
    for read, kept in run_ranks(4, elements_read, CASE.with_layout(layout), folder):
        assert read == kept


@pytest.mark.parametrize(
    "case", [put_off(Case("shard2.tp2+fp32", tied=True)), Case("shard2.tp2+fp32", "qwen3", kv_heads=1)]
)
def test_tied_embeddings_and_single_key_value_heads(tmp_path: Path, case: Case) -> None:
    expected = whole(run_ranks(4, train_and_save, case, tmp_path, 2))
    names = Checkpoint.open(tmp_path / "step-000002").source().names()
    assert ("lm_head.weight" in names) is not case.tied
    ranks = run_ranks(2, load_and_train, case.with_layout("tp2+fp32"), [tmp_path / "step-000002"])
    assert equal(whole([states[0] for states in ranks]), expected)


def test_codes_and_scales_of_8_bits_go_from_layout_to_layout(tmp_path: Path) -> None:
    """One rank goes on from what four have saved as these do."""
    case = Case("shard2.tp2+fp64+8bit_states", overrides=(("intermediate_size", 64),))
    states = run_ranks(4, train_and_save, case, tmp_path, 2, 2)
    records = Checkpoint.open(tmp_path / "step-000002").manifest.tensors
    of_one = [records[f"exp_avg{what}"]["model.layers.0.mlp.down_proj.weight"] for what in ("", "_scale")]
    assert [(each.dtype, each.shape) for each in of_one] == [("uint8", (32, 64)), ("float64", (32, 4))]
    alone = run_ranks(1, load_and_train, case.with_layout("single+fp64+8bit_states"), [tmp_path / "step-000002"], 2)
    assert equal(whole([found[0] for found in alone]), whole(states))
    np.testing.assert_allclose(alone[0][0].losses, states[0].losses, rtol=1e-10)


MUON = ("single", "shard4+zero1", "dp2.shard2", "shard2.tp2")


@pytest.mark.campaign  # the matrix has Muon's momentum in half of its cases
@pytest.mark.parametrize("wrote", MUON)
def test_the_momentum_of_muon_goes_from_layout_to_layout(tmp_path: Path, wrote: str) -> None:
    case = Case(f"{wrote}+fp64", optimizer="muon")
    states = run_ranks(case.parsed.world, train_and_save, case, tmp_path, 2, 2)
    expected, losses = whole(states), states[0].losses
    kinds = {kind: {key.split()[1] for key in expected if key.startswith(f"{kind} ")} for kind in states[0].pieces}
    assert len(kinds["momentum_buffer"]) == 3 * 7 and all("_proj.weight" in name for name in kinds["momentum_buffer"])
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == kinds["weight"] - kinds["momentum_buffer"]
    for layout in MUON:
        other = case.with_layout(f"{layout}+fp64")
        read = run_ranks(other.parsed.world, load_and_train, other, [tmp_path / "step-000002"], 2)
        assert equal(whole([rank[0] for rank in read]), expected), layout
        if layout == wrote:  # as if it had not been stopped
            assert read[0][0].losses == losses
        np.testing.assert_allclose(read[0][0].losses, losses, rtol=1e-10, err_msg=layout)


def test_what_adamw_keeps_beside_muon_is_saved_and_goes_on(tmp_path: Path) -> None:
    """Embedding, head and norms: moments and step counts are in the checkpoint, come back, and are used."""
    case = Case("shard2+fp64", optimizer="muon")
    saved = run_ranks(2, train_and_save, case, tmp_path, 2, 2)
    manifest = Checkpoint.open(tmp_path / "step-000002").manifest
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"):
        assert manifest.scalars[name] == {"step": 2.0}
        assert name in manifest.tensors["exp_avg"] and name in manifest.tensors["exp_avg_sq"]
    again = [rank[0] for rank in run_ranks(2, load_and_train, case, [tmp_path / "step-000002"], 2)]
    assert equal(whole(again), whole(saved))
    assert [state.steps for state in again] == [{2.0}, {2.0}]
    assert all(np.abs(values).max() > 0 for key, values in whole(again).items() if key.startswith("exp_avg"))
    assert again[0].losses == saved[0].losses
