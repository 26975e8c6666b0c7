"""`spread.json` of a run folder: how the model lies over the ranks, and what a step sends. For `fivefold report`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fivefold.config import RunConfig
from fivefold.parallel.apply import spread_of
from fivefold.parallel.collectives import Collective
from fivefold.training.step import declare, step_shape

NAME = "spread.json"


def write(model: Any, config: RunConfig, *, device: str, parameters: int) -> None:
    """Write it into the run folder; every rank calls this. `parameters`: of the whole model."""
    spread = spread_of(model)
    declared = [_collectives(model, config)] * spread.layout.world
    dist.all_gather_object(declared, declared[0])
    if dist.get_rank() == 0:
        about = {
            "layout": str(spread.layout), "world": spread.layout.world, "device": device,
            "model": spread.anatomy.model_class, "parameters": parameters,
            "collectives": [[asdict(each) for each in rank] for rank in declared], "holds": spread.by_rank(),
        }  # fmt: skip
        (Path(config.run_dir) / NAME).write_text(json.dumps(about) + "\n", encoding="utf-8")


def _collectives(model: Any, config: RunConfig) -> tuple[Collective, ...]:
    """What a step sends from this rank."""
    layout = spread_of(model).layout
    tokens = -(-config.data.seq_length // layout.row_multiple) * layout.row_multiple
    chunks = None if config.memory.loss_chunks == "auto" else config.memory.loss_chunks
    micro_batches = layout.accumulation(config.train.global_batch_size)
    shape = step_shape(model, layout.micro_batch_size, tokens, micro_batches, chunks)
    return declare(model, shape, optimizer=config.optimizer.name)
