"""Observation of a rehearsal from outside: memory by phase, host syncs by line, launches, compiles, collectives."""

import re
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import wraps
from linecache import getline
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from fivefold import torch_internals
from fivefold.config import parse_config
from fivefold.core.text import any_layer
from fivefold.parallel.collectives import Collective, by_group, total
from fivefold.parallel.dtensor import local
from fivefold.parallel.mesh import Mesh, record
from fivefold.parallel.state import state_of
from fivefold.rehearsal.request import (
    MemoryItem,
    OutOfMemory,
    Phase,
    Recompile,
    RehearsalRequest,
    Seen,
    SentOverAxis,
    Sync,
)
from fivefold.rehearsal.stream_order import Communicator, Driver, StreamRequest, issued
from fivefold.training import run
from fivefold.training.checkpoints import CheckpointManager
from fivefold.training.evaluation import Evaluation
from fivefold.training.memory import asked_bytes
from fivefold.training.optimizers import rule_for
from fivefold.training.step import declare, step_shape, train_step

# ---- memory at the peak of a phase -----------------------------------------------------------------------------------
# From the history of the caching allocator. An allocation is named after its origin: a line of Python outside torch, or
# its role in FSDP or the optimizer; and after the module that was running, with the numbers of layers as *.

SHOWN = 12  # items of a peak
# Part of a file's name, part of a function's name in it, and what that allocates.
_KNOWN = (
    ("_fsdp_collectives.py", "foreach_reduce", "gradients (FSDP)"),
    ("_fsdp_collectives.py", "foreach_all_gather", "gathered parameters (FSDP)"),
    ("_fsdp_param.py", "all_gather_outputs", "gathered parameters (FSDP)"),
    ("_fsdp_param.py", "accumulated_grad", "gradients of several micro batches (FSDP)"),
    ("torch/optim/", "_init_group", "optimizer state"),
    ("torch/optim/", "", "the optimizer's update"),
    ("fivefold/training/optimizers/", "", "the optimizer's update"),
)
_IN_TORCH = ("/torch/", "torch/_", "<frozen", "<string>")
_COMPILED = "inductor/"  # part of the path of compiled code
_SHAPE = re.compile(r"empty_strided_\w+\(\(([\d, ]+?),?\)")  # as compiled code allocates


@dataclass(frozen=True)
class Allocation:
    """An event of the allocator's history: its time (microseconds), its size, and its stack frames, innermost first, as
    (file, line, function)."""

    time: int
    size: int
    frames: tuple[tuple[str, int, str], ...]
    address: int


@dataclass(frozen=True)
class Peak:
    """The most bytes allocated within a phase, and the allocations alive then."""

    bytes: int
    live: tuple[Allocation, ...]


def peak_of(history: Sequence[Mapping[str, Any]], begin: int, end: int) -> Peak:
    """The peak between two times (microseconds) of a history that begins with the process; if an allocation failed
    between them, the state at the failure."""
    held = most = at_most = 0
    for at, event in enumerate(history):
        if event["time_us"] > end:
            break
        action = event["action"]
        held += event["size"] if action == "alloc" else -event["size"] if action == "free_requested" else 0
        if event["time_us"] >= begin and (held > most or action == "oom"):
            most, at_most = held, at
            if action == "oom":
                break
    live: dict[int, Allocation] = {}
    for event in history[: at_most + 1]:
        if event["action"] == "alloc":
            frames = tuple((f["filename"], f["line"], f["name"]) for f in event.get("frames", ()))
            live[event["addr"]] = Allocation(event["time_us"], event["size"], frames, event["addr"])
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    return Peak(most, tuple(live.values()))


@dataclass
class Running:
    """The running module at each time: names with the times (microseconds) since which they ran; "" between modules."""

    times: list[int]
    names: list[str]

    def at(self, time: int) -> str:
        """The module that was running at a time."""
        place = bisect_right(self.times, time) - 1
        return self.names[place] if place >= 0 else ""


