"""FSDP gathers the weights of linears in fp8: half the bytes of bf16. Each is cast where it rests, not whenever it is
used.

A weight has one scale, which follows from its largest value on all ranks: those that FSDP deals it out to and those
that tp splits it over. Ranks agree on the largest values of all weights of the model at once, over the world, when
passes begin. (With delayed scaling their history says them, and they only note those of now.)

Example, a weight [8, 4] over dp_shard2: each rank casts its 4 rows by the scale of all 8, and gathers 32 bytes, not 64.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fivefold.core.fp8 import RECIPES, Cast
from fivefold.models import hf_internals
from fivefold.ops.fp8 import DTYPES, cast_to_fp8, scale_of
from fivefold.ops.fp8_weight import Fp8Weight
from fivefold.parallel.amax import AmaxHistory
from fivefold.parallel.plan import ParallelPlan
from fivefold.torch_internals import fsdp_extend


class Fp8Gathers:
    """Of the weights `plan.fp8_gathers` of the whole model. Where there are none it does nothing."""

    def __init__(self, model: nn.Module, plan: ParallelPlan, amax: AmaxHistory, dtype: torch.dtype) -> None:
        """`dtype`: of compute. FSDP has dealt the parameters out, and has gathered none yet."""
        self._names, self._amax, self._dtype = plan.fp8_gathers, amax, dtype
        if not self._names:
            return
        self._cast, weights = RECIPES[plan.layout.fp8].output[1], dict[nn.Parameter, Gather]()
        self._gathers: dict[int, Gather] = {}  # of the weights that are here, by their places among the names
        for place, name in enumerate(self._names):
            module, _, leaf = name.rpartition(".")
            if plan.holds(name) and hf_internals.is_plain_linear(model.get_submodule(module)):  # others cast nothing
                weight = model.get_submodule(module).get_parameter(leaf)
                weights[weight] = self._gathers[place] = Gather(self._cast, dtype)
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                fsdp_extend(unit, weights)

    @torch.no_grad()
    def begin_passes(self) -> None:
        """Find the scales of the weights as they are now. All ranks of the world call this together."""
        if not self._names:
            return
        here, device = [*self._gathers], self._amax.device
        largest = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        if here:
            own = torch.stack([each.largest(device) for each in self._gathers.values()])
            largest[torch.tensor(here, device=device)] = own.to(self._dtype).double()
        known = self._amax.of_weights(largest)
        if known is None:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        scales = scale_of(largest if known is None else known, self._cast, largest.to(self._dtype))
        for place, gather in self._gathers.items():
            gather.scale = scales[place].reshape(1, 1)


class Gather:
    """How FSDP gathers one weight: FSDP2's two hooks of a shard."""

    shard: Tensor  # [rows of this rank, ..], and how many rows FSDP pads it to
    rows: int
    scale: Tensor  # [1, 1]

    def __init__(self, cast: Cast, dtype: torch.dtype) -> None:
        self._cast, self._dtype = cast, dtype

    def largest(self, device: torch.device) -> Tensor:
        """The largest absolute value of the shard, a scalar; of no rows, 0."""
        return self.shard.abs().amax() if self.shard.numel() else torch.zeros((), dtype=self.shard.dtype, device=device)

    def before(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        """(what this rank sends, the scale): bytes, for not every backend sends fp8."""
        values = cast_to_fp8(self.shard.to(self._dtype), self._cast, self.scale).view(torch.uint8)
        return (F.pad(values, (0, 0, 0, self.rows - len(values))),), self.scale

    def after(self, gathered: tuple[Tensor, ...], scale: Tensor, dtype: Any, *, out: Fp8Weight | None = None) -> Any:
        """The weight. `out`: the one that was made first, whose storage `gathered` shares."""
        if out is not None:
            out.scale = scale
            return None
        (values,) = gathered
        return Fp8Weight(values.view(DTYPES[self._cast.form]), scale, self._dtype), ()
