"""Attention between blocks of a row: the single-device arithmetic under context parallelism.

A rank has blocks of every row. The queries of a block attend in two shapes, whatever the documents are:

- *diagonal* blocks: queries and keys of the same block. `packed.py` computes them, with documents cut at the edges of
  the block;
- *off-diagonal* blocks: queries of one block, keys of an earlier one. Only the document that begins before the query
  block and reaches into it has such keys, so there is at most one off-diagonal block per row and pair of blocks. Each
  query sees every key, or under a window a band of them. The block is trimmed until every query sees a key, because a
  softmax over no keys would still give a number.

Example: documents of 6 and 10 tokens under cp2. Rank 1 has the block (4, 12), rank 0 has (0, 4) and (12, 16). The
queries 4 and 5 attend to the keys 0 to 3 off-diagonal. The queries 6 to 11 belong to the second document, which begins
inside the block.

Partial results carry their log-sum-exp and are merged with it in fp32 (fp64). Given the merged output and log-sum-exp,
the backward kernels are exact for each partial result. No [T, T] mask exists.

Legend: B rows, T tokens of a row, L of them on this rank, S keys; H query heads, G key/value heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fivefold.models import kernels
from fivefold.models.kernels import AttentionParams
from fivefold.ops.dropout import AttentionDrops

Block = tuple[int, int]  # [start, stop) of the tokens of a row
Blocks = tuple[Block, ...]


@dataclass(frozen=True)
class OffdiagonalBlock:
    """Queries and the earlier keys that they see. `queries`, `keys`: slices of the rank's queries and keys.

    `ahead`: positions from the first key to the first query.
    """

    rows: slice | list[int]
    queries: slice
    keys: slice
    ahead: int

    @property
    def farthest(self) -> int:
        """Positions from the first key to the last query. A smaller window hides some key from some query."""
        queries: int = self.queries.stop - self.queries.start
        return self.ahead + queries - 1


def local_cu_seqlens(edges: tuple[int, ...], rows: int, length: int, blocks: Blocks) -> Tensor:
    """`cu_seqlens` over the B*L tokens of these blocks (int32, CPU), from `edges`, the bounds over all B*T tokens.

    The edges of blocks end documents too; attention across them is off-diagonal. Example: one row of 16 tokens in
    documents of 6 and 10, `edges` (0, 6, 16). The block (4, 12) gives [0, 2, 8]; (0, 4) and (12, 16) give [0, 4, 8].
    """
    held = sum(stop - start for start, stop in blocks)
    found = {rows * held}
    by_row = _by_row(edges, rows, length)
    for row in range(rows):
        offset = row * held
        for start, stop in blocks:
            found.add(offset)
            found.update(offset + edge - start for edge in by_row[row] if start < edge < stop)
            offset += stop - start
    return torch.tensor(sorted(found), dtype=torch.int32, device="cpu")


@lru_cache(maxsize=256)
def offdiagonal_blocks(
    edges: tuple[int, ...], rows: int, length: int, queries: Blocks, keys: Blocks, window: int | None
) -> tuple[OffdiagonalBlock, ...]:
    """The off-diagonal blocks of these query and key blocks, in rows of `length` tokens with document bounds `edges`.

    A key block may contain the query block, or lie inside it: only the keys before the first query of the block count.
    """
    found: dict[tuple[int, int, int, int, int], list[int]] = {}
    by_row = _by_row(edges, rows, length)
    for row in range(rows):
        for (a, b), at in _offsets(queries):
            first, last = _document(by_row[row], a)
            for (s, e), key_at in _offsets(keys):
                trimmed = _trimmed(a, min(b, last), max(s, first), min(e, a), window)
                if trimmed is not None:
                    q0, q1, k0, k1 = trimmed
                    place = (at + q0 - a, at + q1 - a, key_at + k0 - s, key_at + k1 - s, q0 - k0)
                    found.setdefault(place, []).append(row)
    return tuple(
        OffdiagonalBlock(slice(None) if len(alike) == rows else alike, slice(q0, q1), slice(k0, k1), ahead)
        for (q0, q1, k0, k1, ahead), alike in found.items()
    )


def _trimmed(q0: int, q1: int, k0: int, k1: int, window: int | None) -> tuple[int, int, int, int] | None:
    """The bounds without keys that no query sees and queries that see no key; None if nothing is left."""
    if window is not None:
        k0, q1 = max(k0, q0 - window + 1), min(q1, k1 - 1 + window)
    return (q0, q1, k0, k1) if q0 < q1 and k0 < k1 else None


def _by_row(edges: tuple[int, ...], rows: int, length: int) -> list[list[int]]:
    """The edges of each row's documents, from the row's start: 0 first, `length` last."""
    assert edges[0] == 0 and edges[-1] == rows * length, f"bounds {edges[0]}..{edges[-1]} for {rows} x {length} tokens"
    found: list[list[int]] = [[0] for _ in range(rows)]
    for edge in edges[1:]:
        row, at = divmod(edge - 1, length)
        found[row].append(at + 1)
    assert all(row[-1] == length for row in found), "a document crosses from one row to the next"
    return found


def _document(edges: Sequence[int], token: int) -> Block:
    start = max(edge for edge in edges if edge <= token)
    return start, min(edge for edge in edges if edge > token)


def _offsets(blocks: Blocks) -> Iterator[tuple[Block, int]]:
    """Blocks and their offsets when stored one after the other."""
    at = 0
    for block in blocks:
        yield block, at
        at += block[1] - block[0]


# ---- one off-diagonal block, forward and backward --------------------------------------------------------------------


def forward(
    part: OffdiagonalBlock, q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, rule: AttentionParams,
    drops: AttentionDrops | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp [b,H,l,D], [b,H,l] of the block. `drops`: of all queries and keys given."""
    q, k, v = _taken(part, q_BLHD, k_BSGD, v_BSGD)
    return kernels.forward(q, k, v, rule, part.farthest, ahead=part.ahead, drops=_drops_taken(part, drops))


