"""The token store: documents as one memory-mapped run of token ids, made once.

tokens.bin      little-endian uint16 (vocabulary <= 65,536) or uint32, document after document: BOS if the run asks for
                it (`data.bos`), the text, EOS
offsets.npy     int64 [documents + 1], the start of each document; the last is the number of tokens
blocks.npy      uint64 [blocks], a hash of each block of 16,384 tokens of each document, for the validation split
checksums.npy   uint64 [chunks], of each MiB of tokens.bin
trained.bin     uint8 [tokens], 1 for a trained token; only if the documents are examples, which are not cut.
                A pair of answers is one document, one after the other; 2 more in the second of the two, which is the
                rejected one, or that to another prompt; 4 more in a first one that is rated desirable
numbers.npy     float64 [documents, columns], numbers of the records for a loss of the user's own, if it names some
meta.json       sizes and checksums, the tokenizer, and the kind of the records
"""

import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from fivefold.core.cache import Progress, entry, key_of, say_aloud
from fivefold.core.errors import UserError
from fivefold.core.integrity import (
    DamagedError,
    check_chunks,
    check_file,
    chunk_checksums,
    file_checksum,
    is_trusted,
    read_signed,
    signed,
    trust,
)
from fivefold.core.units import many
from fivefold.data.examples import Document, Preference, Text, TokenIds
from fivefold.data.records import Records, check_columns, check_plain, check_used, columns_read
from fivefold.data.source import FileList, reading
from fivefold.data.token_ids import TokenIdsReport
from fivefold.data.tokenizer import TokenizerInfo, encoding, missing_bos
from fivefold.data.windows import Encoded, Encoder

BLOCK = 16_384  # tokens
_VERSION = 2  # 1 had no checksums and no BOS
READING = 5  # raise when the same records give other documents or other trained tokens
_KIND = "fivefold token store"
_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 1_000_000
_TELLINGS = 200  # most progress reports: a display may be slower than a short document
_ARRAYS = ("offsets.npy", "blocks.npy", "checksums.npy")
TOKENS, TRAINED, META, _NUMBERS = "tokens.bin", "trained.bin", "meta.json", "numbers.npy"
_COPIED = 2**22  # bytes copied together

Say = Callable[[str], None]
# Tokens of a document with their marks for `trained.bin`; a text has no marks.
Tokens = tuple[NDArray[np.unsignedinteger], NDArray[np.uint8]]
_NO_MARKS = np.empty(0, np.uint8)
# Characters that few texts mean to have -> what they are.
_ODD = {
    "\r": "carriage returns (\\r, as in line ends of Windows)", "\0": "NUL characters",
    "\ufffd": "U+FFFD, which stands for bytes that were decoded wrongly", "\ufeff": "byte order marks",
}  # fmt: skip


@dataclass(frozen=True)
class StoreMeta:
    """The contents of meta.json. `content` identifies the texts and options, `tokenizer` is the tokenizer's digest.

    `bos`: the tokens in front of each document. `columns`: the report on unused columns of the records;
    `answers_alone`: warnings if the texts are the answers of chat or instruction records, without their prompts.
    `ids`: the report on documents that another engine tokenised. `files`: the checksum of each array. `trained`: number
    of trained tokens of documents that are examples; None for texts, which are trained as a whole. `pairs`: every
    document is a pair of answers; `rated`: the first of the two is rated, and the second is the answer to another
    prompt. `numbers`: the columns of numbers.npy. `odd`: the report on odd characters in texts.
    """

    kind: str
    version: int
    content: str
    tokenizer: str
    vocab_size: int
    eos_token_id: int
    bos: tuple[int, ...]
    dtype: str
    documents: int
    tokens: int
    blocks: int
    answers_alone: tuple[str, ...]
    files: Mapping[str, str]
    trained: int | None = None
    pairs: bool = False
    rated: bool = False
    columns: str = ""
    ids: str = ""
    numbers: tuple[str, ...] = ()
    odd: str = ""


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
        return np.memmap(self.folder / TOKENS, dtype=self.meta.dtype, mode="r")

    @cached_property
    def largest(self) -> int:
        """The largest token id; reads all tokens."""
        size = len(self.tokens)
        return max((int(self.tokens[at : at + 2**24].max()) for at in range(0, size, 2**24)), default=0)

    @cached_property
    def trained(self) -> NDArray[np.uint8] | None:
        """uint8 [tokens], mapped: odd for a trained token, 2 more in the second answer of a pair, 4 more in a desirable
        first one; None if all are trained."""
        if self.meta.trained is None:
            return None
        if not self.meta.tokens:
            return np.empty(0, np.uint8)
        return np.memmap(self.folder / TRAINED, dtype=np.uint8, mode="r")

    def columns(self, token: int) -> dict[str, float]:
        if not self.meta.numbers:
            return {}
        document = int(np.searchsorted(self.offsets, token, side="right")) - 1
        return dict(zip(self.meta.numbers, self.numbers[document].tolist(), strict=True))

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """float64 [documents, columns], mapped."""
        numbers: NDArray[np.float64] = np.load(self.folder / _NUMBERS, mmap_mode="r")
        return numbers

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
    return (path / TOKENS).is_file() and (path / META).is_file()


