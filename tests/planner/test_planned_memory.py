"""Memory of a rank, planned: beside recorded rehearsals of it, and by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from benchmarks.planned_memory import Planned, cells, plan

from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.balance.spec import buffer_bytes
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.layout import Layout
from fivefold.parallel.loss.spec import logit_bytes
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import layer_bytes, layer_numbers, step_bytes
from fivefold.parallel.pipeline.memory import in_flight
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import Recompute
from fivefold.parallel.step import LayerNumbers, LayerStep

CELLS = [cell for cell in cells() if cell.allocated is not None]


def mean_and_worst(found: Sequence[Planned], which: int) -> tuple[float, float]:
    errors = [abs(each.off[which]) for each in found]
    return sum(errors) / len(errors), max(errors)


def test_planned_memory_is_that_of_rehearsals() -> None:
    """Allocated within 2 % at the mean and 5 % at worst, reserved within 5 % at the mean."""
    found = [plan(cell) for cell in CELLS]
    mean, worst = mean_and_worst(found, 0)
    assert mean < 0.01 and worst < 0.05
    assert mean_and_worst(found, 1)[0] < 0.05


def test_a_rank_that_ran_out_of_memory_is_planned_above_its_chip() -> None:
    short = [cell for cell in cells() if not cell.fits]
    assert short
    for cell in short:
        chip = cell.chip
        assert plan(cell).reserved + chip.context_gib * 2**30 > chip.memory_bytes, cell


def test_cells_are_of_every_kind() -> None:
    layouts = [Layout.parse(cell.layout) for cell in CELLS]
    families = ("llama", "qwen3", "gemma-2", "mixtral", "deepseek-v3")
    assert all(any(cell.model.startswith(family) for cell in CELLS) for family in families)
    assert {cell.compiled for cell in CELLS} == {True, False}
    assert {layout.zero for layout in layouts} == {1, 2, 3} and {layout.recompute for layout in layouts} == {
        "none",
        "full",
    }
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep"):
        assert any(getattr(layout, axis) > 1 for layout in layouts), axis
    assert {8, 1024} <= {layout.world for layout in layouts}


# ---- by hand ---------------------------------------------------------------------------------------------------------


def llama(layout: str, rank: int = 0) -> ParallelPlan:
    """Llama 3.1 8B: D 4,096, F 14,336, 32 query and 8 key/value heads of 128, 128,256 tokens."""
    return lower(facts_of_config("llama-3.1-8b"), Layout.parse(layout), rank)


def _numbers(plan: ParallelPlan, shape: StepShape) -> LayerNumbers:
    """Elements of the first layer."""
    return layer_numbers(LayerStep(plan, plan.placement.layers[0], plan.facts.layer_costs[0], shape))


def test_what_a_layer_keeps() -> None:
    """Eager: q and what attention gives, k and v; gate, up, their product and silu(gate); of each of two norms its
    input in fp32, that scaled and weighted, and one root; of each head one sum in fp32. Compiled: the inputs of both
    norms and of the linears, q, k, v and what attention gives, gate, up and their product."""
    (cost,) = facts_of_config("llama-3.1-8b").costs
    d, f, kv, heads = 4096, 14336, 1024, 32
    eager = cost.kept(2, compiled=False).on_rank(1, sequence_parallel=False)
    assert eager == 2 * d + 2 * kv + 4 * f + 2 * (4 * d + 2) + 2 * heads
    assert cost.kept(2, compiled=True).on_rank(1, sequence_parallel=False) == 6 * d + 2 * kv + 3 * f + 2 * heads
    assert cost.kept(4, compiled=False) == cost.saved


def test_what_the_loss_needs() -> None:
    """4 chunks of 2,048 tokens: of the head's gradient the sum in fp32 and this chunk's in bf16; the logits of a chunk
    and their gradient, which compiled takes their memory. Of the hidden states: what the last layer gave, in fp32,
    scaled, weighted, and their gradient: 6 numbers of 2 bytes each."""
    plan = llama("shard8")
    shape = plan.step_shape(1, 8192, 2)
    assert shape.loss_chunks == (2048,) * 4
    vocabulary, d = 128256, 4096
    for compiled, both in ((False, 2), (True, 1)):
        in_head = vocabulary * d * (4 + 2) + both * 2048 * vocabulary * 2
        assert logit_bytes(plan, replace(shape, compiled=compiled)) == in_head + 6 * 8192 * d * 2


def test_what_the_loss_needs_with_tensor_parallelism() -> None:
    """Half of the vocabulary and, before the head, half of the tokens: the head's gradient so far in fp32; of a chunk
    of 4,096 tokens the softmax in fp32, the logits and their gradient. Of the hidden states 5 numbers on half of the
    tokens; gathered, and their gradient, on all."""
    plan = llama("shard4.tp2")
    shape = plan.step_shape(1, 8192, 2)
    assert shape.loss_chunks == (4096,) * 2
    vocabulary, d = 128256 // 2, 4096
    in_loss = vocabulary * d * 4 + 4096 * vocabulary * (4 + 2 + 2)
    assert logit_bytes(plan, shape) == in_loss + 8192 * d * 2 * 5 // 2 + 2 * 8192 * d * 2


@pytest.mark.parametrize(("layout", "at_once"), [("shard8", 3), ("shard4.cp2+ulysses", 1)])
def test_what_the_backward_of_a_compiled_layer_has_besides(layout: str, at_once: int) -> None:
    """One graph: the gradients of gate, up and their product at once. With recompute its input, which its norm reads,
    counts once."""
    plan = llama(layout)
    cost = plan.facts.layer_costs[0]
    shape = replace(plan.step_shape(1, 8192, 2), compiled=True)
    assert _numbers(plan, shape).working == at_once * 14336 + 4096
    token = shape.rows * shape.tokens * shape.compute_bytes
    once, again = (
        layer_bytes(plan, plan.placement.layers[0], cost, replace(shape, recompute=Recompute(mode)))
        for mode in ("none", "full")
    )
    assert (again.kept, again.working) == (4096 * token, once.working + once.kept - 4096 * token)


@pytest.mark.parametrize(("layout", "split"), [("shard8", 1), ("shard4.tp2", 2)])
def test_what_the_backward_of_a_layer_has_besides(layout: str, split: int) -> None:
    """Gradients of two tensors of F numbers, which tp splits, and of the hidden states twice. With recompute all that
    forward makes again; until then it keeps its input alone."""
    plan = llama(layout)
    shape, (cost,) = plan.step_shape(1, 8192, 2), facts_of_config("llama-3.1-8b").costs
    numbers = 2 * 14336 // split + 2 * 4096
    assert _numbers(plan, shape).working == numbers
    once, again = (
        layer_bytes(plan, plan.placement.layers[0], cost, replace(shape, recompute=Recompute(mode)))
        for mode in ("none", "full")
    )
    assert once.working == numbers * 8192 * 2
    assert (again.working, again.kept) == (once.working + once.kept, 8192 * 4096 * 2 // split)


def test_ulysses_keeps_what_it_exchanges() -> None:
    """Of 32 heads what attention gives, and keys and values of 8, of 128 numbers each; a ring keeps none of it."""
    ulysses, ring = (llama(f"shard2.tp2.cp2+{method}") for method in ("ulysses", "ring"))
    found = [_numbers(plan, plan.step_shape(1, 8192, 2)) for plan in (ulysses, ring)]
    assert found[0].exchanged == found[0].saved - found[1].saved == (32 + 8 * 2) * 128 / 2
    assert found[1].exchanged == 0


def test_routers_keep_their_buffers_in_fp32() -> None:
    assert buffer_bytes({"a": (256,), "b": (2, 8)}) == 4 * (256 + 16)


def test_micro_batches_in_flight_are_those_of_one_moment() -> None:
    """Interleaved 1F1B on 2 ranks: the first has at once at most 3 of stage 0 and 2 of stage 2, or 2 and 3; the most of
    each add up to more."""
    plan = Layout.parse("pp2+interleaved+v2").schedule_plan(8)
    order = plan.orders[0]
    now, most, of_each = dict.fromkeys((0, 2), 0), 0, dict.fromkeys((0, 2), 0)
    for slot in order:
        now[slot.stage] += 1 if slot.kind == "F" else -1
        most = max(most, sum(now.values()))
        of_each = {stage: max(of_each[stage], now[stage]) for stage in now}
    found = in_flight(order, (1, 1, 1, 1)).most
    assert sum(found.values()) == most < sum(of_each.values())
    assert in_flight(order, (3, 1, 1, 1)).most[0] == of_each[0]


@pytest.mark.parametrize(("micro_batches", "moment"), [(1, "the first loss"), (2, "the loss")])
def test_gradients_are_there_from_the_second_micro_batch_on(micro_batches: int, moment: str) -> None:
    plan = llama("shard8")
    needs = step_bytes(plan, replace(plan.step_shape(1, 8192, micro_batches), compiled=True))
    assert needs.fullest == moment
    assert needs.by_kind["gradients"] == (needs.gradients if micro_batches > 1 else 0)
