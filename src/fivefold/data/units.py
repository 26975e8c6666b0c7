"""The units of a source: what `fivefold data --prepare` tokenises one by one, on any number of processes and machines.

A unit is some files, or the part of one large file, of 1 to 16 MiB. Its tokens are a folder of the cache:

units/<source>/manifest.json   the files with their sizes and times, and the units
units/<source>/00000/          a token store (`data.store`), and unit.json, what was read of its records
units/<source>/joined          the name of the token store that holds them now
streams/<source>/              the same of a run that tokenises while training: these are read as they are, never joined

The first process writes the manifest and all others read it, so that they divide the source in the same way. Joining
writes the token store that one process would have written, byte for byte.
"""

import glob
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any

from fivefold.core.cache import Progress, entry, key_of, locked, write_atomically
from fivefold.core.errors import UserError
from fivefold.core.files import expanded
from fivefold.core.integrity import DamagedError, read_signed, signed
from fivefold.data.examples import Document
from fivefold.data.records import MOST_FORMS, check_used, columns_read
from fivefold.data.source import FileList, FilePart, Source, reading
from fivefold.data.store import META, READING, Say, StoreWriter, TokenStore, made_by, odd_line, open_store
from fivefold.data.token_ids import TokenIdsReport
from fivefold.data.tokenizer import TokenizerInfo

# Bytes of text: enough units for many shards, and some seconds of one core are lost with a killed process ...
_SMALLEST, _LARGEST, _UNITS = 2**20, 2**24, 1024
_MOST_UNITS = 4096  # ... but no more folders than this, where units of a large source are larger
_VERSION = 1  # raise when the files of a unit change
STREAMS, _UNITS_FOLDER = "streams", "units"  # folders of the cache
_MANIFEST, _JOINED, _UNIT = "manifest.json", "joined", "unit.json"
_COUNTS = ("examples", "pairs", "rated", "trained", "ended")


@dataclass(frozen=True)
class TextUnit:
    """Files `first` to `last` of a source (the last excluded), or the `part` of one; `size`: its bytes of text."""

    first: int
    last: int
    size: int
    part: FilePart | None = None


