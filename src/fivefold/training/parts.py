"""The parts of every run, in the order in which they are called, and those too small for a file of their own."""

import math
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fivefold import checkpoint
from fivefold.config import RunConfig
from fivefold.core.errors import RunFailed
from fivefold.core.interrupts import Stopped, StopRequest
from fivefold.core.kept_steps import MemoryOfNode
from fivefold.data.batch import MicroBatch
from fivefold.data.prepare import PreparedData
from fivefold.parallel.dropout.runtime import Dropout
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.parallel.state import state_of
from fivefold.training import header
from fivefold.training.checkpoints import Checkpoints
from fivefold.training.evaluation import BestSteps, Evaluation, Samples
from fivefold.training.keeping import HeldStep, LastStep
from fivefold.training.memory import PeakMemory, Trial
from fivefold.training.part import Environment, LiveRun, Part, own_parts
from fivefold.training.standing_checks import StandingChecks, Stragglers
from fivefold.training.step import StepResult

MAX_SKIPPED = 3  # steps in a row without a finite loss and gradient before the run is stopped


def parts_of(
    config: RunConfig, model: Any, data: PreparedData, memory: PeakMemory, environment: Environment,
    of_node: MemoryOfNode | None = None,
) -> list[Part]:  # fmt: skip
    """The parts of a run, in the order in which they are called at each moment. `model`: on the meta device. `of_node`:
    see `train`. Raises `UserError`."""
    checks, checkpoints = StandingChecks(), Checkpoints(environment, of_node)
    kept = StepInMemory(checkpoints)
    return [
        OuterUpdates(),  # replicas meet before anything looks at the weights of a step
        DropoutSteps(),
        SlotTimes(environment),
        BlocksNotCompiled(),
        kept,  # as soon as the step is whole
        Evaluation(),
        BestSteps(),
        *own_parts(config),  # may add to the row, in which the evaluation is
        RowInMemory(kept),
        MetricsRows(memory),
        FiniteSteps(),  # ends the run once the row is written
        checks,  # within the times of the slots
        Samples(config, model, data),
        Stragglers(checks, checkpoints),
        checkpoints,  # after all that looks at the step: what is saved has passed
        HuggingFaceFolder(),  # of the last checkpoint
        Interrupts(checkpoints),  # ends the run once the step is saved
        Trial(memory),
    ]


class OuterUpdates(Part):
    """Replicas that train apart meet every `outer.every` steps, and after the last."""

    def build(self, run: LiveRun) -> None:
        state_of(run.model).live(OuterSteps).begin(run.model, **run.config.outer.model_dump(exclude={"every"}))

    def begin(self, run: LiveRun) -> None:
        state_of(run.model).live(OuterSteps).have_met = self._is_due(run)

    def after_update(self, run: LiveRun, result: StepResult) -> None:
        outer = state_of(run.model).live(OuterSteps)
        outer.have_met = self._is_due(run)
        if outer.have_met:
            outer.step()

    def _is_due(self, run: LiveRun) -> bool:
        outer = state_of(run.model).live(OuterSteps)
        return outer.is_due(run.step) or (outer.is_on and run.step == run.total_steps)


class DropoutSteps(Part):
    """Masks of dropout are those of the step, whichever start of the run does it."""

    def before_step(self, run: LiveRun, batch: Sequence[MicroBatch]) -> None:
        state_of(run.model).live(Dropout).step = run.step


class SlotTimes(Part):
    """Times the slots of a pipeline in one step of a start, for the report."""

    def __init__(self, environment: Environment) -> None:
        self._timing = environment.timing

    def in_step(self, run: LiveRun) -> AbstractContextManager[None]:
        step = run.step + 1
        return self._timing(run.model, run.config, step=step, of_start=step - run.resumed.step)


class BlocksNotCompiled(Part):
    """Reports once each block of this rank that Dynamo failed to compile."""

    def after_update(self, run: LiveRun, result: StepResult) -> None:
        for line in state_of(run.model).live(Compiled).news():
            run.log.display.note(f"step {run.step}: {line}")


