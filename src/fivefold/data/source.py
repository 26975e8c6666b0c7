"""The source of documents: an entry of the run file, its files, and the interface of formats."""

import glob
import json
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fivefold.core.cache import file_digest
from fivefold.core.errors import UserError
from fivefold.core.files import expanded
from fivefold.core.plain_yaml import reads_back
from fivefold.data.compression import ending, is_compressed, opened
from fivefold.data.examples import Document, TrainOn

HUB = "hub:"  # prefix of an address of the Hugging Face hub
# Values of `format` that describe records instead of their file format.
RECORD_KINDS = ("chat", "completion", "preference", "alpaca", "sharegpt")
# Formats that other packages convert -> the suffix of their files, their name, and how.
_CONVERTED = {
    "datasets": (
        ".arrow",
        "folders of `datasets` (save_to_disk)",
        "write it to Parquet once: datasets.load_from_disk(FOLDER).to_parquet('train.parquet')",
    ),
    "mds": (
        ".mds",
        "shards of MosaicML's streaming (MDS)",
        "write the samples to Parquet once, by the packages datasets and streaming",
    ),
}
_INDEX = re.compile(r"\[(\d+)\]")
MORE = (
    "formats: txt, md, jsonl, json, csv, tsv (also .gz, .bz2, .xz, .zst), parquet, python-stdlib, a token store, "
    "folders or globs of them, and hub:org/name; tokens of Megatron (.bin with .idx) and datatrove (.ds)"
)
# Files next to texts that are no texts: the card and the notes of a dataset.
_BESIDE = ("readme.md", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# Names of the splits of a dataset in its file and folder names, as `datasets` reads them.
_WORDS = re.compile(r"[a-z]+")
_HELD_OUT = {"test", "testing", "eval", "evaluation", "validation", "valid", "dev", "val"}
_SHRINKS = 4  # approximate compression factor of text
_HEAD = 8192  # bytes that decide if a file of an unknown kind is text


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.validation`.

    `label` is its name in messages: `data.train`, or `data.train[1]` if there are several. `columns`: standard name of
    a part of an example (`messages`, `prompt`, `completion`, `system`, `tools`, `chosen`, `rejected`, `label`) -> its
    key in the records. `pairs`: prefer two answers to a conversation or a text in the same records. `rates`: records
    are answers that are desirable or not. `read`: the keys of records read so far -> the keys used for documents.
    `undecided`: number of records that prefer neither answer, by verdict column. `numbers`: keys of numbers that a loss
    of the user's own reads.
    """

    path: str
    label: str
    format: str = "auto"
    text_key: str = "text"
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "assistant"
    pairs: bool = False
    rates: bool = False
    read: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict, compare=False)
    undecided: Counter[str] = field(default_factory=Counter, compare=False)
    numbers: tuple[str, ...] = ()

    def unread(self) -> "Source":
        """The same source, with notes of its own on what is read."""
        return replace(self, read={}, undecided=Counter())

    def at(self, path: Path) -> str:
        return f"{self.label}: {path}"

    def named(self, key: str) -> str:
        """The name of a key of this source in messages."""
        return f"{self.label}.{key}"

    def option(self, key: str, value: str) -> str:
        """`key=value` for this source, as typed after `fivefold train`: quoted for YAML and for the shell."""
        plain = value if reads_back(value) else json.dumps(value, ensure_ascii=False)
        source = _INDEX.sub(r".\1", self.label)  # brackets are special in shells
        return shlex.quote(f"{source}.{key}={plain}")


@dataclass(frozen=True)
class FilePart:
    """A part of a file: bytes or row groups from `start` to `stop`. `rows_before`: the rows of the file before it; not
    counted until a message needs them."""

    start: int
    stop: int
    rows_before: int = 0


@dataclass(frozen=True)
class Format:
    """Converts one kind of file to documents. A new one is a file in `formats/`: a subclass and an instance."""

    name: str
    suffixes: tuple[str, ...] = ()
    holds_tokens: bool = False  # a token store, used unchanged
    companions: tuple[str, ...] = ()  # endings of files that belong to its files, such as their indices

    def matches(self, path: Path) -> bool:
        """True if `format: auto` reads `path` with this format."""
        return ending(path) in self.suffixes

    def documents(self, path: Path, source: Source) -> Iterator[Document]:
        """The documents of one file, in file order. Raises `UserError` naming the file and the row (from 1)."""
        raise NotImplementedError

    def parts(self, path: Path, source: Source, size: int) -> Sequence[tuple[FilePart, int]]:
        """Consecutive parts of about `size` bytes that can be read without the ones before, each with its bytes; none
        if a file is only read as a whole."""
        return ()

    def counted(self, path: Path, source: Source, part: FilePart) -> FilePart:
        """The part, with the number of rows before it."""
        return part

    def documents_of(self, part: FilePart, path: Path, source: Source) -> Iterator[Document]:
        """The documents of a part of a file from `parts`."""
        raise NotImplementedError

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        """The files of a `path` that is more than a file (a virtual corpus, a special folder), else None.

        `root` is the cache's folder, for results to look up only once.
        """
        return None

    def members(self, path: Path) -> Sequence[Path]:
        """The files that are read for `path`: it alone, or those beside it or in it."""
        return (path,)

    def digest(self, path: Path, root: Path) -> str:
        return file_digest(path, root)

    def is_packed(self, path: Path) -> bool:
        """True if a file is smaller than its text."""
        return is_compressed(path)

    def size(self, path: Path) -> int:
        """Approximate bytes of one file's text, for progress."""
        return path.stat().st_size * (_SHRINKS if self.is_packed(path) else 1)

    def options(self, source: Source) -> dict[str, str]:
        """The options that change the result of `documents`: part of the cache key."""
        return {}


@dataclass(frozen=True)
class FileList:
    """The files of one source, each with its format, in the order of their documents; and the files left out."""

    source: Source
    files: tuple[tuple[Path, Format], ...]
    left_out: tuple[Path, ...] = ()
    known: dict[Path, str] = field(default_factory=dict, compare=False, repr=False)

    def digests(self, root: Path) -> list[str]:
        """A hash of the contents of each file, now; `named` has them from then on."""
        self.known.update({path: form.digest(path, root) for path, form in self.files})
        return [self.known[path] for path, _ in self.files]

    @property
    def named(self) -> dict[str, str]:
        """Digests of the contents that are known, by the path of a file below the folder of all of them."""
        paths = [path for path, _ in self.files if path in self.known]
        above = Path(os.path.commonpath([path.parent for path in paths])) if paths else Path()
        return {f"{self.source.label}: {path.relative_to(above)}": self.known[path] for path in paths}

    @property
    def store(self) -> Path | None:
        """The token store, if the source is one."""
        return self.files[0][0] if self.files[0][1].holds_tokens else None

    @property
    def name(self) -> str:
        """The name of the source on the screen: its path, with the commit if it is on the hub."""
        return str(self.files[0][0]) if self.source.path.startswith(HUB) else self.source.path


def resolve(source: Source, formats: Sequence[Format], root: Path) -> FileList:
    """The files that `source` names. Raises `UserError` for missing files, and files that no format reads."""
    path = expanded(source.path)
    is_named = source.format not in ("auto", *RECORD_KINDS)
    formats = [_named_format(source, formats)] if is_named else formats
    for form in formats:
        if (files := form.files(path, source, root)) is not None:
            return FileList(source, tuple((file, form) for file in files))
    if path.is_dir():
        return _of_one_split(_pick(source, _walk(path), formats, is_folder=True))
    if path.exists():
        return _pick(source, [path], formats, is_named=is_named)
    if glob.has_magic(source.path):
        found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        files = [file for file in found if not file.is_dir()]
        _check_folders(source, [folder for folder in found if folder.is_dir()], files)
        return _pick(source, files, formats, is_named=is_named)
    raise UserError(
        f"{source.label}: {source.path} does not exist", fix=f"paths are relative to {Path.cwd()}", more=MORE
    )


def _named_format(source: Source, formats: Sequence[Format]) -> Format:
    if named := next((form for form in formats if form.name == source.format), None):
        return named
    if source.format in _CONVERTED:
        raise _to_convert(f"{source.label}.format: {source.format}", source.format)
    names = ", ".join([*RECORD_KINDS, *(form.name for form in formats)])
    raise UserError(
        f"{source.label}.format: there is no format {source.format!r}", fix=f"one of auto, {names}", more=MORE
    )


def _of_one_split(files: FileList) -> FileList:
    """Return `files`, those of a folder. Raises `UserError` if `datasets` would train on some and test on others."""
    root = expanded(files.source.path)
    parts = [(path, set(_WORDS.findall(str(path.relative_to(root)).lower()))) for path, _ in files.files]
    held = next((path for path, words in parts if words & _HELD_OUT and "train" not in words), None)
    first = next((path for path, words in parts if "train" in words), None)
    if held and first:
        both = f"{held.relative_to(root)} beside {first.relative_to(root)}"
        raise UserError(
            f"{files.source.label}: {files.source.path} holds {both}, and would be trained on both",
            fix=f"name the files to train on, such as {first.parent}/*train*{first.suffix}, and the others in "
            "data.validation",
            more=MORE,
        )
    return files


def _walk(folder: Path) -> list[Path]:
    """Every file below `folder` except hidden ones, sorted by path. Links are followed; a folder is read once."""

    def unreadable(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}", fix=f"chmod u+rx {error.filename}")

    found, seen = [], set()
    for where, folders, names in os.walk(folder, onerror=unreadable, followlinks=True):
        is_new = os.path.realpath(where) not in seen
        seen.add(os.path.realpath(where))
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        found += [Path(where, name) for name in names if is_new and not name.startswith(".")]
    return sorted(path for path in found if path.is_file() or not path.exists())  # no pipe, no device


def _check_folders(source: Source, folders: list[Path], files: list[Path]) -> None:
    """Raise `UserError` for a folder that a glob matches without the files in it."""
    for folder in folders:
        if (inner := _walk(folder)) and not set(inner) & set(files):
            raise UserError(
                f"{source.label}: {source.path} matches the folder {folder} and none of the files in it",
                fix="name the files, such as 'notes/**/*.txt', or the folder as a source of its own",
            )


def _pick(
    source: Source, paths: list[Path], formats: Sequence[Format], *, is_folder: bool = False, is_named: bool = False
) -> FileList:
    """Pick a format for each file; the first of `formats` if it `is_named`. Other files of a folder are left out and
    counted."""
    for path in paths:
        if kind := next((kind for kind, (suffix, *_) in _CONVERTED.items() if suffix in path.suffixes), None):
            raise _to_convert(source.at(path), kind)
    picked: list[tuple[Path, Format]] = []
    left_out: list[Path] = []
    companions = tuple(ending for form in formats for ending in form.companions)
    for path in paths:
        if companions and path.name.endswith(companions):
            continue
        form = next((candidate for candidate in formats if is_named or candidate.matches(path)), None)
        if is_folder and path.name.lower() in _BESIDE:
            form = None
        if (form or not is_folder) and not path.is_file():  # a pipe cannot be read repeatedly, by each worker
            is_lost = f"is a link to {os.path.realpath(path)}, which does not exist"
            what = f"{source.at(path)} {'is no file but a pipe or a device' if path.exists() else is_lost}"
            raise UserError(what, fix="write its text to a file, and name that", more=MORE)
        if form and not os.access(path, os.R_OK):
            raise UserError(f"{source.at(path)} cannot be read: permission denied", fix=f"chmod u+r {path}")
        if form:
            picked.append((path, form))
        elif is_folder:
            left_out.append(path)
        else:
            raise _unknown(source, path, formats)
    if not picked:
        seen = sorted({path.suffix or path.name for path in left_out})[:5]
        saw = f" (saw {', '.join(seen)})" if seen else ""
        raise UserError(
            f"{source.label}: {source.path} matches no file that can be read{saw}",
            fix="name the format and a glob of the files: {path: 'notes/*.rst', format: txt}",
            more=MORE,
        )
    return FileList(source, tuple(picked), tuple(left_out))


def _to_convert(what: str, kind: str) -> UserError:
    """The error for files of a `kind` of `_CONVERTED`."""
    _, name, fix = _CONVERTED[kind]
    return UserError(
        f"{what}: {name} are not read", fix=fix, more="fivefold docs howto/data, 'Convert Arrow files and MDS'"
    )


def _unknown(source: Source, path: Path, formats: Sequence[Format]) -> UserError:
    known = ", ".join(suffix for form in formats for suffix in form.suffixes)
    suffix = "".join(path.suffixes[-2:]) if is_compressed(path) else path.suffix
    what = f"{source.at(path)}: no format reads the suffix {suffix!r} (known: {known})"
    with reading(path, source), opened(path, source.at(path)) as file:
        head = file.read(_HEAD)
    if is_binary(head):
        return UserError(f"{what}, and it is not text", fix="write its texts to a .jsonl or .txt file", more=MORE)
    return UserError(what, fix=f"say what it holds: {source.option('format', 'txt')} (or jsonl)", more=MORE)


@contextmanager
def reading(path: Path, source: Source) -> Iterator[None]:
    """Raise `UserError` for a file that cannot be read in this context; what is written meanwhile is not to blame."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{source.at(path)} cannot be read: {error.strerror or error}",
            fix="put it back as it was, and run the command again",
        ) from error


def not_utf8(where: str, error: UnicodeDecodeError, offset: str, *, fix: str = "write the file as UTF-8") -> UserError:
    """The error for an invalid byte; `offset`: its place."""
    return UserError(f"{where}: not UTF-8: byte 0x{error.object[error.start]:02x} at {offset}", fix=fix)


def no_documents(where: str, what: str = "the file is empty") -> UserError:
    """The error for a file without documents."""
    return UserError(f"{where}: {what}", fix="remove it, or name the files with a glob")


def is_binary(head: bytes) -> bool:
    """True if the beginning of a file is not text: neither UTF-8 nor another encoding without NUL."""
    return b"\0" in head