def open_store(folder: Path, root: Path) -> TokenStore:
    """The store in `folder`, after comparing all of it with its checksums; `root` is the cache's folder.

    Raises `DamagedError`, naming the file and the place in it.
    """
    try:
        store = TokenStore(folder, _read_meta(folder / META))
        for name in (*_ARRAYS, *[TRAINED] * (store.meta.trained is not None), *[_NUMBERS] * bool(store.meta.numbers)):
            check_file(folder / name, store.meta.files[name], root)
        _check_tokens(store, root)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise error if isinstance(error, DamagedError) else DamagedError(str(error)) from error
    return store


def _read_meta(path: Path) -> StoreMeta:
    tree = read_signed(path)
    if (tree.get("kind"), tree.get("version")) != (_KIND, _VERSION):
        raise DamagedError(f"{path.name} is of version {tree.get('version')!r}; this fivefold reads {_VERSION}")
    return TypeAdapter(StoreMeta).validate_python(tree)


def _dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def _check_tokens(store: TokenStore, root: Path) -> None:
    path, meta = store.folder / TOKENS, store.meta
    width = np.dtype(meta.dtype).itemsize
    if (size := path.stat().st_size) != meta.tokens * width:
        raise DamagedError(f"tokens.bin has {size:,} bytes, not the {meta.tokens * width:,} of {meta.tokens:,} tokens")
    if is_trusted(path, root):
        return
    check_chunks(path, np.load(store.folder / "checksums.npy"))
    trust(path, root)


def store_for(
    files: FileList,
    tokenizer: TokenizerInfo,
    root: Path,
    progress: Progress | None = None,
    say: Say = say_aloud,
    write: "Callable[[StoreWriter], None] | None" = None,
) -> TokenStore:
    """The token store of one source: its own folder if it is one, else the cache's, tokenised now if missing.

    `write`: writes the documents, which were tokenised ahead. A damaged store of the cache is rebuilt, and reported by
    `say`. Raises `UserError` for bad input (file and row named), or for a token store that is damaged, or was made with
    another tokenizer.
    """
    check_settings(files)
    if files.store:
        return _given_store(files, files.store, tokenizer, root)
    content = content_key(files, root)
    folder = store_folder(files, content, tokenizer, root)

    def build(beside: Path, damage: str) -> None:
        if damage:
            say(f"DAMAGED: the cached tokens of {files.name}: {damage}; they are made again from the text")
        with _after(damage, files), StoreWriter(beside, tokenizer, files.source.numbers) as writer:
            if write:
                write(writer)
            else:
                writer.add(_documents(files, progress))
            writer.finish(files, content)

    return entry(folder, read=lambda folder: open_store(folder, root), build=build)


def check_settings(files: FileList) -> None:
    """Raise `UserError` for settings of records on a source that has none."""
    check_columns(files)
    if not any(isinstance(form, Records) for _, form in files.files):
        check_plain(files)


def content_key(files: FileList, root: Path) -> str:
    """A hash of the contents of the files and of the options that change how they are read."""
    digests = files.digests(root)
    return key_of([[form.name, form.options(files.source), digests[at]] for at, (_, form) in enumerate(files.files)])


def store_folder(files: FileList, content: str, tokenizer: TokenizerInfo, root: Path) -> Path:
    """The folder of the token store of a source with these contents."""
    return root / "stores" / key_of(_VERSION, READING, content, *made_by(files, tokenizer))