class StepInMemory(Part):
    """Holds the last whole step in memory, which is kept if other nodes go."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints, self._last, self._is_on = checkpoints, LastStep(), False

    def begin(self, run: LiveRun) -> None:
        self._is_on = self._checkpoints.manager.can_keep
        if self._is_on:
            self._last = LastStep(partial(self._keep, run), device=run.world.device)

    def _keep(self, run: LiveRun, held: HeldStep, after: "torch.cuda.Event | None") -> None:
        self._checkpoints.manager.keep(run.config, held, ranks=run.world.local_size, after=after)

    def running(self, run: LiveRun) -> AbstractContextManager[None]:
        flag = self._checkpoints.manager.memory.here / f"ready-{run.world.rank}"
        return self._last.kept_if_others_go(run.world.folder, flag)

    def before_update(self, run: LiveRun) -> None:
        self._last.changes()

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        if self._is_on:
            self._last.stands(_held(run, row, owes=True))

    def finish_step(self, run: LiveRun, row: dict[str, Any], *, owes: bool) -> None:
        pass

    def hold(self, run: LiveRun, row: Mapping[str, Any], *, owes: bool) -> None:
        """Hold more that is known of a step which is held already."""
        if self._is_on:
            self._last.holds(_held(run, row, owes=owes))


def _held(run: LiveRun, row: Mapping[str, Any], *, owes: bool) -> HeldStep:
    return HeldStep(run.step, run.state(), run.progress.best, dict(row), owes)


class RowInMemory(Part):
    """Adds what follows a step to the one that is held: its evaluation, and its row as it will be written."""

    def __init__(self, kept: StepInMemory) -> None:
        self._kept = kept

    def begin(self, run: LiveRun) -> None:
        if unfinished := run.resumed.unfinished:
            self._kept.hold(run, unfinished["row"], owes=unfinished["owes"])

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        self._kept.hold(run, row, owes=False)

    def finish_step(self, run: LiveRun, row: dict[str, Any], *, owes: bool) -> None:
        self.after_step(run, row)


class MetricsRows(Part):
    """Writes and shows the rows of metrics, and tells them to callbacks of Python."""

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        self._write(run, row)
        run.log.events.tell("step", row)
        if "eval/loss" in row:
            run.log.events.tell("eval", {key: row[key] for key in row if key == "step" or key.startswith("eval/")})

    def finish_step(self, run: LiveRun, row: dict[str, Any], *, owes: bool) -> None:
        if owes:
            self.after_step(run, row)
        else:
            self._write(run, row)

    def _write(self, run: LiveRun, row: dict[str, Any]) -> None:
        if run.due(run.config.log.every) or any(name.startswith("eval/") for name in row):
            row |= self._memory.over_ranks()
            run.log.row(row)


class FiniteSteps(Part):
    """Counts and reports skipped steps, and ends the run after `MAX_SKIPPED` of them in a row."""

    def __init__(self) -> None:
        self._why = ""  # what the user's own loss did

    def after_update(self, run: LiveRun, result: StepResult) -> None:
        progress, self._why = run.progress, result.why
        progress.in_a_row = progress.in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            return
        progress.skipped += 1
        what = "loss" if not math.isfinite(result.loss) else "gradient"
        why = f" ({result.why})" if result.why else ""
        run.log.display.note(f"step {run.step}: the {what} is not finite{why}; the update was skipped")
        run.log.happened("skipped", run.step, f"the {what} was not finite{why}; the update was skipped")

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        in_a_row = run.progress.in_a_row
        if in_a_row >= MAX_SKIPPED:  # more, if nodes changed before this was asked
            raise RunFailed(
                f"{in_a_row} steps in a row without a finite loss and gradient, the last at step {run.step}"
                f"{self._why and f': {self._why}'}",
                fix="lower optimizer.learning_rate or lengthen scheduler.warmup_steps; "
                f"the rows of step {run.step} are the first to look at",
                more=f"metrics: {run.config.run_dir / 'metrics.jsonl'}",
            )


class HuggingFaceFolder(Part):
    """Exports the last checkpoint, or the best, to `hf` in the run folder, if `checkpoint.export_hf` says so."""

    def at_end(self, run: LiveRun) -> None:
        if run.config.checkpoint.export_hf and run.world.is_first:
            shutil.rmtree(run.config.run_dir / "hf", ignore_errors=True)  # an earlier step's
            best = run.config.checkpoint.export_hf == "best"
            checkpoint.export(run.config.run_dir, run.config.run_dir / "hf", best=best)


class Interrupts(Part):
    """Ends the run after a step, saved, if this process gets a signal, a callback of Python fails, or a save does."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints, self._request, self._is_asked = checkpoints, StopRequest(), False

    def running(self, run: LiveRun) -> AbstractContextManager[None]:
        return self._request.listening()

    def interrupts(self, run: LiveRun) -> bool:
        return self._request.by is not None or run.log.events.stop_asked

    def after_update(self, run: LiveRun, result: StepResult) -> None:
        self._is_asked = result.stop

    def saves(self, run: LiveRun) -> bool:
        return self._is_asked

    def leave(self, run: LiveRun) -> None:
        """Raise `Stopped` on every rank, or the error of a failed save."""
        if not self._is_asked:
            return
        self._checkpoints.finish()
        by = self._request.by or signal.SIGTERM  # another rank's
        header.close(run, f"stopped by {by.name} after step {run.step} of {run.total_steps}, which is saved")
        dist.barrier()  # a rank that exits early would make the launcher end the others
        raise Stopped(by)
