"""Before the first step: is there room on the disk for the checkpoints that a run will keep? By arithmetic."""

import shutil
from math import prod
from pathlib import Path

from torch import nn

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.step_folders import step_folder, steps
from fivefold.core.units import human_bytes
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import rule_of


def check(model: nn.Module, config: RunConfig, *, step: int, total_steps: int) -> str:
    """What to tell of a disk that is too small for all checkpoints of the steps after `step`; "" when it is not.

    Raises `UserError` where not even one more fits: what is trained could never be saved.
    """
    folder = config.run_dir / "checkpoints"
    held = [_size(folder / step_folder(each)) for each in steps(folder)]
    saves, size, keep = saves_left(config, step, total_steps), checkpoint_bytes(model, config), config.checkpoint.keep
    disk = shutil.disk_usage(config.run_dir)
    if not saves or not disk.total:  # some network filesystems do not say
        return ""
    where = f"{human_bytes(disk.free)} are free at {config.run_dir}"
    if disk.free < size:
        raise UserError(
            f"a checkpoint takes {human_bytes(size)} (weights and optimizer state), and {where}",
            fix="free space, or set run.dir to a larger disk",
            more="docs/checkpoints.md",
        )
    needed = more_bytes(size, held, keep=keep, saves=saves)
    if disk.free >= needed:
        return ""
    fitting = [fewer for fewer in range(1, keep) if more_bytes(size, held, keep=fewer, saves=saves) <= disk.free]
    advice = f"set checkpoint.keep: {fitting[-1]}, free space, " if fitting else "free space "
    return (
        f"saving will fail: {keep} checkpoint{'s' * (keep != 1)} of {human_bytes(size)}, and the next beside them, "
        f"take {human_bytes(needed)} more, and {where}; {advice}or set run.dir to a larger disk"
    )


def checkpoint_bytes(model: nn.Module, config: RunConfig) -> int:
    """Bytes of the weights and of what the optimizer keeps of them, in their shape."""
    plan = state_of(model).plan
    sizes = {name: prod(spec.shape) for name, spec in plan.shards.items()}
    kept = rule_of(config.optimizer.name).state(plan).values()
    elements = sum(sizes.values()) + sum(sizes[name] for names in kept for name in names)
    return elements * next(model.parameters()).dtype.itemsize


def saves_left(config: RunConfig, step: int, total_steps: int) -> int:
    """Checkpoints that are still to be written: every so many steps, and the last one."""
    every = config.checkpoint.every
    on_time = total_steps // every - step // every if every else 0
    return on_time + int(step < total_steps and not (every and total_steps % every == 0))


def more_bytes(size: int, held: list[int], *, keep: int, saves: int) -> int:
    """The most that checkpoints will take beyond those that are `held`: an old one goes when a new one is there."""
    there, most = list(held), 0
    for _ in range(min(saves, keep + 1)):  # from then on all are new ones
        there.append(size)
        most = max(most, sum(there) - sum(held))
        there = there[-keep:]
    return most


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
