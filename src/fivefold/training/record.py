"""`spread.json` of a run folder, for `fivefold report`: how the model is sharded, what a step sends, and the timeline
of the pipeline's slots."""

import json
import logging
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fivefold import checkpoint
from fivefold.config import RunConfig
from fivefold.core.files import replace
from fivefold.core.system import cores, cpuinfo
from fivefold.parallel import plain
from fivefold.parallel.collectives import Collective
from fivefold.parallel.pipeline.runtime import Pipeline
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import rule_for
from fivefold.training.step import declare, step_shape

NAME = "spread.json"
TIMED = 2  # the timed step of a start: the first one includes set-up


def write(model: Any, config: RunConfig, *, device: str, parameters: int, room: Path | None = None) -> None:
    """Write `spread.json` into the run folder; every rank calls this. `parameters`: those of the whole model. `room`:
    see `core.files.replace`."""
    state = state_of(model)
    declared = plain.everywhere([asdict(call) for call in _collectives(model, config)])
    if dist.get_rank() == 0:
        about: dict[str, Any] = {
            "layout": str(state.plan.layout), "world": state.plan.layout.world, "device": device,
            "model": state.plan.anatomy.model_class, "parameters": parameters,
            "collectives": declared, "holds": state.placement.by_rank(),
        }  # fmt: skip
        if state.plan.layout.pp > 1:
            pipeline = state.plan.feature(PipelinePlan)
            plan = pipeline.schedule(state.plan.layout.accumulation(config.train.global_batch_size))
            about["timeline"] = {
                "simulated": plan.simulate(pipeline.slot_duration).to_json(),
                "ideal_bubble": plan.ideal_bubble,
            }
    checkpoint.on_first_rank(lambda: _save(config, about, room))


@contextmanager
def timing(model: Any, config: RunConfig, *, step: int, of_start: int) -> Iterator[None]:
    """Time the pipeline's slots in step `TIMED` of this start, and add them to the file. `of_start`: the number of this
    step in this start. Every rank calls this."""
    pipeline = state_of(model).live(Pipeline)
    if pipeline.plan.layout.pp == 1 or of_start != TIMED:
        yield
        return
    pipeline.timed = []
    yield
    measured = pipeline.timeline()
    pipeline.timed = None
    if dist.get_rank() == 0:
        try:
            about = json.loads((config.run_dir / NAME).read_text(encoding="utf-8"))
            about["timeline"] |= {"step": step, "measured": measured.to_json()}
            _save(config, about)
        except OSError as error:  # not worth failing the run; an unwritable folder is reported elsewhere
            logging.getLogger(__name__).warning("%s: the timeline is not written: %s", NAME, error)


def device_name(device: str) -> str:
    """A device's name for people: that of the GPU, or of the CPU with its number of cores."""
    if device.startswith("cuda"):
        return str(torch.cuda.get_device_name(device))
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo(), re.MULTILINE)
    return f"{name[1] if name else platform.machine()}, {cores()} cores"


def _save(config: RunConfig, about: dict[str, Any], room: Path | None = None) -> None:
    replace(config.run_dir / NAME, json.dumps(about).encode() + b"\n", room=room)


def _collectives(model: Any, config: RunConfig) -> tuple[Collective, ...]:
    layout = state_of(model).plan.layout
    tokens, micro_batches = layout.padded(config.data.seq_length), layout.accumulation(config.train.global_batch_size)
    shape = step_shape(
        model,
        layout.micro_batch_size,
        tokens,
        micro_batches,
        config.memory.chunks,
        whole_logits=config.objective.is_own,
    )
    return declare(model, shape, optimizer=rule_for(config.optimizer).facts)