def made_by(files: FileList, tokenizer: TokenizerInfo) -> list[Any]:
    """The hashes, besides those of the texts, that determine the tokens of a source."""
    # Records may be examples, rendered by the template; that is known only once they are read.
    written = [tokenizer.template.digest for _, form in files.files[:1] if isinstance(form, Records)]
    return [tokenizer.digest, tokenizer.bos_token_ids, *written]


def _given_store(files: FileList, folder: Path, tokenizer: TokenizerInfo, root: Path) -> TokenStore:
    where = f"{files.source.label}: the token store {folder}"
    try:
        store = open_store(folder, root)
    except DamagedError as damage:
        raise UserError(
            f"{where} is damaged: {damage}", fix="copy it again, or name the texts it was made from"
        ) from damage
    if store.meta.tokenizer != tokenizer.digest:
        raise UserError(
            f"{where} was made with another tokenizer "
            f"({store.meta.vocab_size} entries; the run's has {tokenizer.vocab_size})",
            fix="set tokenizer.name_or_path to the folder of that tokenizer",
        )
    if store.meta.bos != tokenizer.bos_token_ids:
        has, wants = (f"BOS {list(ids)}" if ids else "no BOS" for ids in (store.meta.bos, tokenizer.bos_token_ids))
        raise UserError(
            f"{where} has {has} in front of its documents, and this run {wants}",
            fix=f"set data.bos: {'true' if store.meta.bos else 'false'}",
        )
    return store


@contextmanager
def _after(damage: str, files: FileList) -> Iterator[None]:
    """Name the damage too if damaged tokens cannot be rebuilt."""
    try:
        yield
    except UserError as error:
        if not damage:
            raise
        raise UserError(
            f"the cached tokens of {files.name} are damaged ({damage}) and cannot be made again: {error.what}",
            fix=error.fix,
            more=error.more,
        ) from error


