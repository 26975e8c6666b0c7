"""A trial of a run's memory peaks before its first step, so that memory runs out then and not hours later.

It runs forward and backward of a step's rows while memory as large as the optimizer state, which exists from the second
step on, is allocated; a micro batch of an evaluation; and the allocation for a save. Everything changed is restored:
gradients, random state, buffers, router counts. No parameter changes, and no row is consumed.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.launch.world import World
from fivefold.parallel.state import state_of
from fivefold.training import preflight
from fivefold.training.job import Job
from fivefold.training.step import all_reduce_sum, gradients, mean_loss, squared_norm

ROUNDS = 2  # micro batches of a step without a pipeline: the second one runs while the first one's gradients exist


def pays(config: RunConfig, world: World) -> bool:
    """Decide `memory.trial: auto`: True on a GPU, where memory is short and a step is quick."""
    return world.device != "cpu" if config.memory.trial == "auto" else config.memory.trial


def run(job: Job) -> None:
    """Try the memory of a run before its first step; every rank calls this."""
    with _put_back(job.model), ExitStack() as until_then:
        until_then.callback(job.optimizer.zero_grad, set_to_none=True)
        saved, on_device = (0, 0) if job.optimizer.state else preflight.optimizer_bytes(job.model, job.config)
        kept = torch.full((on_device,), 1, dtype=torch.uint8, device=job.world.device)
        _step(job)
        job.optimizer.zero_grad(set_to_none=True)
        if job.config.eval.every and job.data.validation:
            mean_loss(job.model, islice(job.evaluation(job.data.validation), 1), job.loss)
        job.keeper.try_memory(saved)
        del kept
    if job.world.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # blocks of the trial's sizes; the run allocates its own


def _step(job: Job) -> None:
    """Run the next step without its update: forward, backward and the norm."""
    state, batch = state_of(job.model), job.batch(job.step)
    rounds = batch[:ROUNDS] if state.placement.stages.count == 1 else batch  # a pipeline has many in flight
    scale = 1.0 / max(sum(round_.targets for round_ in rounds), 1)
    gradients(job.model, rounds, torch.tensor(scale, dtype=torch.float64, device=job.world.device), loss=job.loss)
    state.balance.end_step()
    all_reduce_sum(squared_norm(job.model))


@contextmanager
def _put_back(model: Any) -> Iterator[None]:
    """Restore random state, buffers and router counts at the end."""
    balance = state_of(model).balance
    counted, buffers = dict(vars(balance)), {name: buffer.clone() for name, buffer in model.named_buffers()}
    devices = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else []
    with torch.random.fork_rng(devices):
        yield
    vars(balance).update(counted)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
