"""Exchange between the ranks of cp of what attention needs of each other's tokens.

`Ring` or `AllGatherKV` brings keys and values of other ranks' tokens to the queries of a rank, and returns their
gradients. `ulysses_all_to_all` (Ulysses, arXiv:2309.14509) gives each rank all tokens of some heads instead.

Keys and values travel as the model made them: each key/value head once, in the compute dtype.

Legend: B rows, L tokens of a rank, n ranks, T = n L, h heads, G key/value heads, D head size; "kv" is keys and values,
[2,B,L,G,D]; "tokens" are the blocks of a row that each rank of the group has; S tokens of pieces of rows (`spec.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.models.offdiagonal import Blocks
from fivefold.parallel.context.spec import Pieces, SharedRows, hops, tokens_of, width
from fivefold.parallel.ranks import Tokens, narrowed
from fivefold.parallel.tensor.mappings import exchange, mapping
from fivefold.torch_internals import collectives

Pending = Callable[[], Tensor]  # waits for a tensor in transit
PendingSum = Callable[[Tensor], object]  # waits likewise, and adds it to the given one in place


class Exchange(Protocol):
    """Exchange that brings keys and values to the queries, in parts. Every rank of the group takes the same steps."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def parts(self, kv: Tensor, rows: SharedRows) -> Iterator[tuple[Blocks, Tensor]]:
        """Yield (blocks of a row, their kv) for the queries to attend to, this rank's own first. While the caller works
        on one part, the next is in transit. Keys that no query of this rank sees may be zeros."""

    def return_dkv(self, step: int, grad: Tensor, rows: SharedRows, wire: torch.dtype) -> PendingSum:
        """Send the gradient of part `step` (from 0) to the owner of its keys, in the dtype `wire`. The result adds to
        the gradient of this rank's kv what other ranks sent."""


@dataclass(frozen=True)
class Ring:
    """Ring attention (arXiv:2310.01889): a rank attends to the keys of one rank while those of the next travel.

    In hop s keys and values go from rank r straight to rank r - s: those that it attends to (`spec.py`), and nothing if
    there are none. For whole rows that is what neighbours would hand on, and for documents less: one over one edge is
    sent once. Gradients go straight back to the owner of the keys, which adds them up in fp32. A running sum around the
    ring would be rounded on every rank, or take twice the bytes.
    """

    group: dist.ProcessGroup

    def parts(self, kv: Tensor, rows: SharedRows) -> Iterator[tuple[Blocks, Tensor]]:
        rank, tokens = self.group.rank(), rows.tokens
        blocks, part = tokens[rank], kv
        for step, hop in enumerate(hops(rows, rank), 1):
            arriving = self._swap(_packed(kv, hop.sent), -step, tokens_of(hop.received))
            yield blocks, part
            part = _spread(arriving(), hop.received, kv.shape[1])
            blocks = narrowed(tokens[(rank + step) % len(tokens)], 0, part.shape[2])
        yield blocks, part

    def return_dkv(self, step: int, grad: Tensor, rows: SharedRows, wire: torch.dtype) -> PendingSum:
        if step == 0:
            return lambda total: total.add_(grad)
        hop = hops(rows, self.group.rank())[step - 1]
        arriving = self._swap(_packed(grad, hop.received).to(wire), step, tokens_of(hop.sent))
        return lambda total: _add_pieces(total, arriving(), hop.sent)

    def _swap(self, sent_2SGD: Tensor, distance: int, tokens: int) -> Pending:
        """Send to the rank `distance` ahead, and receive `tokens` tokens of kv from the one behind: [2,S,G,D]."""
        rank, size, sent = self.group.rank(), self.group.size(), sent_2SGD.contiguous()
        received = sent.new_empty(sent.shape[0], tokens, *sent.shape[2:])
        # What is received first: gloo's permission to send would wait behind what this rank sends to the same one.
        both = (dist.irecv, received, rank - distance), (dist.isend, sent, rank + distance)
        messages = [
            dist.P2POp(way, tensor, group=self.group, group_peer=peer % size)
            for way, tensor, peer in both
            if tensor.shape[1]
        ]
        works = dist.batch_isend_irecv(messages) if messages else []

        def wait(_: Tensor = sent) -> Tensor:  # `sent` must live until it has been sent
            for work in works:
                work.wait()
            return received

        return wait


def _packed(kv_2BLGD: Tensor, pieces: Pieces) -> Tensor:
    """Put pieces of rows one behind the other: [2,S,G,D]."""
    if tokens_of(pieces) == kv_2BLGD.shape[1] * kv_2BLGD.shape[2]:
        return kv_2BLGD.flatten(1, 2)
    return torch.cat([kv_2BLGD[:, 0, :0], *(kv_2BLGD[:, row, start:stop] for row, start, stop in pieces)], 1)


