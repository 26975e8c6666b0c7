"""Documents that another engine tokenised: their ids are checked, completed with BOS and EOS, and stored as they are.

A whole document gets the run's BOS and EOS if it lacks them, as a text does. A row that was cut from a stream of
documents, a document of a packed row, and one that says which of its tokens are trained, stay as they are.

`BOUNDS` has the columns that say where the documents of a packed row end, and how each says it. All columns of a row
have to say the same: a row in which two disagree, or one says something odd, is refused by name.

Legend: T tokens of a row; the real ones are those that are no padding.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data.examples import Document, TokenIds
from fivefold.data.tokenizer import TokenizerInfo, missing_bos

_NUMBERS = ("documents", "whole", "packed", "cut", "labelled", "without_bos", "without_eos")
_PEEKED = 16  # rows whose lengths tell a stream from documents


@dataclass
class TokenIdsReport:
    """Completes documents of ids by one tokenizer, and counts what it did for the report of a run's data."""

    tokenizer: TokenizerInfo
    documents: int = 0
    whole: int = 0  # documents that get BOS and EOS if they lack them
    packed: int = 0  # documents of packed rows
    cut: int = 0  # rows of a stream
    labelled: int = 0  # rows that say which tokens are trained
    without_bos: int = 0
    without_eos: int = 0
    others: dict[str, None] = field(default_factory=dict)  # names of tokenizers that are not this one
    last: Counter[int] = field(default_factory=Counter)  # the last token of documents that do not end in EOS

    def complete(self, document: TokenIds, dtype: np.dtype[np.unsignedinteger]) -> list[NDArray[np.unsignedinteger]]:
        """The tokens of a document, with BOS and EOS if it lacks them, part after part.

        Raises `UserError` for an id that the tokenizer does not have, naming the document and the place in it.
        """
        self._check(document)
        self.documents += 1
        if document.tokenizer and not self._is_named(document.tokenizer):
            self.others[document.tokenizer] = None
        bos, eos = self.tokenizer.bos_token_ids, self.tokenizer.eos_token_id
        if not document.is_whole:
            self.packed += document.is_packed
            self.cut += document.trained is None and not document.is_packed
            self.labelled += document.trained is not None
            return [document.ids.astype(dtype)]
        self.whole += 1
        front = missing_bos(document.ids[: len(bos)].tolist(), bos)
        has_end = document.ids[-1:].tolist() == [eos]
        if not has_end:
            self.without_eos += 1
            self.last.update(document.ids[-1:].tolist())
        self.without_bos += bool(front)
        parts = (np.array(front, dtype), document.ids.astype(dtype), np.array([eos] * (not has_end), dtype))
        return [part for part in parts if len(part)]

    def _is_named(self, name: str) -> bool:
        """True if a name, of the hub or of a folder, is that of the run's tokenizer."""
        folder, path = self.tokenizer.folder, Path(name.removesuffix("/tokenizer.json"))
        return f"models--{name.replace('/', '--')}" in folder.parts or path.absolute() == folder.absolute()

    def _check(self, document: TokenIds) -> None:
        size, ids = self.tokenizer.vocab_size, document.ids
        wrong = (ids < 0) | (ids >= size)
        if wrong.any():
            at = int(wrong.argmax())
            raise UserError(
                f"{document.where}: token {at + 1:,} is {int(ids[at])}, and the tokenizer in {self.tokenizer.folder} "
                f"has the ids 0 to {size - 1:,}",
                fix="set tokenizer.name_or_path to the tokenizer that made these tokens",
            )

    def counts(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {**numbers, "others": list(self.others), "last": [list(pair) for pair in self.last.items()]}

    def add(self, counts: Mapping[str, Any]) -> None:
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + counts[name])
        self.others |= dict.fromkeys(counts["others"])
        self.last.update(dict(counts["last"]))

    def line(self, name: str) -> str:
        if not self.documents:
            return ""
        whole, eos = self.whole, self.tokenizer.eos_token_id
        said = []
        if self.packed:
            said.append(f"{many(self.packed, 'document')} of packed rows, each by itself: no EOS added")
        if self.cut:
            said.append(f"{many(self.cut, 'row')} of one length, as cut from a stream: no EOS added")
        if self.labelled:
            said.append(f"{many(self.labelled, 'row')} with labels: no EOS added")
        if whole and not self.without_eos:
            said.append(f"{many(whole, 'document')}, all of which end in EOS ({eos})")
        elif whole:
            alike = self.without_eos > 1 and len(self.last) == 1
            ends = f", which end in {next(iter(self.last))}" if alike else ""
            said.append(f"{many(whole, 'document')}, EOS ({eos}) added to {self.without_eos:,}{ends}")
        if self.without_bos:
            said.append(f"BOS added to {self.without_bos:,}")
        said += [
            f"made with the tokenizer {other}, and the run's is in {self.tokenizer.folder}" for other in self.others
        ]
        return f"{name}: {'; '.join(said)}"


def rows_are(documents: Iterable[Document]) -> Literal["documents", "stream", "packed"]:
    """Kind of rows, by the first documents of a file: packed if one of these is; parts of a stream if they are of one
    length, of which only the last may be shorter."""
    first = list(islice(documents, _PEEKED))
    if any(isinstance(document, TokenIds) and document.is_packed for document in first):
        return "packed"
    lengths = [len(document) for document in first]
    if lengths and lengths[-1] < lengths[0]:
        lengths.pop()
    return "stream" if len(lengths) > 1 and len(set(lengths)) == 1 else "documents"


Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


# ---- rows that another engine packed ---------------------------------------------------------------------------------

_MORE = "fivefold docs howto/data, 'Read tokens that another engine made'"
_MASK, _POSITIONS, _NUMBERED, _LENGTHS, _EDGES, _STARTS = "mask", "positions", "numbers", "lengths", "edges", "starts"
# Column -> how it bounds documents. `attention_mask` does so where it has numbers above 1.
BOUNDS: Mapping[str, str] = {
    "attention_mask": _MASK,
    **dict.fromkeys(("position_ids", "positions"), _POSITIONS),
    **dict.fromkeys(("sequence_ids", "sequence_id", "segment_ids", "document_ids", "doc_ids", "seq_idx"), _NUMBERED),
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
        if kind in (_MASK, _NUMBERED):
            real_T &= ~_padding(values, counts_from_0=kind == _NUMBERED)
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
                fix="leave out the column that is wrong",
                more=_MORE,
            )
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
