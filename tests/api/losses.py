"""Losses of a user's own, of ten lines each, and a loop that trains with them."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fivefold as ff
from fivefold.verification.by_hand import exact
from tests.api.loop import CLIP, STEPS, Outcome, as_numpy, assert_equal, build, share

YES, NO = 17, 42  # two tokens of the vocabulary


def label_smoothing(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    return F.cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")


def z_loss(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    """Cross entropy, and the square of the log of the softmax's divisor (PaLM, arXiv:2204.02311)."""
    log_z = logits.logsumexp(-1)
    return log_z - logits.gather(-1, labels[:, None])[:, 0] + 1e-2 * log_z.square()


def focal(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    """Tokens that are likely already count less (arXiv:1708.02002)."""
    nll = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-nll)) ** 2 * nll


def margin(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    """Cross entropy; and "yes" is one ahead of "no" where a column says so, or behind."""
    ahead = (logits[:, YES] - logits[:, NO]) * row["sign"]
    nll = F.cross_entropy(logits, labels, reduction="none")
    return row["weight"] * nll + F.relu(1 - ahead) + 0.01 * (row.position_ids + row.input_ids % 3) * nll


LOSSES = {"label_smoothing": label_smoothing, "z_loss": z_loss, "focal": focal, "margin": margin}


def with_columns(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A weight for each label, and a sign for each row."""
    ids = batch["input_ids"]
    return batch | {"weight": 0.5 + (ids % 7) / 3, "sign": 1.0 - 2.0 * (ids[:, 0] % 2)}


def rows_of(at: int, data_rank: int, data_ranks: int, loss: str) -> list[dict[str, Tensor]]:
    given = share(at, data_rank, data_ranks) * 2  # a zero bubble's rounds of micro batches are whole
    return [with_columns(batch) for batch in given] if loss == "margin" else given


def reference(name: str, loss: str) -> Outcome:
    """Plain `transformers`, the function and autograd in one process: all targets of a micro batch at once."""
    model = build(name)
    update = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outcome = Outcome([], [], {}, {})
    for at in range(STEPS):
        with exact():
            total, targets = mean(model, rows_of(at, 0, 1, loss), loss)
            (total / targets).backward()
        outcome.losses.append((total / targets).item())
        if not at:
            outcome.gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        update.step()
        update.zero_grad()
    outcome.weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return outcome


def mean(model: nn.Module, batches: list[dict[str, Tensor]], loss: str) -> tuple[Tensor, int]:
    """The sum of a loss over all targets, and their number."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        given = {key: batch[key] for key in ("input_ids", "attention_mask", "position_ids") if key in batch}
        logits, labels = model(**given, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        ids, is_target = batch["input_ids"], labels != -100
        positions = batch.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
        columns = {key: torch.as_tensor(batch[key]).double() for key in ("weight", "sign") if key in batch}
        columns = {k: (c[:, None].expand_as(ids) if c.ndim == 1 else c)[:, 1:][is_target] for k, c in columns.items()}
        if is_target.any():
            row = ff.LossRow(ids[:, :-1][is_target], positions[:, :-1][is_target], columns)
            total = total + LOSSES[loss](logits[is_target], labels[is_target], row).sum()
        count += int(is_target.sum())
    return total, count


def train_on_rank(layout: str, name: str, loss: str) -> tuple[Outcome, float]:
    """Train as a user does; also the loss of the first batch afterwards."""
    model = ff.parallelize(build(name), layout, loss_chunks=3)
    update = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outcome = Outcome([], [], {}, {})
    for at in range(STEPS):
        batch = rows_of(at, model.data_rank, model.data_ranks, loss)
        with exact():
            if not at:
                ff.gradients(model, batch, loss=LOSSES[loss])
                outcome.gradients = as_numpy(ff.gather(model, gradients=True))
                update.zero_grad()
            result = ff.train_step(model, update, batch, max_grad_norm=CLIP, loss=LOSSES[loss])
        outcome.losses.append(result.loss)
        outcome.norms.append(result.grad_norm)
    outcome.weights = as_numpy(ff.gather(model))
    with exact():
        evaluated = ff.evaluate(model, rows_of(0, model.data_rank, model.data_ranks, loss), loss=LOSSES[loss])
    return outcome, evaluated


def assert_close(found: Outcome, expected: Outcome) -> None:
    assert found.gradients and not np.isnan(found.losses).any()
    assert_equal(found, expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


def mean_over_tokens(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses - losses.mean() / 2


def raises_on_one_rank(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    return logits[:, 0] / (1 // (1 - torch.distributed.get_rank()))


def infinite(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    return (logits[:, 0] * 0).log() * logits[:, 1]


def refusals_on_rank(layout: str) -> dict[str, str]:
    """The errors of steps that cannot be right, and of one whose losses are not finite the reason."""
    model = ff.parallelize(build("llama"), layout)
    update = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = share(0, model.data_rank, model.data_ranks)[-1]
    rows = len(batch["input_ids"])
    tried: dict[str, tuple[dict[str, Tensor], Any]] = {
        "mean": (batch, mean_over_tokens), "on one rank": (batch, raises_on_one_rank),
        "column": (batch | {"weight": torch.ones(7)}, margin),
        "without a loss": (batch | {"weight": torch.ones(rows)}, None),
    }  # fmt: skip
    found = {}
    for name, (given, loss) in tried.items():
        try:
            ff.train_step(model, update, given, loss=loss)
        except ff.UserError as error:
            found[name] = error.what
    for other in (z_loss, infinite):  # the one before is forgotten, and an evaluation's losses are not those of a step
        ff.evaluate(model, batch, loss=other)
    result = ff.train_step(model, update, batch, loss=infinite)
    targets = int((batch["labels"][:, 1:] != -100).sum())
    return found | {"not finite": result.why if result.skipped else "", "targets": f"{targets} of {targets} losses"}
