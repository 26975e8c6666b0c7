"""Optimizer state in bf16 and in 8 bits: each number is what a search in a table gives, on average nothing is lost, and
layouts and checkpoints keep it (`verification/by_hand.py`, tests/checkpoint/test_reshard.py)."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.core.optimizers import OPTIMIZERS, block_length, kept_in, state_bytes
from fivefold.models.discover import facts_of
from fivefold.parallel.dtensor import local
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.placement import Placement
from fivefold.parallel.sharding import ShardSpec, local_regions
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.optimizers.states import KeptState
from fivefold.training.step import step_shape, train_step
from fivefold.verification.by_hand import kept_state
from fivefold.verification.reference import ReferenceRun
from tests.parity import Case, batch_of, build, documents, proof, reference_model, subject
from tests.pool import run_ranks

SHAPE = (24, 64)


def _kept(dtype: str) -> KeptState:
    spec = ShardSpec("a.weight", SHAPE, (), 1)
    placement = SimpleNamespace(
        shards={"a.weight": spec}, kept_in=lambda name: dtype, local_shape=lambda name: SHAPE,
        regions=lambda name: local_regions(spec, 0, 0, 1),
    )  # fmt: skip
    return KeptState(cast(Placement, placement), "a.weight")


def _after(values: Tensor, kind: str, dtype: str, step: int = 1) -> Tensor:
    """What is left of values that are kept."""
    own = _kept(dtype)
    state = {**own.new(values, kind), "step": torch.tensor(float(step))}
    own.write(state, kind, slice(0, len(values)), values)
    left: Tensor = own.restored(values, state)[kind]
    return left


@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "momentum_buffer"])
@pytest.mark.parametrize("type_", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", ["bf16", "8bit"])
def test_each_number_is_that_of_a_search_in_a_table(dtype: Any, type_: torch.dtype, kind: str) -> None:
    """Numbers of many sizes in a block, some of them zero, and a block of zeros."""
    torch.manual_seed(0)
    values = torch.randn(SHAPE, dtype=type_).mul(3).exp() * torch.randn(SHAPE, dtype=type_).sign()
    values = values.abs() if kind == "exp_avg_sq" else values
    values[3, 5], values[7] = 0, 0
    left = _after(values, kind, dtype, step=7)
    torch.testing.assert_close(left, kept_state(values, "a.weight", kind, 7, dtype), rtol=1e-13, atol=0)
    assert not left[7].any() and not left[3, 5]
    assert kind != "exp_avg_sq" or not (left == 0)[values > 0].any()  # it is divided by


@pytest.mark.parametrize("dtype", ["bf16", "8bit"])
def test_rows_are_kept_alike_piece_by_piece(dtype: str) -> None:
    """A large matrix is restored and kept a few rows at a time."""
    values, kind = torch.rand(SHAPE), "exp_avg_sq"
    own = _kept(dtype)
    state = {**own.new(values, kind), "step": torch.tensor(1.0)}
    for rows in (slice(0, 10), slice(10, 20), slice(20, 30)):
        own.write(state, kind, rows, values[rows])
    assert torch.equal(own.restored(values, state)[kind], _after(values, kind, dtype))


@pytest.mark.parametrize("dtype", ["bf16", "8bit"])
def test_a_second_moment_changes_by_less_than_its_type_can_tell(dtype: str) -> None:
    """Of 1, with the gradient gone, 0.999^600 = 0.549 is left; rounded to the nearest, bf16 would keep 1."""
    values = torch.ones(SHAPE)
    values[:, ::16] = 2  # the largest of its block
    first = values.clone()
    for step in range(1, 601):
        values = _after(values * 0.999, "exp_avg_sq", dtype, step)
    assert float((values / first).mean()) == pytest.approx(0.999**600, rel=0.02)


def test_blocks_and_bytes() -> None:
    assert [block_length(width) for width in (4096, 2048, 11008, 1600, 64, 53)] == [256, 256, 32, 16, 16, 0]
    assert kept_in("8bit", (10, 53), 2) == kept_in("bf16", (64,), 1) == "fp32"
    assert [state_bytes(4096 * 8, each, 4096, 4) / 4096 for each in ("fp32", "bf16", "8bit")] == [32, 16, 8.125]


# ---- under layouts ---------------------------------------------------------------------------------------------------

WIDE = (("intermediate_size", 64),)  # so that every matrix has blocks
CASES = [
    Case("tp2.shard2+fp64+8bit_states", optimizer="muon", overrides=WIDE, steps=4),
    Case("shard2.pp2.ep2+fp64+bf16_states", "mixtral", overrides=WIDE, steps=4),
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_layouts_keep_what_one_process_keeps(case: Case) -> None:
    """Losses of steps that see what three updates have left in the state; and its bytes are the planned ones."""
    model = reference_model(case, torch.float32)
    about = ReferenceRun(subject(case), "fp64", "cpu", model=model, state_dtype=case.parsed.state_dtype)
    expected = about.run([]).tensors["losses"].tolist()
    for found in run_ranks(case.parsed.world, _train, case):
        assert found["losses"] == pytest.approx(expected, rel=1e-10)
        assert found["bytes"] == found["planned"]


def _train(case: Case) -> dict[str, Any]:
    model = build(case)
    optimizer, plan = build_optimizer(model, case.options), state_of(model).plan
    losses = []
    for step in range(case.steps):
        with proof(case):
            batch = batch_of(documents(case, step), case.parsed, plan.placement.data_rank)
            rate, most = case.options.learning_rate, case.max_grad_norm
            losses.append(train_step(model, optimizer, batch, learning_rate=rate, max_grad_norm=most).loss)
    tensors = (local(each) for state in optimizer.state.values() for each in state.values())
    shape = replace(
        step_shape(model, *batch[0].input_ids.shape, len(batch), batch=batch), optimizer=OPTIMIZERS[case.optimizer]
    )
    held = sum(each.nbytes for each in tensors if each.ndim)
    return {"losses": losses, "bytes": held, "planned": step_bytes(plan, shape).optimizer}


def test_a_cut_through_a_block_is_refused() -> None:
    facts = facts_of(reference_model(Case("single", overrides=WIDE)))
    with pytest.raises(UserError, match="blocks of 16 in a row of 32, and tp 4 cuts one"):
        lower(facts, Layout.parse("tp4+8bit_states"), 0)
    assert lower(facts, Layout.parse("tp4+bf16_states"), 0)
