"""W&B, MLflow, Trackio and TensorBoard as sinks: asked for by name in `log.to`, imported only then, on rank 0.

Where to send, and whether to send at all, is each tracker's own business: its environment variables are left to it
(`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`). A run that goes on goes on there too: the id of its
run is kept in `trackers.json`, and rows that an earlier attempt sent are not sent twice.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fivefold.config import RunConfig
from fivefold.core.errors import UserError, first_line
from fivefold.core.files import replace

PROJECT = "fivefold"
IDS = "trackers.json"
_LONGEST_PARAM = 6000  # characters that MLflow keeps of a parameter's value


@dataclass(frozen=True)
class Card:
    """What a tracker is told of a run. `id`: of its run there that goes on; None: a new one. `last_step`: where it goes
    on, 0 for a new one."""

    name: str
    folder: Path
    config: Mapping[str, Any]
    id: str | None
    last_step: int


class Tracker(Protocol):
    """Made of a `Card`, it has begun or gone on with a run of its own, `id`; "" for one that keeps none."""

    id: str

    def log(self, values: Mapping[str, float], step: int) -> None: ...
    def finish(self, *, failed: bool) -> None: ...


class WandB:
    """Weights & Biases; its files lie in the run folder. Steps that its run has already are dropped by W&B itself."""

    def __init__(self, card: Card) -> None:
        import wandb

        ours = {"project": PROJECT, "name": card.name, "dir": str(card.folder)}
        self.id = card.id or secrets.token_hex(4)
        self._run = wandb.init(
            **{key: value for key, value in ours.items() if f"WANDB_{key.upper()}" not in os.environ},
            id=self.id,
            resume="allow",
            config=dict(card.config),
            allow_val_change=True,  # a run may go on under another layout
            settings=wandb.Settings(console="off"),  # the live panel repaints itself
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """MLflow; the config as parameters, which never change there, so that a run that goes on keeps its first ones."""

    def __init__(self, card: Card) -> None:
        import mlflow

        self._mlflow = mlflow
        if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
            mlflow.set_experiment(PROJECT)
        run = mlflow.start_run(run_id=card.id) if card.id else mlflow.start_run(run_name=card.name)
        self.id = str(run.info.run_id)
        if not card.id:
            mlflow.log_params({key: str(value)[:_LONGEST_PARAM] for key, value in flat(card.config).items()})

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class Trackio:
    """Trackio, whose runs go by their names."""

    def __init__(self, card: Card) -> None:
        import trackio

        self._trackio, self.id = trackio, card.id or card.name
        trackio.init(PROJECT, name=self.id, config=flat(card.config), resume="allow" if card.id else "never")

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._trackio.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._trackio.finish()


class TensorBoard:
    """TensorBoard event files (extra `tensorboard`). Rows of an earlier attempt after `last_step` are purged."""

    id = ""

    def __init__(self, card: Card) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(card.folder / "tensorboard"), purge_step=card.last_step + 1)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


TRACKERS: dict[str, Callable[[Card], Tracker]] = {
    "wandb": WandB, "mlflow": MLflow, "trackio": Trackio, "tensorboard": TensorBoard
}  # fmt: skip
_ADVICE = {
    "wandb": "log in with `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server or a database that it can reach",
    "trackio": "is its folder writable, or its Space there?",
    "tensorboard": "is its folder, tensorboard in that of the run, writable?",
}


class TrackerSink:
    """A tracker that cannot stop a run: it fails before the first step, with an error, or is said once and let go."""

    def __init__(
        self, name: str, config: RunConfig, *, last_step: int, logged: int, say: Callable[[str], None]
    ) -> None:
        """`last_step`: where the run goes on, 0 for a new one; `logged`: the last row of an earlier attempt.

        Raises `UserError` when the tracker of a new run cannot be started.
        """
        self._name, self._say = name, say
        ids = _Ids(config.run_dir / IDS)
        known = ids.read().get(name) if last_step else None
        self._sent = logged if known else 0
        self._tracker: Tracker | None = None
        card = Card(config.run.name, config.run_dir, config.model_dump(mode="json", by_alias=True), known, last_step)
        try:
            self._tracker = TRACKERS[name](card)
        except Exception as error:
            if not last_step:
                what = f"log.to names {name}, which does not start: {first_line(error)}"
                raise UserError(what, fix=_ADVICE[name], more=f"or leave {name} out of log.to") from error
            self._let_go(error)
            return
        try:
            if self._tracker.id:
                ids.keep(name, self._tracker.id)
        except OSError as error:
            say(f"{ids.path} cannot be written: {error.strerror or error}; a resume begins a new {name} run")

    def write(self, row: Mapping[str, Any]) -> None:
        if self._tracker is None or row["step"] <= self._sent:
            return
        values = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        try:
            self._tracker.log(values, row["step"])
        except Exception as error:
            self._let_go(error)

    def close(self, *, failed: bool = False) -> None:
        if self._tracker is None:
            return
        try:
            self._tracker.finish(failed=failed)
        except Exception as error:
            self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        self._tracker = None
        self._say(f"{self._name} failed: {first_line(error)}; the run goes on without it")


@dataclass(frozen=True)
class _Ids:
    """The file that keeps the id that each tracker gave to the run."""

    path: Path

    def read(self) -> dict[str, str]:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}

    def keep(self, name: str, value: str) -> None:
        replace(self.path, json.dumps({**self.read(), name: value}).encode() + b"\n")


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of sections as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