@dataclass(frozen=True)
class TextUnits:
    """The units of a source in the folder `folder` of the cache. `state`: the files as the manifest has them."""

    files: FileList
    tokenizer: TokenizerInfo
    root: Path
    folder: Path
    state: Sequence[Sequence[Any]]
    units: tuple[TextUnit, ...]

    @classmethod
    def begin(
        cls, files: FileList, tokenizer: TokenizerInfo, root: Path, size: int | None = None, *, streamed: bool = False
    ) -> "TextUnits":
        """The units of a source, divided now if they are not yet. `streamed`: to be read as they are. Raises
        `UserError` if the files are no longer those that were divided."""
        folder, state = _folder(files, tokenizer, root, STREAMS if streamed else _UNITS_FOLDER), _state(files)
        if _is_of_before(folder, state, root):
            with locked(folder):
                if _is_of_before(folder, state, root):  # another process may have begun anew while this one waited
                    shutil.rmtree(folder, ignore_errors=True)
        manifest = entry(folder, read=_manifest, build=lambda beside, _: _divide(files, state, size, beside))
        found = cls(files, tokenizer, root, folder, manifest["files"], _units_of(manifest))
        found.check_unchanged()
        return found

    @classmethod
    def find(cls, files: FileList, tokenizer: TokenizerInfo, root: Path) -> "TextUnits | None":
        """The units of a source if it is being prepared; None if not, if it changed since, or if they are joined."""
        folder = _folder(files, tokenizer, root, _UNITS_FOLDER)
        if files.store or not (folder / _MANIFEST).exists() or _is_joined(folder):
            return None
        try:
            manifest = _manifest(folder)
        except DamagedError:
            return None
        if manifest["files"] != _state(files):
            return None
        return cls(files, tokenizer, root, folder, manifest["files"], _units_of(manifest))

    def check_unchanged(self) -> None:
        """Raise `UserError` if a file changed since the source was divided."""
        if (now := _state(self.files)) == self.state:
            return
        before, names = {name: rest for name, *rest in self.state}, {name for name, *_ in now}
        files = {name for name, _, time, *_ in self.state if time}  # addresses have no time
        gone = next((name for name in before if name not in names or (name in files and not Path(name).exists())), None)
        changed = next((name for name, *rest in now if before.get(name) != rest), None)
        what = f"{gone} is gone" if gone else f"{changed} {'changed' if changed in before else 'was added'}"
        is_streamed = self.folder.parent.name == STREAMS
        by = "data.streaming" if is_streamed else "`fivefold data --prepare`"
        anew = "another run.name" if is_streamed else "all shards"
        section = "Tokenise while training" if is_streamed else "Prepare ahead"
        raise UserError(
            f"{self.files.source.label}: {what} since {by} began with this source",
            fix=f"put it back as it was; or begin again, with {anew}: rm -r {self.folder}",
            more=f"fivefold docs howto/data, '{section}'",
        )

    def _check_unit(self, number: int) -> None:
        unit = self.units[number]
        mine = slice(unit.first, unit.last)
        if _state(replace(self.files, files=self.files.files[mine])) != self.state[mine]:
            self.check_unchanged()

    @property
    def is_joined(self) -> bool:
        return _is_joined(self.folder)

    def path(self, number: int) -> Path:
        return self.folder / f"{number:05}"

    def counts(self, number: int) -> Mapping[str, Any] | None:
        """The contents of unit.json; None if the unit is not tokenised, or unit.json is damaged."""
        try:
            return read_signed(self.path(number) / _UNIT)
        except DamagedError:
            return None

    def joined_counts(self) -> Mapping[str, Any]:
        """The contents of meta.json of the token store that holds all units. Raises `OSError` or `ValueError`."""
        return read_signed(_store_of(self.folder, self.root) / META)

    def tokenise(self, number: int) -> bool:
        """Tokenise a unit, if that is to be done. False if a token store holds all units by now."""

        def build(beside: Path, _: str) -> None:
            if self.is_joined:
                raise _Joined
            self._write_unchanged(beside, number)

        try:
            entry(self.path(number), read=lambda folder: read_signed(folder / _UNIT), build=build)
        except _Joined:
            return False
        except DamagedError:
            if self.is_joined:  # and the unit removed before this process had read it
                return False
            raise
        return True

    def store(self, number: int, say: Say) -> TokenStore:
        def build(beside: Path, damage: str) -> None:
            if damage and (self.path(number) / META).exists():  # earlier versions wrote none
                say(f"DAMAGED: the prepared tokens in {self.path(number)}: {damage}; they are made again from the text")
            self._write_unchanged(beside, number)

        def read(folder: Path) -> TokenStore:
            read_signed(folder / _UNIT)
            return open_store(folder, self.root)

        return entry(self.path(number), read=read, build=build)

    def described(self, numbers: Sequence[int]) -> dict[str, Any]:
        """The reports of `StoreMeta` on these units, which are tokenised, by name. Raises `UserError` for a setting of
        the records that none of them uses."""
        source, ids = self.files.source.unread(), TokenIdsReport(self.tokenizer)
        left_out, odd, examples = dict[str, None](), Counter[str](), 0
        for number in numbers:
            counts = read_signed(self.path(number) / _UNIT)
            for names, keys in counts["read"]:
                _remember(source.read, tuple(names), tuple(keys))
            source.undecided.update(counts["undecided"])
            left_out |= dict.fromkeys(counts["left_out"])
            odd.update(counts["odd"])
            ids.add(counts["ids"])
            examples += counts["examples"]
        if source.read:
            check_used(source, are_examples=examples > 0)
        columns, alone = columns_read(replace(self.files, source=source), tuple(left_out))
        name = self.files.name
        return {"ids": ids.line(name), "columns": columns, "answers_alone": alone, "odd": odd_line(name, odd)}

    def _write_unchanged(self, folder: Path, number: int) -> None:
        """Write a unit. Raises `UserError` if a file of it changed, which explains any other error of reading it."""
        try:
            self._write(folder, number)
        except UserError:
            self._check_unit(number)
            raise
        self._check_unit(number)

    def _write(self, folder: Path, number: int) -> None:
        source = self.files.source.unread()
        with StoreWriter(folder, self.tokenizer, source.numbers) as writer:
            self._add(writer, number, source)
            writer.check_kinds(self.files)
            writer.end(replace(self.files, source=source))
        tree = {
            **{name: getattr(writer, name) for name in _COUNTS},
            "read": [[list(names), list(keys)] for names, keys in source.read.items()],
            "undecided": dict(source.undecided),
            "left_out": list(writer.left_out),
            "odd": dict(writer.odd),
            "ids": writer.ids.counts(),
            "documents": len(writer.lengths),
            "tokens": sum(writer.lengths),
        }
        (folder / _UNIT).write_text(signed(tree), encoding="utf-8")

    def _add(self, writer: StoreWriter, number: int, source: Source) -> None:
        """Tokenise a unit. An error names the row of the file: rows are counted once there is one."""
        unit = self.units[number]
        try:
            writer.add(self._documents(unit, source))
        except UserError as error:
            if unit.part is None:
                raise
            (path, form) = self.files.files[unit.first]
            with reading(path, source):
                counted = form.counted(path, source, unit.part)
            for _ in self._documents(replace(unit, part=counted), source):
                pass  # raises the error again, with the row
            raise error

    def _documents(self, unit: TextUnit, source: Source) -> Iterator[Document]:
        for path, form in self.files.files[unit.first : unit.last]:
            with reading(path, source):
                if unit.part is None:
                    yield from form.documents(path, source)
                else:
                    yield from form.documents_of(unit.part, path, source)

    # ---- joining -------------------------------------------------------------------------------------------------

    def join(self, writer: StoreWriter, progress: Progress | None, say: Say) -> None:
        """Write every document of the source, in order; units that are missing or damaged are tokenised first."""
        total, behind = sum(unit.size for unit in self.units), 0
        joined, of_file = self.files.source, dict[tuple[str, ...], tuple[str, ...]]()
        for number, unit in enumerate(self.units):
            reading = self._append(writer, number, say)
            if unit.part is None or unit.part.start == 0:
                of_file = {}
            for names, keys in reading["read"]:
                if unit.part is None:
                    joined.read[tuple(names)] = tuple(keys)
                else:
                    _remember(of_file, tuple(names), tuple(keys))
            joined.read.update(of_file)
            joined.undecided.update(reading["undecided"])
            behind += unit.size
            if progress:
                progress(f"joining {self.files.name}", behind, total)
        self.check_unchanged()

    def _append(self, writer: StoreWriter, number: int, say: Say) -> Mapping[str, Any]:
        """Write a unit, and return what was read of its records."""
        writer.append(self.store(number, say))
        counts = read_signed(self.path(number) / _UNIT)
        for name in _COUNTS:
            setattr(writer, name, getattr(writer, name) + counts[name])
        writer.left_out |= dict.fromkeys(counts["left_out"])
        writer.odd.update(counts["odd"])
        writer.ids.add(counts["ids"])
        return counts

    def close(self, store: Path) -> None:
        """Remove the units, which the token store in `store` holds now. A process at work sees that and stops."""
        with locked(self.folder):
            if not self.is_joined:
                write_atomically(self.folder / _JOINED, store.name)
            for number in range(len(self.units)):
                self._remove(number)

    def _remove(self, number: int) -> None:
        """Remove a unit, and what a killed process left of it; a process that is at work on it ends it first."""
        path = self.path(number)
        with locked(path):
            for left in (path, *path.parent.glob(f".{path.name}.*")):
                shutil.rmtree(left, ignore_errors=True)
            path.with_suffix(".lock").unlink(missing_ok=True)


