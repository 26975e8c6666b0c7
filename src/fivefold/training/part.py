"""A training run on one rank while it lives, and the parts that it is made of.

`run.py` builds a `LiveRun` and calls its parts at the moments of a step; what a run does besides the steps is in its
parts. `parts.py` has the list of them, and users add their own: `train.parts` of the run file.
"""

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.save import Write, write_together
from fivefold.config import RunConfig
from fivefold.core.best import Best
from fivefold.core.errors import UserError
from fivefold.core.named_code import NamedCode
from fivefold.data.batch import MicroBatch
from fivefold.data.prepare import PreparedData
from fivefold.data.rows import PackedRows
from fivefold.hardware.chip import bf16_peak
from fivefold.hardware.cluster import Cluster
from fivefold.launch.world import World
from fivefold.models.flops import Costs
from fivefold.models.sources import TensorSource
from fivefold.parallel import plain
from fivefold.parallel.state import state_of
from fivefold.training import preflight, record, schedule
from fivefold.training.display import Line
from fivefold.training.inputs import share_of
from fivefold.training.model import load_source
from fivefold.training.reference import ObjectiveSpecs
from fivefold.training.run_log import RunLog
from fivefold.training.step import StepResult


@dataclass
class RunProgress:
    """How far a run has come. `step`: steps done. `tokens_seen`: input tokens without padding. `skipped`: steps without
    an update, `in_a_row` of them up to the last one. `best`: the best validations. `last_eval`: loss of the last
    evaluation of this start."""

    step: int = 0
    tokens_seen: int = 0
    skipped: int = 0
    in_a_row: int = 0
    best: Best = field(default_factory=Best)
    last_eval: float | None = None

    def counters(self) -> dict[str, int]:
        return {"tokens_seen": self.tokens_seen, "skipped": self.skipped, "in_a_row": self.in_a_row}

    def load(self, state: Mapping[str, Any]) -> None:
        for name in self.counters():
            setattr(self, name, state[name])


@dataclass(frozen=True)
class Resumed:
    """The point a run resumes from: steps done, and the counters in `state`. `where`: the checkpoint; None: a new run.

    `warmup_steps`: that of the schedule so far. `damages`: one message per newer checkpoint skipped as damaged.
    `unfinished`: of a step that no disk has, its `row` of metrics, and whether it `owes` what follows a step.
    """

    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None
    damages: tuple[str, ...] = ()
    warmup_steps: int | None = None
    unfinished: Mapping[str, Any] | None = None


