"""Objectives of preference training, and real weights of targets, against the unmodified model in one process.

The reference is written here: log-softmax, gather, the formulas of the papers (as TRL has them) and autograd through
all of it, in fp64, every answer a sequence of its own. Answers, prompts and rows have unequal lengths; one row has no
pair at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.config import ObjectiveSection
from fivefold.data.batch import IGNORE, MicroBatch, Piece, assemble
from fivefold.parallel.collectives import Collective, by_group, differing, total
from fivefold.parallel.fp8.scales import Fp8Scales
from fivefold.parallel.mesh import record
from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.objectives import Ratings, metrics_of, pair_losses
from fivefold.training.optimizers import build_optimizer
from fivefold.training.preference import ObjectiveSpec, log_probs, mean_over_pairs, pairs_of, table
from fivefold.verification.by_hand import exactly
from tests.parity import ROW, VOCABULARY, Case, build, gathered, gradient, pieces, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off

# The others have a fold of one of these alone.
LAYOUTS = ["shard2.tp2", "pp2.cp2", *map(put_off, ("shard2.ep2", "single", "shard2", "tp2", "pp2", "cp2"))]
# Of each row its pairs: tokens of the prompt, of the chosen answer and of the rejected one.
ROWS = (
    [(3, 5, 2), (2, 1, 4)], [(1, 13, 6)], [(2, 2, 3)], [], [(4, 4, 7)], [(1, 2, 1), (1, 3, 2), (2, 1, 1)],
    [(5, 1, 2)], [(3, 7, 5)],
)  # fmt: skip
DESIRABLE = (True, False, False, True, True, False, True, True, False, True)  # where answers are rated
Pair = tuple[int, np.ndarray, np.ndarray]  # tokens of the prompt; prompt and answer, of the chosen and of the rejected


@lru_cache
def pairs_of_rows() -> list[list[Pair]]:
    rng = np.random.default_rng(11)

    def pair(prompt: int, *answers: int) -> Pair:
        asked = rng.integers(0, VOCABULARY, prompt)
        chosen, rejected = (np.append(asked, rng.integers(0, VOCABULARY, each)) for each in answers)
        return prompt, chosen, rejected

    return [[pair(*lengths) for lengths in row] for row in ROWS]


def all_pairs() -> list[Pair]:
    return [pair for row in pairs_of_rows() for pair in row]


def before() -> np.ndarray:
    """Log-probabilities of a reference model that is another one."""
    return np.random.default_rng(5).normal(-20, 2, (len(all_pairs()), 2))


def near() -> np.ndarray:
    """Of one to which answers are as likely as chance has it, and a little less."""
    tokens = [[len(each) - prompt for each in answers] for prompt, *answers in all_pairs()]
    return -np.log(VOCABULARY) * np.array(tokens) - np.random.default_rng(6).normal(1, 1.5, (len(tokens), 2))


def rows_of_pieces(*, rated: bool = False) -> list[list[Piece]]:
    rows, number = [], 0
    for row in pairs_of_rows():
        found = []
        for prompt, *answers in row:
            for which, tokens in enumerate(answers):
                trained = np.arange(len(tokens) - 1) >= prompt - 1
                desirable = DESIRABLE[number] if rated else None
                found.append(Piece(tokens, tokens[1:], trained, answer=which, pair=number, desirable=desirable))
            number += 1
        rows.append(found)
    return rows


def micro_batches(case: Case, data_rank: int, *, rated: bool = False) -> list[MicroBatch]:
    layout, rows = case.parsed, rows_of_pieces(rated=rated)
    length, size = -(-ROW // layout.row_multiple) * layout.row_multiple, layout.micro_batch_size
    firsts = [(each * layout.data_ranks + data_rank) * size for each in range(layout.accumulation(len(rows)))]
    return [assemble(rows[first : first + size], row_length=length, pad_id=0) for first in firsts]


# ---- plain ----------------------------------------------------------------------------------------------------------


def plain_log_probs(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of the answers and their tokens, [P, 2] each."""
    sums, counts = [], []
    for prompt, *answers in all_pairs():
        for tokens in answers:
            ids = torch.from_numpy(tokens)[None]
            found = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[prompt - 1 :, 0]
            sums.append(found.sum())
            counts.append(len(found))
    return torch.stack(sums).view(-1, 2), torch.tensor(counts).view(-1, 2)


