"""Scales of fp8 in a live model: of the weights that FSDP gathers in fp8, and by the history of delayed scaling.

Gathering in fp8 halves the bytes of bf16. Each weight is cast where it is stored, not at every use. It has one scale,
which follows from its largest value on all ranks: FSDP's shards of it, and tp's parts. Ranks agree on the largest
values of all weights of the model at once, over the world, when passes begin. (Delayed scaling takes them from its
history, and only notes the values of now.)

Example, a weight [8, 4] over dp_shard2: each rank casts its 4 rows by the scale of all 8, and gathers 32 bytes, not 64.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.models import hf_internals
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.fp8.matmul import DTYPES, Fp8Weight, cast_to_fp8, scale_of
from fivefold.parallel.fp8.recipes import KINDS, RECIPES, Cast, Operand
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fsdp.gathers import Gather
from fivefold.parallel.state import LivePart, ParallelState

KEY = "fp8_amax"  # of a checkpoint's state: largest values of earlier steps, by linear


class Fp8Format:
    """fp8 numbers and their scale, as FSDP sends a weight (`WireFormat`): bytes, as not every backend sends fp8."""

    def __init__(self, cast: Cast) -> None:
        self._cast = cast
        self.scale: Tensor | None = None  # [1, 1], of the current passes

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        assert self.scale is not None, "passes have begun"
        return cast_to_fp8(values, self._cast, self.scale).view(torch.uint8), self.scale

    def decode(self, gathered: Tensor, scale: Tensor, dtype: torch.dtype) -> Fp8Weight:
        return Fp8Weight(gathered.view(DTYPES[self._cast.form]), scale, dtype)

    def rescale(self, parameter: Fp8Weight, scale: Tensor) -> None:
        parameter.scale = scale


class Fp8Scales(LivePart):
    """Scales of one model: of the weights `plan.feature(Fp8Plan).gathers` of the whole model, which compute in `dtype`,
    and the `history` of its linears. Without fp8 it does nothing."""

    def __init__(self, state: ParallelState) -> None:
        fp8 = state.plan.feature(Fp8Plan)
        self.history = AmaxHistory(fp8.amax_names, fp8.amax_steps, state.device)
        self._names, self._dtype = fp8.gathers, state.dtype
        self._cast = RECIPES[state.plan.layout.fp8].output[1] if self._names else None
        self._weights: dict[int, tuple[Gather, Fp8Format]] = {}  # of this rank, by their places in the names
        self._rows = torch.tensor([], dtype=torch.int64, device=state.device)

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        return cls(state)

    def formats(self, state: ParallelState) -> Mapping[str, Fp8Format]:
        """Formats by weight that this rank sends in fp8. Linears of another class multiply by themselves."""
        if self._cast is None:
            return {}
        modules = dict(state.model.named_modules())
        here = ((name, modules.get(name.rpartition(".")[0])) for name in self._names)
        return {name: Fp8Format(self._cast) for name, linear in here if linear and hf_internals.is_plain_linear(linear)}

    def end_allocation(self, state: ParallelState, gathers: Mapping[str, Gather]) -> None:
        own = {name: (gather, gather.wire) for name, gather in gathers.items() if isinstance(gather.wire, Fp8Format)}
        self._weights = {place: own[name] for place, name in enumerate(self._names) if name in own}
        self._rows = self._rows.new_tensor([*self._weights])

    @torch.no_grad()
    def begin_passes(self) -> None:
        """Compute the scales of the weights as they are now."""
        if self._cast is None:
            return
        device = self.history.device
        largest = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        if self._weights:
            own = torch.stack([gather.largest() for gather, _ in self._weights.values()])
            largest[self._rows] = own.to(self._dtype).double()
        known = self.history.of_weights(largest)
        if known is None:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        scales = scale_of(largest if known is None else known, self._cast, largest.to(self._dtype))
        for place, (_, format) in self._weights.items():
            format.scale = scales[place].reshape(1, 1)

    def in_gradients(self, state: ParallelState, rows: int) -> AbstractContextManager[None]:
        return self.history.recording()

    def shaped(self, shape: StepShape) -> StepShape:
        return replace(shape, has_history=not self.history.is_first)

    def after_step(self, *, skipped: bool) -> None:
        if not skipped:
            self.history.end_step()

    def state(self) -> dict[str, Any]:
        state = self.history.state()
        return {KEY: state} if state else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self.history.load(state.get(KEY, {}))


# ---- delayed scaling -------------------------------------------------------------------------------------------------


class AmaxHistory:
    """History of the linears `names` of the whole model, in fp64 on `device`. Without names it does nothing.

    A tensor's scale follows from the largest value ("amax") that it had in the last `steps` steps. It is one number
    through a step: for all micro batches, in a forward that recompute repeats, and in evaluation. So ranks need not
    agree before each product, but once a step, on the largest values of all linears in one all-reduce over the world.
    Every rank has the same history under any layout, so a checkpoint of it continues under any other.

    Example, 2 linears and 16 steps: `history` is [16, 2, 3], for inputs, weights and gradients of outputs. An input
    that was at most 3.0 in these steps is multiplied by 448 / 3 and rounded; values above 3.0 now are cut to 448. Until
    a first step has ended there is no history, and every tensor is scaled by itself, as in `tensorwise`.
    """

    def __init__(self, names: Sequence[str], steps: int, device: torch.device) -> None:
        self.names, self.steps, self.device = tuple(names), steps, device
        self.history = torch.zeros(0, len(self.names), len(KINDS), dtype=torch.float64, device=device)
        self.is_first = True  # the last gradients were computed without a history
        self._now = self.history.new_zeros(len(self.names), len(KINDS))  # of the current step
        self._is_open = False
        self._largest: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the gradients of a step in this context, over all its micro batches; afterwards ranks agree."""
        if not self.names:
            yield
            return
        self._now.zero_()
        self._is_open, self.is_first = True, self._largest is None
        try:
            yield
        finally:
            self._is_open = False
        self._now.nan_to_num_(nan=0.0, posinf=0.0)  # such values say nothing about the next step
        dist.all_reduce(self._now, dist.ReduceOp.MAX)

    def note(self, rows: Sequence[int], operand: Operand, largest: Tensor) -> None:
        """Note an operand's largest value in this micro batch, for the linears `rows`, by their places in `names`."""
        if self._is_open:
            own = self._now[rows[0] : rows[-1] + 1, KINDS.index(operand)]
            own.copy_(torch.maximum(own, largest.to(own.dtype)))

    def of_weights(self, largest: Tensor) -> Tensor | None:
        """Return the largest values of all weights in the last steps; None without a history. Notes the values of now,
        [len(names)], of the weights that are here. NaN if the value of now is not finite: a cast would hide it."""
        if self._is_open:
            self._now[:, KINDS.index("weight")].copy_(torch.maximum(self._now[:, KINDS.index("weight")], largest))
        return None if self._largest is None else self._largest[:, KINDS.index("weight")] + 0.0 * largest

    def largest(self, row: int, operand: Operand) -> Tensor | None:
        """Largest value of the last steps, a scalar; None without a history; 1 for a tensor that was all zeros."""
        return None if self._largest is None else self._largest[row, KINDS.index(operand)]

    def end_step(self) -> None:
        """Add the values of the step to the history, when the weights have been updated."""
        if self.names:
            self._keep(torch.cat([self.history, self._now[None]])[-self.steps :])

    def _keep(self, history: Tensor) -> None:
        self.history = history
        largest = history.amax(dim=0)
        self._largest = torch.where(largest > 0, largest, 1.0)

    # ---- in checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: linear -> [steps, 3]. Empty without a history."""
        return dict(zip(self.names, self.history.transpose(0, 1).tolist(), strict=True)) if len(self.history) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. If it lacks a linear, no history is left: the next step begins one."""
        self.history, self._largest = self.history[:0], None
        if self.names and all(name in state for name in self.names):
            each = [state[name][-self.steps :] for name in self.names]
            self._keep(torch.tensor(each, dtype=torch.float64, device=self._now.device).transpose(0, 1).contiguous())
