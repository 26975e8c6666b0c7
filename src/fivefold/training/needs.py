"""What a run needs of the memory of its machine, by arithmetic, before any of it is taken."""

from pathlib import Path
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.launch.memory import GIB, Needs, room
from fivefold.launch.world import World
from fivefold.parallel.data import COMPUTE_DTYPES, master_dtype


def check_memory(model: Any, config: RunConfig, layout: Layout, world: World) -> str | None:
    """What a run is told of its memory when it is likely to need more than is free; None when it is not.

    `model` is whole and on the meta device. The needs are left for the launcher. Raises `UserError`, the same on every
    rank of a machine, when weights, gradients and optimizer state alone are more than there is.
    """
    needs = needs_of(model, config, layout, ranks=world.local_size)
    if world.folder and world.is_first:
        needs.save(Path(world.folder))
    if world.device != "cpu":
        total, free = (torch.cuda.mem_get_info(world.device)[at] * world.local_size for at in (1, 0))
        where = f"{world.local_size} GPUs" if world.local_size > 1 else "the GPU"
    elif (there := room()) is not None:
        total, free, where = there.total, there.free, "this machine"
    else:
        return None
    if needs.state > total:
        raise UserError(
            f"this run does not fit: {needs}, and {where} has {total / GIB:.2f} GiB",
            fix=needs.advice(total),
            more="docs/layouts.md",
        )
    if needs.state + needs.activations <= free:
        return None
    return f"memory may run out: {free / GIB:.2f} GiB of {where} are free, and the run needs {needs}"


def needs_of(model: Any, config: RunConfig, layout: Layout, *, ranks: int) -> Needs:
    """Of `ranks` of the ranks of a resolved layout; where stages of a pipeline differ, of as many mean ones."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # Every copy over dp_replicate holds the whole state, cut evenly among its ranks.
    held = parameters * layout.dp_replicate * ranks // layout.world * master_dtype(layout.precision).itemsize
    return Needs(
        parameters=parameters,
        ranks=ranks,
        weights=held,
        gradients=held,
        optimizer=OPTIMIZERS[config.optimizer.name].per_weight * held,
        activations=ranks * _activations(model.config.get_text_config(), config, layout),
    )


def _activations(shape: Any, config: RunConfig, layout: Layout) -> int:
    """Bytes of a rank, about: what backward needs of the blocks of the micro batches under way (arXiv:2205.05198, with
    attention that keeps no scores: 17 times the width of a token at a ratio of 4), or their inputs and one block."""
    hidden = int(getattr(shape, "hidden_size", 0) or 0)
    inner = int(getattr(shape, "intermediate_size", 0) or 4 * hidden)
    layers = int(getattr(shape, "num_hidden_layers", 0) or 0) // layout.pp
    tokens = layout.micro_batch_size * config.data.seq_length // layout.cp
    block = (9 * hidden + 2 * inner) // layout.tp
    kept = layers * block if config.memory.recompute == "none" else layers * hidden + block
    return tokens * kept * layout.pp * COMPUTE_DTYPES[layout.precision].itemsize
