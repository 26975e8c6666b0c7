"""The memory of a run: its peak, a trial before the first step, and advice where it runs out.

Any allocation may fail, on a GPU or on the machine. The rank where it fails frees the tensors of the step, then asks
the planner: it says where memory ran out, measured and planned bytes by item, and what would fit. A rank killed by the
system cannot; its launcher asks instead.

The trial lets memory run out before the first step and not hours later. It runs forward and backward of a step's rows
while memory as large as the optimizer state, which exists from the second step on, is allocated; a micro batch of an
evaluation; and the allocation for a save. Everything changed is restored: gradients, random state, buffers, router
counts. No parameter changes, and no row is consumed.
"""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fivefold.config import RunConfig
from fivefold.core.errors import RunFailed
from fivefold.core.units import GIB
from fivefold.data.prepare import PreparedData
from fivefold.launch.cluster import cluster_here
from fivefold.launch.failure import WorkerDied, is_want_of_memory
from fivefold.launch.memory import resident, room
from fivefold.launch.world import World
from fivefold.models.discover import facts_of
from fivefold.parallel import passes
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.balance.runtime import Balance
from fivefold.parallel.dtensor import local
from fivefold.parallel.memory import BETWEEN_STEPS, REST
from fivefold.parallel.state import state_of
from fivefold.training import advice, header, preflight
from fivefold.training.display import Line
from fivefold.training.model import build_model
from fivefold.training.part import LiveRun, Part
from fivefold.training.step import all_reduce_sum, inputs_of_step, squared_norm

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
    is_trial = any(frame.name == try_memory.__name__ for frame in traceback.extract_tb(error.__traceback__))
    return "the trial before the first step" if is_trial else f"step {run.step + (phase in _OF_STEP)}"


# ---- where, and what was there ---------------------------------------------------------------------------------------


def phase_of(stack: TracebackType | None) -> str:
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


# ---- the peak --------------------------------------------------------------------------------------------------------


_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak since construction (build it before the model): CUDA's allocator, or the resident set minus its start."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.start_kib = resident("VmRSS")
        try:
            _CLEAR.write_text("5")  # resets VmHWM
        except OSError:
            self.start_kib = self.start_kib and max(self.start_kib, resident("VmHWM") or 0)

    @property
    def gib(self) -> float | None:
        """Peak in GiB; None if the system does not report it."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        peak = resident("VmHWM")
        return None if peak is None or self.start_kib is None else max(0, peak - self.start_kib) / 2**20

    @property
    def reserved_gib(self) -> float | None:
        """Peak in GiB reserved by CUDA's allocator, fragmentation included; None on a CPU."""
        return torch.cuda.max_memory_reserved(self.device) / 2**30 if self.device.type == "cuda" else None

    def over_ranks(self) -> dict[str, float | None]:
        """The largest peaks over all ranks in GiB, as entries of a metrics row."""
        mine = {"memory/peak_gib": self.gib}
        if self.reserved_gib is not None:
            mine["memory/peak_reserved_gib"] = self.reserved_gib
        peaks = torch.tensor([-1.0 if value is None else value for value in mine.values()], device=self.device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        return {name: None if peak < 0 else peak for name, peak in zip(mine, peaks.tolist(), strict=True)}


# ---- the trial -------------------------------------------------------------------------------------------------------


ROUNDS = 2  # micro batches of a step without a pipeline: the second one runs while the first one's gradients exist


def pays(config: RunConfig, world: World) -> bool:
    """Decide `memory.trial: auto`: True on a GPU, where memory is short and a step is quick."""
    return world.device != "cpu" if config.memory.trial == "auto" else config.memory.trial


class Trial(Part):
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