@dataclass
class LiveRun:
    """One training run on one rank, while it trains."""

    config: RunConfig
    world: World  # `world.rank` of `world.size`, and the device
    data: PreparedData
    model: Any  # the parallelized model; `ff.gather`, `ff.scatter` and `ff.clip_grad_norm_` take it
    optimizer: torch.optim.Optimizer
    log: RunLog  # its outputs, which the first rank alone has
    costs: Costs  # FLOPs, and the number of parameters
    total_steps: int
    specs: ObjectiveSpecs  # what it minimises
    parts: Sequence["Part"]  # called in this order at the moments of a step
    progress: RunProgress = field(default_factory=RunProgress)  # its counters
    resumed: Resumed = field(default_factory=Resumed)  # the checkpoint that it goes on from

    @property
    def step(self) -> int:
        """Steps done."""
        return self.progress.step

    @property
    def data_rank(self) -> int:
        """The number of the rows that this rank reads: ranks of tp, cp and pp share it, and their batches are equal."""
        return state_of(self.model).placement.data_rank

    @property
    def why_stopped(self) -> str:
        """The reason why a part ends the run before all steps are done; "" if there is none."""
        whys = (part.why_over(self) for part in self.parts) if self.step < self.total_steps else iter(())
        return next(filter(None, whys), "")

    @property
    def is_over(self) -> bool:
        """True after the last step, and after the step at which the run stops early."""
        return self.step >= self.total_steps or bool(self.why_stopped)

    def due(self, every: int) -> bool:
        """True every `every` steps and at the last one; 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.total_steps)

    def state(self) -> dict[str, Any]:
        """State of a checkpoint beside the tensors: counters, the place in the data, and the state of the parts."""
        place = self.step * self.config.train.global_batch_size
        of_parts = {part.name: state for part in self.parts if (state := part.state())}
        return {
            **self.progress.counters(),
            **self.data.train.position(place),
            **({"parts": of_parts} if of_parts else {}),
        }

    # ---- its rows ----------------------------------------------------------------------------------------------------

    def batch(self, step: int) -> list[MicroBatch]:
        """This rank's micro batches of a step, counted from 0."""
        size, balance = self.config.train.global_batch_size, self.config.data.balance_rows
        rows = self.data.train.batch(step, global_batch_size=size, balance=balance, **share_of(self.model))
        teacher = self.specs.teacher
        return rows if teacher is None else [teacher.beside(row) for row in rows]

    def batches(self) -> Generator[tuple[list[MicroBatch], float]]:
        """Yield this rank's micro batches from the current step on, with the seconds spent waiting for them."""
        with ThreadPoolExecutor(1) as ahead:
            after: Future[list[MicroBatch]] = ahead.submit(self.batch, self.step)
            for step in range(self.step, self.total_steps):
                asked = time.perf_counter()
                batch = after.result()
                waited = time.perf_counter() - asked
                if step + 1 < self.total_steps:
                    after = ahead.submit(self.batch, step + 1)
                yield batch, waited

    def evaluation(self, rows: PackedRows) -> Iterator[MicroBatch]:
        """This rank's micro batches of an evaluation."""
        return rows.sequential(max_tokens=self.config.eval.max_tokens, **share_of(self.model))

    # ---- its rates ---------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> dict[str, Any]:
        """The options of `schedule.learning_rate`."""
        scheduler = self.config.scheduler
        return {
            "name": scheduler.name,
            "peak": self.config.optimizer.learning_rate,
            "warmup_steps": int(scheduler.warmup_steps),
            "total_steps": self.total_steps,
            "min_lr_ratio": scheduler.min_lr_ratio,
        }

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return schedule.learning_rate(step, **self.schedule)

    @cached_property
    def peak_tflops(self) -> float | None:
        """The matmul rate of this device's data sheet; None if it is not known."""
        return peak_tflops(torch.device(self.world.device), self.config.precision.compute)

    @cached_property
    def measured_tflops(self) -> float | None:
        """The matmul rate of a worker of this CPU, if a calibration file has it."""
        hardware = self.config.hardware if self.world.device == "cpu" else ""
        return measured_tflops(hardware, self.config.precision.compute, self.world.local_size)

    # ---- its metrics -------------------------------------------------------------------------------------------------

    def row(self, result: StepResult, rate: float, *, seconds: float, waited: float) -> dict[str, Any]:
        """The row in `metrics.jsonl` of the step just done, which took `seconds`, `waited` of them for its rows."""
        tokens_per_second = result.tokens / seconds
        flops_done = self.costs.per_token * result.tokens + self.costs.per_squared_length * result.squared_lengths
        tflops = flops_done / seconds / self.world.size / 1e12
        peak, measured = self.peak_tflops, self.measured_tflops
        return {
            "step": self.step,
            "train/loss": finite(result.loss),
            "train/grad_norm": finite(result.grad_norm),
            "train/learning_rate": rate,
            "train/tokens_seen": self.progress.tokens_seen,
            "train/skipped_steps": self.progress.skipped,
            "perf/tokens_per_second": tokens_per_second,
            "perf/tokens_per_second_per_device": tokens_per_second / self.world.size,
            "perf/tflops_per_device": tflops,
            "perf/mfu_pct": 100 * tflops / peak if peak else None,
            **({"perf/matmul_pct": 100 * tflops / measured} if measured else {}),
            "perf/step_seconds": seconds,
            "perf/data_wait_pct": 100 * waited / seconds,
            "perf/elapsed_seconds": self.log.seconds_before + time.monotonic() - self.log.began,
            **result.balance.metrics(),
            **{name: finite(number) for name, number in result.metrics.items()},
        }


