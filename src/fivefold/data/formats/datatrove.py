"""Tokenised files of datatrove, which nanotron reads: `NAME.ds`, tokens of two or four bytes, little-endian.

NAME.ds.index       uint64 [documents], where each document ends, in tokens
NAME.ds.metadata    optional text, its first line `tokenizer|bytes of a token`
NAME.ds.loss        optional uint8 [tokens], 1 for a trained token
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.core.cache import file_digest, key_of
from fivefold.core.errors import UserError
from fivefold.data.examples import TokenIds
from fivefold.data.source import Format, Source, no_documents

_PARTS = (".index", ".metadata", ".loss")
_COPY = "copy its files from their origin again"


@dataclass(frozen=True)
class Datatrove(Format):
    """Named by the tokens or by the index. The files are memory-mapped."""

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        tokens = path.with_suffix("")
        return (tokens,) if path.suffix == ".index" and self.matches(tokens) and tokens.is_file() else None

    def members(self, path: Path) -> Sequence[Path]:
        return (path, *(_part(path, part) for part in _PARTS))

    def digest(self, path: Path, root: Path) -> str:
        return key_of(*(file_digest(part, root) if part.is_file() else "" for part in self.members(path)))

    def documents(self, path: Path, source: Source) -> Iterator[TokenIds]:
        where = source.at(path)
        ends = _ends(path, where)
        tokenizer, width = _metadata(path, where)
        width = width or _width(path, int(ends[-1]), where)
        if (size := path.stat().st_size) != width * int(ends[-1]):
            raise UserError(
                f"{where}: {size:,} bytes, and its index ends at {int(ends[-1]):,} tokens of {width} bytes", fix=_COPY
            )
        tokens = _mapped(path, np.dtype(f"<u{width}"))
        trained = _mapped(_part(path, ".loss"), np.dtype("u1")) if _part(path, ".loss").is_file() else None
        if trained is not None and len(trained) != len(tokens):
            raise UserError(f"{where}: {len(tokens):,} tokens, and {len(trained):,} of its .loss", fix=_COPY)
        start = 0
        for number, end in enumerate(map(int, ends), start=1):
            marks = None if trained is None else trained[start:end] != 0
            at = f"{where}: document {number:,}"
            yield TokenIds(at, tokens[start:end], marks, is_whole=marks is None, tokenizer=tokenizer)
            start = end


def _part(path: Path, ending: str) -> Path:
    return Path(f"{path}{ending}")


def _mapped(path: Path, dtype: np.dtype[Any]) -> NDArray[np.unsignedinteger]:
    """The whole elements of a file; no file of 0 bytes can be mapped."""
    if path.stat().st_size < dtype.itemsize:
        return np.empty(0, dtype)
    return np.asarray(np.memmap(path, dtype, "r", shape=(path.stat().st_size // dtype.itemsize,)))


def _ends(path: Path, where: str) -> NDArray[np.int64]:
    index = _part(path, ".index")
    if not index.is_file():
        raise UserError(
            f"{where}: there is no {index.name} beside it, which says where documents end",
            fix="tokenise with save_index=True, or copy the index too",
        )
    if index.stat().st_size % 8:
        raise UserError(f"{where}: its index is cut short", fix=_COPY)
    ends = np.asarray(_mapped(index, np.dtype("<u8"))).astype(np.int64)
    if not len(ends):
        raise no_documents(where, "its index holds no documents")
    if ends[0] < 0 or (np.diff(ends) < 0).any():
        raise UserError(f"{where}: its index is not of documents in order", fix=_COPY)
    return ends


def _metadata(path: Path, where: str) -> tuple[str, int]:
    """The name of the tokenizer and the bytes of a token, "" and 0 where they are not told."""
    if not _part(path, ".metadata").is_file():
        return "", 0
    with _part(path, ".metadata").open("rb") as file:
        head = file.readline(4096).decode("utf-8", "replace").removesuffix("\n")
    name, _, width = head.rpartition("|")
    if width not in ("2", "4"):
        raise UserError(f"{where}: its metadata says {head!r}, not tokenizer|2 or tokenizer|4", fix=_COPY)
    return ("" if name.startswith("Unknown Tokenizer") else name), int(width)


def _width(path: Path, tokens: int, where: str) -> int:
    """The bytes of a token, as the number of tokens tells."""
    size = path.stat().st_size
    if size not in (2 * tokens, 4 * tokens):
        raise UserError(
            f"{where}: {size:,} bytes, and the {tokens:,} tokens of its index are two or four bytes each", fix=_COPY
        )
    return size // tokens if tokens else 2


FORMAT = Datatrove(name="datatrove", suffixes=(".ds",), companions=tuple(f".ds{part}" for part in _PARTS))
