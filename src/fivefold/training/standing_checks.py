"""The standing checks of a run, and the search for stragglers, as parts of it.

A straggler is a device that is too hot, or shared, or broken. In a step all ranks wait for the slowest one, so no time
of a step tells which that is. So each rank multiplies the same matrices alone, a few milliseconds long. A rank that is
slow in several checks in a row is named.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median_low
from typing import Any

import torch

from fivefold.core.text import listed
from fivefold.data.batch import MicroBatch
from fivefold.launch.failure import Suspected
from fivefold.training.checkpoints import Checkpoints
from fivefold.training.checks import Update, fail_on, finite, gather, ledger, moved, observing, rates, replicas
from fivefold.training.optimizers import rule_for
from fivefold.training.part import LiveRun, Part
from fivefold.training.step import StepResult


class StandingChecks(Part):
    """Checks what comes in, and of this start the first step, every `train.check_every`, those saved on time and the
    last. What is saved between them is checked too. Any finding ends the run, on every rank."""

    def __init__(self) -> None:
        self.update: Update | None = None  # of the step under way or just done, if it is checked
        self._batch: Sequence[MicroBatch] = ()
        self._result: StepResult | None = None
        self._passed: int | None = None  # the last step of this start whose checks passed

    def before_step(self, run: LiveRun, batch: Sequence[MicroBatch]) -> None:
        self._batch = batch
        if run.step == run.resumed.step and run.config.train.check_every > 0:
            fail_on(replicas(run.model, run.optimizer), step=run.step, passed=None, came_in=True)

    @contextmanager
    def in_step(self, run: LiveRun) -> Iterator[None]:
        self.update = None
        if not self._is_due(run):
            yield
            return
        with observing(run.model, run.optimizer) as self.update:
            yield

    def _is_due(self, run: LiveRun) -> bool:
        every, saved, step = run.config.train.check_every, run.config.checkpoint.every, run.step + 1
        is_saved = saved > 0 and step % saved == 0
        return every > 0 and (self._passed is None or step % every == 0 or is_saved or step == run.total_steps)

    def after_update(self, run: LiveRun, result: StepResult) -> None:
        self._result = result

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        if self.update is not None and self._result is not None:
            self.check(run, self.update, self._result)

    def check(self, run: LiveRun, update: Update, result: StepResult) -> None:
        """Check the step just done. Raises `RunFailed`, on every rank, for any finding."""
        model, optimizer, step = run.model, run.optimizer, run.step - 1
        findings = replicas(model, optimizer) + finite(model, optimizer)
        findings += ledger(
            model, self._batch, run.data.train, step=step, balance=run.config.data.balance_rows,
            global_batch_size=run.config.train.global_batch_size,
        )  # fmt: skip
        if not result.skipped:
            options, rate = run.config.optimizer, run.learning_rate(step)
            updates = None if options.is_own else run.step - run.progress.skipped  # what it counts is its own affair
            findings += moved(model, optimizer, update, rule=rule_for(options))
            findings += rates(model, optimizer, rate, updates=updates)
        fail_on(findings, step=run.step, passed=self._passed, has_parts=bool(run.config.train.parts))
        self._passed = run.step

    def at_save(self, run: LiveRun) -> None:
        if self.update is None and run.config.train.check_every > 0:
            found = replicas(run.model, run.optimizer) + finite(run.model, run.optimizer)
            fail_on(found, step=run.step, passed=self._passed, has_parts=bool(run.config.train.parts))


# ---- stragglers ------------------------------------------------------------------------------------------------------

SLOW = 2.0  # times the median of all ranks; of two ranks, the faster one
IN_A_ROW = 3  # checks
_TRIES = 5  # the fastest counts: another process may interrupt one
_SIZE = {"cpu": 256, "cuda": 4096}


class Pace:
    """The pace of the ranks, as the checks of a start have seen it."""

    def __init__(self) -> None:
        self._slow: dict[int, int] = {}  # rank -> checks in a row

    def check(self, device: torch.device) -> list[str]:
        """Measure all ranks together. Returns a text for each new straggler, the same on every rank."""
        seconds = gather(torch.tensor([_seconds(device)], dtype=torch.float64, device=device)).flatten().tolist()
        return self.see(seconds)

    def see(self, seconds: list[float]) -> list[str]:
        """As `check`, from the seconds of each rank."""
        usual = median_low(seconds)
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, took in enumerate(seconds) if took > SLOW * usual > 0}
        new = [rank for rank, times in self._slow.items() if times == IN_A_ROW]
        return [f"rank {rank} computes {seconds[rank] / usual:.1f} times as slowly as the usual one" for rank in new]

    @property
    def stragglers(self) -> list[int]:
        return [rank for rank, times in self._slow.items() if times >= IN_A_ROW]


def _seconds(device: torch.device) -> float:
    """The seconds of a product of matrices on this rank."""
    size, dtype = _SIZE.get(device.type, 256), torch.float32 if device.type == "cpu" else torch.bfloat16
    x, found = torch.ones(size, size, device=device, dtype=dtype), []
    for _ in range(_TRIES):
        began = time.perf_counter()
        torch.mm(x, x)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)


class Stragglers(Part):
    """Names ranks that compute slowly, after each checked step. With `train.leave_out` the run is saved and ends with
    their names, if the other nodes suffice."""

    def __init__(self, checks: StandingChecks, checkpoints: Checkpoints) -> None:
        self._checks, self._checkpoints, self._pace, self._leaves = checks, checkpoints, Pace(), False

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        self._leaves = False
        if self._checks.update is None:
            return
        for told in self._pace.check(torch.device(run.world.device)):
            run.log.display.note(f"step {run.step}: {told}")
            run.log.happened("straggler", run.step, told)
        self._leaves = bool(self._pace.stragglers) and may_leave_out(run)

    def saves(self, run: LiveRun) -> bool:
        return self._leaves

    def leave(self, run: LiveRun) -> None:
        """Raise `Suspected` on every rank, once the step is saved."""
        if not self._leaves:
            return
        self._checkpoints.finish()
        slow = self._pace.stragglers
        raise Suspected(
            f"rank {listed(slow, 8)} computes more than {SLOW:g} times as slowly as the usual one",
            fix="look at the temperature and the clocks of its device, and at what else uses it",
            ranks=slow,
        )


def may_leave_out(run: LiveRun) -> bool:
    """True if nodes may be left out, and fewer of them suffice."""
    least, _ = run.config.train.node_range or (run.world.nodes, 0)
    return run.config.train.leave_out and run.world.nodes > least
