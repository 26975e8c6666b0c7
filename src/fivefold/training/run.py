"""`fivefold train` on one rank, read downwards: data, model, resume, the loop, the end.

The same code runs on one CPU and on many GPUs. What a run does besides its steps is in its parts: `parts.py`.
"""

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fivefold import checkpoint
from fivefold.config import RunConfig, check_best, check_supported, parse_config
from fivefold.core.errors import refuse
from fivefold.core.kept_steps import MemoryOfNode
from fivefold.core.text import listed
from fivefold.data.batch import MicroBatch
from fivefold.data.prepare import PreparedData, prepare
from fivefold.launch.events import Events, events_of
from fivefold.launch.rounds import logs_of
from fivefold.launch.world import World
from fivefold.models import kernels
from fivefold.models.discover import facts_of
from fivefold.models.flops import Costs
from fivefold.parallel import legality
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.apply import parallelize
from fivefold.parallel.balance.runtime import Balance, configure
from fivefold.parallel.state import state_of
from fivefold.training import header, preflight, record, reference, schedule
from fivefold.training.inputs import check_loss, own_loss
from fivefold.training.memory import PeakMemory, advised
from fivefold.training.model import balance_options, build_model, compile_pays
from fivefold.training.optimizers import build_optimizer
from fivefold.training.part import Environment, LiveRun
from fivefold.training.parts import parts_of
from fivefold.training.reference import teacher_of
from fivefold.training.run_log import RunLog
from fivefold.training.step import train_step
from fivefold.training.watchdog import watching

Read = Callable[[Tensor], list[float]]


def on_worker(request: Mapping[str, Any], world: World) -> None:
    """The body of a training worker, whether fivefold started the process or something else did."""
    memory = MemoryOfNode.of_request(request.get("memory"), round=world.round, acts=world.local_rank == 0)
    train(parse_config(request["config"]), world, events=events_of(request, is_first=world.is_first), memory=memory)


def train(config: RunConfig, world: World, *, events: Events | None = None, memory: MemoryOfNode | None = None) -> None:
    """Train as `config` says on this rank of `world`, which has been joined. `events` receives what happens. `memory`:
    where the last step is kept if other nodes go.

    Raises `UserError` for a request that cannot be met, `RunFailed` if the run diverges, and `Stopped` if a signal
    ended it early, after a save.
    """
    check_supported(config)
    logs, timeout = logs_of(config.run_dir, world.round), config.train.collective_timeout
    with ExitStack() as stack:
        stack.enter_context(watching(logs, world.rank, timeout, folder=world.folder))
        log = RunLog(config.run_dir, events, round=world.round)
        data = prepare(config)  # prepared before the group: a cache hit
        if world.local_rank == 0:
            stack.enter_context(data.train.filling())
        with advised(config, world, data):
            run = build(config, world, data, log, stack, of_node=memory)
        # These objects live as long as the training. Python's collector would scan all 400,000 of them again and again:
        # 0.2 s on one rank, for which the others wait.
        gc.freeze()
        stack.callback(gc.unfreeze)
        with advised(config, world, data, run):
            take_steps(run)


# ---- before the first step -------------------------------------------------------------------------------------------