class StoreWriter:
    """Writes one store, of a source or of a unit of it (`data.units`). Memory holds a batch of documents with its
    tokens, the offsets and the block hashes."""

    def __init__(self, folder: Path, tokenizer: TokenizerInfo, columns: tuple[str, ...]) -> None:
        self.folder, self.tokenizer, self.columns = folder, tokenizer, columns
        self.dtype = _dtype(tokenizer.vocab_size)
        self.lengths, self.hashes, self.numbers = array("q"), array("Q"), array("d")
        self.ids = TokenIdsReport(self.tokenizer)
        self.left_out: dict[str, None] = {}  # keys of all turns that the template left out
        self.odd: Counter[str] = Counter()  # documents with each of `_ODD`
        self.examples = self.pairs = self.rated = self.trained = self.ended = 0

    def __enter__(self) -> "StoreWriter":
        self.tokens, self.mask = (self.folder / TOKENS).open("wb"), (self.folder / TRAINED).open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        self.tokens.close()
        self.mask.close()

    @cached_property
    def loaded(self) -> Any:
        return self.tokenizer.load()

    def add(self, documents: Iterable[Document]) -> None:
        for batch in _batches(documents):
            for tokens, marks in self._tokens(batch, self.loaded):
                self.tokens.write(tokens.tobytes())
                self.mask.write(marks.tobytes())
            batch.clear()  # free the memory of a long document before the next is read

    def append(self, store: TokenStore) -> None:
        """Add the documents of another store as they are."""
        for name, out in ((TOKENS, self.tokens), (TRAINED, self.mask)):
            if (store.folder / name).exists():
                with (store.folder / name).open("rb") as file:
                    shutil.copyfileobj(file, out, _COPIED)
        self.lengths.frombytes(np.diff(store.offsets).tobytes())
        self.hashes.frombytes(store.block_hashes.tobytes())
        self.numbers.frombytes(store.numbers.tobytes() if self.columns else b"")

    def check_kinds(self, files: FileList) -> None:
        """Raise `UserError` if the documents are of several kinds."""
        mixed = {"texts and examples": self.examples, "pairs of answers and other examples": self.pairs}
        for kinds, number in mixed.items():
            if 0 < number < len(self.lengths):
                raise UserError(
                    f"{files.source.label}: {files.name} holds {kinds}",
                    fix="write them to files of their own, and name each as a source",
                )

    def finish(self, files: FileList, content: str) -> None:
        """End a store of a whole source."""
        if self.ids.labelled == len(self.lengths) and self.trained == sum(self.lengths):
            self.examples = self.trained = 0  # labels that leave nothing out say nothing
        self.check_kinds(files)
        if files.source.read:
            check_used(files.source, are_examples=self.examples > 0)
        self.end(files, content)

    def end(self, files: FileList, content: str = "") -> None:
        """End tokens.bin and trained.bin, and write the other files; of texts there is no trained.bin."""
        self.__exit__()
        if not self.examples:
            (self.folder / TRAINED).unlink()
        offsets = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)]).astype(np.int64)
        checksums = chunk_checksums(self.folder / TOKENS)
        for name, values in zip(_ARRAYS, (offsets, np.array(self.hashes, np.uint64), checksums), strict=True):
            np.save(self.folder / name, values)
        if self.columns:
            np.save(self.folder / _NUMBERS, np.array(self.numbers).reshape(-1, len(self.columns)))
        meta = self._meta(files, content, int(offsets[-1]))
        (self.folder / META).write_text(signed(asdict(meta)), encoding="utf-8")

    def _texts(self, document: Document, tokenizer: Any) -> list[Text]:
        """The text of a document, or the two of a pair of answers; none of token ids."""
        if isinstance(document, TokenIds):
            return []
        if isinstance(document, str):
            return [Text(document)]
        self.examples += 1
        eos = tokenizer.id_to_token(self.tokenizer.eos_token_id) or ""
        self.pairs += isinstance(document, Preference)
        self.rated += isinstance(document, Preference) and document.desirable is not None
        each = [document.first, document.second] if isinstance(document, Preference) else [document]
        texts = [example.rendered(self.tokenizer.template, eos) for example in each]
        self.left_out |= dict.fromkeys(what for text in texts for what in text.left_out)
        return texts

    def _tokens(self, batch: list[Document], tokenizer: Any) -> Iterator[Tokens]:
        """The tokens of all documents, part after part."""
        both = [self._texts(document, tokenizer) for document in batch]
        texts = [text for side in both for text in side]
        is_example = any(text.trained is not None for text in texts)
        strings = [text.text for text in texts]
        for side in both:
            self.odd.update(character for character in _ODD if any(character in text.text for text in side))
        sequences = map(self._sequence, texts, Encoder(tokenizer, with_spans=is_example).encode(strings))
        with encoding(self.tokenizer.folder, tokenizer, strings):
            for document, sides in zip(batch, both, strict=True):
                self.numbers.extend(getattr(document, "numbers", ()))
                desirable = isinstance(document, Preference) and bool(document.desirable)
                tokens = [self._given(document)] if isinstance(document, TokenIds) else [next(sequences) for _ in sides]
                yield from self._document(tokens, desirable=desirable)

    def _document(self, sequences: list[list[Tokens]], *, desirable: bool) -> list[Tokens]:
        """The tokens of a document, of one or two sequences, with their marks."""
        for _, marks in sequences[0] if desirable else ():
            marks |= 4
        for sequence in sequences[1:]:
            for _, marks in sequence[:1]:
                marks[:1] = 0  # the first token is no target
            for _, marks in sequence:
                marks |= 2
        document = [token for sequence in sequences for token in sequence]
        self.trained += sum(int((marks & 1).sum()) for _, marks in document if len(marks))
        self.lengths.append(sum(len(tokens) for tokens, _ in document))
        self.hashes.extend(block_hashes([tokens for tokens, _ in document], BLOCK))
        return document

    def _given(self, document: TokenIds) -> list[Tokens]:
        """The tokens of a document of ids, part after part, with marks if it says which are trained."""
        parts, trained = self.ids.complete(document, self.dtype), document.trained
        self.examples += trained is not None
        return [(part, _NO_MARKS if trained is None else trained.astype(np.uint8)) for part in parts]

    def _sequence(self, text: Text, parts: list[Encoded]) -> list[Tokens]:
        """The tokens of a text, part after part, with marks for the trained ones."""
        bos, eos = self.tokenizer.bos_token_ids, self.tokenizer.eos_token_id
        # A conversation has the tokens of `apply_chat_template`: only the template writes BOS.
        front = () if text.by_template else missing_bos(parts[0].ids[: len(bos)].tolist(), bos)
        has_end = parts[-1].ids[-1:].tolist() == [eos]
        ends = [eos] * (text.ends and not has_end)
        self.ended += has_end
        ids = [front, *(part.ids for part in parts), ends]
        tokens = [np.asarray(sequence, self.dtype) for sequence in ids]
        if text.trained is None:
            return [(token, _NO_MARKS) for token in tokens if len(token)]
        is_last = bool(text.trained) and text.trained[-1][1] == len(text.text)
        flags = [np.zeros(len(front)), *(text.is_trained(part.spans) for part in parts), np.full(len(ends), is_last)]
        return [(part, flag.astype(np.uint8)) for part, flag in zip(tokens, flags, strict=True) if len(part)]

    def _meta(self, files: FileList, content: str, tokens: int) -> StoreMeta:
        names = (*_ARRAYS, *[TRAINED] * bool(self.examples), *[_NUMBERS] * bool(self.columns))
        checksums = {name: file_checksum(self.folder / name) for name in names}
        # A text determines its tokens. A record does not: the template and the trained part matter too. So the digest
        # covers the tokens, as rows and checkpoints of other tokens belong to other data.
        made = [checksums["checksums.npy"]] if self.ended and not self.examples else []
        made = [*checksums.values()] if self.examples or self.ids.packed else made
        columns, answers_alone = columns_read(files, tuple(self.left_out))
        tokenizer = self.tokenizer
        return StoreMeta(
            kind=_KIND,
            version=_VERSION,
            content=key_of(content, *made) if made else content,
            tokenizer=tokenizer.digest,
            vocab_size=tokenizer.vocab_size,
            eos_token_id=tokenizer.eos_token_id,
            bos=tokenizer.bos_token_ids,
            dtype=self.dtype.str,
            documents=len(self.lengths),
            tokens=tokens,
            blocks=len(self.hashes),
            answers_alone=answers_alone,
            files=checksums,
            trained=self.trained if self.examples else None,
            pairs=self.pairs > 0,
            rated=self.rated > 0,
            columns=columns,
            ids=self.ids.line(files.name),
            numbers=self.columns,
            odd=odd_line(files.name, self.odd),
        )


