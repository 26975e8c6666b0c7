"""What the ranks of a ring send to each other, from the documents of the rows alone. No torch.

A key travels as far as some query attends to it. Rows are cut by their length alone (`row_blocks`), and attention goes
over the edge of a block only in the document that the edge cuts, under a sliding window for a few tokens. So a document
within a block stays on one rank, one over one edge is sent to one rank, and long ones go round. The runtime sends, and
the declared calls count, the pieces that `hops` lists. Both ends of a hop list them alike.

Example: 16 tokens over 2 ranks, (0, 4) and (12, 16) on the first, (4, 12) on the second. Documents of 6 and 10 tokens
are cut at 4 and at 12: the second rank gets the keys 0 to 3, and the first one gets 6 to 11. Documents of 4, 8 and 4
tokens are not cut, and nothing is sent.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return sum(stop - start for blocks in self.tokens for start, stop in blocks)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.edges[-1] // self.length


@dataclass(frozen=True)
class Hop:
    """Pieces that a rank of a ring sends and receives in a hop: of keys and values, and of their gradients.

    Keys and values go to the rank before it, and come from the one behind it. Gradients go to the owner of the keys.
    """

    keys_sent: Pieces
    keys_received: Pieces
    gradients_sent: Pieces
    gradients_received: Pieces


@lru_cache(maxsize=64)
def hops(rows: SharedRows, rank: int) -> tuple[Hop, ...]:
    """The hops of a rank, from the first: in hop s it gets keys of the rank s places behind it."""
    length, count = rows.length, rows.count
    return tuple(
        Hop(*(_pieces(rows, reached, length, count) for reached in hop)) for hop in _reached(rows.tokens, rank)
    )


def tokens_of(pieces: Pieces) -> int:
    """Number of tokens."""
    return sum(stop - start for _, start, stop in pieces)


def width(pieces: Pieces) -> int:
    """Tokens of a row that hold all pieces, counted from the first that a rank has."""
    return max((stop for _, _, stop in pieces), default=0)


# ---- what queries see ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reached:
    """A block of keys, tokens [start, stop) of a row from the place `at` on, and the first `query` that may see it: of
    several blocks of queries behind it, the first one sees the earliest keys."""

    at: int
    start: int
    stop: int
    query: int


_OfHop = tuple[tuple[_Reached, ...], ...]  # in the order of the fields of `Hop`


@lru_cache(maxsize=256)
def _reached(tokens: Tokens, rank: int) -> tuple[_OfHop, ...]:
    """The blocks of each hop, whatever the documents are."""
    size = len(tokens)

    def carried(owner: int, step: int) -> tuple[_Reached, ...]:
        """What travels on to the rank `step` places before its owner, for this rank and those further on."""
        return _behind(tokens[owner], [tokens[(owner - step_) % size] for step_ in range(step, size)])

    return tuple(
        (
            carried((rank + step - 1) % size, step),
            carried((rank + step) % size, step),
            _behind(tokens[(rank + step) % size], [tokens[rank]]),
            _behind(tokens[rank], [tokens[(rank - step) % size]]),
        )
        for step in range(1, size)
    )


def _behind(keys: Blocks, queries: Sequence[Blocks]) -> tuple[_Reached, ...]:
    """The blocks of `keys` with a block of `queries` behind them."""
    found, at = [], 0
    for start, stop in keys:
        query = min((first for blocks in queries for first, _ in blocks if first >= stop), default=None)
        if query is not None:
            found.append(_Reached(at, start, stop, query))
        at += stop - start
    return tuple(found)


def _pieces(rows: SharedRows, blocks: Sequence[_Reached], length: int, count: int) -> Pieces:
    """The end of each block that its first query sees, in each row."""
    found = []
    for row in range(count):
        for block in blocks:
            start = max(block.start, _first_seen(rows, row * length + block.query) - row * length)
            if start < block.stop:
                found.append((row, block.at + start - block.start, block.at + block.stop - block.start))
    return tuple(found)


def _first_seen(rows: SharedRows, query: int) -> int:
    """The first token that a query sees, both counted over all rows."""
    first = rows.edges[bisect_right(rows.edges, query) - 1]
    if rows.chunk is not None:
        first += (query - first) // rows.chunk * rows.chunk
    return first if rows.window is None else max(first, query - rows.window + 1)
