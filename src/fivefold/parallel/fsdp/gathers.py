"""All-gather extensions of FSDP2 for parameters that are stored in host memory, or that travel in fp8.

    at rest                    sent                  gathered
    fp32, on the device        e4m3 and a scale      `Fp8Weight`
    fp32, in host memory       the compute dtype     a plain tensor
    fp32, in host memory       e4m3 and a scale      `Fp8Weight`

FSDP gathers all other parameters by itself: stored in fp32 on the device, sent in the compute dtype. It calls `before`
on the stream that copies what it sends, so that transfers from host memory overlap compute.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models import hf_internals
from fivefold.parallel.fp8.matmul import DTYPES, cast_to_fp8
from fivefold.parallel.fp8.recipes import RECIPES, Cast
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fp8.weight import Fp8Weight
from fivefold.parallel.offload.host_memory import HostMemory
from fivefold.parallel.plan import ParallelPlan
from fivefold.torch_internals import fsdp_gather_by, fsdp_pad, fsdp_shards


class Gather:
    """All-gather extension of one parameter, computed with in `dtype`. `cast`: to fp8, if any. `memory`: its place in
    the host; None: on the device."""

    shard: Tensor  # of this rank [rows of the shard, ..]
    rows: int  # padded by FSDP
    scale: Tensor | None = None  # [1, 1], for a weight in fp8

    def __init__(self, dtype: torch.dtype, device: torch.device, cast: Cast | None, memory: HostMemory | None) -> None:
        self._dtype, self._device, self._cast, self._memory = dtype, device, cast, memory

    @property
    def in_fp8(self) -> bool:
        return self._cast is not None

    def rest(self, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Allocate host memory for the padded shard; None on the device."""
        if self._memory is None:
            return None
        return self._memory.take(size.numel() * dtype.itemsize).view(dtype).view(size)

    def there(self) -> Tensor:
        """Return the shard on the device."""
        if self._memory is None:
            return self.shard
        found = self.shard.to(self._device, non_blocking=True)
        self._memory.rest(self.shard)
        return found

    def largest(self) -> Tensor:
        """Largest absolute value of the shard, a scalar; 0 without rows."""
        return self.there().abs().amax() if self.shard.numel() else torch.zeros((), device=self._device)

    # ---- FSDP2's hooks of a shard ------------------------------------------------------------------------------------

    def before(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], Tensor | None]:
        """(values that this rank sends, scale). fp8 is sent as bytes, because not every backend sends fp8."""
        values = self.there().to(self._dtype)
        if self._cast is not None:
            assert self.scale is not None, "passes have begun"
            values = cast_to_fp8(values, self._cast, self.scale).view(torch.uint8)
        if len(values) < self.rows:
            values = F.pad(values, (0, 0) * (values.ndim - 1) + (0, self.rows - len(values)))
        return (values,), self.scale

    def after(self, gathered: tuple[Tensor], scale: Tensor | None, dtype: Any, *, out: Any = None) -> Any:
        """Return the padded parameter. `out`: the one that was made first, whose storage `gathered` shares."""
        (values,) = gathered
        if self._cast is None:
            return None if out is not None else (values, ())
        assert scale is not None
        if out is None:
            return Fp8Weight(values.view(DTYPES[self._cast.form]), scale, self._dtype), ()
        out.scale = scale
        return None


def gather_parameters(
    model: nn.Module, plan: ParallelPlan, device: torch.device, dtype: torch.dtype, memory: HostMemory | None
) -> dict[str, Gather]:
    """Allocate the parameters, sharded on the meta device, where they are stored, and let FSDP gather them from there.
    Returns those that FSDP does not gather by itself, by name.

    `memory`: their storage. Their DTensors report the device, because their gradients are there, and the optimizer
    fetches them (`offload/runtime.py`). Modules go one by one, so that the device holds one of them at a time.
    """
    found = dict[str, Gather]()
    in_fp8, shards = frozenset(plan.feature(Fp8Plan).gathers), fsdp_shards(model)
    for path, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if tensors and not any(each.is_meta for each in tensors):
            continue  # the other name of a tied parameter
        module.to_empty(device=device, recurse=False)
        for leaf in module._parameters:
            name, of = f"{path}.{leaf}", shards.get((module, leaf))
            if of is None:
                continue
            fsdp_pad(of)
            # A linear of another class multiplies by itself, in the compute dtype.
            is_cast = name in in_fp8 and hf_internals.is_plain_linear(module)
            if is_cast or memory is not None:
                cast = RECIPES[plan.layout.fp8].output[1] if is_cast else None
                found[name] = Gather(dtype, device, cast, memory)
                fsdp_gather_by(of, found[name])
    return found
