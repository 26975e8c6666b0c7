"""Messages between the ranks of a ring, from the documents of the rows alone. No torch.

A key goes to the ranks whose queries attend to it. Rows are cut by their length alone (`row_blocks`), and attention
goes over the edge of a block only in the document that the edge cuts, under a sliding window for a few tokens. So a
document within a block stays on one rank, one over one edge is sent to one rank, and long ones go round. The runtime
sends, and the declared calls count, the pieces that `hops` lists. Both ends of a hop list them alike.

Example: 16 tokens over 2 ranks, (0, 4) and (12, 16) on the first, (4, 12) on the second. Documents of 6 and 10 tokens
are cut at 4 and at 12: the second rank gets the keys 0 to 3, and the first one gets 6 to 11. Documents of 4, 8 and 4
tokens are not cut, and nothing is sent.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

from fivefold.parallel.ranks import Blocks, Tokens

Piece = tuple[int, int, int]  # (row, start, stop) of tokens of a row, by their places among those that a rank has
Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class SharedRows:
    """Rows whose tokens the ranks of a group share, and what a query of them sees.

    `tokens`: the blocks of a row that each rank has. `edges`: bounds of the documents over the tokens of all rows
    (`cu_seqlens`). `window`, `chunk`: of the attention (`masks.Mask`).
    """

    tokens: Tokens
    edges: tuple[int, ...]
    window: int | None = None
    chunk: int | None = None

    @cached_property
    def length(self) -> int:
        """Tokens of a row."""
        return sum(stop - start for blocks in self.tokens for start, stop in blocks)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.edges[-1] // self.length


@dataclass(frozen=True)
class Hop:
    """Pieces whose keys and values a rank of a ring sends and receives in a hop. Their gradients go the other way."""

    sent: Pieces
    received: Pieces


@lru_cache(maxsize=64)
def hops(rows: SharedRows, rank: int) -> tuple[Hop, ...]:
    """The hops of a rank: in hop s, from 1, it sends to the rank s places before it what that one attends to, and
    receives of the rank s places behind it."""
    tokens, size = rows.tokens, len(rows.tokens)
    return tuple(
        Hop(
            _pieces(rows, tokens[rank], tokens[(rank - step) % size]),
            _pieces(rows, tokens[(rank + step) % size], tokens[rank]),
        )
        for step in range(1, size)
    )


def tokens_of(pieces: Pieces) -> int:
    """Number of tokens."""
    return sum(stop - start for _, start, stop in pieces)


def width(pieces: Pieces) -> int:
    """Tokens of a row that hold all pieces, counted from the first that a rank has."""
    return max((stop for _, _, stop in pieces), default=0)


def _pieces(rows: SharedRows, keys: Blocks, queries: Blocks) -> Pieces:
    """Keys that blocks of `queries` see of the blocks of `keys` before them: the end of each. Of several blocks behind
    one, the first sees the earliest keys."""
    found, length = [], rows.length
    for row in range(rows.count):
        at = 0
        for start, stop in keys:
            query = min((first for first, _ in queries if first >= stop), default=None)
            if query is not None:
                seen = max(start, _first_seen(rows, row * length + query) - row * length)
                if seen < stop:
                    found.append((row, at + seen - start, at + stop - start))
            at += stop - start
    return tuple(found)


def _first_seen(rows: SharedRows, query: int) -> int:
    """The first token that a query sees, both counted over all rows."""
    first = rows.edges[bisect_right(rows.edges, query) - 1]
    if rows.chunk is not None:
        first += (query - first) // rows.chunk * rows.chunk
    return first if rows.window is None else max(first, query - rows.window + 1)