class _Joined(Exception):
    """The units were joined while this process was at work."""


def shares(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Divide units of these sizes: the largest first, each to the share that has least. The same on every machine.
    Shares beyond the number of units have none, and are left out."""
    found: list[list[int]] = [[] for _ in range(min(number, len(sizes)))]
    loads = [(0, share) for share in range(len(found))]
    heapify(loads)
    for unit in sorted(range(len(sizes)), key=lambda unit: -sizes[unit]):
        load, share = loads[0]
        heapreplace(loads, (load + sizes[unit], share))
        found[share].append(unit)
    return found


def _folder(files: FileList, tokenizer: TokenizerInfo, root: Path, kind: str) -> Path:
    """The folder of the units of a source: by its name, not by its contents, which only a whole reading would tell."""
    source = files.source
    path = expanded(source.path)
    is_path = glob.has_magic(source.path) or path.exists()
    named = [str(path.absolute()) if is_path else source.path, source.format, source.text_key, source.train_on]
    kinds = [source.pairs, source.rates, list(source.numbers), sorted(source.columns.items())]
    return root / kind / key_of(_VERSION, READING, named, kinds, made_by(files, tokenizer))


def _state(files: FileList) -> list[list[Any]]:
    """The state of the files, which any change of them changes: their names, sizes and times."""
    return [  # a folder's own stamp does not change with the files in it
        [*_stamp(path), form.name, *(list(_stamp(member)) for member in form.members(path) if member != path)]
        for path, form in files.files
    ]


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        stat = path.stat()
    except OSError:  # an address of the hub, which names the commit
        return (str(path), 0, 0)
    return (str(path.absolute()), stat.st_size, stat.st_mtime_ns)


def unit_bytes(total: int) -> int:
    """Bytes of text of a unit of a source of `total` bytes."""
    return max(_SMALLEST, min(_LARGEST, total // _UNITS), -(-total // _MOST_UNITS))


def _divide(files: FileList, state: list[list[Any]], size: int | None, folder: Path) -> None:
    sizes = [form.size(path) for path, form in files.files]
    size = size or unit_bytes(sum(sizes))
    units: list[TextUnit] = []
    for number, ((path, form), bytes_) in enumerate(zip(files.files, sizes, strict=True)):
        parts = form.parts(path, files.source, size) if bytes_ > size else ()
        if len(parts) > 1:
            units += [TextUnit(number, number + 1, part_size, part) for part, part_size in parts]
        elif units and units[-1].part is None and units[-1].size + bytes_ <= size:
            units[-1] = replace(units[-1], last=number + 1, size=units[-1].size + bytes_)
        else:
            units.append(TextUnit(number, number + 1, bytes_))
    tree = {"version": _VERSION, "files": state, "units": [asdict(unit) for unit in units]}
    (folder / _MANIFEST).write_text(signed(tree, indent=None), encoding="utf-8")


def _manifest(folder: Path) -> dict[str, Any]:
    return read_signed(folder / _MANIFEST)


def _units_of(manifest: Mapping[str, Any]) -> tuple[TextUnit, ...]:
    return tuple(TextUnit(**{**unit, "part": unit["part"] and FilePart(**unit["part"])}) for unit in manifest["units"])


def _is_joined(folder: Path) -> bool:
    return (folder / _JOINED).exists()


def _is_of_before(folder: Path, state: list[list[Any]], root: Path) -> bool:
    """True if the units were joined and the files changed since, or the token store is gone."""
    try:
        return _is_joined(folder) and (_manifest(folder)["files"] != state or not _store_of(folder, root).is_dir())
    except (OSError, ValueError):
        return False


def _store_of(folder: Path, root: Path) -> Path:
    return root / "stores" / (folder / _JOINED).read_text(encoding="utf-8")


def _remember(read: dict[tuple[str, ...], tuple[str, ...]], names: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Join what parts of one file read: of `MOST_FORMS` sets of keys, the fewest used of each (see `example_of`)."""
    if names in read or len(read) < MOST_FORMS:
        read[names] = min(read.get(names, keys), keys, key=len)
