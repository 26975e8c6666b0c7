"""W&B, MLflow, Trackio and TensorBoard as sinks: asked for by name in `log.to`, imported only then, on rank 0.

Each tracker's own environment variables control where and whether to send (`WANDB_MODE=offline`, `MLFLOW_TRACKING_URI`,
`TRACKIO_SPACE_ID`). A resumed run also resumes its tracker's run: its id is kept in `trackers.json`, and rows that an
earlier attempt sent are not sent again.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError, first_line
from fivefold.core.files import replace
from fivefold.launch.folder import last_logged_step
from fivefold.training.display import Sample

PROJECT = "fivefold"
IDS = "trackers.json"
SAMPLES = "samples"
_LONGEST_PARAM = 6000  # characters that MLflow keeps of a parameter's value


Table = Mapping[str, Sequence[Any]]  # column -> its values: step, prompt, text


@dataclass(frozen=True)
class Tracker:
    """A tracker that has started or resumed its run `id` ("": it has no ids). `log` takes values and their step,
    `table` the samples of a step, a value of `Table` and the step, and `finish` whether the run failed."""

    id: str
    log: Callable[[dict[str, float], int], object]
    table: Callable[[Table, int], object]
    finish: Callable[[bool], object]


def to_wandb(config: RunConfig, known: str | None, last_step: int) -> Tracker:
    """Start Weights & Biases, with its files in the run folder. W&B itself drops steps that its run already has.
    `WANDB_RUN_ID` names the run, and `WANDB_RESUME` whether it must or must not be there already."""
    import wandb

    ours: dict[str, Any] = {"project": PROJECT, "name": config.run.name, "dir": str(config.run_dir), "resume": "allow"}
    name = os.environ.get("WANDB_RUN_ID") or known or secrets.token_hex(4)
    run = wandb.init(
        **{key: value for key, value in ours.items() if f"WANDB_{key.upper()}" not in os.environ},
        id=name,
        config=_plain(config),
        allow_val_change=True,  # a run may resume under another layout
        settings=wandb.Settings(console="off"),  # the live panel repaints itself
    )
    return Tracker(
        name,
        lambda values, step: run.log(values, step=step),
        lambda table, step: run.log(
            {SAMPLES: wandb.Table(columns=[*table], data=[*zip(*table.values(), strict=True)])}, step=step
        ),
        lambda failed: run.finish(exit_code=int(failed)),
    )


def to_mlflow(config: RunConfig, known: str | None, last_step: int) -> Tracker:
    """Start MLflow. The config becomes its parameters; these are immutable, so a resumed run keeps its first ones."""
    import mlflow

    if not {"MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID"} & os.environ.keys():
        mlflow.set_experiment(PROJECT)
    run = mlflow.start_run(run_id=known) if known else mlflow.start_run(run_name=config.run.name)
    if not known:
        mlflow.log_params({key: str(value)[:_LONGEST_PARAM] for key, value in flat(_plain(config)).items()})
    return Tracker(
        str(run.info.run_id),
        lambda values, step: mlflow.log_metrics(values, step=step),
        lambda table, _: mlflow.log_table(dict(table), f"{SAMPLES}.json"),  # appends to the table that is there
        lambda failed: mlflow.end_run("FAILED" if failed else "FINISHED"),
    )


def to_trackio(config: RunConfig, known: str | None, last_step: int) -> Tracker:
    """Start Trackio, which identifies runs by name."""
    import trackio

    name = known or config.run.name
    trackio.init(PROJECT, name=name, config=flat(_plain(config)), resume="allow" if known else "never")

    def log_table(table: Table, step: int) -> None:
        from pandas import DataFrame  # which trackio needs itself

        trackio.log({SAMPLES: trackio.Table(dataframe=DataFrame(table))}, step=step)

    return Tracker(name, lambda values, step: trackio.log(values, step=step), log_table, lambda _: trackio.finish())


def to_tensorboard(config: RunConfig, known: str | None, last_step: int) -> Tracker:
    """Write TensorBoard event files (extra `tensorboard`). Purges rows of an earlier attempt after `last_step`."""
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(config.run_dir / "tensorboard"), purge_step=last_step + 1)

    def log(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    def log_texts(table: Table, step: int) -> None:
        for number, (prompt, text) in enumerate(zip(table["prompt"], table["text"], strict=True)):
            as_written = "".join(f"    {line}\n" for line in f"{prompt}{text}".split("\n"))  # not as Markdown
            writer.add_text(f"{SAMPLES}/{number}", as_written, step)

    return Tracker("", log, log_texts, lambda _: writer.close())


# Each starts a tracker run, or resumes the one with id `known`. `last_step`: the step resumed from, else 0.
TRACKERS: dict[str, Callable[[RunConfig, str | None, int], Tracker]] = {
    "wandb": to_wandb, "mlflow": to_mlflow, "trackio": to_trackio, "tensorboard": to_tensorboard
}  # fmt: skip
_ADVICE = {
    "wandb": "log in with `wandb login`, or set WANDB_MODE=offline",
    "mlflow": "set MLFLOW_TRACKING_URI to a server or a database that it can reach",
    "trackio": "is its folder writable, or its Space there?",
    "tensorboard": "is its folder, tensorboard in that of the run, writable?",
}


class TrackerSink:
    """A tracker that cannot stop a run. It may fail before a new run's first step; later it is reported and dropped."""

    def __init__(self, name: str, config: RunConfig, *, last_step: int, say: Callable[[str], None]) -> None:
        """`last_step`: the step resumed from, 0 for a new run. `metrics.jsonl` must be as an earlier attempt left it.

        Raises `UserError` if the tracker of a new run cannot be started.
        """
        self._name, self._say = name, say
        ids = config.run_dir / IDS
        known = _read(ids).get(name) if last_step else None
        self._sent = 0
        self._tracker: Tracker | None = None
        try:
            self._tracker = TRACKERS[name](config, known, last_step)
        except Exception as error:
            if not last_step:
                what = f"log.to names {name}, which does not start: {first_line(error)}"
                raise UserError(what, fix=_ADVICE[name], more=f"or leave {name} out of log.to") from error
            self._let_go(error)
            return
        if known == self._tracker.id:
            self._sent = last_logged_step(config)
        try:
            if self._tracker.id:
                replace(ids, json.dumps({**_read(ids), name: self._tracker.id}).encode() + b"\n")
        except OSError as error:
            say(f"{ids} cannot be written: {error.strerror or error}; a resume begins a new {name} run")

    def write(self, row: Mapping[str, Any]) -> None:
        values = {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}
        if row["step"] > self._sent:
            self._tell(lambda tracker: tracker.log(values, row["step"]))

    def samples(self, samples: Sequence[Sample]) -> None:
        """Send the samples of a step, unless an earlier attempt has."""
        step = samples[0].step
        table = {name: [getattr(sample, name) for sample in samples] for name in ("step", "prompt", "text")}
        if step > self._sent:
            self._tell(lambda tracker: tracker.table(table, step))

    def close(self, *, failed: bool = False) -> None:
        self._tell(lambda tracker: tracker.finish(failed))

    def _tell(self, tell: Callable[[Tracker], object]) -> None:
        if self._tracker:
            try:
                tell(self._tracker)
            except Exception as error:
                self._let_go(error)

    def _let_go(self, error: Exception) -> None:
        self._tracker = None
        self._say(f"{self._name} failed: {first_line(error)}; the run goes on without it")


def _read(ids: Path) -> dict[str, str]:
    return json.loads(ids.read_text(encoding="utf-8")) if ids.exists() else {}


def _plain(config: RunConfig) -> dict[str, Any]:
    return config.model_dump(mode="json", by_alias=True)


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
