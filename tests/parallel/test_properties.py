"""What must not matter: the other documents of a row, padding, and which rank the targets are on. fp64."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.data.batch import IGNORE, MicroBatch, Piece, assemble
from fivefold.parallel.dtensor import local
from fivefold.parallel.state import state_of
from fivefold.training.step import train_step
from tests.parity import OPTIONS, Case, build, build_optimizer, gathered, gradients, pieces, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full

Rows = Sequence[Sequence[np.ndarray]]
SCALE = 1 / 7


def document(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 101, length)


def batch_of(rows: Rows, length: int = 24) -> MicroBatch:
    pieces = [[Piece(d.astype(np.uint16), d[1:].astype(np.uint16)) for d in row] for row in rows]
    return assemble(pieces, row_length=length, pad_id=0)


def losses_and_gradients(case: Case, batches: list[list[MicroBatch]], shift: int = 0) -> list[tuple[float, Any]]:
    """For each list of micro batches, this data rank's part (one after the other): loss, and pieces of gradients."""
    model = build(case)
    state = state_of(model)
    found = []
    for batch in batches:
        mine = batch[state.placement.data_rank :: state.plan.layout.data_ranks]
        loss = gradients(model, mine, torch.tensor(SCALE, dtype=torch.float64))
        found.append((float(loss), pieces(model, {name: p.grad for name, p in model.named_parameters()})))
        model.zero_grad()
    return found


def whole(case: Case, batches: list[list[MicroBatch]]) -> list[tuple[float, dict[str, np.ndarray]]]:
    """Losses summed over data ranks, and whole gradients."""
    per_rank = run_ranks(case.parsed.world, losses_and_gradients, case, batches)
    shapes = {name: tuple(p.shape) for name, p in reference_model(case).named_parameters()}
    tp = case.parsed.tp
    return [
        (sum(r[i][0] for r in per_rank) / tp, gathered([r[i][1] for r in per_rank], shapes))
        for i in range(len(batches))
    ]


def largest_difference(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


# ---- documents -------------------------------------------------------------------------------------------------------


def one_changed(place: int) -> list[MicroBatch]:
    """A packed row, and the same with one token of its first document changed; only the second one has targets."""
    first, second = document(1, 11), document(2, 7)
    other = first.copy()
    other[place] = (first[place] + 13) % 101
    rows = [batch_of([[one, second]]) for one in (first, other)]
    for row in rows:
        row.labels[0, : len(first)] = IGNORE
    return rows


@pytest.mark.parametrize("layout", ["tp2+fp64", "single", *map(put_off, ("single+fp64", "tp2+fp64+nosp"))])
def test_no_document_reaches_the_next(layout: str) -> None:
    rows = [row for place in (0, 5, 10) for row in one_changed(place)]
    results = whole(Case(layout), [[row] for row in rows])
    for (loss, gradient), (other_loss, other_gradient) in zip(results[::2], results[1::2], strict=True):
        assert loss == other_loss > 0
        assert largest_difference(gradient, other_gradient) == 0.0


def test_without_its_bounds_a_document_would_reach_the_next() -> None:
    """The control: the same rows as one document of 18 tokens."""
    rows = one_changed(5)
    as_one = [MicroBatch(r.input_ids, r.labels, r.position_ids, np.array([0, 24], np.int32), 18, 6) for r in rows]
    (loss, _), (other, _) = whole(Case("single+fp64"), [[row] for row in as_one])
    assert abs(loss - other) > 1e-4


def test_a_document_counts_the_same_wherever_it_lies() -> None:
    """Positions restart: in front, behind another, or alone in its row."""
    first, second = document(1, 11), document(2, 7)
    together, swapped = ([batch_of([row])] for row in ([first, second], [second, first]))
    apart = [batch_of([[first]]), batch_of([[second]])]
    results = whole(Case("tp2+fp64"), [together, swapped, apart])
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-13)
        assert largest_difference(gradient, results[0][1]) < 1e-13


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [put_off("single+mb2+fp64"), "tp2+mb2+fp64"])
def test_padding_contributes_nothing(layout: str) -> None:
    row = [document(3, 13), document(4, 5)]
    alone, with_empty_row = batch_of([row]), batch_of([row, []])
    other_filling = batch_of([row, []])
    other_filling.input_ids[other_filling.input_ids == 0] = 77
    longer = batch_of([row], length=32)
    results = whole(Case(layout), [[one] for one in (alone, with_empty_row, other_filling, longer)])
    assert alone.targets == with_empty_row.targets == longer.targets == 16
    for loss, gradient in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-13)
        assert largest_difference(gradient, results[0][1]) < 1e-13
    assert largest_difference(results[1][1], results[2][1]) == 0.0  # what the padding holds


