"""Outer steps: what replicas that train apart compute, beside the formulas of the paper (arXiv:2311.08105) by hand."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.models.build import build_meta
from fivefold.models.config_facts import facts_of_config
from fivefold.models.discover import facts_of
from fivefold.parallel import legality
from fivefold.parallel.collectives import by_group, differing, summed, total
from fivefold.parallel.dtensor import local
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.mesh import record
from fivefold.parallel.nodes.levels import mean_in_order
from fivefold.parallel.outer import spec
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.parallel.state import state_of
from fivefold.planner.estimate import PricedStep, Workload
from fivefold.planner.price import PriceList
from fivefold.training import step as training_step
from fivefold.training.optimizers import build_optimizer
from tests.parity import OPTIONS, Case, batch_of, build, documents, gathered, hf_config, pieces, proof, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off

RATE, MOMENTUM, STEPS = 0.7, 0.9, 5
RARE = ("dp2.shard2+mb1+zero1", "dp2.tp2+mb2", "dp2.pp2+mb2", "dp2.cp2+mb2", "dp2.shard4+hpz2+hier2+mb1")
NESTEROV = {"learning_rate": RATE, "momentum": MOMENTUM, "nesterov": True}
PLAIN = {"learning_rate": 1.0, "momentum": 0.0, "nesterov": False}
Inner = Callable[[Any], torch.optim.Optimizer]


def adamw(model: Any) -> torch.optim.Optimizer:
    return build_optimizer(model, OPTIONS)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)


def train(case: Case, inner: Inner, outer: dict[str, Any]) -> dict[str, Any]:
    """Some steps on this rank, and what they sent."""
    model = build(case)
    state, optimizer, done = state_of(model), inner(model), []
    state.live(OuterSteps).begin(model, **outer)
    for step in range(STEPS):
        batch = batch_of(documents(case, step), case.parsed, state.placement.data_rank)
        with record(state.mesh) as sent, proof(case):
            done.append(
                training_step.train_step(
                    model, optimizer, batch, learning_rate=OPTIONS.learning_rate, max_grad_norm=case.max_grad_norm
                )
            )
        if state.live(OuterSteps).is_due(step + 1):
            with record(state.mesh) as sent_to_meet:
                state.live(OuterSteps).step()
    shape = training_step.step_shape(model, *batch[0].input_ids.shape, len(batch), case.loss_chunks, batch=batch)
    found = {
        "losses": [result.loss for result in done], "norms": [result.grad_norm for result in done],
        "weights": pieces(model, dict(model.named_parameters())), "copy": state.placement.coords.dp_replicate,
        "sent": (total(sent), by_group(training_step.declare(model, shape), state.mesh.grid)),
    }  # fmt: skip
    if state.live(OuterSteps).is_on:
        declared = by_group(total(summed(list(spec.calls(state.plan, 8)))), state.mesh.grid)
        found["met"] = total(sent_to_meet), declared
    return found


def by_hand(case: Case, start: nn.Module) -> tuple[list[float], list[float], list[nn.Module]]:
    """Losses, norms and replicas after some steps from a whole model on, in one process."""
    layout = case.parsed
    outer = {name: parameter.detach().clone() for name, parameter in start.named_parameters()}
    speed = {name: torch.zeros_like(weight) for name, weight in outer.items()}
    replicas = [deepcopy(start) for _ in range(layout.dp_replicate)]
    optimizers = [_adamw(model) for model in replicas]
    losses, norms = [], []
    for step in range(STEPS):
        rows = documents(case, step)
        targets = sum(len(document) - 1 for row in rows for document in row)
        size = layout.dp_shard * layout.micro_batch_size
        shares = np.array_split(np.arange(len(rows)).reshape(-1, layout.dp_replicate, size), 2, axis=1)
        summed_up, squares = 0.0, []
        for model, optimizer, own in zip(replicas, optimizers, shares, strict=True):
            loss = sum(_cross_entropies(model, document) for row in own.flatten() for document in rows[row])
            optimizer.zero_grad()
            (len(replicas) * loss / targets).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm)
            optimizer.step()
            summed_up, squares = summed_up + loss.item(), [*squares, norm.item() ** 2]
        losses.append(summed_up / targets)
        norms.append(float(np.mean(squares)) ** 0.5)
        for name, weight in outer.items() if (step + 1) % layout.outer_every == 0 else ():
            copies = [model.get_parameter(name) for model in replicas]
            come = sum(weight - copy.detach() for copy in copies) / len(copies)
            speed[name] = MOMENTUM * speed[name] + come
            weight -= RATE * (come + MOMENTUM * speed[name])
            for copy in copies:
                copy.data.copy_(weight)
    return losses, norms, replicas


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": OPTIONS.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=OPTIONS.learning_rate, betas=OPTIONS.betas, eps=OPTIONS.eps)


def _cross_entropies(model: nn.Module, document: np.ndarray) -> torch.Tensor:
    ids = torch.from_numpy(document)[None]
    return nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="sum")


def assert_declared(per_rank: list[dict[str, Any]], what: str) -> None:
    assert not differing([each[what][0] for each in per_rank], [each[what][1] for each in per_rank])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp2+mb2", *(pytest.param(text, marks=pytest.mark.campaign) for text in RARE)])
def test_replicas_train_apart_and_meet_as_by_hand(layout: str) -> None:
    """The fifth step is in the middle of a period: replicas differ."""
    case = Case(f"{layout}+fp64+outer2")
    per_rank = run_ranks(case.parsed.world, partial(train, case, adamw, NESTEROV))
    start = reference_model(case)  # outside of `proof`, which would compute rotary frequencies otherwise
    with proof(case):
        losses, norms, replicas = by_hand(case, start)
    for ran in per_rank:
        np.testing.assert_allclose(ran["losses"], losses, rtol=1e-10)
        np.testing.assert_allclose(ran["norms"], norms, rtol=1e-10)
    for copy, model in enumerate(replicas):
        expected = dict(model.named_parameters())
        own = [each["weights"] for each in per_rank if each["copy"] == copy]
        found = gathered(own, {name: tuple(parameter.shape) for name, parameter in expected.items()})
        for name, weight in expected.items():
            np.testing.assert_allclose(found[name], weight.detach().numpy(), rtol=0, atol=1e-10, err_msg=name)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(*(model.get_parameter(name) for model in replicas))
    assert_declared(per_rank, "sent")
    assert_declared(per_rank, "met")


@pytest.mark.full
def test_a_meeting_after_every_step_of_sgd_is_training_without_outer_steps() -> None:
    """With rate 1 and no momentum, and without clipping, which replicas do by norms of their own."""
    apart, together = (
        run_ranks(2, partial(train, Case(f"dp2+mb2+fp64{outer}", max_grad_norm=0), sgd, PLAIN))
        for outer in ("+outer1", "")
    )
    for one, other in zip(apart, together, strict=True):
        np.testing.assert_allclose(one["losses"], other["losses"], rtol=1e-12)
        for (name, region, weight), (same, place, expected) in zip(one["weights"], other["weights"], strict=True):
            assert (name, region) == (same, place)
            np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-12, err_msg=name)
    start = reference_model(Case("dp2"))
    moved = [np.abs(now - start.get_parameter(name).detach().numpy()).max() for name, _, now in apart[0]["weights"]]
    assert min(moved) > 1e-5 and max(moved) > 1e-3


def meet(case: Case) -> tuple[int, list[tuple[Any, ...]]]:
    """The replica of this rank, and its weights after a meeting of replicas that have come different ways."""
    model = build(case)
    state = state_of(model)
    ways = ways_of(state.placement.stored_shapes, case.parsed.dp_replicate)
    state.live(OuterSteps).begin(model, **PLAIN)
    for name, parameter in model.named_parameters():
        for whole, here in state.placement.regions(name):
            local(parameter.data)[here] -= ways[name][state.placement.coords.dp_replicate][whole]
    state.live(OuterSteps).step()
    return state.placement.coords.dp_replicate, pieces(model, dict(model.named_parameters()))


def ways_of(shapes: Mapping[str, tuple[int, ...]], replicas: int) -> dict[str, torch.Tensor]:
    """How far each replica comes: numbers of many sizes, whose sum depends on its order."""
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(replicas, *shapes[name], generator=generator) ** 5 / 64 for name in sorted(shapes)}


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["dp3", put_off("dp2.shard2"), put_off("dp3.shard2"), put_off("dp2.tp2"), put_off("dp4")]
)
def test_replicas_go_on_from_a_meeting_with_the_same_bits(layout: str) -> None:
    """Those of the mean in the order of replicas, whatever else a layout does: a checkpoint goes on under others."""
    case = Case(f"{layout}+fp32+outer2", rows=12)
    per_rank = run_ranks(case.parsed.world, meet, case)
    start = dict(reference_model(case, torch.float32).named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in start.items()}
    ways = ways_of(shapes, case.parsed.dp_replicate)
    for copy in range(case.parsed.dp_replicate):
        found = gathered([weights for at, weights in per_rank if at == copy], shapes)
        for name, parameter in start.items():
            weight = parameter.detach()
            come = [weight - (weight - way) for way in ways[name]]
            expected = weight - sum(come[1:], come[0]) / len(come)
            np.testing.assert_array_equal(found[name], expected.numpy(), err_msg=f"{name} of replica {copy}")


def mean_of(numbers: int) -> list[tuple[float, ...]]:
    """The mean over ranks in a group that sums by gloo, beside that of all of them in order."""
    group, parts = dist.new_group(), torch.randn(3, numbers, generator=torch.Generator().manual_seed(4)).mul(9).exp()
    expected = (parts[0] + parts[1] + parts[2]) / 3
    return list(zip(mean_in_order(parts[dist.get_rank()], group).tolist(), expected.tolist(), strict=True))


@pytest.mark.full
def test_a_mean_is_in_the_order_of_ranks() -> None:
    """Of few numbers and of many, which an all-reduce divides otherwise. 3 divides none of them."""
    for numbers in (1, 8, 1000):
        assert all(found == expected for pairs in run_ranks(3, mean_of, numbers) for found, expected in pairs)


def test_what_does_not_go_with_outer_steps_is_refused() -> None:
    for text, what in (
        ("shard2+outer5", "dp_replicate is 1"), ("dp2+outer5+offload_optimizer", "optimizer state in host memory"),
    ):  # fmt: skip
        assert what in next(iter(legality.violations(Layout.parse(text)))).what
    assert not legality.violations(Layout.parse("dp2.shard2+outer5"))
    assert str(Layout.parse("dp2+outer5")) == "dp2+outer5"
    with pytest.raises(UserError, match=r"outer_every is 0 or more"):
        Layout(outer_every=-1)


def test_a_checkpoint_has_each_replica_and_what_they_have_in_common() -> None:
    """Of AdamW: three tensors of a parameter for each of two replicas, the outer weights and their momentum."""
    facts = facts_of(build_meta(hf_config(Case("single"))))
    plain, apart = (lower(facts, Layout.parse(text), 0).placement for text in ("dp2.shard4", "dp2.shard4+outer5"))
    states = [*plain.shards] * 2
    assert 3 * apart.checkpoint_bytes(states, 4) == 8 * plain.checkpoint_bytes(states, 4)


def test_a_plan_divides_an_outer_step_by_its_period_and_counts_what_replicas_keep() -> None:
    """Of Llama 3.2 1B, whose 1,235,814,400 numbers lie on 8 devices of each of two nodes, in fp32: half of what a
    device has goes to the other node to be summed, and half of it comes back, over 2 GB/s."""
    cluster, numbers = Cluster.parse("2x8xH100"), 1_235_814_400 // 8
    slow = replace(cluster.node, between=replace(cluster.node.between, gbs=2.0, fraction=1.0))
    priced = PriceList(facts_of_config("llama-3.2-1b"), replace(cluster, node=slow))
    apart, at_once, summed_up = (
        PricedStep(priced, Layout.parse(f"dp2.shard8{words}"), Workload(512, 16))
        for words in ("+outer50", "+outer1", "")
    )
    assert at_once.edges.outer == pytest.approx(50 * apart.edges.outer) and summed_up.edges.outer == 0
    assert 1 < at_once.edges.outer / (4 * numbers / 2e9) < 1.1
    more = apart.memory_of(0)["parameters"] - summed_up.memory_of(0)["parameters"]
    assert more == pytest.approx(2 * 4 * numbers, rel=1e-3)


def test_replicas_keep_and_send_what_is_trained() -> None:
    """The outer weights and their momentum, in fp32; of a frozen parameter neither."""
    facts, name = facts_of(build_meta(hf_config(Case("single")))), "model.layers.0.mlp.up_proj.weight"
    frozen = {**facts.parameters, name: replace(facts.parameters[name], is_trained=False)}
    for known, left in ((facts, set[str]()), (replace(facts, parameters=frozen), {name})):
        apart, together = (lower(known, Layout.parse(text), 0) for text in ("dp2.shard2+outer5", "dp2.shard2"))
        averaged = spec.averaged(apart)
        assert apart.placement.shards.keys() - averaged.keys() == left
        held, plain = (step_bytes(plan, plan.step_shape(1, 32, 1)).parameters for plan in (apart, together))
        assert held - plain == 2 * 4 * sum(averaged.values())


def test_buckets_hold_every_parameter_once_in_order() -> None:
    sizes = {"a": 3, "b": spec.BUCKET, "c": spec.BUCKET - 5, "d": 5, "e": 1, "f": 0}
    assert list(spec.buckets(sizes)) == [["a"], ["b"], ["c", "d"], ["e", "f"]]
