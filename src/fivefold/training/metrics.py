"""`metrics.jsonl` and the other places metrics go. Rank 0 writes; names are slash-grouped (design, section 5)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from fivefold.config import RunConfig
from fivefold.core.json_lines import JsonLines
from fivefold.launch.folder import last_logged_step
from fivefold.training.trackers import TRACKERS, TrackerSink

Row = Mapping[str, Any]


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self, *, failed: bool = False) -> None: ...


class TensorBoard:
    """TensorBoard event files (extra `tensorboard`). Rows after `last_step` of an earlier attempt are purged.

    An error of writing them is said once, and the run goes on without them.
    """

    def __init__(self, folder: Path, *, last_step: int, say: Callable[[str], None]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._say = say
        self._writer: Any = SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, row: Row) -> None:
        with self._letting_go():
            for name, value in row.items():
                if self._writer and name != "step" and isinstance(value, (int, float)):
                    self._writer.add_scalar(name, value, row["step"])

    def close(self, *, failed: bool = False) -> None:
        with self._letting_go():
            if self._writer:
                self._writer.close()

    @contextmanager
    def _letting_go(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._writer = None
            self._say(f"tensorboard failed: {error.strerror or error}; the run goes on without it")


def open_sinks(config: RunConfig, *, last_step: int, say: Callable[[str], None]) -> list[Sink]:
    """The sinks of `log.to`; `metrics.jsonl` is always written. `say`: how a tracker that fails is told of.

    Raises `UserError` when a tracker that a new run asks for cannot be started.
    """
    names, run_dir, logged = config.log.to, config.run_dir, last_logged_step(config)
    sinks: list[Sink] = [
        TrackerSink(name, config, last_step=last_step, logged=logged, say=say) for name in TRACKERS if name in names
    ]
    if "tensorboard" in names:
        sinks.append(TensorBoard(run_dir / "tensorboard", last_step=last_step, say=say))
    return [JsonLines(run_dir / "metrics.jsonl", last_step=last_step, say=say), *sinks]
