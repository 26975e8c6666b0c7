"""All-gather extensions of FSDP2 for parameters that are stored in host memory, or sent in a format of their own.

    at rest                    sent                  gathered
    fp32, on the device        a `WireFormat`        what the format makes of it
    fp32, in host memory       the compute dtype     a plain tensor
    fp32, in host memory       a `WireFormat`        what the format makes of it

FSDP gathers all other parameters by itself: stored in fp32 on the device, sent in the compute dtype. It calls `before`
on the stream that copies what it sends, so that transfers from host memory overlap compute.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.offload.host_memory import HostMemory
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.state import ParallelState
from fivefold.torch_internals import fsdp_gather_by, fsdp_pad, fsdp_shards


class WireFormat(Protocol):
    """Format in which a parameter is sent: bytes, and a scale that every rank has."""

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """(bytes of the rows that this rank sends, scale)."""

    def decode(self, gathered: Tensor, scale: Tensor, dtype: torch.dtype) -> Any:
        """Return the parameter, which computes as one of `dtype`. It shares the storage of `gathered`."""

    def rescale(self, parameter: Any, scale: Tensor) -> None:
        """Set the scale of a parameter whose storage has been filled again."""


class Gather:
    """All-gather extension of one parameter, computed with in `dtype`. `wire`: None sends `dtype`. `memory`: its place
    in the host; None: on the device."""

    shard: Tensor  # of this rank [rows of the shard, ..]
    rows: int  # padded by FSDP

    def __init__(
        self, dtype: torch.dtype, device: torch.device, wire: WireFormat | None, memory: HostMemory | None
    ) -> None:
        self._dtype, self._device, self.wire, self._memory = dtype, device, wire, memory

    def rest(self, size: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Allocate host memory for the padded shard; None on the device."""
        if self._memory is None:
            return None
        return self._memory.take(size.numel() * dtype.itemsize).view(dtype).view(size)

    def there(self) -> Tensor:
        return self.shard if self._memory is None else self.shard.to(self._device, non_blocking=True)

    def largest(self) -> Tensor:
        """Largest absolute value of the shard, a scalar; 0 without rows."""
        return self.there().abs().amax() if self.shard.numel() else torch.zeros((), device=self._device)

    # ---- FSDP2's hooks of a shard ------------------------------------------------------------------------------------

    def before(
        self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> tuple[tuple[Tensor], Tensor | None]:
        """(values that this rank sends, scale)."""
        values, scale = self.there().to(self._dtype), None
        if self.wire is not None:
            values, scale = self.wire.encode(values)
        if len(values) < self.rows:
            values = F.pad(values, (0, 0) * (values.ndim - 1) + (0, self.rows - len(values)))
        return (values,), scale

    def after(self, gathered: tuple[Tensor], scale: Tensor | None, dtype: Any, *, out: Any = None) -> Any:
        """Return the padded parameter. `out`: the one that was made first, whose storage `gathered` shares."""
        (values,) = gathered
        if self.wire is None:
            return None if out is not None else (values, ())
        assert scale is not None
        if out is None:
            return self.wire.decode(values, scale, self._dtype), ()
        self.wire.rescale(out, scale)
        return None


def gather_parameters(state: ParallelState) -> dict[str, Gather]:
    """Allocate the parameters, sharded on the meta device, where they are stored, and let FSDP gather them from there.
    Returns those that FSDP does not gather by itself, by name.

    DTensors of parameters in host memory report the device, because their gradients are there, and the optimizer
    fetches them (`offload/runtime.py`). Modules go one by one, so that the device holds one of them at a time.
    """
    model, device = state.model, state.device
    formats = {name: form for part in state.parts for name, form in part.formats(state).items()}
    memory = state.live(Offload).memory if state.plan.layout.offload_parameters else None
    found = dict[str, Gather]()
    shards = fsdp_shards(model)
    for path, module in model.named_modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if tensors and not any(tensor.is_meta for tensor in tensors):
            continue  # the other name of a tied parameter
        module.to_empty(device=device, recurse=False)
        for leaf in module._parameters:
            name, of = f"{path}.{leaf}", shards.get((module, leaf))
            if of is None:
                continue
            fsdp_pad(of)
            if name in formats or memory is not None:
                found[name] = Gather(state.dtype, device, formats.get(name), memory)
                fsdp_gather_by(of, found[name])
    return found
