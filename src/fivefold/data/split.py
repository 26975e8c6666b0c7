"""From documents to the pieces of rows: the validation split, and the cut at `seq_length`.

    block   at most 16,384 tokens of a document, fewer if the text is short (the last block of a document is the rest);
            goes to one side by the hash of its tokens
    span    the longest run of blocks of one document on one side: a document as training sees it
    piece   at most seq_length tokens of a span: never cut again, whole in one row

An example, of a conversation or of a prompt with its answer, is one block and one piece; if it is longer than a row it
loses its end. So is a pair of a chosen and a rejected answer, two sequences in one row; if it is longer than a row it
is left out.

The label of a position is the next token of its span, also across a cut: a cut costs context but no target. Positions
are tokens counted over all the stores of a side, one store after the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.data.store import BLOCK, TokenStore, block_hashes

Int64s = NDArray[np.int64]
Spans = tuple[Int64s, Int64s]  # start and length of each, in tokens of all stores

_SMALLEST_BLOCK = 64  # tokens: less context is not enough to judge a model
_BLOCKS_HELD_OUT = 4  # at least, if the text allows: held-out tokens are then within an eighth of the request
_NEAR = 0.1  # tolerated relative error of the plain threshold
_MOST_TIMES = 4  # most tokens held out of a short text, as a multiple of the request


@dataclass(frozen=True)
class Blocks:
    """The blocks of all the stores of a side, in order: int64, int64, int64 and uint64 [blocks]."""

    start: Int64s
    length: Int64s
    document: Int64s
    hash: NDArray[np.uint64]


@dataclass(frozen=True)
class Pieces:
    """int64 start, int32 length, and a bool, true if the last position has a target: [pieces]."""

    start: Int64s
    length: NDArray[np.int32]
    has_next: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.start)

    @property
    def targets(self) -> NDArray[np.int32]:
        """Targets in each piece, int32 [pieces]."""
        return (self.length - ~self.has_next).astype(np.int32)

    def select(self, keep: NDArray[np.bool_]) -> "Pieces":
        return Pieces(self.start[keep], self.length[keep], self.has_next[keep])


def block_size(tokens: int, fraction: float) -> int:
    """Tokens of a block: a power of two, a quarter to an eighth of the tokens to hold out of `tokens`."""
    wanted = max(_SMALLEST_BLOCK, int(tokens * fraction) // _BLOCKS_HELD_OUT)
    return int(min(BLOCK, 2 ** (wanted.bit_length() - 1)))


def blocks_of(stores: Sequence[TokenStore], size: int = BLOCK) -> Blocks:
    """The blocks of `size` tokens of the stores, as one sequence. A document of at most `size` tokens is one block, and
    its hash is that of the document for any size."""
    ends = [store.offsets[1:] + base for store, base in zip(stores, bases_of(stores).tolist(), strict=True)]
    bounds = np.concatenate([np.zeros(1, np.int64), *ends])
    lengths = np.diff(bounds)
    sizes = np.concatenate([np.full(store.meta.documents, _size_in(store, size)) for store in stores])
    which, within = _repeat_and_count(-(-lengths // sizes))
    start = bounds[which] + within * sizes[which]
    length = np.minimum(sizes[which], bounds[which + 1] - start)
    return Blocks(start, length, which, np.concatenate([_hashes(store, size) for store in stores]))


def _size_in(store: TokenStore, size: int) -> int:
    """The size of the blocks of a store: an example is one block."""
    return size if store.meta.trained is None else max(1, store.meta.tokens)


def _hashes(store: TokenStore, size: int) -> NDArray[np.uint64]:
    """The hashes of the blocks of a store. Hashes of whole documents are stored; documents cut into smaller blocks are
    hashed again. An example has the hash of its first 16,384 tokens."""
    lengths = np.diff(store.offsets)
    first = np.cumsum(-(-lengths // BLOCK)) - (-(-lengths // BLOCK))
    if store.meta.trained is not None:
        of_documents: NDArray[np.uint64] = store.block_hashes[first[lengths > 0]]
        return of_documents
    if size == BLOCK or not (lengths > size).any():
        return store.block_hashes
    starts = store.offsets[:-1]
    hashes: list[int] = []
    for start, length, block in zip(starts.tolist(), lengths.tolist(), first.tolist(), strict=True):
        if length > size:
            hashes += block_hashes([store.tokens[start : start + length]], size)
        elif length:
            hashes.append(int(store.block_hashes[block]))
    return np.array(hashes, np.uint64)


def bases_of(stores: Sequence[TokenStore]) -> Int64s:
    """The first token of each store in the count over all of them, int64 [stores]."""
    sizes = [store.meta.tokens for store in stores]
    return np.cumsum(sizes, dtype=np.int64) - sizes


def store_at(bases: Int64s, start: int | Int64s) -> Int64s:
    """The index of the store with the token at `start`; never an empty store."""
    return np.searchsorted(bases, start, side="right") - 1


def held_out(blocks: Blocks, fraction: float) -> NDArray[np.bool_]:
    """A mask of the validation blocks, bool [blocks]: those whose hash is below `fraction` of its range.

    If that misses the requested tokens by more than a tenth, as by chance with a short text, the threshold moves to the
    hash that comes nearest. Equal blocks have equal hashes and so stay on one side. If there are two different blocks
    of two or more tokens each side gets one, unless one is more than four times the request.
    """
    nothing = np.zeros(len(blocks.hash), np.bool_)
    candidates = np.unique(blocks.hash[blocks.length > 1])
    if fraction <= 0 or len(candidates) < 2:
        return nothing
    wanted = fraction * int(blocks.length.sum())
    threshold = np.uint64(min(int(fraction * 2**64), 2**64 - 1))
    plain: NDArray[np.bool_] = blocks.hash < threshold
    is_near = abs(int(blocks.length[plain].sum()) - wanted) <= _NEAR * wanted
    if is_near and candidates[0] < threshold <= candidates[-1]:
        return plain
    mask: NDArray[np.bool_] = blocks.hash <= _nearest(blocks, candidates, wanted)
    return mask if int(blocks.length[mask].sum()) <= _MOST_TIMES * wanted else nothing


def _nearest(blocks: Blocks, candidates: NDArray[np.uint64], wanted: float) -> np.uint64:
    """The hash up to which the blocks hold about `wanted` tokens. `candidates`: possible last hashes, sorted; the last
    of them always stays in training."""
    order = np.argsort(blocks.hash, kind="stable")
    held = np.cumsum(blocks.length[order])
    upto = held[np.searchsorted(blocks.hash[order], candidates[:-1], side="right") - 1]
    return np.uint64(candidates[int(np.abs(upto - wanted).argmin())])


def spans_of(blocks: Blocks, side: NDArray[np.bool_]) -> Spans:
    """The spans on the side where `side` is true: int64 [spans] each."""
    same = (blocks.document[1:] == blocks.document[:-1]) & side[1:] & side[:-1]
    first = side & ~np.concatenate([[False], same])
    last = side & ~np.concatenate([same, [False]])
    start = blocks.start[first]
    return start, blocks.start[last] + blocks.length[last] - start


def are_examples(stores: Sequence[TokenStore], start: Int64s) -> NDArray[np.bool_]:
    """True for documents that begin at `start` and are examples, bool like `start`."""
    of_store = np.array([store.meta.trained is not None for store in stores])
    return of_store[store_at(bases_of(stores), start)]


def are_pairs(stores: Sequence[TokenStore], start: Int64s) -> NDArray[np.bool_]:
    """True for documents that begin at `start` and are pairs of answers, bool like `start`."""
    return np.array([store.meta.pairs for store in stores])[store_at(bases_of(stores), start)]


def trained_targets(stores: Sequence[TokenStore], pieces: Pieces) -> Int64s:
    """Trained targets of each piece, int64 [pieces]; 0 for a pair with an answer that has none."""
    found = pieces.targets.astype(np.int64)
    which = store_at(bases_of(stores), pieces.start)
    for number, (store, base) in enumerate(zip(stores, bases_of(stores).tolist(), strict=True)):
        if store.trained is not None:
            own = np.flatnonzero(which == number)
            first = pieces.start[own] - base + 1
            count = _trained_of_pair if store.meta.pairs else np.sum
            found[own] = [count(store.trained[at : at + size]) for at, size in zip(first, found[own], strict=True)]
    return found


def _trained_of_pair(marks: NDArray[np.uint8]) -> int:
    first, second = int((marks & 3 == 1).sum()), int((marks & 3 == 3).sum())
    return first + second if first and second else 0


def pieces_of(start: Int64s, length: Int64s, seq_length: int) -> Pieces:
    """The spans cut every `seq_length` tokens."""
    which, within = _repeat_and_count(-(-length // seq_length))
    left = length[which] - within * seq_length
    size = np.minimum(left, seq_length).astype(np.int32)
    return Pieces(start[which] + within * seq_length, size, left > seq_length)


def _repeat_and_count(counts: Int64s) -> tuple[Int64s, Int64s]:
    """counts [2, 0, 3] -> which [0, 0, 2, 2, 2] and within [0, 1, 0, 1, 2]."""
    which = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return which, np.arange(len(which), dtype=np.int64) - first[which]