def items(live: Iterable[Allocation], running: Running, named: Mapping[int, str]) -> tuple[MemoryItem, ...]:
    """The largest items in memory, equal ones together. `named`: addresses of parameters."""
    found: dict[tuple[str, str], list[int]] = {}
    for block in live:
        name = named.get(block.address)
        what, where = ("parameters", name) if name else (made_by(block.frames), running.at(block.time))
        found.setdefault((what, any_layer(where)), []).append(block.size)
    rows = [MemoryItem(what, where, len(sizes), sum(sizes)) for (what, where), sizes in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:SHOWN])


def made_by(frames: Sequence[tuple[str, int, str]]) -> str:
    """Origin of an allocation, in words."""
    for file, line, function in frames:
        for part, name, says in _KNOWN:
            if part in file and name in function:
                return says
        if _COMPILED in file:
            shape = _SHAPE.search(getline(file, line))
            return f"a compiled block [{shape[1]}]" if shape else "a compiled block"
        if not any(part in file for part in _IN_TORCH):
            return f"{short(file)}:{line} {function}"
    return "backward, in torch"


def short(file: str) -> str:
    """Shorten a path: fivefold's files start at the package, as `fivefold/models/packed.py`; of others only the file
    name stays."""
    parts = Path(file).parts
    if "fivefold" in parts:
        return "/".join(parts[len(parts) - 1 - parts[::-1].index("fivefold") :])
    return parts[-1] if parts else file


_OWN = "/fivefold/rehearsal/"
_AROUND = ("/torch/", "<frozen", "/unittest/", "/contextlib.py", "/functools.py")


@dataclass(frozen=True)
class _Span:
    """Begin and end of a phase, in microseconds of the allocator's clock."""

    begin: int
    end: int


