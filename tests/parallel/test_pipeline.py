"""Pipelines: uneven stages and few micro batches, who holds what, evaluation, timing, what is refused, bf16.

(Every schedule beside every other option is in the matrix, test_matrix.py.)
"""

import time
from collections import ChainMap
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from fivefold.core.errors import UserError
from fivefold.core.schedule import SCHEDULES as RECORDS
from fivefold.core.schedule import SchedulePlan, Slot
from fivefold.models.build import build_meta
from fivefold.models.facts import ModelFacts
from fivefold.parallel import passes
from fivefold.parallel.apply import parallelize
from fivefold.parallel.dtensor import local
from fivefold.parallel.pipeline import runtime as pipeline
from fivefold.parallel.pipeline.runtime import Pipeline
from fivefold.parallel.pipeline.stages import StageModules
from fivefold.parallel.state import state_of
from fivefold.training.inputs import evaluating, to_device
from tests.parallel.test_parity import run
from tests.parity import Case, assert_proved, batch_of, build, documents, gradients, hf_config, refusal
from tests.pool import run_ranks
from tests.tiers import put_off

LAYERS_4 = (("num_hidden_layers", 4),)
OTHERS = [
    put_off(Case("pp4+fp64", tied=True, overrides=LAYERS_4, steps=2)),
    put_off(Case("pp2+split1-3+fp64", overrides=LAYERS_4, steps=2)),
    Case("pp2+zb+v2+fp64", tied=True, overrides=LAYERS_4, steps=2),
    Case("pp2+zbv+mb4+fp64", rows=8, overrides=LAYERS_4, steps=2, packing=False),  # two micro batches: it is not filled
    put_off(Case("pp2+mb8+fp64", steps=2)),  # one micro batch
]


def name(case: Case) -> str:
    return f"{case.layout}-{case.family}{'-tied' * case.tied}-{case.optimizer}"


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS, ids=name)
def test_a_schedule_equals_one_process(case: Case) -> None:
    found, expected, per_rank = run(case)
    assert_proved(found, expected, per_rank)


# ---- who holds what, and what else a pipeline does -------------------------------------------------------------------


def held(case: Case) -> tuple[set[str], set[str], int]:
    """(parameters of this rank's model, those that its record says it holds, how many numbers they have)."""
    model = build(case)
    state = state_of(model)
    named = dict(model.named_parameters())
    return (
        set(named),
        {each for each in state.placement.shards if state.placement.holds(each)},
        sum(p.numel() for p in named.values()),
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [put_off(Case("pp2")), Case("pp2", tied=True), put_off(Case("pp2+zbv", overrides=LAYERS_4))], ids=name
)
def test_a_rank_has_its_own_layers_and_nothing_else(case: Case) -> None:
    (first, said, numbers), (last, also_said, more) = run_ranks(2, held, case)
    whole = {name: p.numel() for name, p in build_meta(hf_config(case)).named_parameters()}
    assert first == said and last == also_said
    assert first | last == set(whole)
    both = first & last
    assert both == ({"model.embed_tokens.weight"} if case.tied else set())
    assert numbers + more == sum(whole.values()) + sum(whole[name] for name in both)


def stands_in(case: Case) -> bool:
    """Whether what stands for the embedding while the last stage runs has the weight of the head."""
    model = build(case)
    staged = state_of(model).live(Pipeline).staged
    with staged.running(1, torch.zeros(1)) if 1 in staged.views else nullcontext():
        return model.get_submodule("model.embed_tokens").weight is model.lm_head.weight


@pytest.mark.full
def test_a_tied_embedding_is_where_its_head_is() -> None:
    """Llama 4 asks its embedding for the device, in every stage: what stands for it must not stay on meta."""
    assert run_ranks(2, stands_in, Case("pp2", tied=True))[1]


