"""Tensors and files of a checkpoint as nouns, and as JSON: of all of it, or of what one rank wrote. No torch."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from math import prod
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from fivefold.checkpoint.cut import Box, TensorCut, file_of, meet, tiles

# torch name -> safetensors name.
DTYPES = {
    "float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8",
    "bool": "BOOL", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",  # state of a user's optimizer
}  # fmt: skip

Size = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class FileRecord:
    """A file of the checkpoint: its size, and the checksum of all of it or, in a safetensors file, of its header and of
    its slices' checksums."""

    bytes: Size
    checksum: str


@dataclass(frozen=True)
class Slice:
    """One block of a tensor, and the rank that wrote it."""

    rank: int
    box: Box


@dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """One whole tensor: how it is cut, from `rank` on. `instead`: the slices of ranks that have others than the cut
    says; without a cut, of all ranks."""

    shape: tuple[int, ...]
    dtype: str
    cut: TensorCut | None = None
    rank: int = 0
    instead: Mapping[int, tuple[Box, ...]] = field(default_factory=dict)

    @property
    def slices(self) -> Iterator[Slice]:
        for rank in sorted({*self.instead, *(rank for ranks in self.ranks for rank in ranks)}):
            yield from (Slice(rank, own) for own in self.of_rank(rank))

    @property
    def ranks(self) -> Iterator[range]:
        """The ranks that have slices by the cut."""
        for places in tiles(self.shape, self.cut).places() if self.cut else ():
            yield range(places.start + self.rank, places.stop + self.rank, places.step)

    @property
    def first(self) -> int | None:
        """The first rank that has a slice by the cut."""
        place = tiles(self.shape, self.cut).first if self.cut else None
        return None if place is None else self.rank + place

    def of_rank(self, rank: int) -> tuple[Box, ...]:
        if self.cut is None or rank in self.instead:
            return self.instead.get(rank, ())
        return tiles(self.shape, self.cut).boxes(rank - self.rank)

    def overlapping(self, wanted: Box) -> Iterator[Slice]:
        """The slices that share elements with a region: found by arithmetic, however many there are."""
        for place, own in tiles(self.shape, self.cut).overlapping(wanted) if self.cut else ():
            if self.rank + place not in self.instead:
                yield Slice(self.rank + place, own)
        for rank, boxes in self.instead.items():
            yield from (Slice(rank, own) for own in boxes if meet(own, wanted))


Records = Mapping[str, Mapping[str, TensorRecord]]  # kind -> parameter name -> record


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """One rank's record. `tensors`: those of which it is the first rank, and those of which it has other slices than
    the cut says. `numbers`: kind -> elements of all its slices. `files`, `scalars`: as in a `Manifest`."""

    files: Mapping[str, FileRecord]
    scalars: Mapping[str, Mapping[str, float]]
    tensors: Records
    numbers: Mapping[str, Size]

    def tree(self) -> dict[str, Any]:
        files = {name: asdict(record) for name, record in self.files.items()}
        return {"files": files, "scalars": self.scalars, "numbers": self.numbers, **tree_of(self.tensors)}

    @staticmethod
    def from_tree(tree: Mapping[str, Any]) -> "RankRecord":
        """Rebuild a part from the result of `tree`. Raises `ValueError` for another tree."""
        found = _RANK.validate_python(tree)
        tensors = records_of(found.cuts, found.tensors)
        return RankRecord(files=found.files, scalars=found.scalars, numbers=found.numbers, tensors=tensors)


def joined(parts: Iterable[RankRecord]) -> dict[str, dict[str, TensorRecord]]:
    """The tensors of all parts. Raises `ValueError` if ranks differ in how one is cut, or have other numbers of
    elements than it."""
    found: dict[str, dict[str, TensorRecord]] = {}
    numbers: dict[str, int] = {}
    for part in parts:
        for kind, count in part.numbers.items():
            numbers[kind] = numbers.get(kind, 0) + count
        for kind, name, record in ((kind, *one) for kind, records in part.tensors.items() for one in records.items()):
            known = found.setdefault(kind, {}).setdefault(name, record)
            if replace(known, instead={}) != replace(record, instead={}):
                raise ValueError(f"{kind} of {name}: ranks cut it in different ways")
            found[kind][name] = replace(known, instead={**known.instead, **record.instead})
    for kind, count in numbers.items():
        whole = sum(prod(record.shape) for record in found.get(kind, {}).values())
        if count != whole:
            raise ValueError(f"{kind}: the slices of all ranks have {count:,} elements, and the tensors {whole:,}")
    return found


# ---- JSON ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A `TensorRecord` in JSON: the number of its cut, and pairs for what would be keyed by numbers."""

    shape: tuple[Size, ...]
    dtype: str
    cut: Size | None = None
    rank: Size = 0
    instead: tuple[tuple[Size, tuple[Box, ...]], ...] = ()


@dataclass(frozen=True)
class _Rank:
    files: Mapping[str, FileRecord]
    scalars: Mapping[str, Mapping[str, float]]
    numbers: Mapping[str, Size]
    cuts: tuple[TensorCut, ...]
    tensors: Mapping[str, Mapping[str, Written]]