class Part:
    """One concern of a run: override the moments that it needs. Every rank has the same parts, and calls them in the
    same order, so a part may use collectives; what it decides must be the same on every rank.

    A part that changes neither the model nor the optimizer, nor draws from torch's global random numbers, leaves the
    bits of a run as they are.
    """

    @property
    def name(self) -> str:
        """Key of its state in checkpoints."""
        return type(self).__name__

    def build(self, run: LiveRun) -> None:
        """Called once model and optimizer are built, before a checkpoint is loaded into them."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Called with what `state` returned when the checkpoint was saved, if it has that."""

    def begin(self, run: LiveRun) -> None:
        """Called before the first step of this start, with `run.step` steps done."""

    def lines(self, run: LiveRun) -> Sequence[Line]:
        """(label, text) lines of the header; called on the first rank alone."""
        return ()

    def running(self, run: LiveRun) -> AbstractContextManager[object]:
        """A context around all steps of this start."""
        return nullcontext()

    # ---- of each step, in this order ---------------------------------------------------------------------------------

    def before_step(self, run: LiveRun, batch: Sequence[MicroBatch]) -> None:
        """Called before a step; `run.step` steps are done. `batch`: this rank's micro batches of the step."""

    def in_step(self, run: LiveRun) -> AbstractContextManager[object]:
        """A context around forward, backward and update."""
        return nullcontext()

    def try_memory(self, run: LiveRun, more: int) -> None:
        """Called in a trial before the first step: allocate what the part will need. `more`: bytes of optimizer state
        that this rank has yet to allocate. Changes nothing."""

    def interrupts(self, run: LiveRun) -> bool:
        """True if this rank asks all ranks to stop after the next step, saved, to go on another time."""
        return False

    def before_update(self, run: LiveRun) -> None:
        """Called once gradients are summed over ranks, before anything changes that a checkpoint has."""

    def after_update(self, run: LiveRun, result: StepResult) -> None:
        """Called when `run.step` counts the step."""

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        """Called with the step's row of metrics, which may be added to: `row["mine/number"] = 1.0`."""

    def why_over(self, run: LiveRun) -> str:
        """The reason why the run ends after the step just done, "" to go on. The same on every rank."""
        return ""

    def saves(self, run: LiveRun) -> bool:
        """True if the step just done is to be saved, whatever `checkpoint.every` says. The same on every rank."""
        return False

    def at_save(self, run: LiveRun) -> None:
        """Called before a checkpoint is written, and `state` after it."""

    def leave(self, run: LiveRun) -> None:
        """Called last of each step but the run's last, after its save if it has one; may raise, to end the run."""

    def finish_step(self, run: LiveRun, row: dict[str, Any], *, owes: bool) -> None:
        """Called in place of all these for a step that another start has done, but not written: its `row` is known.
        `owes`: `after_step` was not called for it."""
        if owes:
            self.after_step(run, row)

    # ---- at the end --------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[str, Any]:
        """State of this part in a checkpoint: JSON, the same on every rank."""
        return {}

    def at_end(self, run: LiveRun) -> None:
        """Called after the last step; not if an error ends the run, or a signal."""


def finite(number: float) -> float | None:
    """Map NaN and infinities, which JSON does not have, to None."""
    return number if math.isfinite(number) else None


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's dense bf16 peak in TFLOP/s; None if unknown (every CPU, other precisions)."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return bf16_peak(torch.cuda.get_device_name(device))


def measured_tflops(hardware: str, precision: str, workers: int) -> float | None:
    """TFLOP/s of large matmuls on the cores of this machine that each of its `workers` has, by the file that `fivefold
    calibrate` wrote; None without a file of a CPU. `hardware`: `layout.hardware` of the run."""
    try:
        cluster = Cluster.parse(hardware) if hardware else None
    except UserError:  # moved since the run began: this number is not worth ending it
        cluster = None
    if cluster is None or not cluster.chip.is_host or cluster.chip.is_guess:
        return None
    of_core = cluster.chip.flops_per_second(precision)
    return None if of_core is None else of_core * (cluster.node.cores or workers) / workers / 1e12


# ---- parts of the user's own -----------------------------------------------------------------------------------------

_MORE = "fivefold docs howto/parts"
_MOMENTS = [name for name, value in vars(Part).items() if callable(value)]


