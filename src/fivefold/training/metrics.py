"""`metrics.jsonl` and the other places metrics go. Rank 0 writes; names are slash-grouped (design, section 5)."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fivefold.config import RunConfig
from fivefold.launch.folder import last_logged_step
from fivefold.training.trackers import TRACKERS, TrackerSink

Row = Mapping[str, Any]


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self, *, failed: bool = False) -> None: ...


class JsonLines:
    """One JSON object a line, flushed at once. A resumed run first loses the rows after `last_step`."""

    def __init__(self, path: Path, *, last_step: int) -> None:
        keep = [line for line in _complete_lines(path) if json.loads(line)["step"] <= last_step]
        path.write_text("".join(keep), encoding="utf-8")
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        self._file.write(json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


class TensorBoard:
    """TensorBoard event files (extra `tensorboard`). Rows after `last_step` of an earlier attempt are purged."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, row["step"])

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


def open_sinks(config: RunConfig, *, last_step: int, say: Callable[[str], None]) -> list[Sink]:
    """The sinks of `log.to`; `metrics.jsonl` is always written. `say`: how a tracker that fails is told of.

    Raises `UserError` when a tracker that a new run asks for cannot be started.
    """
    names, run_dir, logged = config.log.to, config.run_dir, last_logged_step(config)
    sinks: list[Sink] = [
        TrackerSink(name, config, last_step=last_step, logged=logged, say=say) for name in TRACKERS if name in names
    ]
    if "tensorboard" in names:
        sinks.append(TensorBoard(run_dir / "tensorboard", last_step=last_step))
    return [JsonLines(run_dir / "metrics.jsonl", last_step=last_step), *sinks]


def _complete_lines(path: Path) -> list[str]:
    """Lines of an earlier attempt; a half-written last line is dropped."""
    if not path.exists():
        return []
    return [
        line
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n") and line.strip()
    ]
