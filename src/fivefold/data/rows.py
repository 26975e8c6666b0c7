"""Packed rows: the index from a row to its pieces, and the batches of a data rank.

The index is memory-mapped from the cache, so opening it costs nothing and any row is found at once. `RowSource` is all
that a trainer asks for; rows that are packed while it trains are another kind of it (`data.stream`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fivefold.config import RunConfig
from fivefold.core.cache import entry
from fivefold.core.integrity import check_file, file_checksum, read_signed, signed
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.data.counts import RowCounts
from fivefold.data.order import RowOrder, row_cost, shares
from fivefold.data.pack import one_per_row, order_rows, pack
from fivefold.data.split import (
    Int64s,
    Pieces,
    Spans,
    are_examples,
    are_pairs,
    bases_of,
    pieces_of,
    store_at,
    trained_targets,
)
from fivefold.data.store import Say, TokenStore


@dataclass(frozen=True, eq=False)
class RowIndex:
    """Row r is the pieces `offsets[r]` to `offsets[r + 1]`: `pieces` [pieces], `offsets` int64 [rows + 1]."""

    pieces: Pieces
    offsets: Int64s

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def save(self, folder: Path) -> None:
        """Write the arrays, one .npy each, into the new folder `folder`."""
        folder.mkdir()
        for name, array in {**vars(self.pieces), "offsets": self.offsets}.items():
            np.save(folder / f"{name}.npy", array)

    @classmethod
    def join(cls, parts: Sequence["RowIndex"]) -> "RowIndex":
        ends = np.cumsum([len(part.pieces) for part in parts])
        offsets = [part.offsets[1:] + end - len(part.pieces) for part, end in zip(parts, ends, strict=True)]
        pieces = {name: np.concatenate([vars(part.pieces)[name] for part in parts]) for name in vars(parts[0].pieces)}
        return cls(Pieces(**pieces), np.concatenate([np.zeros(1, np.int64), *offsets]))

    @classmethod
    def load(cls, folder: Path) -> "RowIndex":
        """The saved index, mapped. Raises `OSError`, `EOFError` or `ValueError` if it is incomplete."""
        names = ("start", "length", "has_next", "offsets")
        start, length, has_next, offsets = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
        if not len(start) == len(length) == len(has_next) == int(offsets[-1]):
            raise ValueError(f"{folder}: the arrays do not belong together")
        return cls(Pieces(start, length, has_next), offsets)


def kept_counts(folder: Path, root: Path, say: Say, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """The counts of the rows in the entry `folder` of the cache, after checking the rows. `build` writes their indices,
    each into a folder of its own, and returns the counts."""

    def write(beside: Path, damage: str) -> None:
        if damage:
            say(f"DAMAGED: the cached rows: {damage}; they are packed again")
        counts = build(beside)
        arrays = {str(path.relative_to(beside)): file_checksum(path) for path in sorted(beside.glob("*/*.npy"))}
        (beside / "counts.json").write_text(signed({**counts, "arrays": arrays}), encoding="utf-8")

    def read(folder: Path) -> dict[str, Any]:
        counts = read_signed(folder / "counts.json")
        for name, checksum in counts["arrays"].items():
            check_file(folder / name, checksum, root)
        return counts

    return entry(folder, read=read, build=write)


@dataclass(frozen=True)
class Pool:
    """Rows that are packed together and read equally often, and the real input tokens in them."""

    weight: float
    rows: int
    tokens: int


class RowSource(ABC):
    """The rows of training in their endless order, epoch after epoch: a function of the data and the seed alone.

    `seq_length`: tokens of a row. `pad_id`: the token that fills it.
    """

    seq_length: int
    pad_id: int

    def batch(
        self,
        step: int,
        *,
        global_batch_size: int,
        data_rank: int,
        data_ranks: int,
        micro_batch_size: int,
        row_multiple: int,
        balance: bool = False,
    ) -> list[MicroBatch]:
        """The micro batches of `data_rank` for step `step` (from 0), in order of accumulation.

        The batch is rows `[step * G, (step + 1) * G)` of the endless order of the seed, whatever the layout; `shares`
        says which of them a rank has. `balance`: shared out by what they cost.
        """
        shared = self.shares(
            step, global_batch_size=global_batch_size, data_ranks=data_ranks, micro_batch_size=micro_batch_size,
            balance=balance,
        )  # fmt: skip
        first = step * global_batch_size
        return [
            replace(self.rows(self.in_order((first + places).tolist()), row_multiple=row_multiple), places=places)
            for places in shared[:, data_rank]
        ]

    def shares(
        self, step: int, *, global_batch_size: int, data_ranks: int, micro_batch_size: int, balance: bool
    ) -> Int64s:
        """The places in the batch of `step` of the rows of all ranks: see `data.order.shares`."""
        rows = self.in_order(range(step * global_batch_size, (step + 1) * global_batch_size)) if balance else []
        costs = np.array([self.cost(row) for row in rows], np.int64) if balance else None
        return shares(global_batch_size, data_ranks=data_ranks, micro_batch_size=micro_batch_size, costs=costs)

    def cost(self, row: int) -> int:
        """The cost of the row of this number: see `row_cost`."""
        return row_cost((len(piece.tokens) for piece in self.pieces_of(row)), self.seq_length)

    @abstractmethod
    def in_order(self, places: Iterable[int]) -> list[int]:
        """The numbers of the rows at these places (0, 1, ...) of the endless order."""

    def rows(self, rows: Sequence[int | None], *, row_multiple: int) -> MicroBatch:
        """The micro batch of these rows; None is a row of padding."""
        length = -(-self.seq_length // row_multiple) * row_multiple
        contents = [[] if row is None else self.pieces_of(row) for row in rows]
        numbers = np.array([-1 if row is None else row for row in rows], np.int64)
        return replace(assemble(contents, row_length=length, pad_id=self.pad_id), rows=numbers)

    @abstractmethod
    def pieces_of(self, row: int) -> list[Piece]:
        """The sequences in the row of this number."""

    @property
    @abstractmethod
    def sample(self) -> "PackedRows":
        """The rows that describe the others: all there are, or the first that are packed."""

    @property
    def tokens_per_row(self) -> float:
        """Average real input tokens per row, over the long-run output of `batch`."""
        pools = self.sample.pools
        rows = sum(Fraction(pool.weight) * pool.rows for pool in pools)
        return float(sum(Fraction(pool.weight) * pool.tokens for pool in pools) / rows)

    @property
    @abstractmethod
    def largest_token(self) -> int:
        """The largest token id there may be."""

    @abstractmethod
    def extent(self, rows: int, steps: str) -> str:
        """A text such as `1.8 epochs: 20 steps over 178 rows`, of `steps` that read `rows` rows."""

    @abstractmethod
    def position(self, place: int) -> Mapping[str, Any]:
        """Values of a checkpoint by which `place` is found again at once; a dictionary of one key, or none."""

    @abstractmethod
    def go_on(self, state: Mapping[str, Any]) -> None:
        """Use the `position` in the state of a checkpoint."""

    @abstractmethod
    def filling(self) -> AbstractContextManager[None]:
        """Inside, a process of this machine prepares the rows that come, if that is left to be done."""


@dataclass(frozen=True, eq=False)
class PackedRows(RowSource):
    """The rows of one side, training or validation: those of the first pool, then of the second, and so on."""

    index: RowIndex
    stores: tuple[TokenStore, ...]
    counts: RowCounts
    pools: tuple[Pool, ...]
    seq_length: int
    pad_id: int
    seed: int

    def __len__(self) -> int:
        return len(self.index)

    @property
    def largest_token(self) -> int:
        return max(store.largest for store in self.stores)

    @property
    def epoch_rows(self) -> Fraction:
        """Average rows per epoch: one pass over the pool with the largest weight, and the share of the others."""
        return self._order.per_epoch

    def epochs(self, rows: int) -> float:
        return float(rows / self.epoch_rows)

    def extent(self, rows: int, steps: str) -> str:
        times = self.epochs(rows)
        often = f"{times:.3g}" if times < 1000 else f"{times:,.0f}"
        per_epoch = "" if len(self.pools) == 1 else f", {float(self.epoch_rows):,.0f} an epoch by their weights"
        return f"{often} epoch{'s' * (often != '1')}: {steps} over {len(self):,} rows{per_epoch}"

    @property
    def sample(self) -> "PackedRows":
        return self

    def position(self, place: int) -> Mapping[str, Any]:
        return {}  # any place is found at once

    def go_on(self, state: Mapping[str, Any]) -> None:
        pass

    def filling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def sequential(
        self,
        *,
        data_rank: int,
        data_ranks: int,
        micro_batch_size: int,
        row_multiple: int,
        max_tokens: int | None = None,
        only: Sequence[int] | Int64s | None = None,
    ) -> Iterator[MicroBatch]:
        """Every row once in file order, for evaluation, or each of `only`. The rows are distributed as in `batch`;
        every rank gets equally many micro batches, the last filled with rows of padding. Stops with the row that
        reaches `max_tokens` input tokens."""
        chosen = range(self.rows_within(max_tokens)) if only is None else only
        for first in range(0, len(chosen), data_ranks * micro_batch_size):
            mine = range(first + data_rank * micro_batch_size, first + (data_rank + 1) * micro_batch_size)
            rows = [int(chosen[at]) if at < len(chosen) else None for at in mine]
            yield self.rows(rows, row_multiple=row_multiple)

    def in_order(self, places: Iterable[int]) -> list[int]:
        return [self._order[place] for place in places]

    def rows_within(self, max_tokens: int | None) -> int:
        """Number of rows, in file order, that contain `max_tokens` input tokens (None: all rows)."""
        if max_tokens is None:
            return len(self)
        before = np.cumsum(self.row_tokens) - self.row_tokens
        return int(np.searchsorted(before, max_tokens))

    @cached_property
    def row_tokens(self) -> NDArray[np.int64]:
        """Real input tokens of each row, int64 [rows]."""
        if not len(self):
            return np.zeros(0, np.int64)
        lengths = np.asarray(self.index.pieces.length, np.int64)
        return np.add.reduceat(lengths, self.index.offsets[:-1])

    @cached_property
    def row_targets(self) -> Int64s:
        """Trained targets of each row, int64 [rows]."""
        if not len(self):
            return np.zeros(0, np.int64)
        return np.add.reduceat(trained_targets(self.stores, self.index.pieces), self.index.offsets[:-1])

    def pieces_of(self, row: int) -> list[Piece]:
        pieces = self.index.pieces
        here = slice(int(self.index.offsets[row]), int(self.index.offsets[row + 1]))
        spans = zip(
            range(here.start, here.stop), pieces.start[here].tolist(), pieces.length[here].tolist(),
            pieces.has_next[here].tolist(), strict=True,
        )  # fmt: skip
        return [piece for span in spans for piece in self._sequences(*span)]

    def _sequences(self, number: int, start: int, length: int, has_next: bool) -> list[Piece]:
        """The sequence of a piece, or the two of a pair of answers, which share its number."""
        which = int(store_at(self._bases, start))
        store, at = self.stores[which], start - int(self._bases[which])
        if store.meta.pairs and store.trained is not None:
            marks = store.trained[at : at + length]
            middle, desirable = at + int((marks & 2 > 0).argmax()), bool(marks[0] & 4) if store.meta.rated else None
            return [
                Piece(
                    store.tokens[first:last], store.tokens[first + 1 : last],
                    store.trained[first + 1 : last] & 1 > 0, answer=answer, pair=number,
                    desirable=desirable,
                )
                for answer, (first, last) in enumerate(((at, middle), (middle, at + length)))
            ]  # fmt: skip
        targets = slice(at + 1, at + length + has_next)
        trained = None if store.trained is None else store.trained[targets] > 0
        return [Piece(store.tokens[at : at + length], store.tokens[targets], trained, columns=store.columns(at))]

    def cost(self, row: int) -> int:
        if self.counts.pairs:  # a piece of two sequences
            return super().cost(row)
        here = slice(int(self.index.offsets[row]), int(self.index.offsets[row + 1]))
        return row_cost(self.index.pieces.length[here].tolist(), self.seq_length)

    @cached_property
    def _bases(self) -> Int64s:
        return bases_of(self.stores)

    @cached_property
    def _order(self) -> RowOrder:
        return RowOrder([pool.rows for pool in self.pools], [pool.weight for pool in self.pools], self.seed)


@dataclass(frozen=True)
class RowPacking:
    """How spans of tokens become rows. `joins`: several documents share a row. `ranks`: of context parallelism, for
    which the documents of a row are ordered. `seed`: of the order of the rows."""

    seq_length: int
    pad_id: int
    seed: int = 0
    joins: bool = True
    ranks: int = 1

    @classmethod
    def of(cls, config: RunConfig, pad_id: int) -> "RowPacking":
        data = config.data
        return cls(data.seq_length, pad_id, config.train.seed, data.packing, data.balance_documents)

    def index(self, stores: Sequence[TokenStore], spans: Spans) -> tuple[RowIndex, RowCounts]:
        """The rows of the spans of `stores`; counts of cuts, omissions and padding."""
        (start, length), seq_length = spans, self.seq_length
        is_pair = are_pairs(stores, start)
        fits = ~is_pair | (length <= seq_length)
        if not fits.all():  # arrays of many documents are large: they are not copied for nothing
            start, length = start[fits], length[fits]
        is_example, is_long = are_examples(stores, start), length > seq_length
        cut = pieces_of(start, np.where(is_example, np.minimum(length, seq_length), length), seq_length)
        targets = trained_targets(stores, cut)
        pieces = cut.select(targets > 0)
        offsets, order = pack(pieces.length, seq_length) if self.joins else one_per_row(len(pieces))
        order = order_rows(pieces.length, offsets, order, seq_length, self.ranks)
        index = RowIndex(Pieces(pieces.start[order], pieces.length[order], pieces.has_next[order]), offsets)
        tokens = int(pieces.length.sum())
        counts = RowCounts(
            spans=len(spans[0]),
            split=int((is_long & ~is_example).sum()),
            without_target=int((cut.targets == 0).sum()),
            rows=len(index),
            tokens=tokens,
            targets=int(targets.sum()),
            padding=len(index) * seq_length - tokens,
            examples=int(is_example.sum()),
            shortened=int((is_long & is_example).sum()),
            untrained=int(((targets == 0) & (cut.targets > 0)).sum()),
            pairs=int(are_pairs(stores, pieces.start).sum()),
            rated=any(store.meta.rated for store in stores),
            too_long=int((~fits).sum()),
        )
        return index, counts

    def write(self, folder: Path, stores: Sequence[TokenStore], spans: Spans) -> dict[str, Any]:
        """Pack spans of the stores into `folder`, and return the counts of the rows."""
        index, counts = self.index(stores, spans)
        index.save(folder)
        return asdict(counts)

    def read(
        self, folder: Path, stores: tuple[TokenStore, ...], counts: Mapping[str, Any], pools: Sequence[Pool] = ()
    ) -> PackedRows:
        """The rows that are written in `folder`."""
        return self.rows(RowIndex.load(folder), RowCounts(**counts), stores, pools)

    def rows(
        self, index: RowIndex, counts: RowCounts, stores: tuple[TokenStore, ...], pools: Sequence[Pool] = ()
    ) -> PackedRows:
        """The rows of an index; one pool unless there are others."""
        pools = pools or (Pool(1.0, counts.rows, counts.tokens),)
        return PackedRows(index, stores, counts, tuple(pools), self.seq_length, self.pad_id, self.seed)
