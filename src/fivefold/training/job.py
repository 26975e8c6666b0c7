"""The objects of a training run on one rank, and its rows."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.core.best import Best
from fivefold.core.interrupts import StopRequest
from fivefold.data.batch import MicroBatch
from fivefold.data.prepare import PreparedData
from fivefold.data.rows import PackedRows
from fivefold.launch.world import World
from fivefold.models.flops import Costs
from fivefold.parallel.loss.own import TokenLoss
from fivefold.parallel.state import state_of
from fivefold.training import checks, flops, reference
from fivefold.training.checkpoints import CheckpointManager
from fivefold.training.distillation import Teacher
from fivefold.training.environment import Environment
from fivefold.training.keeping import LastStep
from fivefold.training.peak_memory import PeakMemory
from fivefold.training.run_log import RunLog
from fivefold.training.samples import Samples


@dataclass
class Job:
    """One training run on one rank: the argument of the code that describes, measures or tries it."""

    config: RunConfig
    world: World
    data: PreparedData
    model: Any
    optimizer: torch.optim.Optimizer
    keeper: CheckpointManager
    log: RunLog
    memory: PeakMemory
    costs: Costs
    total_steps: int
    samples: Samples
    goals: reference.ObjectiveSpecs = field(default_factory=reference.ObjectiveSpecs)
    teacher: Teacher | None = None
    loss: TokenLoss | None = None  # of the user's own
    attention: str = ""  # see `kernels.choose`
    environment: Environment = field(default_factory=Environment)
    step: int = 0  # steps done
    start: int = 0  # steps done before this start
    is_in_memory: bool = False  # this start went on from a step that no disk has
    tokens_seen: int = 0
    skipped: int = 0
    in_a_row: int = 0
    last_eval: float | None = None
    best: Best = field(default_factory=Best)
    checked: int | None = None  # the last step of this start whose standing checks passed
    pace: checks.Pace = field(default_factory=checks.Pace)
    began: float = field(default_factory=time.monotonic)  # this start
    stop: StopRequest = field(default_factory=StopRequest)
    last: LastStep = field(default_factory=LastStep)
    prefetch: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def batch(self, step: int) -> list[MicroBatch]:
        """This rank's micro batches of a step, counted from 0."""
        size, balance = self.config.train.global_batch_size, self.config.data.balance_rows
        rows = self.data.train.batch(step, global_batch_size=size, balance=balance, **self._share)
        return rows if self.teacher is None else [self.teacher.beside(row) for row in rows]

    @property
    def _share(self) -> dict[str, Any]:
        """The arguments with which `PackedRows` selects this rank's rows."""
        placement = state_of(self.model).placement
        return {
            "data_rank": placement.data_rank,
            "data_ranks": placement.layout.data_ranks,
            "micro_batch_size": placement.layout.micro_batch_size,
            "row_multiple": placement.layout.row_multiple,
        }

    def evaluation(self, rows: PackedRows) -> Iterator[MicroBatch]:
        """This rank's micro batches of an evaluation."""
        return rows.sequential(max_tokens=self.config.eval.max_tokens, **self._share)

    @cached_property
    def peak_tflops(self) -> float | None:
        return flops.peak_tflops(torch.device(self.world.device), self.config.precision.compute)

    @cached_property
    def measured_tflops(self) -> float | None:
        """The matmul rate of a worker of this CPU, if a calibration file has it."""
        hardware = self.config.hardware if self.world.device == "cpu" else ""
        return flops.measured_tflops(hardware, self.config.precision.compute, self.world.local_size)
