"""`fivefold train` inside Ray Train: `train_loop` runs on every worker of a `TorchTrainer`, and reports to Ray.

Ray places the workers, watches them, and starts all of them again after a failure; the run then goes on from its newest
checkpoint. Checkpoints stay in the run folder. Ray gets a checkpoint of a few bytes whose metadata names the folder:
Ray keeps, counts and removes its own, and a restart of Ray refuses a list of checkpoints that no longer exist.
"""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fivefold.core.run_folder import steps_of
from fivefold.launch.events import Listener
from fivefold.training.launch import run

FOLDER = "folder"  # key of the metadata of Ray's checkpoint
_MOST_ROWS = 1000  # of steps whose checkpoint may still be written in the background


def train_loop(options: Mapping[str, Any]) -> None:
    """Train on this worker: the `train_loop_per_worker` of a `TorchTrainer`.

    `options`, its `train_loop_config`: `path`, the run file, and `overrides`, a list of `key=value`. All nodes must
    share `run.dir`. Ray is told the row of every evaluation, and every checkpoint with the row of its step. Raises
    `UserError` and `RunFailed`, after which Ray starts the workers again, as often as its `FailureConfig` says.
    """
    with _Reports() as reports:
        listener = Listener(reports.step, reports.evaluation, reports.checkpoint, everywhere=True)
        run(Path(options["path"]), options.get("overrides", ()), listener=listener)


class _Reports(AbstractContextManager["_Reports"]):
    """Reports of this worker to Ray, in order, by a thread of its own.

    `ray.train.report` returns once all workers have called it. Called between steps it would hang: a checkpoint that is
    written in the background is published after another step on each rank.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, float]] = {}
        self._thread = ThreadPoolExecutor(1, "ray")
        self._sent: list[Future[None]] = []

    def __exit__(self, *failed: object) -> None:
        """Wait until Ray has everything, and raise what went wrong there. After a failure others may never come."""
        has_failed = failed[0] is not None
        self._thread.shutdown(wait=not has_failed, cancel_futures=has_failed)
        for sent in () if has_failed else self._sent:
            sent.result()

    def step(self, row: Mapping[str, Any]) -> None:
        self._rows[row["step"]] = _numbers(row)
        if len(self._rows) > _MOST_ROWS:
            del self._rows[next(iter(self._rows))]

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._sent.append(self._thread.submit(_report, _numbers(row), None))

    def checkpoint(self, folder: Path) -> None:
        (step,) = steps_of([folder.name])
        row = self._rows.get(step, {"step": step})
        self._rows = {later: kept for later, kept in self._rows.items() if later > step}
        self._sent.append(self._thread.submit(_report, row, folder))


def _report(row: Mapping[str, float], folder: Path | None) -> None:
    """Report from this worker. Ray keeps what the first one says; the others only have to call it as often."""
    from ray.train import Checkpoint, get_context, report

    if folder is None or get_context().get_world_rank() > 0:
        report(dict(row))
        return
    with TemporaryDirectory() as pointer:
        checkpoint = Checkpoint.from_directory(pointer)
        checkpoint.set_metadata({FOLDER: str(folder.absolute()), "step": row["step"]})
        report(dict(row), checkpoint=checkpoint)


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}
