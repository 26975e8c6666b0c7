"""A user's own loop: the same global batches and the same optimizer on plain `transformers` and under a layout."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.verification.by_hand import exact
from tests.api.optimizers import Lamb
from tests.parity import PAD, VOCABULARY, Case, reference_model

STEPS, CLIP = 3, 0.5
MODELS = {"llama": Case("single"), "tied": Case("single", "qwen3", tied=True), "moe": Case("single", "olmoe")}


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Any]  # of the first step, numpy: a tensor would be shared memory between processes
    weights: dict[str, Any]


def build(name: str) -> Any:
    """The model as its user has it: of `transformers`, in fp64, with values."""
    return reference_model(MODELS[name])


def packed(rng: np.random.Generator) -> dict[str, Tensor]:
    """Two rows of documents, marked by positions that restart; a document's first token is no target."""
    lengths = [[7, 11, 3], [19, 2]]
    positions = torch.tensor([[at for length in row for at in range(length)] for row in lengths])
    ids = tokens(rng, 2, 21)
    return {"input_ids": ids, "labels": ids.masked_fill(positions == 0, -100), "position_ids": positions}


def padded(rng: np.random.Generator, side: str) -> dict[str, Tensor]:
    """Three rows of unequal length with a mask; prompts and padding are no targets."""
    length, real = 13, [13, 5, 9]
    mask = torch.stack([(torch.arange(length) < n).long() for n in real])
    mask = mask if side == "right" else mask.flip(1)
    ids = tokens(rng, 3, length).masked_fill(mask == 0, PAD)
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :6] = -100
    if side == "left":
        labels[torch.arange(3), mask.argmax(1)] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def plain(rng: np.random.Generator, rows: int, length: int) -> dict[str, Tensor]:
    ids = tokens(rng, rows, length)
    return {"input_ids": ids, "labels": ids.clone()}


def tokens(rng: np.random.Generator, rows: int, length: int) -> Tensor:
    return torch.from_numpy(rng.integers(0, VOCABULARY, (rows, length)))


def global_batch(at: int) -> list[list[dict[str, Tensor]]]:
    """Of two data ranks: micro batches of unequal numbers, rows, lengths and targets; in the last, one without any."""
    rng = np.random.default_rng(40 + at)
    shares = [[packed(rng), padded(rng, "right"), plain(rng, 1, 5)], [plain(rng, 2, 17), padded(rng, "left")]]
    if at == STEPS - 1:
        shares[1] = [plain(rng, 1, 6)]
        shares[1][0]["labels"][:] = -100
    return shares


def share(at: int, data_rank: int, data_ranks: int) -> list[dict[str, Tensor]]:
    """What a data rank is given of it."""
    shares = global_batch(at)
    return [batch for given in shares[data_rank::data_ranks] for batch in given]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups as users make them: no decay for vectors, another rate for the embedding."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if p.ndim > 1 and "embed" not in n], "weight_decay": 0.1},
        {"params": [p for n, p in named if p.ndim <= 1], "weight_decay": 0.0, "lr": 1e-2},
        {"params": [p for n, p in named if p.ndim > 1 and "embed" in n], "weight_decay": 0.03, "lr": 5e-4},
    ]


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(groups(model), lr=3e-3),
    "sgd": lambda model: torch.optim.SGD(groups(model), lr=3e-2, momentum=0.9, nesterov=True),
    "lamb": lambda model: Lamb(groups(model), lr=3e-3),
}


def reference(name: str, optimizer: str = "adamw") -> Outcome:
    """Plain `transformers` and torch in one process."""
    model = build(name)
    update = OPTIMIZERS[optimizer](model)
    rates = torch.optim.lr_scheduler.LambdaLR(update, lambda at: 1 / (1 + at))
    outcome = Outcome([], [], {}, {})
    for at in range(STEPS):
        with exact():
            loss = mean_loss(model, share(at, 0, 1))
            loss.backward()
        if not at:
            outcome.gradients = {n: p.grad.numpy().copy() for n, p in model.named_parameters()}
        outcome.losses.append(loss.item())
        outcome.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        update.step()
        rates.step()
        update.zero_grad()
    outcome.weights = {n: p.detach().numpy().copy() for n, p in model.named_parameters()}
    return outcome


def mean_loss(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """The cross entropy of all targets over their number. (That of `transformers` would be computed in fp32.)"""
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for batch in batches:
        given = {key: value for key, value in batch.items() if key != "labels"}
        logits, labels = model(**given, use_cache=False).logits[:, :-1], batch["labels"][:, 1:]
        total = total + nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        targets += int((labels != -100).sum())
    return total / targets


def train_on_rank(layout: str, name: str, optimizer: str = "adamw", own: bool = False) -> Outcome:
    """The loop of docs/howto/python.md; `own`: by backward and clipping, with the gradients of the first step."""
    model = ff.parallelize(build(name), layout)
    update = OPTIMIZERS[optimizer](model)
    rates = torch.optim.lr_scheduler.LambdaLR(update, lambda at: 1 / (1 + at))
    outcome = Outcome([], [], {}, {})
    for at in range(STEPS):
        batch = share(at, model.data_rank, model.data_ranks)
        with exact():
            if own:
                loss = float(model.backward(batch))
                if not at:
                    outcome.gradients = as_numpy(ff.gather(model, gradients=True))
                norm = float(ff.clip_grad_norm_(model, CLIP))
                update.step()
                update.zero_grad()
            else:
                result = ff.train_step(model, update, batch, max_grad_norm=CLIP)
                loss, norm = result.loss, result.grad_norm
        rates.step()
        outcome.losses.append(loss)
        outcome.norms.append(norm)
    outcome.weights = as_numpy(ff.gather(model))
    return outcome


def as_numpy(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """To 1e-10 in fp64: losses, norms, every gradient (of its own norm) and every weight."""
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-10)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-10)
    for name, gradient in expected.gradients.items() if found.gradients else ():
        error = np.linalg.norm(found.gradients[name] - gradient)
        assert error <= 1e-10 * max(np.linalg.norm(gradient), 1e-6 * expected.norms[0]), name
    assert found.weights.keys() == expected.weights.keys()
    for name, weights in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=1e-10, err_msg=name)