def losses(case: Case) -> tuple[float, float]:
    """The loss of a batch forward only, and as training computes it; each summed over ranks."""
    model = build(case)
    scale = torch.tensor(1.0, dtype=torch.float64)
    batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    with evaluating(model):
        forward = sum(passes.loss(model, to_device(each, scale.device, scale)) for each in batch)
    trained = gradients(model, batch, scale)
    return float(forward), float(trained)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2+zbv", *map(put_off, ("pp2", "pp2.tp2+interleaved+v2"))])
def test_evaluation_computes_the_loss_of_training(layout: str) -> None:
    case = Case(f"{layout}+fp64", overrides=LAYERS_4)
    per_rank = run_ranks(case.parsed.world, losses, case)
    assert sum(forward for forward, _ in per_rank) > 0
    np.testing.assert_allclose(*zip(*per_rank, strict=True), rtol=1e-12)


def timed(case: Case) -> list[tuple[int, Slot, float, float]]:
    """The slots of one step as they ran."""
    model = build(case)
    pipeline = state_of(model).live(Pipeline)
    pipeline.timed = []
    batch = batch_of(documents(case, 0), case.parsed, 0)
    gradients(model, batch, torch.tensor(1.0, dtype=torch.float64))
    return [(t.rank, t.slot, t.start, t.end) for t in pipeline.timeline().slots]


@pytest.mark.full
def test_a_step_is_timed_slot_by_slot() -> None:
    case = Case("pp2+zbv+fp64", overrides=LAYERS_4)
    everywhere = run_ranks(2, timed, case)
    assert everywhere[0] == everywhere[1]
    for rank, order in enumerate(SchedulePlan("zbv", 2, 2, case.rows).orders):
        own = [(slot, start, end) for on, slot, start, end in everywhere[0] if on == rank]
        assert tuple(slot for slot, _, _ in own) == order
        assert all(start < end for _, start, end in own)
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(own))


SLOW = 0.3  # seconds that the last stage sleeps in a forward


def timed_with_a_slow_stage(case: Case) -> Any:
    model = build(case)
    pipeline = state_of(model).live(Pipeline)
    pipeline.timed = []
    plain = model.run_stage

    def run_stage(inputs: Any, stage: int, hidden: Any) -> Any:
        if pipeline.staged.is_last(stage):
            time.sleep(SLOW)
        return plain(inputs, stage, hidden)

    model.run_stage = run_stage
    gradients(model, batch_of(documents(case, 0), case.parsed, 0), torch.tensor(1.0, dtype=torch.float64))
    return pipeline.timeline().to_json()


@pytest.mark.full
def test_waiting_for_a_slow_stage_is_no_work() -> None:
    """Rank 0 waits for rank 1, which sleeps in every forward: it is idle for nearly all of the time."""
    case = Case("pp2+fp64", rows=4)
    timeline, _ = run_ranks(2, timed_with_a_slow_stage, case)
    of_rank = [[each for each in timeline["slots"] if each["rank"] == rank] for rank in (0, 1)]
    waited = sum(each["waited"] for each in of_rank[0] if each["kind"] == "B")
    busy = [sum(each["end"] - each["start"] for each in own) for own in of_rank]
    assert waited > 3 * SLOW, "the first backward waits for one forward of the other, those after it for one each"
    assert busy[1] > case.rows * SLOW
    assert busy[0] < timeline["span"] - waited
    assert timeline["bubble"] == pytest.approx(1 - sum(busy) / (2 * timeline["span"]))
    assert timeline["bubble"] > waited / (2 * timeline["span"])


class _Event:
    """A CUDA event of a queue that is at 1, 4, 9, 16, ... ms."""

    recorded = 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        _Event.recorded += 1
        self.at = float(_Event.recorded**2)

    def elapsed_time(self, later: "_Event") -> float:
        return later.at - self.at


