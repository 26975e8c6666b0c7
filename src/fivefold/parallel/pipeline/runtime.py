"""Pipeline parallelism: one optimizer step over the stages of this rank, in the order of a schedule.

Every model runs here. Without pipeline parallelism it is one stage, whose micro batches go forward and back one after
the other; nothing is sent.

`run_pipeline` executes this rank's actions of a `SchedulePlan`: slots (forward, backward) and the transfers between
them. Hidden states go to the next stage, their gradients to the stage before; the last stage computes the loss. The
orders equal those of `torch.distributed.pipelining` (a test compares them). They are executed here for two reasons:
FSDP must be told, unit by unit, which backward is the last; and every transfer must be known, and declared, before the
step.

Legend: B rows, T tokens of a row on this rank, D hidden size.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fivefold.core.schedule import SchedulePlan, Slot, Timed, Timeline, Transfer
from fivefold.ops.linear import WeightGradStore
from fivefold.parallel import plain
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.dtensor import local
from fivefold.parallel.fsdp.copies import Copies
from fivefold.parallel.fsdp.runtime import reshard
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.fsdp.unshards import Progress
from fivefold.parallel.linears.runtime import LinearsOfModel
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.pipeline.stages import StageModules, stage_builders
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.state import Builders, LivePart, ParallelState, state_of
from fivefold.parallel.tensor.runtime import TensorParallel
from fivefold.torch_internals import fsdp_add_late, fsdp_reduce_now


@dataclass
class Pipeline(LivePart):
    """Pipeline parallelism of one model on this rank.

    `group`: None if one rank has all stages. `embedding_group`: sums the gradient of a tied embedding; None if one rank
    has both ends. `store`: weight gradients that a schedule defers; None if it defers none. `running`: the current
    slot, for observers. `timed`: slots with their times, if it is a list.
    """

    plan: ParallelPlan
    staged: StageModules
    group: dist.ProcessGroup | None
    embedding_group: dist.ProcessGroup | None
    store: WeightGradStore | None = None
    running: Slot | None = None
    timed: list[Timed] | None = None

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        staged = StageModules(
            state.plan, state.model, state.dtype, state.live(TensorParallel), state.live(ContextParallel)
        )
        group, ends = state.mesh.groups.get("pp"), state.mesh.groups.get("pp_ends")
        return cls(state.plan, staged, group, ends, state.live(LinearsOfModel).linears.store)

    def timeline(self) -> Timeline:
        """Timeline of `timed` on all ranks of the pipeline. Each calls this; zero is the step's begin."""
        everyone = plain.everywhere([asdict(timed) for timed in self.timed or ()], self.group)
        slots = [Timed(**timed | {"slot": Slot(*timed["slot"])}) for own in everyone for timed in own]
        return Timeline(self.plan.layout.pp, tuple(slots))


def builders(state: ParallelState) -> Builders:
    return stage_builders(state.live(Pipeline).staged)


def run_pipeline(model: Any, pipeline: Pipeline, inputs: Sequence[Any]) -> Tensor:
    """Run forward and backward of every micro batch (`passes.Inputs`); gradients end up reduced. Returns the sum of the
    losses, fp64: 0 on ranks without the last stage."""
    plan = pipeline.plan.feature(PipelinePlan).schedule(len(inputs))
    step = _Step(model, pipeline, plan, inputs)
    slots = {"F": step.forward, "B": step.backward, "I": step.backward, "W": step.weights}
    for action in plan.actions[pipeline.plan.placement.coords.pp]:
        if isinstance(action, Transfer):
            (step.send if action.way == "send" else step.receive)(action)
        else:
            with step.running(action):
                slots[action.kind](action)
    step.finish()
    return step.loss