# ---- where the targets are -------------------------------------------------------------------------------------------


def steps(case: Case, batches: list[list[MicroBatch]]) -> list[tuple[float, float, int, bool]]:
    """(loss, norm, targets, skipped) of training steps on this data rank's part of each batch."""
    model = build(case)
    optimizer, state = build_optimizer(model, OPTIONS), state_of(model)
    results = [
        train_step(
            model,
            optimizer,
            batch[state.placement.data_rank :: state.plan.layout.data_ranks],
            learning_rate=1e-3,
            max_grad_norm=0.5,
        )
        for batch in batches
    ]
    assert all(torch.isfinite(local(p)).all() for p in model.parameters())
    return [(r.loss, r.grad_norm, r.targets, r.skipped) for r in results]


FULL, SHORT, EMPTY = [document(5, 23)], [document(6, 3)], []


SOME_WITHOUT = [[FULL, EMPTY, SHORT, EMPTY], [EMPTY, FULL, EMPTY, EMPTY], [FULL, SHORT, FULL, EMPTY]]


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ("shard2", SOME_WITHOUT[0]), *(put_off("shard2", rows) for rows in SOME_WITHOUT[1:]),
        put_off("shard2.tp2", SOME_WITHOUT[0]), *(put_off("shard2.tp2", rows) for rows in SOME_WITHOUT[1:]),
        *(put_off(layout, rows) for layout in ("shard2+zero1", "dp2") for rows in SOME_WITHOUT),
    ],
)  # fmt: skip
def test_ranks_without_a_target_and_unequal_counts_give_the_global_mean(layout: str, rows: Rows) -> None:
    """Each rank has two micro batches; some have no target in either."""
    batch = [batch_of([row]) for row in rows]
    alone = run_ranks(1, steps, Case("single+fp64"), [batch] * 3)[0]
    case = Case(f"{layout}+fp64")
    for found in run_ranks(case.parsed.world, steps, case, [batch] * 3):
        for (loss, norm, targets, skipped), (loss_alone, norm_alone, count, _) in zip(found, alone, strict=True):
            assert (loss, norm) == pytest.approx((loss_alone, norm_alone), rel=1e-10)
            assert targets == count == sum(part.targets for part in batch) and not skipped


def test_the_mean_is_over_tokens_not_over_ranks() -> None:
    """The rows above would not tell the two apart if they happened to agree."""
    singles = [run_ranks(1, steps, Case("single+fp64"), [[batch_of([row])]])[0][0] for row in (FULL, SHORT)]
    batch = [batch_of([FULL]), batch_of([SHORT])]
    both = run_ranks(2, steps, Case("shard2+fp64"), [batch])[0][0][0]
    weighted = sum(loss * targets for loss, _, targets, _ in singles) / 24
    assert both == pytest.approx(weighted, rel=1e-12)
    assert abs(both - sum(loss for loss, *_ in singles) / 2) > 1e-3 * both


def test_a_batch_without_any_target_is_skipped() -> None:
    """The mean over no targets is no number, as in `transformers`; nothing is learnt, so nothing is stepped."""
    for ((loss, norm, targets, skipped),) in run_ranks(2, steps, Case("shard2+fp64"), [[batch_of([EMPTY])] * 2]):
        assert np.isnan(loss) and (norm, targets, skipped) == (0.0, 0, True)