def test_a_gpu_s_slots_are_timed_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by when the CPU put them into the queue."""
    order: list[str] = []
    for name, value in (("Event", _Event), ("synchronize", lambda: order.append("synchronize"))):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(pipeline.dist, "barrier", lambda group: order.append(f"barrier of {group}"))
    watch = pipeline.Stopwatch(torch.device("cuda"), cast(Any, "pp"))
    assert order == ["barrier of pp", "synchronize"], "zero is one moment on all ranks, and on the device"
    slots = [Slot(0, "F", 0), Slot(0, "B", 0)]
    for slot in slots:
        watch.asked(slot)
        watch.mark()
        watch.mark()
    found = [(t.rank, t.slot, t.start, t.end, t.waited) for t in watch.timed(3)]
    expected = [(3, slots[0], 0.008, 0.015, 0.005), (3, slots[1], 0.035, 0.048, 0.011)]
    for got, wanted in zip(found, expected, strict=True):
        assert got[:2] == wanted[:2] and got[2:] == pytest.approx(wanted[2:])


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("pp4"), "pp 4 x 1 stages a rank = 4, but the model has 3 layers"),
        (Case("pp2+split1-1"), "pp_split 1-1 has 2 layers, but the model has 3"),
        (Case("pp2+v2"), "pp_schedule 1f1b has one stage a rank"),
    ],
    ids=lambda each: each if isinstance(each, str) else each.layout,
)
def test_refusals(case: Case, said: str) -> None:
    for error in run_ranks(case.parsed.world, refusal, case):
        assert error.startswith("UserError") and said in error, error


def carried_refusal(case: Case) -> str:
    from unittest.mock import patch

    from fivefold.parallel import apply

    plain = apply.facts_of

    def carrying(model: Any) -> ModelFacts:
        return replace(plain(model), carried="layer 1 is given more")

    with patch.object(apply, "facts_of", carrying):
        try:
            parallelize(build_meta(hf_config(case)), case.parsed)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.full
def test_what_would_have_to_travel_too_is_refused() -> None:
    for error in run_ranks(2, carried_refusal, Case("pp2")):
        assert "layer 1 is given more, and a stage is sent no more" in error


def test_hidden_states_that_the_next_stage_does_not_expect_are_refused() -> None:
    plan, half, whole = (
        SimpleNamespace(facts=SimpleNamespace(hidden_size=8)),
        SimpleNamespace(share=lambda length: length // 2),
        SimpleNamespace(share=lambda length: length),
    )
    staged = StageModules(plan, nn.Identity(), torch.bfloat16, half, whole)  # type: ignore[arg-type]
    ids = torch.zeros(3, 10, dtype=torch.int64)
    staged.check(1, torch.zeros(3, 5, 8, dtype=torch.bfloat16), ids)
    for wrong in (torch.zeros(3, 5, 8), torch.zeros(3, 10, 8, dtype=torch.bfloat16)):
        with pytest.raises(UserError, match=r"stage 1 of Identity gives hidden states"):
            staged.check(1, wrong, ids)


# ---- bf16 ------------------------------------------------------------------------------------------------------------


def bf16_gradients(case: Case) -> dict[str, np.ndarray]:
    """Of one step, by parameter, on this rank."""
    model = parallelize(build_meta(hf_config(case)), case.parsed)
    batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    gradients(model, batch, torch.tensor(0.01, dtype=torch.float64))
    return {name: local(p.grad).float().numpy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.full
@pytest.mark.parametrize("schedule", [name for name, record in RECORDS.items() if record.splits_backward])
@pytest.mark.parametrize("zero", [put_off(1), 3])
def test_weights_put_off_are_summed_as_precisely_in_bf16(schedule: str, zero: int) -> None:
    """Each micro batch's gradient is rounded to bf16, and their sum is not: under 1F1B as where matrices come late."""
    cases = [Case(f"pp2+{name}+zero{zero}", overrides=LAYERS_4) for name in ("1f1b", schedule)]
    expected, found = (dict(ChainMap(*run_ranks(2, bf16_gradients, case))) for case in cases)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        largest = float(np.abs(expected[name]).max())
        np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=1e-5 * largest, err_msg=name)