def backward(
    part: OffdiagonalBlock, grad: Tensor, q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, out: Tensor, lse: Tensor,
    rule: AttentionParams, drops: AttentionDrops | None = None,
) -> kernels.Gradients:  # fmt: skip
    """Gradients [b,H or G,.,D] of the block's q, k, v. `grad` and `out` [B,L,H,D] and `lse` [B,L,H] cover all keys."""
    q, k, v = _taken(part, q_BLHD, k_BSGD, v_BSGD)
    g, o, stat = (tensor[part.rows, part.queries].transpose(1, 2) for tensor in (grad, out, lse))
    return kernels.backward(g, q, k, v, o, stat, rule, part.farthest, ahead=part.ahead, drops=_drops_taken(part, drops))


Combine = Callable[[Tensor, Tensor, Tensor, Tensor], None]


def merge(
    part: OffdiagonalBlock, out_BLHD: Tensor, lse_BLH: Tensor, out_bHlD: Tensor, lse_bHl: Tensor, combine: Combine
) -> None:
    """Merge the output and log-sum-exp of an off-diagonal block into those of the keys so far, in place. `combine`:
    the function below, or compiled."""
    out, lse = out_BLHD[part.rows, part.queries], lse_BLH[part.rows, part.queries]
    combine(out, lse, out_bHlD.transpose(1, 2), lse_bHl.transpose(1, 2))
    if not isinstance(part.rows, slice):  # these are copies
        out_BLHD[part.rows, part.queries], lse_BLH[part.rows, part.queries] = out, lse


def combine(out_blHD: Tensor, lse_blH: Tensor, more_blHD: Tensor, more_lse_blH: Tensor) -> None:
    """Combine attention to some keys with attention to `more` keys, in place."""
    both = torch.logaddexp(lse_blH, more_lse_blH)
    weight, more_weight = ((lse - both).exp().unsqueeze(-1) for lse in (lse_blH, more_lse_blH))
    out_blHD.copy_(out_blHD * weight + more_blHD.to(out_blHD.dtype) * more_weight)
    lse_blH.copy_(both)


def add(total_BLxD: Tensor, rows: slice | list[int], tokens: slice, more_bxlD: Tensor) -> None:
    """Add the gradient of q, k or v of an off-diagonal block to the rank's total, in place."""
    total_BLxD[rows, tokens] += more_bxlD.transpose(1, 2).to(total_BLxD.dtype)


def _taken(part: OffdiagonalBlock, q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = q_BLHD[part.rows, part.queries].transpose(1, 2)
    k, v = (tensor[part.rows, part.keys].transpose(1, 2) for tensor in (k_BSGD, v_BSGD))
    return q, k, v


def _drops_taken(part: OffdiagonalBlock, drops: AttentionDrops | None) -> AttentionDrops | None:
    if drops is None:
        return None
    return AttentionDrops(drops.queries[part.rows, part.queries], drops.keys[part.rows, part.keys], drops.p)
