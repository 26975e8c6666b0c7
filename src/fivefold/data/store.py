"""The token store: documents as one memory-mapped run of token ids, made once.

tokens.bin    little-endian uint16 (vocabulary <= 65,536) or uint32, document after document, each with its EOS
offsets.npy   int64 [documents + 1], where each document starts; the last is the number of tokens
blocks.npy    uint64 [blocks], a hash of each block of 16,384 tokens of each document, by which validation is split off
meta.json     the sizes, against which the files are checked, and whose tokens they are
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fivefold.data.cache import Progress, entry, key_of
from fivefold.data.source import FileList
from fivefold.data.tokenizer import TokenizerInfo
from fivefold.errors import UserError

BLOCK = 16_384  # tokens
_VERSION = 1
_KIND = "fivefold token store"
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 2_000_000
_TELLINGS = 200  # how often progress is told at most: a display may be slower than a short document


@dataclass(frozen=True)
class StoreMeta:
    """What meta.json says. `content` names the texts and options, `tokenizer` the tokenizer's digest."""

    kind: str
    version: int
    content: str
    tokenizer: str
    vocab_size: int
    eos_token_id: int
    dtype: str
    documents: int
    tokens: int
    blocks: int


@dataclass(frozen=True)
class TokenStore:
    """A store on disk, opened lazily."""

    folder: Path
    meta: StoreMeta

    @cached_property
    def tokens(self) -> NDArray[np.unsignedinteger]:
        """uint16 or uint32 [tokens], mapped."""
        if not self.meta.tokens:
            return np.empty(0, self.meta.dtype)
        return np.memmap(self.folder / "tokens.bin", dtype=self.meta.dtype, mode="r")

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """int64 [documents + 1], mapped."""
        offsets: NDArray[np.int64] = np.load(self.folder / "offsets.npy", mmap_mode="r")
        return offsets

    @cached_property
    def block_hashes(self) -> NDArray[np.uint64]:
        """uint64 [blocks]."""
        hashes: NDArray[np.uint64] = np.load(self.folder / "blocks.npy")
        return hashes


def is_store(path: Path) -> bool:
    """Whether the folder says that it is a token store."""
    return (path / "tokens.bin").is_file() and (path / "meta.json").is_file()


def open_store(folder: Path) -> TokenStore | None:
    """The store in `folder`; None if it is not there, of another version, or its files have not the sizes it states."""
    try:
        meta = StoreMeta(**json.loads((folder / "meta.json").read_text()))
        store = TokenStore(folder, meta)
        sound = (
            (meta.kind, meta.version) == (_KIND, _VERSION)
            and (folder / "tokens.bin").stat().st_size == meta.tokens * np.dtype(meta.dtype).itemsize
            and store.offsets.shape == (meta.documents + 1,)
            and (int(store.offsets[0]), int(store.offsets[-1])) == (0, meta.tokens)
            and store.block_hashes.shape == (meta.blocks,)
        )
    except (OSError, EOFError, ValueError, TypeError):
        return None
    return store if sound else None


def store_for(files: FileList, tokenizer: TokenizerInfo, root: Path, progress: Progress | None = None) -> TokenStore:
    """The token store of one source: its own folder if it is one, else the cache's, tokenised now if it is not there.

    Raises UserError for bad input (file and row named), or a token store that another tokenizer made.
    """
    if files.store:
        return _given_store(files, files.store, tokenizer)
    content = key_of([[form.name, form.options(files.source), form.digest(path, root)] for path, form in files.files])
    folder = root / "stores" / key_of(_VERSION, content, tokenizer.digest)
    entry(
        folder,
        is_valid=lambda folder: open_store(folder) is not None,
        build=lambda beside: _Writer(beside, tokenizer, content).write(files, progress),
    )
    store = open_store(folder)
    assert store is not None
    return store


def _given_store(files: FileList, folder: Path, tokenizer: TokenizerInfo) -> TokenStore:
    store = open_store(folder)
    if store is None:
        raise UserError(
            f"{files.source.label}: the token store {folder} is damaged or of another version",
            fix="copy it again, or name the texts it was made from",
        )
    if store.meta.tokenizer != tokenizer.digest:
        raise UserError(
            f"{files.source.label}: the token store {folder} was made with another tokenizer "
            f"({store.meta.vocab_size} entries; the run's has {tokenizer.vocab_size})",
            fix="set tokenizer.name_or_path to the folder of that tokenizer",
        )
    return store


class _Writer:
    """Writes one store: memory holds a batch of documents, the offsets and the block hashes."""

    def __init__(self, folder: Path, tokenizer: TokenizerInfo, content: str) -> None:
        self.folder, self.tokenizer, self.content = folder, tokenizer, content
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
        self.lengths: list[int] = []
        self.hashes: list[int] = []

    def write(self, files: FileList, progress: Progress | None) -> None:
        tokenizer = self.tokenizer.load()
        with (self.folder / "tokens.bin").open("wb") as out:
            for texts in _batches(_documents(files, progress)):
                for encoded in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                    out.write(self._document(encoded.ids).tobytes())
        offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64)
        np.save(self.folder / "offsets.npy", offsets)
        np.save(self.folder / "blocks.npy", np.array(self.hashes, np.uint64))
        (self.folder / "meta.json").write_text(json.dumps(asdict(self._meta(int(offsets[-1]))), indent=2))

    def _document(self, ids: list[int]) -> NDArray[np.unsignedinteger]:
        tokens = np.array([*ids, self.tokenizer.eos_token_id], dtype=self.dtype)
        self.lengths.append(len(tokens))
        self.hashes += [_hash(tokens[start : start + BLOCK]) for start in range(0, len(tokens), BLOCK)]
        return tokens

    def _meta(self, tokens: int) -> StoreMeta:
        return StoreMeta(
            kind=_KIND,
            version=_VERSION,
            content=self.content,
            tokenizer=self.tokenizer.digest,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_id=self.tokenizer.eos_token_id,
            dtype=self.dtype.str,
            documents=len(self.lengths),
            tokens=tokens,
            blocks=len(self.hashes),
        )


def _hash(tokens: NDArray[np.unsignedinteger]) -> int:
    """The same for the same tokens, however wide they are stored."""
    return int.from_bytes(blake2b(tokens.astype("<u4").tobytes(), digest_size=8).digest(), "little")


def _documents(files: FileList, progress: Progress | None) -> Iterator[str]:
    """Every document of the source; tells `progress` how many of the bytes are behind us."""
    sizes = [form.size(path) for path, form in files.files]
    total, behind, told = sum(sizes), 0, 0
    for (path, form), size in zip(files.files, sizes, strict=True):
        read = 0
        for text in form.documents(path, files.source):
            yield text
            read = min(size, read + len(text))
            if progress and (behind + read - told) * _TELLINGS >= total:
                told = behind + read
                progress(f"tokenising {files.name}", told, total)
        behind += size
    if progress:
        progress(f"tokenising {files.name}", total, total)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Lists of documents of about `_BATCH_CHARACTERS` together (one document at least)."""
    iterator = iter(texts)
    while batch := list(islice(iterator, 1)):
        room = _BATCH_CHARACTERS - len(batch[0])
        while room > 0 and len(batch) < _BATCH_DOCUMENTS and (more := next(iterator, None)) is not None:
            batch.append(more)
            room -= len(more)
        yield batch
