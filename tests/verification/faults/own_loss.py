"""Bugs of a loss of the user's own: of what its function is given, of its gradient, of what is made of its losses."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.data.batch import IGNORE
from fivefold.parallel.loss import own
from fivefold.parallel.loss.own import LossRow, TokenLoss
from fivefold.parallel.loss.tasks import Head
from fivefold.training import step
from fivefold.verification import proof_case
from tests.verification.faults.fault import Model, fault

OWN = Model(objective="python")
LOSS, GRADIENT = [("loss", r"")], [("gradient of output", r"norm")]
EVALUATED = [("loss, evaluated", r"")]


def _called(change: Callable[..., Any]) -> Any:
    """The function gets what `change(logits, labels, row)` makes of it."""
    plain = TokenLoss.of_tokens
    return patch.object(TokenLoss, "of_tokens", lambda loss, *given: plain(loss, *change(*given)))


@fault(
    "each tensor parallel rank puts its own columns in the place of the first",
    known="a gather whose parts come back in another order",
    layout="tp2", expects=LOSS, model=OWN,
)  # fmt: skip
def columns_gathered_in_the_wrong_order() -> Any:
    plain = own.gather_columns

    def gather(logits: Tensor, group: Any, blocks: Any) -> Tensor:
        whole = plain(logits, group, blocks)
        return torch.cat([whole[..., slice(*block)] for block in reversed(blocks)], -1)

    return patch.object(own, "gather_columns", gather)


@fault(
    "columns that pad an uneven vocabulary shift those of the next rank",
    known="vocabularies padded to a multiple",
    layout="tp2", expects=LOSS, model=OWN,
)  # fmt: skip
def padding_between_gathered_columns() -> Any:
    plain = own.gather_columns

    def gather(logits: Tensor, group: Any, blocks: Any) -> Tensor:
        whole, (_, stop) = plain(logits, group, blocks), blocks[0]
        return torch.cat([whole[..., :stop], torch.zeros_like(whole[..., :1]), whole[..., stop:-1]], -1)

    return patch.object(own, "gather_columns", gather)


@fault(
    "every rank of tp takes the gradient of the first columns",
    known="a gradient sliced without the rank's offset",
    layout="tp2", expects=GRADIENT, model=OWN,
)  # fmt: skip
def gradient_of_the_first_columns() -> Any:
    plain = TokenLoss.of_chunk

    def of_chunk(loss: Any, *given: Any, fold: Any, **options: Any) -> Any:
        losses, gradient = plain(loss, *given, fold=fold, **options)
        first = gradient.clone()
        if dist.get_rank() == 0:
            dist.broadcast(first, 0)
            return losses, gradient
        width = fold.vocabulary[0][1]
        first = gradient.new_empty(*gradient.shape[:-1], width)
        dist.broadcast(first, 0)
        return losses, first[..., : gradient.shape[-1]].contiguous()

    return patch.object(TokenLoss, "of_chunk", of_chunk)


@fault(
    "the gradient of the gathered logits is summed over the ranks of tp, which all computed it",
    known="torch.distributed.nn.all_gather, whose backward sums",
    layout="tp2", expects=GRADIENT, model=OWN,
)  # fmt: skip
def gradient_of_gathered_logits_summed() -> Any:
    plain = TokenLoss.of_chunk

    def of_chunk(loss: Any, *given: Any, fold: Any, **options: Any) -> Any:
        losses, gradient = plain(loss, *given, fold=fold, **options)
        return losses, gradient * fold.size

    return patch.object(TokenLoss, "of_chunk", of_chunk)


@fault(
    "the function gets logits rounded to bf16",
    known="logits in the model's type (transformers #24622)",
    layout="shard2", expects=LOSS, model=OWN,
)  # fmt: skip
def logits_of_the_function_rounded() -> Any:
    return _called(lambda logits, labels, row: (logits.bfloat16().to(logits.dtype), labels, row))


@fault(
    "tokens without a target are given to the function, as targets of token 0",
    known="labels of -100 clamped to 0, without a mask on the losses",
    layout="shard2", expects=LOSS, model=OWN,
)  # fmt: skip
def tokens_without_a_target_have_losses() -> Any:
    plain = TokenLoss.of_chunk

    def of_chunk(loss: Any, labels_N: Tensor, *given: Any, **options: Any) -> Any:
        return plain(loss, torch.where(labels_N == IGNORE, 0, labels_N), *given, **options)

    return patch.object(TokenLoss, "of_chunk", of_chunk)


@fault(
    "positions begin again in every chunk of the loss",
    known="an arange of a chunk's own tokens",
    layout="shard2", expects=LOSS, model=OWN,
)  # fmt: skip
def positions_of_the_chunk() -> Any:
    plain = LossRow.split

    def split(row: LossRow, sizes: Any) -> Any:
        for chunk in plain(row, sizes):
            yield replace(chunk, position_ids=torch.arange(len(chunk.position_ids)))

    return patch.object(LossRow, "split", split)


@fault(
    "tokens beside the logits are not cut as the hidden states are",
    known="ms-swift #10071: zigzag order on one side, contiguous on the other",
    layout="cp2", expects=LOSS, model=OWN,
)  # fmt: skip
def tokens_of_contiguous_slices() -> Any:
    def cut(row: LossRow, take: Any) -> LossRow:
        def contiguous(tokens: Tensor) -> Tensor:
            wanted = take(tokens)
            if wanted.shape == tokens.shape or tokens.ndim == 1:
                return wanted
            return tokens.tensor_split(2, 1)[dist.get_rank()]

        columns = {name: contiguous(column) for name, column in row.columns.items()}
        return LossRow(contiguous(row.input_ids), contiguous(row.position_ids), columns)

    return patch.object(LossRow, "cut", cut)


@fault(
    "each chunk's losses are a mean over its tokens, not a sum",
    known="transformers #34191, over chunks",
    layout="shard2", expects=LOSS, model=OWN,
)  # fmt: skip
def losses_are_a_mean_over_the_chunk() -> Any:
    plain = TokenLoss.of_chunk

    def of_chunk(loss: Any, labels_N: Tensor, *given: Any, **options: Any) -> Any:
        targets = max(1, int((labels_N != IGNORE).sum()))
        losses, gradient = plain(loss, labels_N, *given, **options)
        return losses / targets, gradient / targets

    return patch.object(TokenLoss, "of_chunk", of_chunk)


@fault(
    "the number by which the loss is divided does not reach its gradient",
    known="a loss that is scaled after its backward",
    layout="single", expects=GRADIENT, model=OWN,
)  # fmt: skip
def gradient_without_its_scale() -> Any:
    plain = TokenLoss.of_chunk

    def of_chunk(loss: Any, labels: Tensor, row: Any, logits: Tensor, factor: Any, **options: Any) -> Any:
        return plain(loss, labels, row, logits, factor if factor is None else torch.ones_like(factor), **options)

    return patch.object(TokenLoss, "of_chunk", of_chunk)


@fault(
    "columns of the data are those of the first document of a row",
    known="packing that keeps one value a row",
    layout="shard2", expects=LOSS, model=OWN,
)  # fmt: skip
def columns_of_the_first_document() -> Any:
    plain = proof_case.assemble

    def assemble(rows: Any, **options: Any) -> Any:
        batch = plain(rows, **options)
        for column in batch.columns.values():
            column[:] = column[:, :1]
        return batch

    return patch.object(proof_case, "assemble", assemble)


@fault(
    "evaluation has the cross entropy of the text, not the user's own loss",
    known="an evaluation loop of its own",
    layout="single", expects=EVALUATED, model=OWN,
)  # fmt: skip
def evaluated_by_cross_entropy() -> Any:
    plain = step.mean_loss
    return patch.object(step, "mean_loss", lambda model, batches, *own: plain(model, batches))


@fault(
    "the last chunk of a micro batch gets no loss",
    known="chunked losses whose last chunk is shorter",
    layout="tp2", expects=LOSS, model=OWN,
)  # fmt: skip
def last_chunk_of_the_function_dropped() -> Any:
    plain = Head.own_chunks

    def chunks(head: Any, loss: Any, labels_BT: Tensor, row: Any) -> Any:
        kept = labels_BT.clone()
        kept.view(-1)[-labels_BT.numel() // 3 :] = IGNORE
        return plain(head, loss, kept, row)

    return patch.object(Head, "own_chunks", chunks)