def plain_loss(objective: ObjectiveSection, sums: Tensor, counts: Tensor, other: Tensor) -> Tensor:
    """The mean over pairs."""
    beta, means = objective.beta, sums / counts
    if objective.name == "dpo":
        ratio = (sums[:, 0] - other[:, 0]) - (sums[:, 1] - other[:, 1])
        return -F.logsigmoid(beta * ratio).mean()
    if objective.name == "ipo":
        distance = (means - other / counts)[:, 0] - (means - other / counts)[:, 1]
        return ((distance - 1 / (2 * beta)) ** 2).mean()
    if objective.name == "simpo":
        return -F.logsigmoid(beta * (means[:, 0] - means[:, 1] - objective.gamma / beta)).mean()
    if objective.name == "kto":
        gains = sums - torch.from_numpy(near())
        baseline, good = gains[:, 1].detach().mean().clamp(min=0), torch.tensor(DESIRABLE)
        liked = objective.desirable_weight * (1 - torch.sigmoid(beta * (gains[:, 0] - baseline)))
        disliked = objective.undesirable_weight * (1 - torch.sigmoid(beta * (baseline - gains[:, 0])))
        return (liked[good].sum() + disliked[~good].sum()) / len(good)
    odds = (means[:, 0] - means[:, 1]) - (torch.log1p(-means[:, 0].exp()) - torch.log1p(-means[:, 1].exp()))
    return (-means[:, 0] - beta * F.logsigmoid(odds)).mean()


def plain(case: Case, loss_of: Callable[[nn.Module], Tensor]) -> tuple[float, dict[str, np.ndarray]]:
    model = reference_model(case, torch.float32).double()
    with exactly("fp64"):
        loss = loss_of(model)
        loss.backward()
    grads = {name: gradient(p).numpy() for name, p in model.named_parameters()}
    return loss.item(), grads


def plain_objective(objective: ObjectiveSection) -> Callable[[nn.Module], Tensor]:
    return lambda model: plain_loss(objective, *plain_log_probs(model), torch.from_numpy(before()))


# ---- under a layout --------------------------------------------------------------------------------------------------


def on_rank(case: Case, objective: ObjectiveSection) -> dict[str, Any]:
    model = build(case)
    batch = micro_batches(case, state_of(model).placement.data_rank, rated=objective.is_rated)
    other = near() if objective.is_rated else before()
    spec = ObjectiveSpec(objective, other if objective.compares else None)
    with exactly(case.parsed.precision):
        loss = float(training_step.accumulate(model, batch, spec=spec))
        gradients = pieces(model, {name: gradient(p) for name, p in model.named_parameters()})
        model.zero_grad()
        evaluated, _ = mean_over_pairs(model, batch, spec)
        mine = table(model, batch, len(all_pairs()))
        with record(state_of(model).mesh) as ran:
            result = training_step.train_step(
                model, build_optimizer(model, case.options), batch, learning_rate=0.0, max_grad_norm=0.0, spec=spec
            )
    return {
        "loss": loss, "gradients": gradients, "evaluated": evaluated, "table": mine, "step": result.loss,
        "metrics": dict(result.metrics), "issued": total(ran), "declared": declared(case, model, batch, objective),
    }  # fmt: skip


def declared(
    case: Case, model: Any, batch: Sequence[MicroBatch], objective: ObjectiveSection
) -> tuple[Collective, ...]:
    shape = training_step.step_shape(model, *batch[0].input_ids.shape, len(batch), case.loss_chunks, batch=batch)
    judged = replace(shape, answers=tuple(2 * pairs_of(each) for each in batch), metrics=len(metrics_of(objective)))
    return by_group(training_step.declare(model, judged), state_of(model).placement.grid)


def compare(per_rank: Sequence[dict[str, Any]], loss: float, grads: dict[str, np.ndarray]) -> None:
    for found in per_rank:
        assert found["loss"] == pytest.approx(loss, rel=1e-10)
    whole = gathered([found["gradients"] for found in per_rank], {name: g.shape for name, g in grads.items()})
    floor = 1e-6 * np.sqrt(sum((g**2).sum() for g in grads.values()))
    for name, right in grads.items():
        assert np.linalg.norm(whole[name] - right) <= 1e-10 * max(np.linalg.norm(right), floor), name


def case_of(layout: str) -> Case:
    if "ep" in layout:
        return Case(f"{layout}+mb2+fp64", "qwen3_moe", loss_chunks=3)
    return Case(f"{layout}+mb2+fp64", loss_chunks=3)


