"""How FSDP gathers a parameter that rests in host memory, or that travels in fp8: an all-gather extension of FSDP2.

    at rest                    sent                  gathered
    fp32, on the device        e4m3 and a scale      `Fp8Weight`
    fp32, in host memory       the compute dtype     a plain tensor
    fp32, in host memory       e4m3 and a scale      `Fp8Weight`

A parameter of no kind of these FSDP gathers by itself: at rest in fp32 on the device, sent in the compute dtype.
FSDP calls `before` on the stream on which it copies what it sends, so what comes from host memory comes beside compute.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.fp8 import RECIPES, Cast
from fivefold.models import hf_internals
from fivefold.ops.fp8 import DTYPES, cast_to_fp8
from fivefold.ops.fp8_weight import Fp8Weight
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.offload.host_memory import HostMemory
from fivefold.parallel.plan import ParallelPlan
from fivefold.torch_internals import fsdp_gather_by, fsdp_pad, fsdp_shards


class Gather:
    """Of one parameter, computed with in `dtype`. `cast`: its way to fp8. `memory`: where it rests; None: on the
    device."""

    shard: Tensor  # of this rank [rows of the shard, ..]
    rows: int  # to which FSDP pads it
    scale: Tensor | None = None  # [1, 1], of a weight in fp8

    def __init__(self, dtype: torch.dtype, device: torch.device, cast: Cast | None, memory: HostMemory | None) -> None:
        self._dtype, self._device, self._cast, self._memory = dtype, device, cast, memory

    @property
    def in_fp8(self) -> bool:
        return self._cast is not None

    def rest(self, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Room for the padded shard."""
        if self._memory is None:
            return None
        return self._memory.take(size.numel() * dtype.itemsize).view(dtype).view(size)

    def there(self) -> Tensor:
        """The shard on the device."""
        if self._memory is None:
            return self.shard
        found = self.shard.to(self._device, non_blocking=True)
        self._memory.rest(self.shard)
        return found

    def largest(self) -> Tensor:
        """The largest absolute value of the shard, a scalar; of no rows, 0."""
        return self.there().abs().amax() if self.shard.numel() else torch.zeros((), device=self._device)

    # ---- FSDP2's hooks of a shard ------------------------------------------------------------------------------------

    def before(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], Tensor | None]:
        """(what this rank sends, the scale). What is in fp8 is sent as bytes, for not every backend sends fp8."""
        values = self.there().to(self._dtype)
        if self._cast is not None:
            assert self.scale is not None, "passes have begun"
            values = cast_to_fp8(values, self._cast, self.scale).view(torch.uint8)
        if len(values) < self.rows:
            values = F.pad(values, (0, 0) * (values.ndim - 1) + (0, self.rows - len(values)))
        return (values,), self.scale

    def after(self, gathered: tuple[Tensor], scale: Tensor | None, dtype: Any, *, out: Any = None) -> Any:
        """The parameter, padded. `out`: the one that was made first, whose storage `gathered` shares."""
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
    """Put the parameters, dealt out on the meta device, where they rest, and let FSDP gather them from there. Returns
    those that it does not gather by itself, by name.

    `memory`: the parameters rest there. Their DTensors say the device: their gradients are there, and the optimizer
    brings them (`offload.py`). This goes module by module, so that the device has to hold one of them at a time.
    """
    found = dict[str, Gather]()
    in_fp8, shards = frozenset(plan.feature(Fp8Plan).gathers), fsdp_shards(model)
    for path, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if tensors and not any(each.is_meta for each in tensors):
            continue  # the other name of a tied one
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
