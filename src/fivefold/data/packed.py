"""Rows that another engine packed: the documents in a row of tokens, by the columns that say where they end.

`BOUNDS` has the columns and how each says it. All columns of a row have to say the same: a row in which two disagree,
or one says something odd, is refused by name. A document of a packed row stays as it is: no BOS or EOS is added.

Legend: T tokens of a row; the real ones are those that are no padding.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import UserError

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

_MORE = "docs/howto/data.md, 'Read tokens that another engine made'"
_MASK, _POSITIONS, _NUMBERS, _LENGTHS, _EDGES, _STARTS = "mask", "positions", "numbers", "lengths", "edges", "starts"
# Column -> how it bounds documents. `attention_mask` does so where it has numbers above 1.
BOUNDS: Mapping[str, str] = {
    "attention_mask": _MASK,
    **dict.fromkeys(("position_ids", "positions"), _POSITIONS),
    **dict.fromkeys(("sequence_ids", "sequence_id", "segment_ids", "document_ids", "doc_ids", "seq_idx"), _NUMBERS),
    **dict.fromkeys(("seq_lengths", "sequence_lengths", "seq_lens", "seqlens", "document_lengths"), _LENGTHS),
    **dict.fromkeys((f"cu_{name}{of}" for name in ("seqlens", "seq_lens") for of in ("", "_q", "_k")), _EDGES),
    "cumulative_len": _EDGES,
    "seq_start_id": _STARTS,
}
LISTS = (_LENGTHS, _EDGES, _STARTS)  # kinds of columns that have no number for each token


def documents_in(
    columns: Mapping[str, NDArray[np.integer]], tokens: int, where: str
) -> tuple[list[tuple[str, slice]], bool]:
    """The places of the documents in a row of T `tokens` by its `columns`, those of `BOUNDS` among them, each with its
    name in messages; and whether the row is packed, which a list says by being there and another column by a second
    document. Padding is left out. Raises `UserError`."""
    given = {name: (BOUNDS[name], values) for name, values in columns.items() if name in BOUNDS}
    if not given:
        return [(where, slice(0, tokens))], False
    real_T = np.ones(tokens, np.bool_)
    for kind, values in given.values():
        if kind in (_MASK, _NUMBERS):
            real_T &= ~_padding(values, counts_from_0=kind == _NUMBERS)
    begins = _agreed(given, real_T, where)
    places = np.split(np.flatnonzero(real_T), np.flatnonzero(begins) + 1)
    names = [f"{where}, document {number:,}" for number in range(1, len(places) + 1)] if len(places) > 1 else [where]
    is_packed = len(places) > 1 or any(kind in LISTS for kind, _ in given.values())
    return list(map(_place, names, places)), is_packed


def _agreed(given: Mapping[str, tuple[str, NDArray[np.integer]]], real_T: Bools, where: str) -> Bools:
    """A mask of the real tokens, without the first, at which a document begins: all columns agree on it."""
    agreed, by = np.zeros(max(0, int(real_T.sum()) - 1), np.bool_), ""
    for name, (kind, values) in given.items():
        if kind == _MASK and values.max(initial=0) <= 1:
            continue
        begins = (_of_list if kind in LISTS else _of_tokens)(name, kind, values, real_T, where)
        if by and (begins != agreed).any():
            at = int(np.flatnonzero(real_T)[int((begins != agreed).argmax()) + 1])
            raise UserError(
                f"{where}: {by} and {name} bound other documents, from token {at + 1:,} on",
                fix="leave out the column that is wrong", more=_MORE,
            )  # fmt: skip
        agreed, by = begins, name
    return agreed


def _place(where: str, tokens: Int64s) -> tuple[str, slice]:
    """The slice of a document with these real `tokens`."""
    place = slice(int(tokens[0]), int(tokens[-1]) + 1) if len(tokens) else slice(0, 0)
    if place.stop - place.start != len(tokens):
        raise UserError(f"{where}: the attention_mask is 0 between tokens", fix="leave out tokens of padding alone")
    return where, place


def _padding(values: NDArray[np.integer], *, counts_from_0: bool) -> Bools:
    """A mask of the padding that numbers tell: negative ones, and 0; but where documents may be counted from 0 and the
    first one is 0, it is a document."""
    return np.asarray(values < 0 if counts_from_0 and values[values >= 0][:1].tolist() == [0] else values <= 0)


def _of_tokens(name: str, kind: str, values: NDArray[np.integer], real_T: Bools, where: str) -> Bools:
    """Starts of documents by a column with a number for each token: a position in the document, or the number of the
    document."""
    numbers = values[real_T].astype(np.int64)
    begins = np.diff(numbers) != (kind == _POSITIONS)
    starts = np.flatnonzero(begins) + 1
    first = numbers[starts]
    is_odd, rule = first != 0, "positions count from 0 in each document"
    if kind != _POSITIONS:
        runs = np.concatenate([numbers[:1], first])
        is_odd = ~np.isin(np.arange(len(runs)), np.unique(runs, return_index=True)[1])[1:]
        rule = "tokens of one number stand together"
    if is_odd.any():
        at = int(starts[int(is_odd.argmax())])
        place = int(np.flatnonzero(real_T)[at]) + 1
        raise _odd(f"{where}: {name} goes from {numbers[at - 1]} to {numbers[at]} at token {place:,}", rule, name)
    return np.asarray(begins)


def _of_list(name: str, kind: str, values: NDArray[np.integer], real_T: Bools, where: str) -> Bools:
    """The same by a list: the lengths of the documents, their edges, or their first tokens."""
    tokens, real, given = len(real_T), np.flatnonzero(real_T), values.astype(np.int64)
    edges = np.concatenate([[0], np.cumsum(given)]) if kind == _LENGTHS else given
    edges = np.append(edges, tokens) if kind == _STARTS else edges
    is_whole = edges[:1].tolist() == [0] and int(real.max(initial=-1)) < edges[-1] <= tokens
    if not is_whole or (np.diff(edges) < 0).any():
        what = "the lengths of documents" if kind == _LENGTHS else "places of documents, from 0 on"
        raise _odd(f"{where}: {name} is {str(given.tolist())[:60]}, of {tokens:,} tokens", f"they are {what}", name)
    return np.asarray(np.diff(np.searchsorted(edges, real, "right")) != 0)


def _odd(what: str, rule: str, name: str) -> UserError:
    return UserError(what, fix=f"{rule}: write it so, or leave {name} out", more=_MORE)
