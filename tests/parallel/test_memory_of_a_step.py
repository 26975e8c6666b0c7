"""What `memory.py` counts, held against numbers by hand."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.schedule import Slot
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.fp8.spec import cast_numbers
from fivefold.parallel.fsdp.memory import Units, bytes_of_units
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import layer_bytes, layer_numbers, step_bytes
from fivefold.parallel.offload.spec import PART_BYTES
from fivefold.parallel.pipeline.memory import InFlightBytes, edge_bytes, in_flight
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import Mode, Recompute
from fivefold.parallel.recompute.spec import expensive_numbers
from fivefold.parallel.step import FIRST, MOMENTS, UPDATE, LayerStep


def _first_layer(plan: ParallelPlan, shape: StepShape) -> LayerStep:
    return LayerStep(plan, plan.placement.layers[0], plan.facts.layer_costs[0], shape)


def _expensive(plan: ParallelPlan, shape: StepShape) -> float:
    """Elements per token that selective recompute saves of the first layer."""
    step = _first_layer(plan, shape)
    return expensive_numbers(step, layer_numbers(step).exchanged)


def test_inputs_of_linears_wait_for_the_gradients_of_weights() -> None:
    order = [Slot(0, "F", 0), Slot(0, "F", 1), Slot(0, "I", 0), Slot(0, "F", 2), Slot(0, "W", 0), Slot(0, "B", 1)]
    assert in_flight(order, [4]).most[0] == 3


@pytest.mark.parametrize(
    ("zero", "gathered", "waiting"),
    [(1, [65, 65, 65, 65], [260, 26 + 260, 86 + 260, 130 + 260]), (2, [65, 65, 65, 65], [0, 26, 86, 130]),
     (3, [25, 40, 40, 25], [0, 26, 86, 130])],
)  # fmt: skip
def test_units_are_gathered_and_wait_by_zero_stage(zero: int, gathered: list[int], waiting: list[int]) -> None:
    """A layer of 20 numbers, 5 of them of experts, 8 of the others in one matrix, an embedding of 10, the model's own
    unit of 5, 65 in all, in bf16, reduced in fp32; they are gathered in twice as many bytes."""
    shape: Any = SimpleNamespace(compute_bytes=2, reduce_bytes=4, micro_batches=1)
    units = Units(layer=(40, 20), own=(30, 15), embedding=(20, 10), root=(10, 5), total=(130, 65), matrix=8, ahead=30)
    found = bytes_of_units({"parameters": 7, "gradients": 9}, units, zero, shape, root_waits=False)
    moments = [found[moment] for moment in MOMENTS[:4]]
    assert [each["parameters"] for each in moments] == [7, 7, 7, 7]
    assert [each["gradients"] for each in moments] == [9 if zero > 1 else 0] * 4
    assert [each["gathered parameters"] for each in moments] == [2 * numbers for numbers in gathered]
    assert [each["unreduced gradients"] for each in moments] == waiting
    for first, later in FIRST.items():
        summed = 65 * 4 if zero == 1 else 0
        without = {"gradients": 0, "unreduced gradients": found[later]["unreduced gradients"] - summed}
        assert found[first] == found[later] | without


@pytest.mark.parametrize(("layout", "shares"), [("shard2.ep2", 1), ("shard4.ep2", 2)])
def test_units_of_experts_are_gathered_with_their_layer_and_not_ahead(layout: str, shares: int) -> None:
    """Mixtral, whose rank gathers four of eight experts of a layer, and of the next layer attention alone."""
    plan = lower(facts_of_config("mixtral-8x7b"), Layout.parse(layout), 0)
    experts, matrix = 4 * 3 * 14336 * 4096, 4 * 2 * 14336 * 4096
    attention = 2 * 4096 * 4096 + 2 * 1024 * 4096 + 8 * 4096 + 2 * 4096
    root, layer = 32000 * 4096 + 4096, attention + experts
    moments = step_bytes(plan, plan.step_shape(1, 1000, 1)).moments
    gathered = [moments[moment]["gathered parameters"] for moment in MOMENTS[:4]]
    assert gathered == [2 * (root + layer), *[2 * (root + layer + attention)] * 2, 2 * (root + layer)]
    waiting = [moments[moment]["unreduced gradients"] for moment in MOMENTS[:4]]
    begun = 2 * (root + matrix)
    assert waiting == [0, begun, begun + 4 * attention, 2 * (root + layer) + 4 * layer]
    assert plan.placement.grid.fsdp_shards("ep") == shares


def test_what_a_rank_has_whole_is_not_gathered_ahead() -> None:
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse("single"), 0)
    moments = step_bytes(plan, plan.step_shape(1, 1000, 1)).moments
    assert moments["a backward begins"]["gathered parameters"] == moments["the loss"]["gathered parameters"] > 0


@pytest.mark.parametrize(
    ("layout", "entered", "left"),
    [("pp2", 1, 1), ("pp2+full", 0, 1), ("tp2.pp2", 1 / 2, 1 / 2), ("tp2.pp2+nosp", 1, 1)],
)
def test_a_stage_holds_its_input_and_its_output(layout: str, entered: float, left: float) -> None:
    """Of a Llama 1B: a recomputed layer holds its input itself, also if a budget chose it alone."""
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse(layout), 0)
    shape, size = plan.step_shape(1, 1000, 1), 2048 * 1000 * 2
    assert edge_bytes(plan, shape) == (entered * size, left * size)
    one: dict[str, Mode] = dict.fromkeys(plan.placement.layers, "none") | {plan.placement.layers[0]: "full"}
    assert edge_bytes(plan, replace(shape, recompute=Recompute("1GiB", one))) == (0, left * size)


@pytest.mark.parametrize(("layout", "part"), [("tp2+full", 2), ("tp2+nosp+full", 1)])
def test_a_recomputed_layer_keeps_this_ranks_tokens_of_its_input(layout: str, part: int) -> None:
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse(layout), 0)
    shape = plan.step_shape(1, 1000, 1)
    found = layer_bytes(plan, plan.placement.layers[0], plan.facts.layer_costs[0], shape)
    assert found.kept == 2048 * 1000 * 2 // part


def test_gradients_come_with_the_first_backward() -> None:
    """gpipe has all micro batches under way without gradients, and all but one with them; its losses come before. 1F1B
    has as many under way with gradients as without, where there are enough."""
    gpipe, few, many = (
        Layout.parse(text).schedule_plan(count).orders for text, count in (("pp2+gpipe", 4), ("pp2", 2), ("pp2", 4))
    )
    last = in_flight(gpipe[1], (1, 1))
    assert (last.most, last.at_loss, last.later, last.later_at_loss) == ({1: 4}, {1: 4}, {1: 3}, {1: 0})
    assert [(each.most[0], each.later[0]) for each in (in_flight(few[0], (1, 1)), in_flight(many[0], (1, 1)))] == [
        (2, 1), (2, 2),
    ]  # fmt: skip


def test_what_comes_from_host_memory_is_there_beside_its_layer() -> None:
    """The layer whose backward runs, and from the next one on also the one that comes: 10 each."""
    moments = InFlightBytes(
        saved=100, at_loss=90, later=80, later_at_loss=70, layer=10, stage=40, working=5, loss=3, fetched=10
    ).at()
    assert [moments[each]["saved activations"] for each in MOMENTS] == [70, 90, 90, 60, 0, 90, 110, 110]


def test_both_levers_of_offload_leave_one_layer_and_three_parts() -> None:
    """Of 32 layers, 31 go to host memory; state is there in the update alone, a matrix of the vocabulary at once. So
    are parameters, with a third lever."""
    plan = lower(facts_of_config("llama-3.1-8b"), Layout.parse("single+offload+offload_optimizer"), 0)
    shape = plan.step_shape(1, 1000, 1)
    found = step_bytes(plan, shape)
    kept = layer_bytes(plan, plan.placement.layers[0], plan.facts.layer_costs[0], shape).host
    state = 2 * found.parameters
    assert found.host == {"parameters": 0, "optimizer state": state, "saved activations": 31 * kept}
    assert found.optimizer == state
    assert [found.moments[each]["saved activations"] // kept for each in MOMENTS] == [0, 1, 0, 0, 0, 1, 2, 2]
    part = 2 * (128256 * 4096 * 4 + 2 * PART_BYTES)
    assert [found.moments[each]["optimizer state"] for each in MOMENTS] == [part * (each == UPDATE) for each in MOMENTS]
    all_away = step_bytes(lower(plan.facts, replace(plan.layout, offload_parameters=True), 0), shape)
    assert all_away.host["parameters"] == found.parameters and all_away.by_kind["parameters"] == 0
    assert all_away.moments[UPDATE]["optimizer state"] == part * 3 // 2


@pytest.mark.parametrize(
    ("model", "layout", "column", "others"),
    [
        ("llama-3.1-8b", "single", 1, 4096),
        ("llama-3.1-8b", "tp2", 2, 4096 / 2),
        ("llama-3.1-8b", "tp2+nosp", 2, 4096),
        # keys and values, what attention gives and the queries once more
        ("llama-3.1-8b", "cp2+ulysses", 1, 4096 + 2 * 1024 + 2 * 4096),
    ],
)
def test_what_is_dear_in_a_layer(model: str, layout: str, column: int, others: float) -> None:
    """Columns: q, k, v, attention with a number in fp32 for each of 32 heads, gate and up. The others: o; not down,
    which nothing reads."""
    plan = lower(facts_of_config(model), Layout.parse(f"{layout}+selective"), 0)
    columns = 4096 + 2 * 1024 + 32 * (128 + 2) + 2 * 14336
    shape = plan.step_shape(1, 1000, 1)
    assert _expensive(plan, shape) == columns / column + others


@pytest.mark.parametrize(("layout", "more"), [("single+fp8_rowwise", 2048), ("tp2+fp8_rowwise", 0)])
def test_a_linear_in_fp8_keeps_what_the_last_one_gives(layout: str, more: int) -> None:
    """Behind a row over tp nothing is kept: it computes its product again, or hands it on."""
    found = []
    for text in (layout, layout.partition("+")[0]):
        plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse(f"{text}+selective"), 0)
        shape = plan.step_shape(1, 1000, 1)
        found.append(_expensive(plan, shape))
    assert found[0] - found[1] == more


def test_rows_of_experts_are_kept_before_between_and_behind_what_sends_them() -> None:
    """Mixtral: rows of 4,096 numbers, two experts to a token."""
    found = []
    for layout in ("shard2+selective", "shard2.ep2+selective"):
        plan = lower(facts_of_config("mixtral-8x7b"), Layout.parse(layout), 0)
        shape = plan.step_shape(1, 1000, 1)
        found.append(_expensive(plan, shape))
    assert found[1] - found[0] == (3 - 1) * 2 * 4096


@pytest.mark.parametrize(
    ("layout", "compiled", "more"),
    [
        # Llama 1B: norms make 2,048 numbers for q, k and v, and for gate and up; the activation 8,192 for down.
        ("single+fp8_rowwise", True, -2048 - 2048 - 8192),
        ("single+fp8_rowwise_gw_hp", True, 0),  # reads its inputs again
        ("single+fp8_rowwise", False, 0),
        ("single+fp8", False, -2048 - 2048 - 8192 + (2 * 2048 + 2048 + 8192) / 2),
        # A rank has half of what attention and the activation give; casts, of a byte, by scales of both.
        ("tp2+fp8", True, -2048 - 2048 - 4096 + (2048 + 1024 + 2048 + 4096) / 2),
        ("tp2+fp8_rowwise", True, -2048 - 2048 - 4096 + 4096 / 2),
        ("cp2+fp8_rowwise", True, -2048 - 8192),  # the norm before q, k and v is a graph of its own
        ("single+fp8_delayed", True, -2048 - 2048 + (2 * 2048 + 2048 + 8192) / 2),
    ],
)
def test_what_fp8_keeps_of_a_layer(layout: str, compiled: bool, more: float) -> None:
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse(layout), 0)
    shape = replace(plan.step_shape(1, 1000, 1), compiled=compiled)
    assert cast_numbers(_first_layer(plan, shape)) == more


def test_a_layer_in_fp8_saves_casts_in_place_of_inputs() -> None:
    """Compiled, none of the three inputs, which are made again."""
    kept = []
    for layout in ("single", "single+fp8_rowwise"):
        plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse(layout), 0)
        shape = replace(plan.step_shape(1, 1000, 1), compiled=True)
        kept.append(layer_bytes(plan, plan.placement.layers[0], plan.facts.layer_costs[0], shape).kept)
    assert kept[0] - kept[1] == (2048 + 2048 + 8192) * 1000 * 2


def test_a_recomputed_layer_sends_its_input_alone_to_host_memory() -> None:
    """The last layer of the stage keeps it on the device; its backward has what it recomputes there."""
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse("single+full+offload"), 0)
    shape, costs = plan.step_shape(1, 1000, 1), plan.facts.layer_costs
    first, *_, last = (
        layer_bytes(plan, layer, cost, shape) for layer, cost in zip(plan.placement.layers, costs, strict=True)
    )
    assert (first.kept, first.host) == (0, 2048 * 1000 * 2)
    assert (last.kept, last.host) == (2048 * 1000 * 2, 0)
    assert first.working == last.working


def test_what_is_frozen_beside_an_adapter_has_no_gradient_and_no_state() -> None:
    """It rests in bf16; the adapter's matrices, their gradients and both of their moments in fp32."""
    facts = adapted(facts_of_config("llama-3.2-1b"), Lora(rank=8))
    trained = sum(parameter.size for parameter in facts.parameters.values() if parameter.is_trained)
    frozen = sum(parameter.size for parameter in facts.parameters.values()) - trained
    plan = lower(facts, Layout.parse("single"), 0)
    found = step_bytes(plan, plan.step_shape(1, 1000, 1))
    assert (found.parameters, found.gradients, found.optimizer) == (2 * frozen + 4 * trained, 4 * trained, 8 * trained)