class _Step:
    """One optimizer step on this rank: the tensors received, and those that backward still needs."""

    def __init__(self, model: Any, pipeline: Pipeline, plan: SchedulePlan, inputs: Sequence[Any]) -> None:
        self.model, self.pipeline, self.plan, self.inputs = model, pipeline, plan, inputs
        self.staged = pipeline.staged
        self.loss = torch.zeros((), dtype=torch.float64, device=inputs[0].input_ids.device)
        self._fsdp = _Flags(model, pipeline, plan)
        state_of(model).live(Copies).hold()
        self._given: dict[tuple[str, int, int], tuple[Tensor, dist.Work | None]] = {}
        self._outbox: dict[tuple[str, int, int], Tensor] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._watch = None if pipeline.timed is None else Stopwatch(self.loss.device, pipeline.group)

    @contextmanager
    def running(self, slot: Slot) -> Iterator[None]:
        """Wait for the slot's input, and time the slot."""
        self.pipeline.running = slot
        if self._watch:
            self._watch.asked(slot)
        self._wait_for(slot)
        self._mark()
        yield
        self._mark()
        self.pipeline.running = None

    def _mark(self) -> None:
        if self._watch:
            self._watch.mark()

    def finish(self) -> None:
        """Wait until everything is sent, and sum a tied embedding's two gradients."""
        if self._watch and self.pipeline.timed is not None:
            self.pipeline.timed += self._watch.timed(self.pipeline.plan.placement.coords.pp)
        for work, _ in self._sent:
            work.wait()
        assert not (self._given or self._outbox or self._kept), "a pipeline step left something behind"
        reshard(self.model)
        _sum_ends(self.model, self.pipeline)

    # ---- slots -------------------------------------------------------------------------------------------------------

    def forward(self, slot: Slot) -> None:
        stage, at = slot.stage, slot.micro_batch
        hidden = self._take("F", stage, at).requires_grad_() if stage else None
        with self._collecting(stage, at):
            out = self.model.run_stage(self.inputs[at], stage, hidden)
        if self.staged.is_last(stage):
            self.loss += out.detach()
        else:
            self.staged.check(stage, out, self.inputs[at].input_ids)
            self._give("F", stage + 1, at, out.detach())
        self._kept[stage, at] = hidden, out

    def backward(self, slot: Slot) -> None:
        stage, at = slot.stage, slot.micro_batch
        hidden, out = self._kept.pop((stage, at))
        gradient = None if self.staged.is_last(stage) else self._take("B", stage, at)
        self._fsdp.before_backward(slot)
        state_of(self.model).begin_inputs(self.inputs[at], again=True)
        with self._collecting(stage, at):
            if out.requires_grad:  # not if all that ran is frozen
                torch.autograd.backward(out, gradient)
        if hidden is not None:
            assert hidden.grad is not None, f"no gradient reached the input of stage {stage}"
            self._give("B", stage - 1, at, hidden.grad)
        if self.plan.record.splits_backward and slot.kind == "B":
            self.weights(slot)

    def weights(self, slot: Slot) -> None:
        assert self.pipeline.store is not None, f"{slot} of a schedule that splits no backward"
        self.pipeline.store.compute((slot.stage, slot.micro_batch))
        self._fsdp.after_weights(slot)

    def _collecting(self, stage: int, at: int) -> AbstractContextManager[None]:
        return self.pipeline.store.collecting((stage, at)) if self.pipeline.store else nullcontext()

    # ---- transfers ---------------------------------------------------------------------------------------------------

    def _give(self, of: str, stage: int, at: int, tensor: Tensor) -> None:
        """Pass to another stage: on this rank at once, on another when its transfer comes."""
        if stage in self.pipeline.plan.placement.own_stages:
            self._given[of, stage, at] = tensor, None
        else:
            self._outbox[of, stage, at] = tensor.contiguous()

    def _wait_for(self, slot: Slot) -> None:
        """Wait for the slot's input from another rank."""
        key = "F" if slot.kind == "F" else "B", slot.stage, slot.micro_batch
        tensor, work = self._given.get(key, (None, None))
        if tensor is not None and work is not None:
            work.wait()
            self._given[key] = tensor, None

    def _take(self, of: str, stage: int, at: int) -> Tensor:
        tensor, _ = self._given.pop((of, stage, at))
        return tensor

    def send(self, transfer: Transfer) -> None:
        tensor = self._outbox.pop((transfer.of, transfer.stage, transfer.micro_batch))
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        self._sent.append((_isend(tensor, self.pipeline.group, transfer.peer), tensor))

    def receive(self, transfer: Transfer) -> None:
        buffer = self.staged.empty(self.inputs[transfer.micro_batch].input_ids)
        work = _irecv(buffer, self.pipeline.group, transfer.peer)
        self._given[transfer.of, transfer.stage, transfer.micro_batch] = buffer, work


def _sum_ends(model: nn.Module, pipeline: Pipeline) -> None:
    """Sum the gradient of a tied embedding over the embedding group: the first and the last stage each have a part."""
    if pipeline.embedding_group is not None:
        tied = dict(model.named_parameters())[pipeline.plan.tied or ""]
        if not tied.requires_grad:
            return
        assert tied.grad is not None, f"{pipeline.plan.tied} has no gradient"
        dist.all_reduce(local(tied.grad), group=pipeline.embedding_group)


def _isend(tensor: Tensor, group: dist.ProcessGroup | None, peer: int) -> dist.Work:
    return cast(dist.Work, dist.isend(tensor, group=group, group_dst=peer))


def _irecv(buffer: Tensor, group: dist.ProcessGroup | None, peer: int) -> dist.Work:
    return cast(dist.Work, dist.irecv(buffer, group=group, group_src=peer))


# ---- times of slots --------------------------------------------------------------------------------------------------


