"""Optimizer state and parameters in host memory: each part comes to the device while the optimizer updates it.

The arithmetic is that of the same optimizer on the same values, part after part instead of all at once. So a step gives
the same bits, for an optimizer that updates a parameter by its own gradient and state.

    parts of parameters    1         2         3         4
    to the device          fetched   fetched   fetched   ...      part 3 while part 2 is updated
    updated                          1         2         3
    back to the host                           1         2        part 1 while part 2 is updated

At most `PARTS` parts of the state are on the device. Between steps `optimizer.state` holds the same tensors with their
values in host memory, where checkpoints and checks read them. The same holds for parameters, which FSDP gathers from
there (`fsdp/gathers.py`); their gradients stay on the device.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.core.units import in_parts
from fivefold.parallel.dtensor import local, put_local, with_local
from fivefold.parallel.offload.activations import HostActivations
from fivefold.parallel.offload.host_memory import CopiesInFlight, HostMemory, Lane, most_bytes
from fivefold.parallel.offload.spec import OffloadActivations, part_bytes
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.torch_internals import step_hooks

WEIGHT = ""  # the kind of a parameter itself, besides those of its state
WALKING = "fivefold_walking"  # an attribute of an optimizer whose state is on the device part by part


@dataclass(frozen=True)
class Offload(LivePart):
    """Parts of a model that lie in host memory. `memory`: None if there are none."""

    memory: HostMemory | None
    states: "OptimizerStates"
    activations: HostActivations | None

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        layout, device = state.plan.layout, state.device
        is_on = layout.offload_optimizer or layout.offload_activations or layout.offload_parameters
        memory = HostMemory(locks=device.type == "cuda") if is_on else None
        states = OptimizerStates(memory, device, is_on=layout.offload_optimizer)
        return cls(memory, states, HostActivations(memory, device) if memory and layout.offload_activations else None)

    def end_allocation(self, state: ParallelState, gathers: Mapping[str, Any]) -> None:
        if state.plan.layout.offload_parameters:
            self.states.rest({state.model.get_parameter(name): gather.shard for name, gather in gathers.items()})


def builders(state: ParallelState) -> Builders:
    offload = state.live(Offload)

    def offload_activations(layer: Any, edit: OffloadActivations) -> None:
        assert offload.activations is not None, "the layout offloads them"
        layer.forward = offload.activations.layer(layer, layer.forward, is_first=edit.is_first, is_last=edit.is_last)

    return {OffloadActivations: offload_activations}


class OptimizerStates:
    """Parameters and state that the optimizers of one model update. `is_on`: the state lies in `memory`."""

    def __init__(self, memory: HostMemory | None, device: torch.device, *, is_on: bool) -> None:
        self._memory, self._device, self.is_on = memory, device, is_on
        self._homes: dict[Tensor, dict[str, Tensor]] = {}  # parameter -> kind -> its values in host memory
        self._weights: dict[Tensor, Tensor] = {}  # parameter -> its own values there, if it is stored there
        self._inward, self._outward = Lane(device), Lane(device)

    def rest(self, weights: Mapping[Tensor, Tensor]) -> None:
        """Register parameters that are stored in host memory; `weights`: their shards there."""
        self._weights = dict(weights)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `optimizer.step()` once for each part of its parameters. Its hooks run as for one step.

        Raises `UserError` for an optimizer that counts its steps in its parameter groups.
        """
        if not (self.is_on or self._weights) or getattr(optimizer, "walks_its_states", False):
            optimizer.step()
            return
        groups = optimizer.param_groups
        parts = list(_parts([parameter for group in groups for parameter in group["params"]]))
        before = [_options(group) for group in groups]
        for at, part in enumerate(self.walk(optimizer, parts, weights=True)):
            with _only(optimizer, part), step_hooks(optimizer, before=at == 0, after=at == len(parts) - 1):
                optimizer.step()
            if len(parts) > 1 and at == 0 and [_options(group) for group in groups] != before:
                raise UserError(
                    f"{type(optimizer).__name__} counts in its parameter groups, so it cannot update part after part",
                    fix="leave offload_optimizer and offload_parameters out of the layout, or use another optimizer",
                )

    def walk(
        self, optimizer: torch.optim.Optimizer, parts: Iterable[Sequence[Tensor]], *, weights: bool = False
    ) -> Iterator[Sequence[Tensor]]:
        """Yield each of `parts`, lists of parameters, while their state is on the device; `weights`: with their values.

        The caller must update a part before it takes the next. At the end everything is back in host memory.
        """
        if not (self.is_on or (weights and self._weights)):
            yield from parts
            return
        todo, leaving = list(parts), CopiesInFlight(())
        coming = self._fetch(optimizer, todo[0], weights=weights) if todo else None
        for at, part in enumerate(todo):
            assert coming is not None
            values, arriving = coming
            arriving.meet()
            self._use(optimizer, values)
            coming = self._fetch(optimizer, todo[at + 1], weights=weights) if at + 1 < len(todo) else None
            setattr(optimizer, WALKING, True)
            try:
                yield part
            finally:
                setattr(optimizer, WALKING, False)
            values.clear()
            leaving.meet()
            leaving = self._put(optimizer, part, weights=weights)
        leaving.wait()  # readers of host memory wait for no stream

    @contextmanager
    def there(self, parameter: Tensor) -> Iterator[Tensor]:
        """Bring a parameter to the device in this context, to be changed by an optimizer that walks its own states."""
        if parameter not in self._weights:
            yield local(parameter)
            return
        home, values = self._weights[parameter], torch.empty_like(self._weights[parameter], device=self._device)
        self._inward.copy([(values, home)]).meet()
        yield values
        self._outward.copy([(home, values)]).wait()

    def keep(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        """Move the state of a parameter, which was set anew, to host memory."""
        if self.is_on:
            self._put(optimizer, [parameter], weights=False).wait()

    def reserve(self, optimizer_bytes: int, tensors: int) -> None:
        """Reserve room for state of so many bytes in so many tensors."""
        if self._memory is not None:
            self._memory.reserve(most_bytes(optimizer_bytes, tensors))

    def _fetch(
        self, optimizer: torch.optim.Optimizer, part: Sequence[Tensor], *, weights: bool
    ) -> tuple[list[tuple[Tensor, str, Tensor]], CopiesInFlight]:
        """Begin to copy a part to the device: (parameter, kind of its state or `WEIGHT`, values there)."""
        found, pairs = list[tuple[Tensor, str, Tensor]](), list[tuple[Tensor, Tensor]]()
        for parameter in part:
            homes = {WEIGHT: self._weights.get(parameter)} if weights else {}
            for kind, tensor in _tensors(optimizer.state.get(parameter)) if self.is_on else ():
                homes[kind] = self._home(parameter, kind, tensor)
            for kind, home in homes.items():
                if home is not None:
                    found.append((parameter, kind, torch.empty_like(home, device=self._device)))
                    pairs.append((found[-1][2], home))
        return found, self._inward.copy(pairs)

    def _use(self, optimizer: torch.optim.Optimizer, values: Iterable[tuple[Tensor, str, Tensor]]) -> None:
        """Let the optimizer update the fetched values."""
        for parameter, kind, value in values:
            if kind == WEIGHT:
                put_local(parameter, value)
            else:
                state = optimizer.state[parameter]
                state[kind] = with_local(state[kind], value)

    def _put(self, optimizer: torch.optim.Optimizer, part: Sequence[Tensor], *, weights: bool) -> CopiesInFlight:
        """Begin to copy a part to host memory, where parameters and `optimizer.state` then have it."""
        assert self._memory is not None
        pairs = list[tuple[Tensor, Tensor]]()
        for parameter in part:
            if weights and (home := self._weights.get(parameter)) is not None:
                pairs.append((home, local(parameter)))
                put_local(parameter, home)
            for kind, tensor in _tensors(optimizer.state.get(parameter)) if self.is_on else ():
                values, own = local(tensor), self._homes.setdefault(parameter, {})
                home = own.get(kind)
                if home is None or (home.shape, home.dtype) != (values.shape, values.dtype):
                    block = self._memory.take(values.nbytes)
                    home = own[kind] = block.view(values.dtype).view(values.shape)
                if home.data_ptr() != values.data_ptr():
                    pairs.append((home, values))
                    optimizer.state[parameter][kind] = with_local(tensor, home)
        return self._outward.copy(pairs)

    def _home(self, parameter: Tensor, kind: str, tensor: Tensor) -> Tensor | None:
        """Find the values of a state in host memory; None for a state that something else has set since."""
        home = self._homes.get(parameter, {}).get(kind)
        return home if home is not None and home.data_ptr() == local(tensor).data_ptr() else None


def _tensors(state: Any) -> list[tuple[str, Tensor]]:
    """List a parameter's state by kind; what exists once per parameter, such as a step count, stays where it is."""
    return [(kind, value) for kind, value in (state or {}).items() if isinstance(value, Tensor) and value.ndim > 0]


def _parts(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Lists of parameters of at most `part_bytes` each; a larger parameter is a part of its own."""
    return in_parts(parameters, _bytes, part_bytes(sum(map(_bytes, parameters))))


def _bytes(parameter: Tensor) -> int:
    return local(parameter).nbytes


@contextmanager
def _only(optimizer: torch.optim.Optimizer, part: Sequence[Tensor]) -> Iterator[None]:
    """Limit the groups of the optimizer to these parameters in this context."""
    chosen, whole = set(map(id, part)), [group["params"] for group in optimizer.param_groups]
    for group, parameters in zip(optimizer.param_groups, whole, strict=True):
        group["params"] = [parameter for parameter in parameters if id(parameter) in chosen]
    try:
        yield
    finally:
        for group, parameters in zip(optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a group, in which an optimizer may count."""
    return {key: value for key, value in group.items() if isinstance(value, int | float)}
