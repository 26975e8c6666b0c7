"""Bugs of context parallelism."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.data.batch import IGNORE
from fivefold.models import offdiagonal
from fivefold.parallel.context import kv_exchange
from fivefold.parallel.context import runtime as context
from fivefold.parallel.context.kv_exchange import Ring
from fivefold.parallel.context.runtime import ContextParallel, CPAttentionArgs
from fivefold.parallel.ranks import row_blocks
from fivefold.parallel.state import state_of
from fivefold.training import step
from tests.verification.faults.fault import Model, fault

ATTENTION = r"self_attn\.o_proj input"  # what attention made
KEYS = r"[kv]_proj"


# ---- the cut of tokens -----------------------------------------------------------------------------------------------


def _positions(of: Callable[[ContextParallel, Tensor], Tensor]) -> Any:
    """The base is given other positions: `of(fold, those of whole rows)`."""
    plain = context._cut_rows

    def cut_rows(fold: ContextParallel) -> Any:
        hook = plain(fold)

        def wrong(base: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            args, cut = hook(base, args, kwargs)
            return args, {**cut, "position_ids": of(fold, kwargs["position_ids"])} if fold.is_on else cut

        return wrong

    return patch.object(context, "_cut_rows", cut_rows)


def _contiguous(fold: ContextParallel, x_BT: Tensor) -> Tensor:
    return x_BT.chunk(fold.size, 1)[fold.rank]


@fault(
    "positions count from zero on every rank",
    known="verl #6267; position_ids left to a model that counts its slice",
    layout="cp2",
    expects=[("output", r"rotary_emb")],
)
def positions_restart_on_every_rank() -> Any:
    return _positions(lambda fold, x: torch.arange(x.shape[1] // fold.size, device=x.device).expand(len(x), -1))


@fault(
    "learnt positions (GPT-2) count from zero on every rank",
    known="verl #6267, where positions are a table",
    layout="cp2",
    model=Model("gpt2"),
    expects=[("output", r"transformer\.wpe")],
)
def learnt_positions_restart_on_every_rank() -> Any:
    return _positions(lambda fold, x: torch.arange(x.shape[1] // fold.size, device=x.device).expand(len(x), -1))


@fault(
    "tokens in zigzag order, their positions in that of contiguous slices",
    known="ms-swift #10071: zigzag order on one side, contiguous on the other",
    layout="cp2",
    expects=[("output", r"rotary_emb")],
)
def positions_of_contiguous_slices() -> Any:
    return _positions(_contiguous)


def _labels(of: Callable[[ContextParallel, Tensor], Tensor]) -> Any:
    """Labels (what holds `IGNORE`) are cut otherwise."""
    plain = ContextParallel.cut

    def cut(fold: ContextParallel, x_BT: Tensor) -> Tensor:
        is_labels = x_BT.dtype == torch.int64 and bool((x_BT == IGNORE).any())
        return of(fold, x_BT) if is_labels else plain(fold, x_BT)

    return patch.object(ContextParallel, "cut", cut)


@fault(
    "tokens in zigzag order, their labels in that of contiguous slices",
    known="ms-swift #10071: zigzag order on one side, contiguous on the other",
    layout="cp2",
    expects=[("loss", "")],
)
def labels_of_contiguous_slices() -> Any:
    return _labels(_contiguous)


@fault(
    "labels cut before they are shifted: the last token of every chunk has no target",
    known="transformers #36607, bionemo-recipes #1449",
    layout="cp2",
    expects=[("loss", "")],
)
def labels_cut_before_the_shift() -> Any:
    def cut(fold: ContextParallel, x_BT: Tensor) -> Tensor:
        found = []
        for start, stop in row_blocks(x_BT.shape[1], fold.size, fold.rank):
            piece = x_BT[:, start:stop].clone()
            piece[:, -1] = IGNORE
            found.append(piece)
        return torch.cat(found, 1)

    return _labels(cut)


@fault(
    "the loss is a mean over each rank's own targets, then over ranks",
    known="torchtitan #2206, prime-rl #1960",
    layout="cp2",
    expects=[("loss", "")],
)
def loss_is_a_mean_of_means_over_cp() -> Any:
    plain = step.inputs_of_step

    def inputs_of_step(model: Any, batch: Any, scale: Tensor, *rest: Any, **options: Any) -> Any:
        fold = state_of(model).live(ContextParallel)
        assert fold is not None
        mine = sum(int((fold.cut(torch.from_numpy(each.labels)) != IGNORE).sum()) for each in batch)
        return plain(model, batch, torch.tensor(1.0 / (mine * fold.size), dtype=scale.dtype), *rest, **options)

    return patch.object(step, "inputs_of_step", inputs_of_step)


# ---- what attention sees ---------------------------------------------------------------------------------------------


@fault(
    "partial results of the ring added up without the rescale by their log-sum-exp",
    known="ring attention written by hand: each block's softmax is its own",
    layout="cp2+ring",
    expects=[("output", ATTENTION)],
)
def partial_results_without_rescale() -> Any:
    def merge(part: Any, out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, _: Any) -> None:
        before, plain = lse[part.rows, part.queries], more.transpose(1, 2)
        out[part.rows, part.queries] = (out[part.rows, part.queries] + plain) / 2
        lse[part.rows, part.queries] = torch.logaddexp(before, more_lse.transpose(1, 2))

    return patch.object(offdiagonal, "merge", merge)


def _sees(**changes: Callable[[CPAttentionArgs], Any]) -> Any:
    """What queries see of other blocks is told from other documents or another window."""

    def seen(job: CPAttentionArgs, keys: Any) -> Any:
        given = {name: change(job) for name, change in changes.items()}
        window = given.get("window", job.rule.window)
        return offdiagonal.offdiagonal_blocks(
            given.get("edges", job.edges), job.rows, job.length, job.mine, keys, window
        )

    return patch.object(CPAttentionArgs, "offdiagonal_blocks", seen)


@fault(
    "the document mask holds inside a block and is dropped between blocks",
    known="trl #6843",
    layout="cp2+ring",
    expects=[("output", ATTENTION)],
)
def documents_see_each_other_across_ranks() -> Any:
    return _sees(edges=lambda job: tuple(range(0, (job.rows + 1) * job.length, job.length)))


@fault(
    "the sliding window holds inside a block and is dropped between blocks",
    known="accelerate #4177, a review of prime-rl #2828",
    layout="cp2+ring",
    model=Model("mistral"),
    expects=[("output", ATTENTION)],
)
@contextmanager
def the_window_ends_at_the_block() -> Iterator[None]:
    with _sees(window=lambda job: None), patch.object(offdiagonal.OffdiagonalBlock, "farthest", 0):
        yield


@fault(
    "blocks are not seen beyond their own edge: every rank attends to its own tokens",
    known="layers that the exchange does not reach, accelerate #4177",
    layout="cp2",
    expects=[("output", ATTENTION)],
)
def every_rank_for_itself() -> Any:
    return patch.object(CPAttentionArgs, "offdiagonal_blocks", lambda job, keys: ())


@fault(
    "the two chunks of a rank are attended to as one sequence, although tokens lie between them",
    known="is_causal over the local zigzag sequence",
    layout="cp2+ring",
    expects=[("output", ATTENTION)],
)
def chunks_of_a_rank_as_one_sequence() -> Any:
    plain = offdiagonal.local_cu_seqlens

    def cu_seqlens(edges: Any, rows: int, length: int, blocks: Any) -> Tensor:
        held = sum(stop - start for start, stop in blocks)
        seams = {row * held + blocks[0][1] - blocks[0][0] for row in range(rows) if len(blocks) > 1}
        edges_of_documents = {row * length + start for row in range(rows) for start, _ in blocks} & set(edges)
        return torch.tensor(
            [e for e in plain(edges, rows, length, blocks).tolist() if e not in seams or e in edges_of_documents],
            dtype=torch.int32,
        )

    return patch.object(context, "_cu_seqlens", cu_seqlens)


@fault(
    "gathered keys and values left in the order of ranks, not of the row",
    known="ms-swift #10071, for keys and values",
    layout="cp2+allgather",
    expects=[("output", ATTENTION)],
)
def gathered_keys_in_the_order_of_ranks() -> Any:
    return patch.object(kv_exchange, "in_order", lambda x, tokens, dim: torch.cat(list(x), dim))


@fault(
    "the heads that come back from Ulysses are in another order than those that went",
    known="two all-to-alls that disagree",
    layout="cp2+ulysses",
    expects=[("output", ATTENTION)],
)
def heads_come_back_in_another_order() -> Any:
    plain = kv_exchange.tokens_for_heads
    return patch.object(context, "tokens_for_heads", lambda *args: plain(*args).flip(2))


# ---- gradients -------------------------------------------------------------------------------------------------------


@fault(
    "gradients of keys and values that another rank used are not sent home",
    known="diffusers #14265: the backward of a ring that knows its own keys only",
    layout="cp2+ring",
    expects=[("gradient of output", KEYS)],
)
def gradients_of_remote_keys_lost() -> Any:
    plain = Ring.return_dkv

    def return_dkv(ring: Ring, at: int, grad: Tensor, rows: Any, wire: torch.dtype) -> Any:
        return (lambda total: None) if at else plain(ring, at, grad, rows, wire)

    return patch.object(Ring, "return_dkv", return_dkv)


@fault(
    "gradients of keys and values are sent to the wrong rank",
    known="Megatron-LM #1464 (gradients of attention wrong under cp); the ring turned round in backward",
    layout="cp3+ring",
    expects=[("gradient of output", KEYS)],
)
def gradients_of_keys_sent_the_wrong_way() -> Any:
    plain = Ring.return_dkv

    def return_dkv(ring: Ring, at: int, grad: Tensor, rows: Any, wire: torch.dtype) -> Any:
        if not at:
            return plain(ring, at, grad, rows, wire)
        whole = grad.new_zeros(*grad.shape[:2], sum(stop - start for start, stop in rows.tokens[0]), *grad.shape[3:])
        whole[:, :, : grad.shape[2]] = grad
        arriving = ring._swap(whole.flatten(1, 2), -at, whole.shape[1] * whole.shape[2])
        return lambda total: total.add_(arriving().view_as(whole))

    return patch.object(Ring, "return_dkv", return_dkv)


@fault(
    "key/value heads that Ulysses sends to several ranks get the gradient of one",
    known="repeated key/value heads whose copies are not summed",
    layout="cp2+ulysses",
    model=Model(kv_heads=1),
    expects=[("gradient of output", KEYS)],
)
def copies_of_key_value_heads_not_summed() -> Any:
    plain = context._by_rank_of_heads

    def dealt(x: Tensor, u: int) -> Tensor:
        copies = plain(x, u)
        return torch.cat([copies[:, :, :1], copies[:, :, 1:].detach()], 2) if x.shape[2] < u else copies

    return patch.object(context, "_by_rank_of_heads", dealt)


@fault(
    "parts of an off-diagonal block's backward weighed by its own log-sum-exp, not by the merged one",
    known="diffusers #14265: a ring's backward reads what one of its steps saved",
    layout="cp2+ring",
    expects=[("gradient of output", r"self_attn")],
)
def backward_by_the_statistics_of_a_part() -> Any:
    plain = offdiagonal.backward

    def backward(
        part: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: Any, drops: Any = None
    ) -> Any:
        own, own_lse = offdiagonal.forward(part, q, k, v, rule, drops)
        out, lse = out.clone(), lse.clone()
        out[part.rows, part.queries], lse[part.rows, part.queries] = own.transpose(1, 2), own_lse.transpose(1, 2)
        return plain(part, grad, q, k, v, out, lse, rule, drops)

    return patch.object(offdiagonal, "backward", backward)