@dataclass
class RankWatch:
    """Observer of one rank. `full`: the stand-in for the driver; None on the CPU, where memory, kernels and waits are
    not seen."""

    request: RehearsalRequest
    full: Driver | None
    phases: list[Phase] = field(default_factory=list)
    spans: dict[str, _Span] = field(default_factory=dict)
    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)
    running: Running = field(default_factory=lambda: Running([], []))
    current: str = ""
    steps: int = 0
    coordinates: dict[str, int] = field(default_factory=dict)
    communicators: int = 0
    sent: tuple[SentOverAxis, ...] = ()
    named: dict[int, str] = field(default_factory=dict)
    lack: OutOfMemory | None = None

    @classmethod
    def of(cls, request: RehearsalRequest) -> "RankWatch":
        return cls(request, Driver() if request.is_full else None)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, the parts of a run are recorded as phases."""
        torch_internals.compiles()  # starts recording them
        with ExitStack() as stack:
            if self.full:
                torch_internals.record_allocations()
                stack.enter_context(self.full.calling(self._waited))
            for owner, name, phase in ((Evaluation, "measure", "evaluation"), (CheckpointManager, "save", "save")):
                stack.enter_context(patch.object(owner, name, self._in_phase(getattr(owner, name), phase)))
            stack.enter_context(patch.object(run, "train_step", self._step(train_step)))
            yield

    def _in_phase(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return function(*args, **kwargs)

        return run

    def _step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a step as a phase, and note the collectives of the last one."""

        @wraps(function)
        def run(model: Any, optimizer: Any, batch: Any, **options: Any) -> Any:
            self.steps += 1
            with self.phase(f"step {self.steps}"):
                if self.steps < self.request.steps:
                    return function(model, optimizer, batch, **options)
                with self._sending(model, batch):
                    return function(model, optimizer, batch, **{**options, "stop": True})  # and save

        return run

    # ---- phases ------------------------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Inside, the run is in this phase. If a phase repeats, the last time counts."""
        self.current, before = name, self.full and self.full.counts()
        self.syncs = Counter({key: count for key, count in self.syncs.items() if key[0] != name})
        compiled, began, begin = len(torch_internals.compiles()), time.process_time(), _now()
        if self.full:
            torch.cuda.reset_peak_memory_stats()
        try:
            yield
        finally:
            self.current, self.spans[name] = "", _Span(begin, _now())
            seconds, compiled = time.process_time() - began, len(torch_internals.compiles()) - compiled
            self.phases = [phase for phase in self.phases if phase.name != name]
            self.phases.append(self._phase(name, before, seconds, compiled))

    def _phase(self, name: str, before: Any, seconds: float, compiles: int) -> Phase:
        if not self.full:
            return Phase(
                name=name, allocated=None, reserved=None, after=None, launches=None, syncs=None, compiles=compiles,
                seconds=seconds,
            )  # fmt: skip
        memory, after = torch.cuda.memory_stats(), self.full.counts()
        return Phase(
            name=name,
            allocated=memory["allocated_bytes.all.peak"],
            reserved=memory["reserved_bytes.all.peak"],
            after=memory["allocated_bytes.all.current"],
            launches=after.launches - before.launches,
            syncs=after.syncs - before.syncs,
            compiles=compiles,
            seconds=seconds,
        )

    def built(self, model: nn.Module) -> None:
        """Register the built model: names of its parameters, and hooks that record which module runs."""
        state = state_of(model)
        self.coordinates = state.plan.layout.coordinates(self.request.rank)
        if not self.full:
            return
        groups = _groups(state.mesh)
        self.communicators = len(groups)
        for address, group in groups.items():
            self.full.tell(address, group.size, group.rank)
        for name, parameter in model.named_parameters():
            self.named[local(parameter).untyped_storage().data_ptr()] = name
        ends = (state.plan.anatomy.embedding, state.plan.anatomy.head)
        for name in (*state.placement.layers, *ends):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: self._runs(name))
            module.register_forward_hook(lambda *_: self._runs(""))

    def _runs(self, name: str) -> None:
        self.running.times.append(_now())
        self.running.names.append(name)

    # ---- host syncs --------------------------------------------------------------------------------------------------

    def _waited(self) -> None:
        """Called when the host waits for the device."""
        if self.current:
            self.syncs[self.current, line_of(sys._getframe(1))] += 1

    # ---- collectives -------------------------------------------------------------------------------------------------

    @contextmanager
    def _sending(self, model: Any, batch: Sequence[Any]) -> Iterator[None]:
        """Inside, note the collectives of a step; then compare them with those that its plan declares."""
        mesh, noted, seen = state_of(model).mesh, list[StreamRequest](), list[Collective]()
        is_compiled = state_of(model).plan.compiled
        exposed: Counter[tuple[str, str]] | None = None
        # Dynamo compiles nothing under the recorder, a mode of the dispatcher.
        with self.full.noting(noted) if self.full else nullcontext() if is_compiled else record(mesh) as found:
            yield
        if self.full:
            calls = issued(noted, _groups(mesh))
            seen = [Collective(call.axis, call.kind, 1, call.bytes) for call in calls]
            exposed = Counter((call.axis, call.kind) for call in calls if call.exposed)
        elif is_compiled:
            return
        else:
            seen = list(found or ())
        self.sent = _against_plan(total(seen), self._declared(model, batch), exposed)

    def _declared(self, model: Any, batch: Sequence[Any]) -> tuple[Collective, ...]:
        config = parse_config(self.request.config)
        chunks = None if config.memory.loss_chunks == "auto" else config.memory.loss_chunks
        rows, tokens = batch[0].input_ids.shape
        shape = step_shape(model, rows, tokens, len(batch), chunks, whole_logits=config.objective.is_own, batch=batch)
        return by_group(
            declare(model, shape, optimizer=rule_for(config.optimizer).facts), state_of(model).placement.grid
        )

    # ---- out of memory -----------------------------------------------------------------------------------------------

    def is_out_of_memory(self, error: Exception) -> bool:
        """True for an out-of-memory error; also records the contents of memory."""
        if not isinstance(error, torch.OutOfMemoryError):
            return False
        phase = self.phases[-1]
        trace = self._history()
        failed = next((event for event in reversed(trace) if event["action"] == "oom"), None)
        span = self.spans[phase.name]
        peak = peak_of(trace, span.begin, span.end)
        # The allocator's history only has the size that it would have reserved for it.
        asked = int(asked_bytes(str(error))) or (int(failed["size"]) if failed else 0)
        frames = [(f["filename"], f["line"], f["name"]) for f in (failed or {}).get("frames", ())]
        where = " ".join(filter(None, (made_by(frames), self.running.at(failed["time_us"]) if failed else "")))
        self.lack = OutOfMemory(
            phase.name, asked, where, peak.bytes, phase.reserved or 0, items(peak.live, self.running, self.named)
        )
        return True

    def _history(self) -> list[dict[str, Any]]:
        return torch_internals.allocations(torch.cuda.current_device())

    # ---- results -----------------------------------------------------------------------------------------------------

    def seen(self, failed: str = "") -> Seen:
        history = self._history() if self.full and torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        phases = self.phases
        if history:
            phases = [replace(phase, items=self._items(history, self.spans[phase.name])) for phase in phases]
        return Seen(
            rank=self.request.rank,
            coordinates=self.coordinates,
            phases=tuple(phases),
            syncs=tuple(Sync(phase, where, count) for (phase, where), count in self.syncs.most_common()),
            sent=self.sent,
            recompiles=_recompiles(),
            communicators=self.communicators,
            out_of_memory=self.lack,
            failed=failed,
        )

    def _items(self, history: Sequence[Mapping[str, Any]], span: _Span) -> Any:
        return items(peak_of(history, span.begin, span.end).live, self.running, self.named)


