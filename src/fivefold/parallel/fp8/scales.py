"""Scales of the weights that FSDP gathers in fp8, which halves the bytes of bf16. Each weight is cast where it is
stored, not at every use.

A weight has one scale, which follows from its largest value on all ranks: FSDP's shards of it, and tp's parts. Ranks
agree on the largest values of all weights of the model at once, over the world, when passes begin. (Delayed scaling
takes them from its history, and only notes the values of now.)

Example, a weight [8, 4] over dp_shard2: each rank casts its 4 rows by the scale of all 8, and gathers 32 bytes, not 64.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from fivefold.parallel.fp8.amax import AmaxHistory
from fivefold.parallel.fp8.matmul import scale_of
from fivefold.parallel.fp8.recipes import RECIPES
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fsdp.gathers import Gather
from fivefold.parallel.plan import ParallelPlan


class Fp8Scales:
    """Scales of the weights `plan.feature(Fp8Plan).gathers` of the whole model. Without any it does nothing."""

    def __init__(
        self, plan: ParallelPlan, gathers: Mapping[str, Gather], amax: AmaxHistory, dtype: torch.dtype
    ) -> None:
        """`gathers`: of the parameters on this rank. `dtype`: of compute."""
        self._names, self._amax, self._dtype = plan.feature(Fp8Plan).gathers, amax, dtype
        here = ((place, gathers.get(name)) for place, name in enumerate(self._names))
        self._gathers = {place: each for place, each in here if each is not None and each.in_fp8}
        self._cast = RECIPES[plan.layout.fp8].output[1] if self._names else None
        self._rows = torch.tensor([*self._gathers], dtype=torch.int64, device=amax.device)

    @torch.no_grad()
    def begin_passes(self) -> None:
        """Compute the scales of the weights as they are now. All ranks of the world call this together."""
        if self._cast is None:
            return
        device = self._amax.device
        largest = torch.zeros(len(self._names), dtype=torch.float64, device=device)
        if self._gathers:
            own = torch.stack([each.largest() for each in self._gathers.values()])
            largest[self._rows] = own.to(self._dtype).double()
        known = self._amax.of_weights(largest)
        if known is None:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        scales = scale_of(largest if known is None else known, self._cast, largest.to(self._dtype))
        for place, gather in self._gathers.items():
            gather.scale = scales[place].reshape(1, 1)