def own_parts(config: RunConfig) -> list[Part]:
    """Make the parts that a run file names; their files are run. Raises `UserError`."""
    parts = [OwnPart(NamedCode.read(text, key), key) for key, text in config.code_of("train", "parts").items()]
    names = [part.name for part in parts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"train.parts has two parts called {twice[0]}", fix="give each a `name` of its own", more=_MORE)
    return [*parts]


class OwnPart(Part):
    """Passes each moment on to a part of the user's own.

    Errors name the line of the file. What the first rank's part decides holds for all ranks, and numbers that it adds
    to a row are numbers that files and trackers take. `key`, `digest`: of its file, as it was run.
    """

    def __init__(self, code: NamedCode, key: str) -> None:
        """Raises `UserError` if the file does not make a part."""
        self._code, self.key, self.digest, self._why, self._saves = code, key, code.digest, "", False
        with self._named():
            self._part = code.load()()
        if not isinstance(self._part, Part):
            what = f"{key}: {code.name} of {code.path} makes a {type(self._part).__name__}, which is no part of a run"
            raise UserError(what, fix=f"derive it: class {code.name}(fivefold.Part)", more=_MORE)
        for moment in set(_MOMENTS) - set(vars(OwnPart)):
            setattr(self, moment, partial(self._pass_on, moment))

    @property
    def name(self) -> str:
        return str(self._part.name)

    def _pass_on(self, moment: str, *args: Any, **options: Any) -> Any:
        with self._named():
            return getattr(self._part, moment)(*args, **options)

    @contextmanager
    def _named(self) -> Any:
        """Give an error of the user's code the line of its file."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit(0) would pass for the end of the run
            raise self._code.error(error, more=_MORE) from error

    def begin(self, run: LiveRun) -> None:
        self._pass_on("begin", run)
        self.state()  # one that cannot be saved is refused now
        self._decide(run)

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        self._add("after_step", run, row)

    def finish_step(self, run: LiveRun, row: dict[str, Any], *, owes: bool) -> None:
        self._add("finish_step", run, row, owes=owes)

    def _add(self, moment: str, run: LiveRun, row: dict[str, Any], **options: bool) -> None:
        """Let the part add numbers to the row, and decide."""
        before = dict(row)
        self._pass_on(moment, run, row, **options)
        for name in row:
            row[name] = row[name] if row[name] is before.get(name) else self._number(name, row[name])
        if changed := [name for name in before if name not in row or row[name] is not before[name]]:
            what = f"{self.key}: {self.name} changes {changed[0]} of the row, which the run has measured"
            raise UserError(what, fix=f"add a number of another name: mine/{changed[0]}", more=_MORE)
        self._decide(run)

    def _decide(self, run: LiveRun) -> None:
        """Ask the part once after each step, the first rank's for all."""
        if type(self._part).why_over is Part.why_over and type(self._part).saves is Part.saves:
            return
        mine = [str(self._pass_on("why_over", run) or ""), bool(self._pass_on("saves", run))]
        self._why, self._saves = plain.of_first(mine)

    def why_over(self, run: LiveRun) -> str:
        return self._why

    def saves(self, run: LiveRun) -> bool:
        return self._saves

    def state(self) -> Mapping[str, Any]:
        state = self._pass_on("state")
        with self._named():
            return dict(json.loads(json.dumps(state, allow_nan=False)))

    def _number(self, name: Any, value: Any) -> float | int | None:
        """A number of a row as JSON has it; NaN and infinities are None."""
        try:
            number = value if isinstance(value, bool | int) else float(value)
        except (TypeError, ValueError) as error:
            what = f"{self.key}: {self.name} adds {name} to the row, a {type(value).__name__}, which is no number"
            raise UserError(what, fix="add numbers", more=_MORE) from error
        return finite(number)


# ---- what a rehearsal replaces ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Environment:
    """Functions with which a run reaches its surroundings. The defaults are those of a real run."""

    load_source: Callable[..., TensorSource | None] = load_source
    resume: Callable[..., Resumed] = lambda manager, config: manager.resume(config)
    write: Write = write_together  # a checkpoint
    check_disk: Callable[..., str] = preflight.check_disk
    timing: Callable[..., AbstractContextManager[None]] = record.timing  # of the slots of a pipeline
    read: Callable[[Tensor], list[float]] = Tensor.tolist  # the summed loss and squared norm of a step