def build(
    config: RunConfig, world: World, data: PreparedData, log: RunLog, stack: ExitStack,
    environment: Environment | None = None, of_node: MemoryOfNode | None = None,
) -> LiveRun:  # fmt: skip
    """Build everything that the first step needs; `stack` closes it. `environment`: None is that of a real run.
    `of_node`: the memory of this node, see `train`."""
    environment = environment or Environment()
    preflight.check_ranks_agree(config, data, world)
    check_best(config, has_validation=data.validation is not None)
    memory = PeakMemory(torch.device(world.device))
    layout = config.layout.resolve(world.size)
    refuse(legality.violations(layout, batch=config.train.global_batch_size))
    model = build_model(config, data)
    lora = config.adapter.lora
    facts = adapted(facts_of(model), lora)
    costs = Costs.of(facts)
    total_steps = schedule.total_steps(config, data)
    compiled = compile_pays(config, costs, data, world, total_steps)
    source, compared = environment.load_source(config, model, facts), reference.Reference.of(config, model)
    if source is not None and source.unread and world.is_first:
        what = f"{len(source.unread):,} tensors of {config.model.name_or_path} ({listed(source.unread, 2)})"
        print(f"note: {what} are not of its model class: they are not trained, and not exported", flush=True)
    parts = parts_of(config, model, data, memory, environment, of_node)
    scarce = preflight.check_memory(facts, config, layout, world)
    if scarce and world.is_first:
        print(f"note: {scarce}", flush=True)
    attention = kernels.choose(config.train.attention, torch.device(world.device))
    teacher, loss = teacher_of(config, data, world, total_steps), own_loss(config)
    parallelize(
        model, layout, device=world.device, source=source, seed=config.train.seed,
        reduce=config.precision.reduce, loss_chunks=config.memory.chunks, compile_blocks=compiled,
        step=(layout.padded(config.data.seq_length), layout.accumulation(config.train.global_batch_size)),
        adapter=lora, neftune_noise_alpha=config.train.neftune_noise_alpha,
    )  # fmt: skip
    preflight.reserve_host_memory(model, config)
    state = state_of(model)
    configure(model, state.live(Balance), balance_options(config, model.config), state.placement.buffers)
    specs = replace(reference.goals(config, data, model, compared), loss=loss, teacher=teacher)
    optimizer = build_optimizer(model, config.optimizer)
    stack.callback(log.folder.release)
    checkpoint.on_first_rank(log.folder.take)
    run = LiveRun(config, world, data, model, optimizer, log, costs, total_steps, specs, parts)
    log.began = time.monotonic()
    for part in parts:
        part.build(run)
    record.write(model, run.config, device=world.device, parameters=costs.parameters, room=log.folder.room)
    if loss and run.step < total_steps:
        check_loss(loss, model, run.batch(run.step))
    for part in parts:
        part.begin(run)
    checkpoint.on_first_rank(lambda: header.open_log(run, stack, attention=attention))
    stack.push(lambda _, error, __: log.close(run.step, error))
    return run


# ---- the loop --------------------------------------------------------------------------------------------------------


def take_steps(run: LiveRun, read: Read = Tensor.tolist) -> None:
    """Take steps until the end, and call the parts at the moments of each. `read`: see `train_step`."""
    with ExitStack() as around:
        for part in run.parts:
            around.enter_context(part.running(run))
        around.push(lambda _, error, __: run.log.close(run.step, error))  # before parts end, which wait for a save
        if unfinished := run.resumed.unfinished:
            for part in run.parts:
                part.finish_step(run, unfinished["row"], owes=unfinished["owes"])
        if run.is_over:
            _end(run, run.why_stopped or f"this run is finished: {run.step} of {run.total_steps} steps are done")
            return
        for batch, waited in around.enter_context(closing(run.batches())):
            _step(run, batch, waited, read)
            if run.is_over:
                break
            for part in run.parts:
                part.leave(run)
        if why := run.why_stopped:
            run.log.happened("stopped early", run.step, why)
        _end(run, why)


def _step(run: LiveRun, batch: list[MicroBatch], waited: float, read: Read) -> None:
    """Take one step. This rank has `waited` so many seconds for its rows."""
    for part in run.parts:
        part.before_step(run, batch)
    started, rate = time.perf_counter() - waited, run.learning_rate(run.step)
    with ExitStack() as around:
        for part in run.parts:
            around.enter_context(part.in_step(run))
        asked = [part.interrupts(run) for part in run.parts]  # of each: they may ask together
        result = train_step(
            run.model, run.optimizer, batch, learning_rate=rate, max_grad_norm=run.config.optimizer.max_grad_norm,
            stop=any(asked), spec=run.specs.train, loss=run.specs.loss,
            read=read, before_update=partial(_before_update, run),
        )  # fmt: skip
    run.progress.step += 1
    run.progress.tokens_seen += result.tokens
    for part in run.parts:
        part.after_update(run, result)
    row = run.row(result, rate, seconds=time.perf_counter() - started, waited=waited)
    for part in run.parts:
        part.after_step(run, row)


def _before_update(run: LiveRun) -> None:
    for part in run.parts:
        part.before_update(run)


def _end(run: LiveRun, why: str) -> None:
    for part in run.parts:
        part.at_end(run)
    header.close(run, why)
