"""Read and write files of one JSON object a line (`metrics.jsonl`, `samples.jsonl`, `history.jsonl`). No torch.

They report on a run and are not its state: a damaged line is set aside and named, a failed write is retried, and
neither ends a run. A line ends at a line feed and nowhere else: text may hold U+2028 or U+0085.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from errno import EINVAL
from pathlib import Path
from typing import Any

from fivefold.core.errors import UserError
from fivefold.core.files import replace, write_all
from fivefold.core.units import many

LOAD = "moe/load"  # the one metric that is not a number
MOST_WAITING = 50_000  # rows kept in memory while they cannot be written
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Lines:
    """Contents of a file: parsed `rows`, their raw `texts`, and the `damaged` lines."""

    rows: tuple[dict[str, Any], ...] = ()
    texts: tuple[bytes, ...] = ()  # with their line feeds
    damaged: tuple["DamagedLine", ...] = ()
    size: int = 0  # bytes of the file


@dataclass(frozen=True)
class DamagedLine:
    """A line that is not a row. `number`: from 1."""

    path: Path
    number: int
    why: str
    text: bytes

    def __str__(self) -> str:
        return f"{self.path}:{self.number} {self.why}"


def needed(path: Path) -> Lines:
    """`read`, for a command that needs the file. Raises `UserError`."""
    try:
        return read(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}", fix="move it away") from error


def read(path: Path) -> Lines:
    """Read the rows and the damaged lines of a file; empty for a missing file. Raises `OSError`."""
    if not path.exists():
        return Lines()
    if not path.is_file():  # a pipe never ends
        raise OSError(EINVAL, "not a regular file", str(path))
    content = path.read_bytes()
    rows, texts, damaged = [], [], []
    *ended, cut = content.split(b"\n")
    for number, text in enumerate((*ended, cut), start=1):
        if not text.strip():
            continue
        row = _row(text)
        if row is not None:
            rows.append(row)
            texts.append(text + b"\n")
        else:
            is_cut = number == len(ended) + 1
            damaged.append(DamagedLine(path, number, "is cut short" if is_cut else "is not a row of JSON", text))
    return Lines(tuple(rows), tuple(texts), tuple(damaged), len(content))


def _row(text: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    is_row = isinstance(row, dict) and type(row.get("step")) is int and _is_number(row["step"])
    return row if is_row and all(_is_metric(name, value) for name, value in row.items() if "/" in name) else None


def _is_metric(name: str, value: Any) -> bool:
    """True if `value` is a metric: a number or null; for `moe/load`, rows by layer and expert."""
    if name == LOAD and isinstance(value, list):
        return all(isinstance(layer, list) and all(_is_number(rows) for rows in layer) for layer in value)
    return value is None or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


class JsonLines:
    """Writer of rows to a file, each as it comes.

    A run that resumes first drops the rows after `last_step` (None: none of them), in one replacement of the file;
    damaged lines go to `NAME.damaged`. Rows that cannot be written are kept and retried with the next row. A file that
    was removed is written again, with all its rows. `say` reports each of these, once.

    `room`: a folder that is no longer there once another writer has taken over. The file is then replaced by each
    writer as it begins, so that what an earlier one has open is no longer this file.
    """

    def __init__(
        self, path: Path, *, last_step: int | None, say: Callable[[str], None], room: Path | None = None
    ) -> None:
        self._path, self._say, self._room = path, say, room
        self._descriptor: int | None = None
        self._waiting: deque[bytes] = deque(maxlen=MOST_WAITING)
        self._failing = False
        self._is_other = False  # another file has replaced the one we opened
        self.failed = 0  # writes that failed
        self._lines = self._read()
        kept = [
            (row, text)
            for row, text in zip(self._lines.rows, self._lines.texts, strict=True)
            if last_step is None or row["step"] <= last_step
        ]
        self.last: dict[str, Any] = kept[-1][0] if kept else {}
        self._kept = b"".join(text for _, text in kept)
        self._is_cut = len(self._kept) != self._lines.size or room is not None
        self._flush()

    def write(self, row: Row) -> None:
        """Append `row`, and the rows that are still waiting."""
        self._waiting.append(json.dumps(row, allow_nan=False, ensure_ascii=False).encode(errors="backslashreplace"))
        self._flush()

    def close(self, *, failed: bool = False) -> None:
        """Retry the rows that are still waiting, and report lost ones."""
        if self._waiting:
            self._flush()
        if self._waiting:
            self._say(f"{self._path}: the last {many(len(self._waiting), 'row')} could not be written and are lost")
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self) -> Lines:
        try:
            return read(self._path)
        except OSError as error:
            self._say(f"{self._path} cannot be read: {error.strerror or error}")
            return Lines()

    def _flush(self) -> None:
        if self._room and not self._room.is_dir():  # said once, by who holds the room
            self._waiting.clear()
            return
        late = len(self._waiting) - 1
        try:
            if self._descriptor is not None and self._is_removed():
                self._write_again()
            if self._descriptor is None:
                self._open()
            while self._waiting:
                self._append(self._waiting[0] + b"\n")
                self._waiting.popleft()
        except OSError as error:
            self.failed += 1
            if not self._failing:
                self._failing = True
                why = error.strerror or error
                self._say(f"{self._path} cannot be written: {why}; its rows are kept and tried again")
            return
        if self._failing:
            self._failing = False
            self._say(f"{self._path} can be written again; {many(max(0, late), 'row')} came late")

    def _open(self) -> None:
        """Truncate the file to the kept rows, then open it to append."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_cut:
            self._set_aside()
            replace(self._path, self._kept, room=self._room)
            self._is_cut = False
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if self._room:  # only now: a file that was opened while the room was ours is not that of the next writer
                os.stat(self._room)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def _set_aside(self) -> None:
        damaged = self._lines.damaged
        if not damaged:
            return
        aside = self._path.with_name(f"{self._path.name}.damaged")
        with aside.open("ab") as file:
            file.write(b"".join(line.text + b"\n" for line in damaged))
        self._lines = Lines()
        more = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
        self._say(f"{damaged[0]}{more}: set aside in {aside}; the run does not depend on it")

    def _append(self, line: bytes) -> None:
        assert self._descriptor is not None
        size = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, line)
        except OSError:
            os.ftruncate(self._descriptor, size)  # drop half a line
            raise

    def _is_removed(self) -> bool:
        assert self._descriptor is not None
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except FileNotFoundError:
            return True

    def _write_again(self) -> None:
        """Restore a removed file with all its rows, which the system keeps while it is open."""
        assert self._descriptor is not None
        held = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        is_other = self._path.exists()
        if not is_other:
            replace(self._path, held, room=self._room)
        os.close(self._descriptor)
        self._descriptor = None
        now = "another file is there now, which it goes on with" if is_other else "it is there again, with all its rows"
        if not (is_other and self._is_other):
            self._say(f"{self._path} was removed while the run writes to it; {now}")
        self._is_other = is_other