def check(layout: str, objective: ObjectiveSection) -> None:
    case = case_of(layout)
    loss, grads = plain(replace(case, layout="single+fp64"), plain_objective(objective))
    per_rank = run_ranks(case.parsed.world, on_rank, case, objective)
    compare(per_rank, loss, grads)
    model = reference_model(case, torch.float32).double()
    with torch.no_grad(), exactly("fp64"):
        sums, counts = plain_log_probs(model)
    if not objective.is_rated:  # for which there is a forward more
        assert differing([found["issued"] for found in per_rank], [found["declared"] for found in per_rank]) == []
    for found in per_rank:
        np.testing.assert_allclose(found["table"], sums.numpy(), rtol=1e-11)
        assert [found["evaluated"], found["step"]] == pytest.approx([loss, loss], rel=1e-10)
        assert set(found["metrics"]) == set(metrics_of(objective)) and found["metrics"] == per_rank[0]["metrics"]
    if not objective.is_rated:
        shown = sums.numpy() if objective.compares else (sums / counts).numpy()
        rewards = objective.beta * (shown - before() * objective.compares)
        expected = {
            "rewards/chosen": rewards[:, 0].mean(), "rewards/rejected": rewards[:, 1].mean(),
            "rewards/margins": (rewards[:, 0] - rewards[:, 1]).mean(),
            "rewards/accuracies": (rewards[:, 0] > rewards[:, 1]).mean(),
            "logps/chosen": shown[:, 0].mean(), "logps/rejected": shown[:, 1].mean(),
        }  # fmt: skip
        assert per_rank[0]["metrics"] == pytest.approx(expected, rel=1e-10)
        assert 0 < expected["rewards/accuracies"] < 1


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dpo_equals_plain_transformers(layout: str) -> None:
    check(layout, ObjectiveSection(name="dpo", beta=0.3))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "layout"), [("ipo", "shard2.tp2"), ("orpo", "pp2.cp2"), ("simpo", "tp2"), put_off("orpo", "single")]
)
def test_other_objectives_equal_plain_transformers(name: str, layout: str) -> None:
    check(layout, ObjectiveSection(name=name, beta=0.7, gamma=0.4))


RATED = ObjectiveSection(name="kto", beta=0.4, desirable_weight=1.3, undesirable_weight=0.7)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2", "shard2.ep2", *map(put_off, ("pp2.cp2", "single", "shard2"))])
def test_kto_equals_plain_transformers(layout: str) -> None:
    """The baseline is a mean over the whole global batch, which is above 0 here, and has no gradient."""
    check(layout, RATED)


@pytest.mark.full
def test_the_metrics_of_kto() -> None:
    case = case_of("shard2")
    found = run_ranks(2, on_rank, case, RATED)[0]["metrics"]
    model = reference_model(case, torch.float32).double()
    with torch.no_grad(), exactly("fp64"):
        sums, _ = plain_log_probs(model)
    gains, good = sums.numpy() - near(), np.array(DESIRABLE)
    means = {"chosen": good, "rejected": ~good}
    expected = {f"logps/{name}": sums.numpy()[which, 0].mean() for name, which in means.items()}
    expected |= {f"rewards/{name}": 0.4 * gains[which, 0].mean() for name, which in means.items()}
    expected["rewards/margins"] = expected["rewards/chosen"] - expected["rewards/rejected"]
    assert found == pytest.approx(expected | {"kl": gains[:, 1].mean()}, rel=1e-10) and found["kl"] > 0.1


def test_a_baseline_below_0_is_0() -> None:
    """Answers to other prompts that became less likely: nothing to be above."""
    ratings = Ratings(torch.tensor([True, False]), torch.zeros((), dtype=torch.float64))
    found = pair_losses(
        RATED, torch.tensor([[-3.0, -9.0]] * 2), torch.ones(2, 2), torch.tensor([[-3.0, -1.0]] * 2), ratings
    )
    assert found.loss_P.tolist() == pytest.approx([0.65, 0.35])
    assert not found.slope_P2[:, 1].any() and (found.slope_P2[:, 0] * torch.tensor([-1, 1]) > 0).all()


# ---- weights ---------------------------------------------------------------------------------------------------------


def weighted(case: Case, data_rank: int) -> list[MicroBatch]:
    """Rows with a real weight at every target: some of them 0, some negative."""
    return [replace(each, weights=_weight(each.input_ids, each.labels), answers=None, pairs=None)
            for each in micro_batches(case, data_rank)]  # fmt: skip


def _weight(ids: Any, labels: Any) -> Any:
    """Of a target, by its token and the one before."""
    return np.maximum(-0.2, ((7 * ids + 3 * labels) % 11) / 7 - 0.3) * (labels % 5 != 0)


