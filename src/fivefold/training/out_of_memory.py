"""Advice for a run out of memory: where it ran out, measured and planned bytes by item, and what would fit.

Any allocation may fail, on a GPU or on the machine. The rank where it fails frees the tensors of the step, then asks
the planner. A rank killed by the system cannot; its launcher asks instead.
"""

import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from fivefold.config import RunConfig
from fivefold.core.errors import RunFailed
from fivefold.core.units import GIB
from fivefold.data.prepare import PreparedData
from fivefold.launch.cluster import cluster_here
from fivefold.launch.failure import WorkerDied, is_want_of_memory
from fivefold.launch.memory import room
from fivefold.launch.world import World
from fivefold.models.discover import facts_of
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.dtensor import local
from fivefold.parallel.memory import BETWEEN_STEPS, REST
from fivefold.parallel.state import state_of
from fivefold.training import advice
from fivefold.training.model import build_model
from fivefold.training.part import LiveRun
from fivefold.training.peak_memory import resident

TRIAL = "training/trial.py"
_ASKED = r"Tried to allocate ([\d.]+ \w+)|tried to allocate (\d+) bytes"
_THERE = {
    "capacity": r"total capacity of ([\d.]+ \w+)",
    "free": r"of which ([\d.]+ \w+) is free",
    "allocated": r"allocated memory ([\d.]+ \w+) is allocated by PyTorch",
    "kept": r"and ([\d.]+ \w+) is reserved by PyTorch but unallocated",
}
_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}

# Phases by a frame of the stack: (part of the file name, function, phase). The first match wins.
_PHASES = (
    ("training/checkpoints.py", "save", "a save"),
    ("training/checkpoints.py", "try_memory", "the memory of a save"),
    ("training/checkpoints.py", "resume", "loading the checkpoint"),
    ("training/evaluation.py", "measure", "an evaluation"),
    ("training/step.py", "mean_loss", "an evaluation"),
    ("training/evaluation.py", "draw", "a sample"),
    ("training/standing_checks.py", "after_step", "the standing checks"),
    ("torch/autograd/", "backward", "backward"),
    ("torch/autograd/", "_engine_run_backward", "backward"),
    ("parallel/passes.py", "gradients", "forward"),
    ("training/step.py", "inputs_of_step", "forward"),
    ("training/step.py", "train_step", "the optimizer"),
    ("parallel/apply.py", "parallelize", "building the model"),
)
_OF_STEP = ("forward", "backward", "the optimizer")


@contextmanager
def advised(config: RunConfig, world: World, data: PreparedData, run: LiveRun | None = None) -> Iterator[None]:
    """Turn an out-of-memory error raised inside into a `RunFailed` with advice. Re-raises the error itself if the
    planner has none. `run`: None while it is built."""
    try:
        yield
    except Exception as error:
        if not is_want_of_memory(error):
            raise
        found = _advice(error, config, world, data, run)
        if found is None:
            raise
        raise found from error


def advise(death: WorkerDied, config: RunConfig, ranks: int) -> None:
    """Add the planner's advice to the error of a worker, one of `ranks` on this machine, killed for lack of memory."""
    with suppress(Exception):
        cluster = cluster_here("cpu", ranks, ranks, config.hardware)
        death.fix = "\n".join([death.fix or "", *advice.to_fit(config, cluster)]).strip()


def _advice(
    error: Exception, config: RunConfig, world: World, data: PreparedData, run: LiveRun | None
) -> RunFailed | None:
    """The error that the failing rank raises; None if the planner cannot be asked, or memory is too scarce for it."""
    with suppress(Exception):
        what, phase = str(error), phase_of(error.__traceback__)
        there = held(what, world.device, run)
        traceback.clear_frames(error.__traceback__)  # frees the step's tensors: on a CPU the planner needs the memory
        is_of_host = world.device != "cpu" and not isinstance(error, torch.OutOfMemoryError)
        where = f"rank {world.rank}: memory ran out in {phase}, {_when(error, phase, run)}"
        if is_of_host:
            return RunFailed(f"{where}: that of the machine, not of its GPUs{_asked(what)}", fix=_for_host(world))
        kind, lora = "cpu" if world.device == "cpu" else "cuda", config.adapter.lora
        cluster = cluster_here(kind, world.size, world.local_size, config.hardware)
        facts = state_of(run.model).plan.facts if run else adapted(facts_of(build_model(config, data)), lora)
        lines = advice.to_fit(config, cluster, facts, rank=world.rank, needed=there.needed, measured=there.items)
        return RunFailed(f"{where}{_asked(what)}{there.left}", fix="\n".join(lines))
    return None


