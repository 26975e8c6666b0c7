"""The rows of a run that tokenises while it trains (`data.streaming`).

The units of all sources (`data.units`) are read in an order of their own in each epoch, window after window of `WINDOW`
units. A window is packed as a small corpus is, and its rows are shuffled. The order of the units and of the rows in a
window follows from the manifests and the seed; how many rows a window has is known once it is packed. So window n
begins where window n - 1 ends, and a checkpoint keeps where the window being read begins.

One process of each machine tokenises the units of the windows that come. A rank that comes to a unit before that
process waits for it, or tokenises the unit itself: nothing depends on the process.
"""

import json
import subprocess
import sys
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from threading import RLock
from typing import IO, Any

import numpy as np

from fivefold.config import RunConfig
from fivefold.core.cache import Progress, key_of, telling
from fivefold.core.units import many
from fivefold.data.batch import Piece
from fivefold.data.order import permutation
from fivefold.data.pack import for_ranks
from fivefold.data.rows import PackedRows, RowPacking, RowSource, kept_counts
from fivefold.data.source import FileList
from fivefold.data.split import blocks_of, spans_of
from fivefold.data.store import Say, TokenStore
from fivefold.data.tokenizer import TokenizerInfo
from fivefold.data.units import TextUnits

WINDOW = 8  # units: their rows are shuffled together, and tokenised before the first step
_OPEN = 3  # windows: a batch may straddle two, and the next one is read ahead
_VERSION = 1  # raise when the rows of the same units change
_UNITS, _ROWS = 0, 1  # streams of `permutation`
_POSITION = "stream"  # key of a checkpoint's state
_ROW_BITS = 32  # of the number of a row; the others are those of its window

Check = Callable[[FileList, TokenStore], None]


