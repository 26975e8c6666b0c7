"""The yardstick: what anyone would write to train a Hugging Face model in plain PyTorch. Nothing of fivefold is used.

Legend: B rows, T tokens a row.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def train(
    model: Any, batches: Iterable[list[Any]], learning_rates: Iterable[float], *, bf16: bool,
    betas: tuple[float, float], eps: float, weight_decay: float, max_grad_norm: float,
) -> Iterator[float]:  # fmt: skip
    """Train, and yield the loss of each step. A step's batch is a list of micro batches with int64 [B, T] arrays
    `input_ids`, `labels` (already shifted, -100 without a target) and `position_ids` (0 where a document starts)."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps, fused=True)
    for batch, learning_rate in zip(batches, learning_rates, strict=False):
        targets = sum(int((part.labels != -100).sum()) for part in batch)
        total = 0.0
        for part in batch:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):  # fp32 weights, bf16 matmuls
                logits = model(
                    torch.from_numpy(part.input_ids), **documents(torch.from_numpy(part.position_ids))
                ).logits
            labels = torch.from_numpy(part.labels)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        optimizer.zero_grad()
        yield total


def documents(position_ids: Tensor) -> dict[str, Tensor]:
    """What the model needs to keep packed documents apart: their positions and a mask [B, 1, T, T]; nothing when
    each row is one document."""
    if not (position_ids[:, 1:] == 0).any():
        return {}
    which = (position_ids == 0).cumsum(1)
    same = which[:, None, :, None] == which[:, None, None, :]
    return {"position_ids": position_ids, "attention_mask": same.tril()}
