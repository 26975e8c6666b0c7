"""What is seen of a rehearsal, from outside: memory by phase, host syncs by line, launches, compiles, collectives."""

import ctypes
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch

from fivefold.rehearsal.request import Phase, Request, Seen

LAUNCHES, SYNCS, COPIES_IN, COPIES_OUT = range(4)


@dataclass
class Watch:
    request: Request
    phases: list[Phase] = field(default_factory=list)
    name: str = ""
    steps: int = 0
    job: Any = None

    @classmethod
    def of(cls, request: Request) -> "Watch":
        return cls(request)

    @contextmanager
    def watching(self) -> Iterator[None]:
        from fivefold.training import run
        from fivefold.training.checkpoints import CheckpointManager

        with ExitStack() as stack:
            for owner, name, phase in (
                (run, "train_step", None), (run.Trainer, "_evaluate", "evaluation"), (run.Trainer, "_check", "checks"),
                (CheckpointManager, "save", "save"),
            ):
                stack.enter_context(patch.object(owner, name, self._in_phase(getattr(owner, name), phase)))
            yield

    def _in_phase(self, function: Any, phase: str | None) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.steps += phase is None
            with self.phase(phase or f"step {self.steps}"):
                return function(*args, **kwargs)

        return run

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        driver = ctypes.CDLL(None)
        count = driver.rehearsal_count
        count.restype = ctypes.c_long
        before = [count(i) for i in range(4)]
        began = time.process_time()
        torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            s = torch.cuda.memory_stats()
            done = [count(i) - was for i, was in enumerate(before)]
            self.phases.append(Phase(name=name, allocated=s["allocated_bytes.all.peak"], reserved=s["reserved_bytes.all.peak"], after=s["allocated_bytes.all.current"], launches=done[0], syncs=done[1], compiles=0, seconds=time.process_time() - began))
            print(self.phases[-1], file=__import__("sys").stderr, flush=True)

    def built(self, job: Any) -> None:
        self.job = job

    def is_out_of_memory(self, error: Exception) -> bool:
        return isinstance(error, torch.OutOfMemoryError)

    def seen(self, failed: str = "") -> Seen:
        return Seen(rank=self.request.rank, phases=tuple(self.phases), failed=failed)