def _now() -> int:
    return time.time_ns() // 1000


def line_of(frame: FrameType | None) -> str:
    """The line that caused a wait: the innermost one of fivefold, or else of a package other than torch."""
    other = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if "/fivefold/" in file and _OWN not in file:
            return f"{short(file)}:{frame.f_lineno} {frame.f_code.co_name}"
        if not other and _OWN not in file and not any(part in file for part in _AROUND):
            other = f"{short(file)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return other or "backward, in torch"


def _groups(mesh: Mesh) -> dict[int, Communicator]:
    """Groups of a mesh by communicator."""
    world = {"world": dist.group.WORLD} if dist.group.WORLD else {}
    return {
        torch_internals.communicator(group): Communicator(mesh.axis_of(group.group_name), group.size(), group.rank())
        for group in {**mesh.groups, **world}.values()
    }


def _against_plan(
    seen: Sequence[Collective], declared: Sequence[Collective], exposed: Mapping[tuple[str, str], int] | None
) -> tuple[SentOverAxis, ...]:
    found, said = ({(call.axis, call.kind): call for call in some} for some in (seen, declared))
    rows = []
    for axis, kind in sorted({*found, *said}):
        ran, plan = (some.get((axis, kind), Collective(axis, kind, 0, 0)) for some in (found, said))
        alone = None if exposed is None else exposed.get((axis, kind), 0)
        rows.append(SentOverAxis(axis, kind, ran.count, ran.bytes, plan.count, plan.bytes, alone))
    return tuple(rows)


def _recompiles() -> tuple[Recompile, ...]:
    """Functions that were compiled more than once, by cause, and graph breaks."""
    again = Counter(
        (f"{short(compiled.file)}:{compiled.line} {compiled.function}", any_layer(compiled.again))
        for compiled in torch_internals.compiles()
        if compiled.again
    )
    breaks = torch_internals.graph_breaks()
    return (
        *(Recompile(function, why, count) for (function, why), count in again.most_common()),
        *(Recompile("a graph broke", " ".join(why.split())[:300], count) for why, count in breaks.items()),
    )