def test_muon_keeps_one_number_for_each_of_a_matrix_of_a_layer() -> None:
    """And two for each of the embedding and of norms, as AdamW."""
    facts = facts_of_config("llama-3.2-1b")
    matrices = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    others = sum(parameter.size for parameter in facts.parameters.values()) - matrices
    plan = lower(facts, Layout.parse("single"), 0)
    shape = replace(plan.step_shape(1, 1000, 1), optimizer=OPTIMIZERS["muon"])
    assert step_bytes(plan, shape).optimizer == 4 * (matrices + 2 * others)


def test_an_update_converts_the_state_of_the_largest_parameter() -> None:
    """Of an embedding [128256, 2048] over 128 ranks: 16 bytes a number beside states in bf16."""
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse("shard128+bf16_states"), 0)
    found = step_bytes(plan, plan.step_shape(1, 1000, 1))
    assert found.moments[UPDATE]["optimizer state"] - found.optimizer == 16 * 128256 * 2048 // 128


def test_keys_of_all_ranks_take_more_than_those_of_one() -> None:
    """Llama 2 13B, rows of 131,072 tokens on 16 ranks: 11.4 GiB more are rehearsed where all keys and values are
    gathered, 78.3 GiB beside 66.9."""
    facts, found = facts_of_config("llama-2-13b"), []
    for method in ("allgather", "ring"):
        plan = lower(facts, Layout.parse(f"cp16+{method}"), 0)
        shape = plan.step_shape(1, 131072, 1)
        found.append(layer_numbers(_first_layer(plan, shape)).gradients * shape.tokens * shape.compute_bytes / 2**30)
    assert found[0] - found[1] == pytest.approx(11.5, abs=0.1)


@pytest.mark.parametrize("layout", ["single", "tp2"])
def test_inputs_that_adapters_drop_are_saved_by_themselves(layout: str) -> None:
    """A token: three in place of one of q, k and v, two of gate and up, and that of o: a rank has that of its heads."""
    parsed, hidden = Layout.parse(layout), 2048
    plain, dropping = (
        lower(adapted(facts_of_config("llama-3.2-1b"), Lora(rank=4, dropout=p)), parsed, 0) for p in (0.0, 0.1)
    )
    shape = plain.step_shape(1, 128, 1)
    more = layer_numbers(_first_layer(dropping, shape)).saved - layer_numbers(_first_layer(plain, shape)).saved
    assert more == 3 * hidden + hidden / parsed.tp