def odd_line(name: str, odd: Mapping[str, int]) -> str:
    """The report on odd characters: how many documents have each of them; empty if there are none."""
    said = [f"{many(odd[character], 'document')} with {what}" for character, what in _ODD.items() if odd.get(character)]
    return f"{name}: {'; '.join(said)}: trained as they are" if said else ""


def block_hashes(parts: Iterable[NDArray[np.unsignedinteger]], size: int) -> list[int]:
    """A hash of each `size` tokens of a document that comes in `parts`, the last block shorter. Equal tokens have equal
    hashes, whatever their storage width."""
    states, room = [], 0
    for part in parts:
        while len(part):
            if not room:
                states.append(blake2b(digest_size=8))
                room = size
            states[-1].update(part[:room].astype("<u4").tobytes())
            part, room = part[room:], max(0, room - len(part))
    return [int.from_bytes(state.digest(), "little") for state in states]


def _documents(files: FileList, progress: Progress | None) -> Iterator[Document]:
    """Every document of the source; reports the bytes read so far to `progress`."""
    sizes = [form.size(path) for path, form in files.files]
    total, behind, told = sum(sizes), 0, 0
    for (path, form), size in zip(files.files, sizes, strict=True):
        read = 0
        with reading(path, files.source):
            for text in form.documents(path, files.source):
                yield text
                read = min(size, read + len(text))
                del text
                if progress and (behind + read - told) * _TELLINGS >= total:
                    told = behind + read
                    progress(f"tokenising {files.name}", told, total)
        behind += size
    if progress:
        progress(f"tokenising {files.name}", total, total)


def _batches(texts: Iterable[Document]) -> Iterator[list[Document]]:
    """Lists of documents of about `_BATCH_CHARACTERS` in total (at least one document)."""
    iterator = iter(texts)
    while batch := list(islice(iterator, 1)):
        room = _BATCH_CHARACTERS - len(batch[0])
        while room > 0 and len(batch) < _BATCH_DOCUMENTS and (more := next(iterator, None)) is not None:
            batch.append(more)
            room -= len(more)
        yield batch
