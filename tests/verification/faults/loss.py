"""Bugs of the loss: over a split vocabulary, over chunks, over labels."""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fivefold.data import batch
from fivefold.data.batch import IGNORE
from fivefold.parallel import passes
from fivefold.parallel.loss import runtime as loss
from fivefold.parallel.loss import tasks
from fivefold.parallel.tensor.runtime import TensorParallel
from fivefold.training import step
from fivefold.verification import proof_case
from tests.verification.faults.fault import Model, fault

LOSS = [("loss", r"")]


def _cross_entropy(instead: Callable[..., Any]) -> Any:
    """The cross entropy is `instead(plain, logits, fold)`."""
    softmax_losses = loss.softmax_losses

    def losses(labels_N: Tensor, soft: Any, logits: Tensor, factor_N: Any, *, fold: Any, **options: Any) -> Any:
        def plain(logits: Tensor, fold: Any) -> Any:
            return softmax_losses(labels_N, soft, logits, factor_N, fold=fold, **options)

        return instead(plain, logits, fold)

    return patch.object(loss, "softmax_losses", losses)


def _all_reduce(instead: Callable[..., None]) -> Any:
    """The collectives of the loss are `instead(tensor, op, group)`."""

    def all_reduce(fold: TensorParallel, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        instead(tensor, op, fold.group)

    return patch.object(TensorParallel, "all_reduce", all_reduce)


@fault(
    "labels looked up as if every rank's vocabulary started at 0",
    known="Megatron's vocabulary-parallel cross entropy without its offset",
    layout="tp2",
    expects=LOSS,
)
def offset_of_the_vocabulary_ignored() -> Any:
    def cross_entropy(plain: Any, logits: Tensor, fold: Any) -> Any:
        return plain(logits, replace(fold, vocabulary=tuple((0, stop - start) for start, stop in fold.vocabulary)))

    return _cross_entropy(cross_entropy)


@fault(
    "each rank subtracts its own largest logit",
    known="Megatron's vocabulary-parallel cross entropy without its first all-reduce",
    layout="tp2",
    expects=LOSS,
)
def largest_logit_not_shared() -> Any:
    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        if op != dist.ReduceOp.MAX:
            dist.all_reduce(tensor, op, group)

    return _all_reduce(all_reduce)


@fault(
    "each rank divides by the sum of its own exponentials",
    known="Megatron's vocabulary-parallel cross entropy without its second all-reduce",
    layout="tp2",
    expects=LOSS,
)
def sum_of_exponentials_not_shared() -> Any:
    def all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
        own = tensor[0].clone()
        dist.all_reduce(tensor, op, group)
        if op != dist.ReduceOp.MAX:
            tensor[0].copy_(own)

    return _all_reduce(all_reduce)


@fault(
    "columns that pad an uneven vocabulary join the softmax",
    known="vocabularies padded to a multiple",
    layout="tp2",
    expects=LOSS,
)
def padded_columns_join_the_softmax() -> Any:
    def cross_entropy(plain: Any, logits: Tensor, fold: Any) -> Any:
        longest = max(stop - start for start, stop in fold.vocabulary)
        found, grad = plain(F.pad(logits, (0, longest - logits.shape[-1])), fold)
        return found, grad[..., : logits.shape[-1]].contiguous()

    return _cross_entropy(cross_entropy)


@fault(
    "logits rounded to bf16 before the loss",
    known="logits in the model's type",
    layout="shard2",
    expects=LOSS,
)
def logits_rounded() -> Any:
    return _cross_entropy(lambda plain, logits, fold: plain(_rounded(logits), fold))


def _rounded(values: Tensor) -> Tensor:
    return values.bfloat16().type(values.dtype)


@fault(
    "the head is called in place of the model's own forward: the soft cap of the logits (Gemma 2) is lost",
    known="fused losses that call lm_head alone",
    layout="shard2",
    model=Model("gemma2"),
    expects=LOSS,
)
def soft_cap_of_logits_lost() -> Any:
    plain = passes.head_only

    def head_only(model: Any, anatomy: Any) -> Any:
        manager = plain(model, anatomy)
        head = model.get_submodule(anatomy.head)
        return _Entered(manager, lambda hidden: head(hidden))

    return patch.object(passes, "head_only", head_only)


class _Entered:
    """A context manager that gives another value."""

    def __init__(self, manager: Any, value: Any) -> None:
        self._manager, self._value = manager, value

    def __enter__(self) -> Any:
        self._manager.__enter__()
        return self._value

    def __exit__(self, *error: Any) -> Any:
        return self._manager.__exit__(*error)


@fault(
    "the last chunk of the loss is left out",
    known="chunked losses whose last chunk is shorter",
    layout="shard2",
    expects=LOSS,
)
def last_chunk_dropped() -> Any:
    plain = tasks.Head.softmax_chunks

    def chunks(head: Any, labels_BT: Tensor, *rest: Any) -> Any:
        kept = labels_BT.clone()
        kept.view(-1)[-labels_BT.numel() // 3 :] = IGNORE
        return plain(head, kept, *rest)

    return patch.object(tasks.Head, "softmax_chunks", chunks)


@fault(
    "of the head's gradient the last chunk alone is kept",
    known="gradients of chunks assigned in place of added",
    layout="shard2",
    expects=[("gradient, raw", r"lm_head")],
)
def head_gradient_of_the_last_chunk() -> Any:
    return patch.object(loss, "_accumulate", lambda sums, grads: [*grads])


@fault(
    "evaluation counts targets on every tensor parallel rank",
    known="a mean over ranks that have the same tokens",
    layout="tp2",
    expects=[("loss, evaluated", r"")],
)
def evaluated_targets_counted_on_every_tensor_rank() -> Any:
    plain = step.mean_loss

    def mean_loss(model: Any, batches: Any, *own: Any) -> float:
        return plain(model, batches, *own) / step.state_of(model).plan.layout.tp

    return patch.object(step, "mean_loss", mean_loss)


# ---- labels ----------------------------------------------------------------------------------------------------------


def _labels(change: Callable[[Tensor], Tensor]) -> Any:
    plain = step.to_device

    def to_device(*args: Any, **options: Any) -> Any:
        inputs = plain(*args, **options)
        inputs.task.labels = change(inputs.task.labels)
        return inputs

    return patch.object(step, "to_device", to_device)


@fault(
    "labels that are shifted already are shifted again",
    known="transformers #47394, #37830",
    layout="shard2",
    expects=LOSS,
)
def labels_shifted_twice() -> Any:
    return _labels(lambda labels: F.pad(labels[:, 1:], (0, 1), value=IGNORE))


@fault(
    "labels not shifted: a token is its own target",
    known="Qwen #834",
    layout="shard2",
    expects=LOSS,
)
def labels_not_shifted() -> Any:
    return _labels(lambda labels: F.pad(labels[:, :-1], (1, 0), value=IGNORE))


@fault(
    "padding at a row's end has targets",
    known="padding without the label that is ignored",
    layout="shard2",
    expects=LOSS,
)
def padding_carries_loss() -> Any:
    plain = proof_case.assemble

    def assemble(rows: Any, **options: Any) -> Any:
        batch = plain(rows, **options)
        for labels, row in zip(batch.labels, rows, strict=True):
            labels[sum(len(piece.tokens) for piece in row) :] = 0
        return batch

    return patch.object(proof_case, "assemble", assemble)


@fault(
    "the first token of a document is the target of the last one before it",
    known="TRL's packed sets, read without `seq_lengths`",
    layout="shard2",
    expects=LOSS,
)
def first_tokens_are_targets() -> Any:
    plain = proof_case.assemble

    def assemble(rows: Any, **options: Any) -> Any:
        batch = plain(rows, **options)
        for labels, row in zip(batch.labels, rows, strict=True):
            ends = accumulate(len(piece.tokens) for piece in row)
            for end, following in zip(ends, row[1:], strict=False):
                labels[end - 1] = following.tokens[0]
        return batch

    return patch.object(proof_case, "assemble", assemble)


# ---- tied weights ---------------------------------------------------------------------------------------------------


@fault(
    "a tied embedding loses the gradient of the head",
    known="Megatron-LM #844",
    layout="shard2",
    model=Model(tied=True),
    expects=[("gradient, raw", r"embed_tokens")],
)
def head_gradient_of_a_tied_embedding_lost() -> Any:
    return patch.object(passes, "parameters_after_base", lambda *_: [])


@fault(
    "a tied embedding gets the gradient of the head twice",
    known="a tied weight listed twice",
    layout="shard2",
    model=Model(tied=True),
    expects=[("gradient, raw", r"embed_tokens")],
)
def head_gradient_of_a_tied_embedding_doubled() -> Any:
    plain = loss.SummedLoss.backward

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        given = plain(ctx, *grads)
        return (*given[:5], *(each if each is None else 2 * each for each in given[5:]))  # of parameters alone

    return patch.object(loss.SummedLoss, "backward", staticmethod(backward))


@fault(
    "a tied head is given values of its own after loading and never sees an update",
    known="Megatron-LM #656",
    layout="shard2",
    model=Model(tied=True),
    expects=[("losses of .* steps", r"step 2"), ("gradient, second step", r"model\.norm|embed_tokens")],
)
def tied_head_keeps_its_first_values() -> Any:
    plain = passes.head_only
    kept: dict[int, Tensor] = {}

    def head_only(model: Any, anatomy: Any) -> Any:
        head = model.get_submodule(anatomy.head)
        first = kept.setdefault(id(model), head.weight.detach().clone())

        def logits(hidden: Tensor) -> Tensor:
            return F.linear(hidden, head.weight + (first - head.weight).detach())

        return _Entered(plain(model, anatomy), logits)

    return patch.object(passes, "head_only", head_only)


# ---- which targets are trained ---------------------------------------------------------------------------------------


@fault(
    "what is asked is trained too",
    known="TRL #2545: assistant_only_loss without a mask",
    layout="shard2",
    expects=[*LOSS, ("counts of a step", r"targets")],
)
def all_of_an_example_is_trained() -> Any:
    return patch.object(batch.Piece, "labels", property(lambda piece: piece.targets.astype("int64")))


@fault(
    "the loss is divided by all targets, those that are not trained too",
    known="Hugging Face transformers #34191, where padding was counted",
    layout="dp2",
    expects=[*LOSS, ("counts of a step", r"targets")],
)
def untrained_targets_are_counted() -> Any:
    plain = step._count

    def count(rows: Any, *rest: Any) -> Any:
        every = [replace(each, targets=each.tokens - len(each.cu_seqlens) + 1) for each in rows]
        return plain(every, *rest)

    return patch.object(step, "_count", count)