def plain_weighted(model: nn.Module) -> Tensor:
    losses, weights = [], []
    for prompt, *answers in all_pairs():
        for tokens in answers:
            ids = torch.from_numpy(tokens)[None]
            nll = F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")[prompt - 1 :]
            losses.append(nll)
            weights.append(torch.from_numpy(_weight(tokens[:-1], tokens[1:]))[prompt - 1 :])
    return (torch.cat(losses) * torch.cat(weights)).sum() / torch.cat(weights).sum()


def weighted_on_rank(case: Case) -> dict[str, Any]:
    model = build(case)
    batch = weighted(case, state_of(model).placement.data_rank)
    with exactly(case.parsed.precision):
        loss = float(training_step.accumulate(model, batch, spec=ObjectiveSpec(ObjectiveSection())))
    return {"loss": loss, "gradients": pieces(model, {name: gradient(p) for name, p in model.named_parameters()})}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_targets_equal_plain_transformers(layout: str) -> None:
    case = case_of(layout)
    loss, grads = plain(replace(case, layout="single+fp64"), plain_weighted)
    compare(run_ranks(case.parsed.world, weighted_on_rank, case), loss, grads)


# ---- formulas --------------------------------------------------------------------------------------------------------


def test_a_model_that_is_its_own_reference_has_no_preference() -> None:
    sums, tokens = torch.tensor([[-7.0, -3.0], [-200.0, -1.0]]), torch.tensor([[3, 2], [50, 1]])
    found = pair_losses(ObjectiveSection(name="dpo", beta=0.1), sums, tokens, sums)
    assert found.loss_P.tolist() == pytest.approx([np.log(2)] * 2)
    assert found.slope_P2.tolist() == [[pytest.approx(-0.05), pytest.approx(0.05)]] * 2
    assert not found.metrics["rewards/accuracies"].any()


def test_extreme_answers_stay_finite() -> None:
    sums, tokens = torch.tensor([[0.0, -1e5], [-1e5, 0.0], [-1e-9, -1e-9]]), torch.tensor([[1, 9]] * 3)
    for name in ("dpo", "ipo", "orpo", "simpo"):
        found = pair_losses(ObjectiveSection(name=name), sums, tokens, torch.zeros(3, 2))
        assert found.loss_P.isfinite().all() and found.slope_P2.isfinite().all(), name


def test_a_reference_is_asked_for() -> None:
    with pytest.raises(ValueError, match="reference"):
        pair_losses(ObjectiveSection(name="dpo"), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="ratings"):
        pair_losses(RATED, torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, 2))


def test_labels_without_an_answer_have_no_weight() -> None:
    """Padding and prompts."""
    (batch,) = micro_batches(Case("single+mb8+fp64"), 0)
    assert batch.answers is not None and batch.pairs is not None
    assert ((batch.answers >= 0) == (batch.labels != IGNORE)).all()
    assert batch.pairs.tolist() == list(range(len(all_pairs())))


# ---- what a forward without gradient leaves behind ----------------------------------------------------------------


def loads_on_rank(case: Case, has_goal: bool) -> Any:
    """The tokens of every expert that a step counts."""
    model = build(case)
    batch = micro_batches(case, state_of(model).placement.data_rank)
    spec = ObjectiveSpec(ObjectiveSection(name="simpo")) if has_goal else None
    result = training_step.train_step(
        model, build_optimizer(model, case.options), batch, learning_rate=0.0, max_grad_norm=0.0, spec=spec
    )
    return result.balance.tokens_per_expert


@pytest.mark.full
def test_routers_count_the_pass_that_trains_alone() -> None:
    case = case_of("shard2.ep2")
    with_goal, without = (run_ranks(2, loads_on_rank, case, has_goal)[0] for has_goal in (True, False))
    assert with_goal == without and sum(map(sum, without)) > 0


def amax_on_rank(case: Case) -> tuple[bool, bool]:
    """Whether the history of fp8 scales notes anything of a forward without gradient, and of a step."""
    model = build(case)
    batch = micro_batches(case, state_of(model).placement.data_rank)
    amax = state_of(model).live(Fp8Scales).history
    assert amax.names
    log_probs(model, batch)
    first = bool(amax._now.any()) or bool(len(amax.history))
    training_step.accumulate(model, batch, spec=ObjectiveSpec(ObjectiveSection(name="simpo")))
    return first, bool(amax.history.any())


@pytest.mark.full
def test_log_probabilities_are_no_part_of_the_history_of_fp8_scales() -> None:
    assert run_ranks(2, amax_on_rank, Case("shard2+mb2+fp32+fp8_delayed")) == [(False, True)] * 2