@dataclass(frozen=True)
class UnitOrder:
    """The units of all sources, window after window of an endless order."""

    sources: tuple[TextUnits, ...]
    seed: int

    @property
    def units(self) -> list[tuple[int, int]]:
        """All units: the number of the source, and that of the unit in it."""
        return [(at, number) for at, source in enumerate(self.sources) for number in range(len(source.units))]

    @property
    def windows(self) -> int:
        """Windows of an epoch; the last one may have fewer units."""
        return -(-len(self.units) // WINDOW)

    def window(self, number: int) -> list[tuple[int, int]]:
        """The units of window `number`, in the order in which they are packed."""
        epoch, within = divmod(number, self.windows)
        units = self.units
        order = permutation(len(units), self.seed, epoch, _UNITS)[within * WINDOW : (within + 1) * WINDOW]
        return [units[at] for at in order.tolist()]


class StreamedRows(RowSource):
    """The rows of a stream. The number of a row is that of its window, and its number in it."""

    def __init__(
        self, config: RunConfig, units: Sequence[TextUnits], *, root: Path, tokenizer: TokenizerInfo, check: Check,
        say: Say, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """`units`: of each source. `check` raises `UserError` for tokens of another kind
        than the objective trains."""
        data = config.data
        self.order = order = UnitOrder(tuple(units), config.train.seed)
        self.packing = RowPacking.of(config, tokenizer.eos_token_id)
        self.seq_length, self.pad_id = data.seq_length, tokenizer.eos_token_id
        self._fraction = data.fraction
        self._config, self._root = config, root
        self._tokenizer, self._check, self._say = tokenizer, check, say
        self._begins = [(0, 0)]  # known places where a window begins, with its number
        self._lock = RLock()  # the next batch is read in another thread
        self._filler: IO[bytes] | None = None  # takes the number of each window that is opened
        self._window = lru_cache(maxsize=_OPEN)(self._opened)
        self._rows_in = lru_cache(maxsize=_OPEN)(
            lambda number: permutation(len(self._window(number)), order.seed, number, _ROWS)
        )
        self._tokenise_first(progress)

    @property
    def fingerprint(self) -> str:
        """A hash of all that the rows follow from, besides the seed; the files are those of the manifests."""
        sources = [[one.folder.name, one.state, [asdict(unit) for unit in one.units]] for one in self.order.sources]
        options = [self._fraction, self.seq_length, self.packing.joins, WINDOW, list(self._tokenizer.bos_token_ids)]
        options += for_ranks(self.packing.ranks)
        return key_of(_POSITION, _VERSION, sources, options)

    # ---- windows -------------------------------------------------------------------------------------------------

    @property
    def first(self) -> list[tuple[int, int]]:
        return self.order.window(0)

    @property
    def sample(self) -> PackedRows:
        return self._window(0)

    def held_out(self) -> PackedRows | None:
        """The rows held out of the first window; None if there are none. No window trains on what a hash holds out."""
        rows = self._rows(0, "validation") if self._fraction else None
        return rows or None

    def _tokenise_first(self, progress: Progress | None) -> None:
        units = [(self.order.sources[at], number) for at, number in self.first]
        total, done = sum(source.units[number].size for source, number in units), 0
        for source, number in units:
            if progress and source.counts(number) is None:
                progress("tokenising the first window", done, total)
            source.store(number, self._say)
            done += source.units[number].size

    def _opened(self, number: int) -> PackedRows:
        self._tell_filler(number)
        return self._rows(number, "train")

    def _rows(self, number: int, side: str) -> PackedRows:
        units = self.order.window(number)
        waiting = f"waiting for text: window {number + 1} of the units is being tokenised"
        with telling(waiting, self._say) if self._filler else nullcontext():  # once for each machine
            stores = tuple(self._store(*unit) for unit in units)

            def build(folder: Path) -> dict[str, Any]:
                blocks = blocks_of(stores)
                out = blocks.hash < np.uint64(min(int(self._fraction * 2**64), 2**64 - 1))
                sides = {"train": ~out, "validation": out} if self._fraction else {"train": ~out}
                return {
                    name: self.packing.write(folder / name, stores, spans_of(blocks, in_))
                    for name, in_ in sides.items()
                }

            folder = self._root / "rows" / key_of(self.fingerprint, units)
            found = kept_counts(folder, self._root, self._say, build)[side]
        return self.packing.read(folder / side, stores, found)

    def _store(self, at: int, number: int) -> TokenStore:
        source = self.order.sources[at]
        store = source.store(number, self._say)
        self._check(source.files, store)
        return store

    # ---- places --------------------------------------------------------------------------------------------------

    def in_order(self, places: Iterable[int]) -> list[int]:
        with self._lock:
            return [self._at(place) for place in places]

    def pieces_of(self, row: int) -> list[Piece]:
        with self._lock:
            return self._window(row >> _ROW_BITS).pieces_of(row % 2**_ROW_BITS)

    def cost(self, row: int) -> int:
        with self._lock:
            return self._window(row >> _ROW_BITS).cost(row % 2**_ROW_BITS)

    def _at(self, place: int) -> int:
        """The number of the row at `place`: walks on from the last window before it whose begin is known."""
        begin, number = self._begins[bisect_right(self._begins, (place, inf)) - 1]
        while place >= begin + (rows := len(self._window(number))):
            begin, number = begin + rows, number + 1
            if (begin, number) not in self._begins:
                insort(self._begins, (begin, number))
        return (number << _ROW_BITS) + int(self._rows_in(number)[place - begin])

    def position(self, place: int) -> Mapping[str, Any]:
        with self._lock:
            begin, number = self._begins[bisect_right(self._begins, (place, inf)) - 1]
        return {_POSITION: {"window": number, "begin": begin}}

    def go_on(self, state: Mapping[str, Any]) -> None:
        if at := state.get(_POSITION):
            with self._lock:
                self._begins = sorted({(0, 0), (at["begin"], at["window"])})

    @property
    def largest_token(self) -> int:
        return self._tokenizer.vocab_size - 1  # text that is yet to come may have it

    def extent(self, rows: int, steps: str) -> str:
        windows = many(self.order.windows, "window")
        return f"{steps} read {many(rows, 'row')}; an epoch is {windows}, the first of {many(len(self.sample), 'row')}"

    # ---- the process that fills ----------------------------------------------------------------------------------

    @contextmanager
    def filling(self) -> Iterator[None]:
        # A command of its own, in place of a process of `multiprocessing`, which would run the user's script again.
        command = [sys.executable, "-P", "-m", "fivefold.data.ahead"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0) as process:
            self._filler = process.stdin
            self._tell_filler(json.dumps({"config": self._config.to_yaml(), "cache": str(self._root)}))
            try:
                yield
            finally:
                self._filler = None
                process.kill()  # one that is stopped does not see SIGTERM; it leaves whole units whenever it ends

    def _tell_filler(self, line: object) -> None:
        if self._filler:
            with suppress(OSError):  # it has ended: every unit is tokenised, or it failed, and so will the trainer
                self._filler.write(f"{line}\n".encode())


def settings_of(sources: Sequence[TextUnits], units: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """The result of `TextUnits.described` for each source with one of `units`."""
    numbers = {at: [number for source, number in units if source == at] for at in dict.fromkeys(at for at, _ in units)}
    return [sources[at].described(of_source) for at, of_source in numbers.items()]
