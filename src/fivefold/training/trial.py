"""A trial of a run's memory peaks before its first step, so that memory runs out then and not hours later.

It runs forward and backward of a step's rows while memory as large as the optimizer state, which exists from the second
step on, is allocated; a micro batch of an evaluation; and the allocation for a save. Everything changed is restored:
gradients, random state, buffers, router counts. No parameter changes, and no row is consumed.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.launch.world import World
from fivefold.parallel import passes
from fivefold.parallel.balance.runtime import Balance
from fivefold.parallel.state import state_of
from fivefold.training import header, preflight
from fivefold.training.display import Line
from fivefold.training.out_of_memory import advised
from fivefold.training.part import LiveRun, Part
from fivefold.training.peak_memory import PeakMemory
from fivefold.training.step import all_reduce_sum, inputs_of_step, squared_norm

ROUNDS = 2  # micro batches of a step without a pipeline: the second one runs while the first one's gradients exist


def pays(config: RunConfig, world: World) -> bool:
    """Decide `memory.trial: auto`: True on a GPU, where memory is short and a step is quick."""
    return world.device != "cpu" if config.memory.trial == "auto" else config.memory.trial


class Trial(Part):
    """Tries the memory of a run before its first step."""

    def __init__(self, memory: PeakMemory) -> None:
        self._memory, self._told = memory, ""

    def begin(self, run: LiveRun) -> None:
        if not pays(run.config, run.world) or run.step >= run.total_steps:
            return
        with advised(run.config, run.world, run.data, run):
            try_memory(run)
        peaks = self._memory.over_ranks()
        if run.world.device != "cpu":
            torch.cuda.reset_peak_memory_stats(run.world.device)
        self._told = header.memory_line(run, peaks) if run.world.is_first else ""

    def lines(self, run: LiveRun) -> Sequence[Line]:
        return [("memory", self._told)] if self._told else []


def try_memory(run: LiveRun) -> None:
    """Take the memory of a step, an evaluation and a save; every rank calls this."""
    with _put_back(run.model), ExitStack() as until_then:
        until_then.callback(run.optimizer.zero_grad, set_to_none=True)
        saved, on_device = (0, 0) if run.optimizer.state else preflight.optimizer_bytes(run.model, run.config)
        kept = torch.full((on_device,), 1, dtype=torch.uint8, device=run.world.device)
        _step(run)
        run.optimizer.zero_grad(set_to_none=True)
        for part in run.parts:
            part.try_memory(run, saved)
        del kept
    if run.world.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # blocks of the trial's sizes; the run allocates its own


def _step(run: LiveRun) -> None:
    """Run the next step without its update: forward, backward and the norm."""
    state, batch = state_of(run.model), run.batch(run.step)
    rounds = batch[:ROUNDS] if state.placement.stages.count == 1 else batch  # a pipeline has many in flight
    targets = max(sum(round_.targets for round_ in rounds), 1)
    scale = torch.tensor(1.0 / targets, dtype=torch.float64, device=run.world.device)
    passes.gradients(run.model, inputs_of_step(run.model, rounds, scale, loss=run.specs.loss))
    state.live(Balance).end_step()
    all_reduce_sum(squared_norm(run.model))


@contextmanager
def _put_back(model: Any) -> Iterator[None]:
    """Restore random state, buffers and router counts at the end."""
    balance = state_of(model).live(Balance)
    counted, buffers = dict(vars(balance)), {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else []
    with torch.random.fork_rng(devices):
        yield
    vars(balance).update(counted)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