_RANK, _CUT = TypeAdapter(_Rank), TypeAdapter(TensorCut)


def tree_of(tensors: Records) -> dict[str, Any]:
    """JSON values: the cuts, each once, and the tensors with the numbers of theirs."""
    named = [(kind, name, record) for kind, records in tensors.items() for name, record in records.items()]
    cuts = list(dict.fromkeys(record.cut for _, _, record in named if record.cut))
    numbers, found = {cut: number for number, cut in enumerate(cuts)}, {kind: dict[str, Any]() for kind in tensors}
    for kind, name, record in named:
        tree: dict[str, Any] = {"shape": list(record.shape), "dtype": record.dtype}
        if record.cut:
            tree |= {"cut": numbers[record.cut], "rank": record.rank}
        if record.instead:
            tree["instead"] = sorted(record.instead.items())
        found[kind][name] = tree
    return {"cuts": [_CUT.dump_python(cut) for cut in cuts], "tensors": found}


def records_of(cuts: tuple[TensorCut, ...], tensors: Mapping[str, Mapping[str, Written]]) -> Records:
    """Rebuild the tensors from the values of `tree_of`. Raises `ValueError` for the number of a cut that is not
    there."""
    last = max((one.cut for records in tensors.values() for one in records.values() if one.cut is not None), default=-1)
    if last >= len(cuts):
        raise ValueError(f"cut {last} of {len(cuts)}")
    return {
        kind: {
            name: TensorRecord(
                shape=one.shape, dtype=one.dtype, cut=None if one.cut is None else cuts[one.cut], rank=one.rank,
                instead=dict(one.instead),
            )
            for name, one in records.items()
        }
        for kind, records in tensors.items()
    }  # fmt: skip


@dataclass(frozen=True)
class Columns:
    """The files of ranks, one after the other: [first, last + 1) of ranks, [size, files of this size in a row], and a
    checksum of each."""

    ranks: tuple[tuple[Size, Size], ...]
    bytes: tuple[tuple[Size, Size], ...]
    checksums: tuple[str, ...]

    @staticmethod
    def tree(records: Mapping[int, FileRecord]) -> dict[str, Any]:
        ordered = dict(sorted(records.items()))
        runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
        sizes = [(size, len([*same])) for size, same in groupby(record.bytes for record in ordered.values())]
        checksums = [record.checksum for record in ordered.values()]
        return {"ranks": [(run[0], run[-1] + 1) for run in runs], "bytes": sizes, "checksums": checksums}

    def records(self) -> Iterator[tuple[int, FileRecord]]:
        """(rank, record) of each file. Raises `ValueError` if the columns differ in length."""
        count = len(self.checksums)  # compared first: no pair of numbers makes a reader list more
        if any(sum(found) != count for found in ((b - a for a, b in self.ranks), (times for _, times in self.bytes))):
            raise ValueError(f"{count} checksums of files, for other numbers of ranks and sizes")
        ranks = (rank for start, stop in self.ranks for rank in range(start, stop))
        sizes = (size for size, times in self.bytes for _ in range(times))
        for rank, size, checksum in zip(ranks, sizes, self.checksums, strict=True):
            yield rank, FileRecord(size, checksum)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_record(kind: str, name: str, record: TensorRecord, ranks: Collection[int]) -> None:
    """Check that slices tile the tensor, in the files of `ranks`. Raises `ValueError`."""
    try:
        if record.dtype not in DTYPES:
            raise ValueError(f"dtype {record.dtype!r}")
        for rank in _needed(record):
            if rank not in ranks:
                raise ValueError(f"{file_of(kind, rank)!r} is not listed")
        if record.instead or not record.cut:
            _check_cover(record)
    except ValueError as error:
        raise ValueError(f"{kind} of {name}: {error}") from error


def _needed(record: TensorRecord) -> Iterator[int]:
    """The ranks whose files a tensor needs."""
    yield from (rank for rank, boxes in record.instead.items() if boxes)
    yield from (rank for ranks in record.ranks for rank in ranks if rank not in record.instead)


def _check_cover(record: TensorRecord) -> None:
    """Check slices one by one, where no rule says how all of them lie."""
    boxes = [one.box for one in record.slices]
    for own in boxes:
        if len(own) != len(record.shape):
            raise ValueError("a slice of another rank")
        if any(not 0 <= start <= stop <= size for (start, stop), size in zip(own, record.shape, strict=True)):
            raise ValueError("a slice that leaves the tensor")
    if sum(prod(stop - start for start, stop in own) for own in boxes) != prod(record.shape):
        raise ValueError(f"its slices do not add up to {list(record.shape)}")
    if _overlap(boxes):
        raise ValueError("slices that overlap")


def _overlap(boxes: Iterable[Box]) -> bool:
    """True if two boxes share an element. Swept along the first dimension, so that many thin ones cost little."""
    open_boxes: list[Box] = []
    for own in sorted(own for own in boxes if all(start < stop for start, stop in own)):
        open_boxes = [other for other in open_boxes if not own or other[0][1] > own[0][0]]
        if any(meet(own, other) for other in open_boxes):
            return True
        open_boxes.append(own)
    return False
