"""What a run will need the most memory for, once, before its first step: so that memory runs out then, not in hours.

Forward and backward of a step's rows beside memory as large as the optimizer's state, which a run has from its second
step on; a micro batch of an evaluation; the memory that a save copies to. All that these change is put back: gradients,
random numbers, buffers, what routers have counted. No parameter changes, and no row is used up.
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

ROUNDS = 2  # micro batches of a step without a pipeline: the second one meets the gradients of the first


def pays(config: RunConfig, world: World) -> bool:
    """What `memory.trial: auto` decides: on a GPU, where memory is short and a step is quick."""
    return world.device != "cpu" if config.memory.trial == "auto" else config.memory.trial


def run(job: Job) -> None:
    """On every rank, of a run that is about to begin its first step."""
    with _put_back(job.model), ExitStack() as until_then:
        until_then.callback(job.optimizer.zero_grad, set_to_none=True)
        saved, on_device = (0, 0) if job.optimizer.state else preflight.optimizer_bytes(job.model, job.config)
        kept = torch.full((on_device,), 1, dtype=torch.uint8, device=job.world.device)
        _step(job)
        job.optimizer.zero_grad(set_to_none=True)
        if job.config.eval.every and job.data.validation:
            mean_loss(job.model, islice(job.evaluation(job.data.validation), 1))
        job.keeper.try_memory(saved)
        del kept
    if job.world.device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the memory of the trial's sizes: the run's are asked for anew


def _step(job: Job) -> None:
    """Forward and backward of the first step to come, and the norm: all but the update."""
    state, batch = state_of(job.model), job.batch(job.step)
    rounds = batch[:ROUNDS] if state.placement.stages.count == 1 else batch  # several stages have many under way
    scale = 1.0 / max(sum(each.targets for each in rounds), 1)
    gradients(job.model, rounds, torch.tensor(scale, dtype=torch.float64, device=job.world.device))
    state.balance.end_step()
    all_reduce_sum(squared_norm(job.model))


@contextmanager
def _put_back(model: Any) -> Iterator[None]:
    """Afterwards random numbers, buffers and what routers have counted are as before."""
    balance = state_of(model).balance
    counted, buffers = dict(vars(balance)), {name: each.clone() for name, each in model.named_buffers()}
    devices = [torch.cuda.current_device()] if next(model.parameters()).is_cuda else []
    with torch.random.fork_rng(devices):
        yield
    vars(balance).update(counted)
    with torch.no_grad():
        for name, each in model.named_buffers():
            each.copy_(buffers[name])
