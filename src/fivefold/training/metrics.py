"""`metrics.jsonl` and the other places metrics go. Rank 0 writes. Names have groups: `train/loss`."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fivefold.config import RunConfig
from fivefold.core.json_lines import JsonLines
from fivefold.launch.folder import last_logged_step
from fivefold.training.trackers import TRACKERS, TrackerSink

Row = Mapping[str, Any]


class Sink(Protocol):
    def write(self, row: Row) -> None: ...
    def close(self, *, failed: bool = False) -> None: ...


def open_sinks(config: RunConfig, *, last_step: int, say: Callable[[str], None]) -> list[Sink]:
    """The sinks of `log.to`; `metrics.jsonl` is always written. `say`: how a tracker that fails is told of.

    Raises `UserError` when a tracker that a new run asks for cannot be started.
    """
    logged = last_logged_step(config)
    trackers = [  # first: where one does not start, no row has been written
        TrackerSink(name, config, last_step=last_step, logged=logged, say=say)
        for name in TRACKERS
        if name in config.log.to
    ]
    return [JsonLines(config.run_dir / "metrics.jsonl", last_step=last_step, say=say), *trackers]