class Stopwatch:
    """Times of a step's slots on this rank. Starts at zero on all ranks of a group at once, which all make one.

    On a CPU the wall clock measures the slots. On a GPU a slot is only queued, so CUDA events between the slots measure
    them. The time that a slot waits for hidden states or a gradient ends at its start, and is recorded apart.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self._is_cuda = device.type == "cuda"
        dist.barrier(group)
        self._synchronize()
        self._slots: list[Slot] = []
        self._marks: list[Any] = []  # seconds, or events of CUDA
        self._zero = self._now()

    def asked(self, slot: Slot) -> None:
        """Note that the rank has come to `slot`, which may have to wait."""
        self._slots.append(slot)
        self._marks.append(self._now())

    def mark(self) -> None:
        """Note that the slot's input is here; and again, that the slot is done."""
        self._marks.append(self._now())

    def timed(self, rank: int) -> list[Timed]:
        """Return the slots with their seconds since zero. Waits for the device."""
        self._synchronize()
        seconds = [self._seconds(mark) for mark in self._marks]
        of_slots = zip(self._slots, seconds[::3], seconds[1::3], seconds[2::3], strict=True)
        return [Timed(rank, slot, start, end, start - asked) for slot, asked, start, end in of_slots]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        return float(self._zero.elapsed_time(mark) / 1000 if self._is_cuda else mark - self._zero)

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


# ---- settings of FSDP ------------------------------------------------------------------------------------------------


class _Flags:
    """Settings of FSDP, unit by unit: what each backward reduces and keeps gathered. With deferred weight gradients (W
    slots), FSDP's own hooks come too early: the unit is then reduced after a W slot."""

    def __init__(self, model: Any, pipeline: Pipeline, plan: SchedulePlan) -> None:
        self._zero, self._splits = pipeline.plan.layout.zero, plan.record.splits_backward
        fsdp = pipeline.plan.feature(FsdpPlan)
        self._units: list[tuple[FSDPModule, frozenset[int], bool]] = [
            (model.get_submodule(unit.name), fsdp.users(unit), fsdp.node_ranks(unit) == 1)
            for unit in fsdp.sharded
            if unit.parameters
        ]
        self._progress = Progress(plan.micro_batches, pipeline.plan.placement.own_stages, self._zero)

    def before_backward(self, slot: Slot) -> None:
        """Set what FSDP's hooks do in the backward that comes."""
        if slot.kind == "I" or not self._splits:
            self._progress.note(slot)
        for module, users, is_kept in self._units:
            reduces = not self._splits and self._progress.reduces(slot, users)
            is_last = reduces and self._progress.is_last(users)
            module.set_requires_gradient_sync(reduces, recurse=False)
            module.set_requires_all_reduce(is_last, recurse=False)
            module.set_reshard_after_backward(self._zero == 3 and (is_last or not is_kept), recurse=False)

    def after_weights(self, slot: Slot) -> None:
        """Add up, and reduce, what the hooks have left."""
        self._progress.note(slot)
        for module, users, _ in self._units:
            if slot.stage in users:
                fsdp_add_late(module)
            if self._progress.reduces(slot, users):
                module.set_requires_gradient_sync(True, recurse=False)
                module.set_requires_all_reduce(self._progress.is_last(users), recurse=False)
                fsdp_reduce_now(module)


# ---- forward only ----------------------------------------------------------------------------------------------------


def forward_only(pipeline: Pipeline, ids_BT: Tensor, work: Callable[[int, Tensor | None], Tensor]) -> Tensor | None:
    """Run `work(stage, hidden)` through all stages in order. Returns the last result on its rank, None elsewhere."""
    staged, placement, hidden = pipeline.staged, pipeline.plan.placement, None
    stages, own = placement.stages, placement.own_stages
    for stage in own:
        before, after = stage - 1, stage + 1
        if stage and before not in own:
            hidden = staged.empty(ids_BT)
            _irecv(hidden, pipeline.group, stages.rank_of(before)).wait()
        hidden = work(stage, hidden if stage else None)
        if staged.is_last(stage):
            return hidden
        staged.check(stage, hidden, ids_BT)
        if after not in own:
            _isend(hidden.contiguous(), pipeline.group, stages.rank_of(after)).wait()
    return None


def broadcast_from_last_stage(
    pipeline: Pipeline, tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: Any
) -> Tensor:
    """Broadcast the tensor of the last stage's rank to all ranks of the pipeline."""
    if pipeline.group is None and tensor is not None:
        return tensor
    source = pipeline.plan.placement.stages.rank_of(pipeline.plan.placement.stages.count - 1)
    shared = torch.empty(*shape, dtype=dtype, device=device) if tensor is None else tensor.to(dtype).contiguous()
    dist.broadcast(shared, group=pipeline.group, group_src=source)
    return shared
