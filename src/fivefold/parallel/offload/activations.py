"""Saved activations of layers, in host memory until backward.

    forward     layer 1      layer 2      layer 3                  backward   3            2            1
    to the host              1            2                        from it    2            1

While a layer runs forward, the tensors that the layer before it saved are copied to the host. The last layer of a stage
keeps its own: its backward may come next, and while it runs, the layer before it is fetched. Saved tensors are
identified by their memory: views of the same memory are one copy. Some stay on the device: what the layer was given
besides its input, its parameters, and tensors that are small beside its input.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fivefold.parallel.offload.host_memory import CopiesInFlight, HostMemory, Lane
from fivefold.parallel.offload.spec import SMALL
from fivefold.torch_internals import plain_tensors, storage_key


class SavedMemory:
    """Memory that a layer saved, away until backward. It lives as long as something in the graph refers to it."""

    def __init__(self, values: Tensor, home: Tensor, owner: "HostActivations") -> None:
        self.values: Tensor | None = values  # uint8 on the device, while they are there
        self.home = home
        weakref.finalize(self, owner.give_back, home).atexit = False


@dataclass
class Pass:
    """One forward pass of one layer. `before`: that of the layer before it in the same micro batch; None at the first
    layer of a stage. `saved`: the tensors that are still needed."""

    before: "Pass | None"
    saved: list["weakref.ref[SavedMemory]"] = field(default_factory=list)
    copies: CopiesInFlight = field(default_factory=lambda: CopiesInFlight(()))
    has_begun: bool = False  # its backward has

    def away(self) -> list[SavedMemory]:
        """Saved memory without values on the device; backward asks for the last first."""
        there = (release() for release in reversed(self.saved))
        return [saved for saved in there if saved is not None and saved.values is None]


@dataclass(frozen=True)
class Packed:
    """A saved tensor, which is a view of saved memory."""

    of: SavedMemory | None  # None: it stays on the device
    made_in: Pass
    kept: Tensor | None
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class HostActivations:
    """Saved activations of the layers of one model on this rank."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self._memory, self._device, self._lane = memory, device, Lane(device)
        self._last: Pass | None = None  # the newest forward pass of the micro batch
        self._leaving: tuple[CopiesInFlight, list[SavedMemory]] = CopiesInFlight(()), []  # in transit to the host
        self._coming = CopiesInFlight(())  # and from it

    def layer(
        self, block: nn.Module, forward: Callable[..., Any], *, is_first: bool, is_last: bool
    ) -> Callable[..., Any]:
        """Wrap `forward` of a layer: saved tensors are away until backward. `is_first`, `is_last`: of its stage."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            own = Pass(None if is_first else self._last)
            given = [tensor for tensor in tree_leaves((args[1:], kwargs)) if isinstance(tensor, Tensor)]
            least = args[0].nbytes // SMALL if args and isinstance(args[0], Tensor) else 0
            saving = _Saving(self, own, block, set(map(storage_key, given)), least=least, moves=not is_last)
            with saved_tensors_hooks(saving.pack, self.unpack):
                result = forward(*args, **kwargs)
            self._send(own, saving)
            self._last = own
            return result

        return run

    def take(self, values: Tensor) -> SavedMemory:
        return SavedMemory(values, self._memory.take(values.nbytes), self)

    def give_back(self, home: Tensor) -> None:
        """Free a block. The lane keeps order: the next copy into the block waits for the current copy out of it."""
        self._memory.give_back(home)

    def _send(self, own: Pass, saving: "_Saving") -> None:
        """Begin to copy a layer's saved tensors; those of the layer before it are then freed on the device."""
        self._settle()
        moving = list(saving.found.values())
        pairs = [(saved.home, saved.values) for saved in moving if saved.values is not None]
        self._leaving = self._lane.copy(pairs), moving
        if not self._lane.is_apart:
            self._settle()

    def _settle(self) -> None:
        """End the copies in transit to the host before any later work of the device."""
        copies, moving = self._leaving
        copies.meet()
        for saved in moving:
            saved.values = None
        self._leaving = CopiesInFlight(()), []

    def unpack(self, packed: Packed) -> Tensor:
        """Return the tensor, in backward. The first one of a layer starts to fetch the layer before it."""
        own = packed.made_in
        if not own.has_begun:
            own.has_begun = True
            self._fetch(own)
            own.copies.meet()
            if own.before is not None:
                self._fetch(own.before)
        if packed.of is None:
            assert packed.kept is not None
            return packed.kept
        if packed.of.values is None:  # a second backward through the same graph
            self._fetch(own)
            own.copies.meet()
        assert packed.of.values is not None
        whole = torch.empty(0, dtype=packed.dtype, device=self._device)
        whole.set_(packed.of.values.untyped_storage(), packed.offset, packed.shape, packed.stride)
        return whole.data  # with its count of in-place changes at zero

    def _fetch(self, own: Pass) -> None:
        away = own.away()
        if not away:
            return
        self._coming.meet()
        for saved in away:
            saved.values = torch.empty_like(saved.home, device=self._device)
        own.copies = self._coming = self._lane.copy(
            [(saved.values, saved.home) for saved in away if saved.values is not None]
        )


class _Saving:
    """Tensors saved by one forward pass of a layer. `least`: bytes that are worth a copy; `moves`: they go away."""

    def __init__(
        self, owner: HostActivations, own: Pass, block: nn.Module, staying: set[int], *, least: int, moves: bool
    ) -> None:
        self._owner, self._own, self._block, self._staying = owner, own, block, staying
        self._least, self._moves = least, moves
        # By memory and version. The values of `found` hold the memory, so that nothing else gets its place meanwhile.
        self.found: dict[tuple[int, int], SavedMemory] = {}

    def pack(self, tensor: Tensor) -> Packed:
        key = storage_key(tensor)
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device == self._owner._device
        place = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        if not (self._moves and is_plain) or tensor.untyped_storage().nbytes() <= self._least or self._stays(key):
            return Packed(None, self._own, tensor, *place)
        if (key, tensor._version) not in self.found:
            values = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            self.found[key, tensor._version] = saved = self._owner.take(values)
            self._own.saved.append(weakref.ref(saved))
        return Packed(self.found[key, tensor._version], self._own, None, *place)

    def _stays(self, key: int) -> bool:
        """True if the memory was given to the layer, or is a parameter's. FSDP gathers the parameters of experts after
        the layer has begun, and frees their memory after forward, so each save looks for them."""
        if key not in self._staying and not any(key == of for of, _ in self.found):
            gathered = (parameter for parameter in self._block.parameters() if not isinstance(parameter, DTensor))
            self._staying.update(storage_key(own) for parameter in gathered for own in plain_tensors(parameter))
        return key in self._staying