def _when(error: Exception, phase: str, run: LiveRun | None) -> str:
    if run is None:
        return "before the first step"
    is_trial = any(frame.filename.endswith(TRIAL) for frame in traceback.extract_tb(error.__traceback__))
    return "the trial before the first step" if is_trial else f"step {run.step + (phase in _OF_STEP)}"


# ---- where, and what was there ---------------------------------------------------------------------------------------


def phase_of(stack: TracebackType | None) -> str:
    """The phase, in words, in which an error was raised, from its stack."""
    frames = [(frame.filename.replace("\\", "/"), frame.name) for frame in traceback.extract_tb(stack)]
    for part, function, phase in _PHASES:
        if any(part in file and name == function for file, name in frames):
            return phase
    return "the build"


@dataclass(frozen=True)
class Held:
    """Memory of a rank when it ran out. `items`: bytes by item. `needed`: bytes of the device that it held, plus those
    it asked for; 0: unknown. `left`: in words, how much was free."""

    items: Mapping[str, float]
    needed: float
    left: str


def held(message: str, device: str, run: LiveRun | None) -> Held:
    """Measure memory from the text of torch's error, which describes the moment of failure, and the run's tensors."""
    own = _states(run) if run else dict.fromkeys(BETWEEN_STEPS, 0)
    said = {name: _bytes(found[1]) for name, pattern in _THERE.items() if (found := re.search(pattern, message))}
    if device == "cpu" and "allocated" not in said:
        peak = 1024 * (resident("VmHWM") or 0)
        return Held({**own, **({"the process at its peak": peak} if peak else {})}, 0, "")
    allocated = said.get("allocated") or (torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0.0)  # type: ignore[no-untyped-call]
    capacity, free, kept = (said.get(name, 0.0) for name in ("capacity", "free", "kept"))
    outside = max(0.0, capacity - free - allocated - kept) if capacity else 0.0
    items = {**own, REST: max(0.0, allocated - sum(own.values())), "allocator": kept, "runtime": outside}
    left = f"; {free / GIB:.2f} of {capacity / GIB:.2f} GiB were free" if capacity else ""
    return Held(items, sum(items.values()) + asked_bytes(message), left)


def _states(run: LiveRun) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer state on the rank's device."""
    device = torch.device(run.world.device).type

    def size(tensors: Any) -> float:
        mine = (local(tensor) for tensor in tensors if isinstance(tensor, torch.Tensor))
        return float(sum(tensor.nbytes for tensor in mine if tensor.device.type == device))

    parameters = list(run.model.parameters())
    return {
        "parameters": size(parameters),
        "gradients": size(parameter.grad for parameter in parameters),
        "optimizer state": size(value for state in run.optimizer.state.values() for value in state.values()),
    }


def asked_bytes(message: str) -> float:
    """Bytes of the failed allocation; 0 if the error does not say."""
    found = re.search(_ASKED, message)
    return 0.0 if found is None else float(found[2]) if found[2] else _bytes(found[1])


def _asked(message: str) -> str:
    size = asked_bytes(message)
    return f": {size / GIB:.2f} GiB more were asked for" if size else ""


def _bytes(said: str) -> float:
    number, unit = said.split()
    return float(number) * _UNITS[unit]


# ---- in words --------------------------------------------------------------------------------------------------------


def _for_host(world: World) -> str:
    there = room()
    has = f"this machine has {there.total / GIB:.1f} GiB, {there.free / GIB:.1f} of them free now; " if there else ""
    return (
        f"{has}a save copies what its {world.local_size} ranks hold of weights and optimizer state: shard it over more "
        "machines with layout.dp_shard, or give the job more memory"
    )