def _spread(kv_2SGD: Tensor, pieces: Pieces, rows: int) -> Tensor:
    """Put pieces back into rows of as many tokens as hold them all: [2,B,l,G,D], zeros between them."""
    wide = width(pieces)
    if rows * wide == kv_2SGD.shape[1]:
        return kv_2SGD.unflatten(1, (rows, wide))  # type: ignore[no-any-return,no-untyped-call]
    spread = kv_2SGD.new_zeros(kv_2SGD.shape[0], rows, wide, *kv_2SGD.shape[2:])
    _add_pieces(spread, kv_2SGD, pieces)
    return spread


def _add_pieces(total_2BLGD: Tensor, kv_2SGD: Tensor, pieces: Pieces) -> None:
    """Add pieces to those of the rows, in place."""
    sizes = [stop - start for _, start, stop in pieces]
    for (row, start, stop), piece in zip(pieces, torch.split(kv_2SGD, sizes, 1), strict=True):
        total_2BLGD[:, row, start:stop] += piece


@dataclass(frozen=True)
class AllGatherKV:
    """All-gather of the keys and values of all tokens, in the row's order, as in Llama 3 (arXiv:2407.21783).

    One all-to-all sends the gradients to the ranks that own the keys, which add them up in fp32. A reduce-scatter would
    add them up in the dtype in which they are sent.
    """

    group: dist.ProcessGroup

    def parts(self, kv: Tensor, rows: SharedRows) -> Iterator[tuple[Blocks, Tensor]]:
        tokens = rows.tokens
        arriving = collectives.all_gather_into_tensor(kv, len(tokens), self.group.group_name)
        yield (), kv  # its own arrive again among all
        whole = in_order(collectives.wait_tensor(arriving).view(len(tokens), *kv.shape), tokens, 2)
        del arriving  # a second copy of `whole`'s size
        yield ((0, whole.shape[2]),), whole

    def return_dkv(self, step: int, grad: Tensor, rows: SharedRows, wire: torch.dtype) -> PendingSum:
        if step == 0:
            return lambda total: total.add_(grad)
        each = [1] * len(rows.tokens)
        dealt = by_rank(grad.to(wire), rows.tokens, 2)
        arriving = collectives.all_to_all_single(dealt, each, each, self.group.group_name)
        return lambda total: total.add_(collectives.wait_tensor(arriving).sum(0, dtype=grad.dtype))


# ---- heads for tokens ------------------------------------------------------------------------------------------------


def _to_heads(x_BLnhD: Tensor, group: dist.ProcessGroup, tokens: Tokens) -> Tensor:
    return in_order(_all_to_all(x_BLnhD.movedim(2, 0), group), tokens, 1)


def _to_tokens(x_BThD: Tensor, group: dist.ProcessGroup, tokens: Tokens) -> Tensor:
    return _all_to_all(by_rank(x_BThD, tokens, 1), group).movedim(0, 2)


def _all_to_all(x_nx: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send x[i] to rank i; [i] of the result comes from rank i."""
    each = [1] * group.size()
    return exchange(x_nx, each, each, group)


# [B,L,n,h,D] -> [B,T,h,D]: rank i gets the heads [:, :, i] of the tokens of all ranks, in the row's order.
ulysses_all_to_all = mapping(_to_heads, _to_tokens, is_kept=True)
# [B,T,h,D] -> [B,L,n,h,D]: the way back.
tokens_for_heads = mapping(_to_tokens, _to_heads, is_kept=True)


# ---- rows of all ranks -----------------------------------------------------------------------------------------------


def gathered(x_BLx: Tensor, group: dist.ProcessGroup, tokens: Tokens) -> Tensor:
    """Gather [B,L,...] on each rank into [B,T,...] in the order of the row."""
    stacked = collectives.all_gather_into_tensor(x_BLx.contiguous(), len(tokens), group.group_name)
    return in_order(collectives.wait_tensor(stacked).view(len(tokens), *x_BLx.shape), tokens, 1)


def in_order(x_nxLx: Tensor, tokens: Tokens, dim: int) -> Tensor:
    """Put the tokens of all ranks, rank r's in x[r] along `dim`, in the order of the row."""
    return torch.cat([x_nxLx[rank].narrow(dim, at, size) for rank, at, size in _places(tokens)], dim)


def by_rank(x_xTx: Tensor, tokens: Tokens, dim: int) -> Tensor:
    """Undo `in_order`: [n, ...]."""
    size = x_xTx.shape[dim] // len(tokens)
    out = x_xTx.new_empty(len(tokens), *x_xTx.shape[:dim], size, *x_xTx.shape[dim + 1 :])
    whole_at = 0
    for rank, at, length in _places(tokens):
        out[rank].narrow(dim, at, length).copy_(x_xTx.narrow(dim, whole_at, length))
        whole_at += length
    return out


def _places(tokens: Sequence[Blocks]) -> list[tuple[int, int, int]]:
    """List (rank, start of a block within the rank's tokens, its length), in the order of the row."""
    found = []
    for rank, blocks in enumerate(tokens):
        at = 0
        for start, stop in blocks:
            found.append((start, rank, at, stop - start))
            at += stop - start
    return [(rank, at, length) for _, rank, at, length in sorted(found)]
