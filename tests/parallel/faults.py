"""Bugs that shipped in good trainers, planted on purpose: the measures of `tests/parity.py` must see each of them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import sqrt
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel import loss, pairs, tensor
from fivefold.parallel.apply import Spread
from fivefold.training import step
from fivefold.training.optimizer import squared_norm
from tests.parity import Case, on_rank


def _partial_gradients_not_summed() -> Any:
    return patch.object(tensor, "sum_partial_gradients", lambda *_: None)


def _input_gradient_of_a_column_not_reduced() -> Any:
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None

    return patch.object(pairs.GatherSequence, "backward", staticmethod(backward))


def _bias_of_a_row_added_on_every_rank() -> Any:
    def row_linear(linear: Any, fold: Any) -> Callable[[Tensor], Tensor]:
        return lambda x_BTF: fold.leave(F.linear(x_BTF, linear.weight, linear.bias))

    return patch.object(tensor, "_row_linear", row_linear)


def _clipping_by_a_local_norm() -> Any:
    clip = step.clip_
    return patch.object(step, "clip_", lambda model, _, limit: clip(model, sqrt(float(squared_norm(model))), limit))


def _loss_is_a_mean_of_means() -> Any:
    """Each data rank divides by its own count of targets."""

    def count(batch: Any, spread: Spread, device: torch.device, stop: bool) -> Tensor:
        mine = sum(b.targets for b in batch) * spread.layout.data_ranks
        return torch.tensor([mine, sum(b.tokens for b in batch), 0, int(stop)], device=device)

    return patch.object(step, "_count", count)


def _offset_of_the_vocabulary_ignored() -> Any:
    plain = loss._cross_entropy

    def cross_entropy(logits: Tensor, labels_N: Tensor, fold: Any, *rest: Any, **options: Any) -> Any:
        shifted = replace(fold, vocabulary=tuple((0, stop - start) for start, stop in fold.vocabulary))
        return plain(logits, labels_N, shifted, *rest, **options)

    return patch.object(loss, "_cross_entropy", cross_entropy)


def _key_value_copies_not_summed() -> Any:
    """Only the sum over the ranks that share key/value heads is lost."""
    plain = tensor.gradient_sums

    def sums(*args: Any, **options: Any) -> dict[str, str]:
        return {name: axis for name, axis in plain(*args, **options).items() if axis != "tp_kv"}

    return patch.object(tensor, "gradient_sums", sums)


def _gradients_averaged() -> Any:
    """What FSDP does unless it is told to sum: gradients too small by the number of data ranks."""
    plain = step.gradients

    def averaged(model: Any, *args: Any) -> Tensor:
        found = plain(model, *args)
        for parameter in model.parameters():
            parameter.grad /= step.spread_of(model).layout.data_ranks
        return found

    return patch.object(step, "gradients", averaged)


FAULTS: dict[str, Callable[[], Any]] = {
    plant.__name__.removeprefix("_"): plant
    for plant in (
        _partial_gradients_not_summed,
        _key_value_copies_not_summed,
        _input_gradient_of_a_column_not_reduced,
        _bias_of_a_row_added_on_every_rank,
        _clipping_by_a_local_norm,
        _loss_is_a_mean_of_means,
        _offset_of_the_vocabulary_ignored,
        _gradients_averaged,
    )
}


@contextmanager
def planted(fault: str | None) -> Iterator[None]:
    with ExitStack() as stack:
        if fault:
            stack.enter_context(FAULTS[fault]())
        yield


def on_faulty_rank(case: Case, fault: str | None) -> dict[str, Any]:
    with planted(fault):
        return on_rank(case)
