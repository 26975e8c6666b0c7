"""The trial of a user's class on a vector and a matrix: what every run needs of it, under any layout.

A run that goes on builds the class anew and gives it what a checkpoint has: the weights, and the tensors and numbers in
`self.state` of each parameter. A class must then go on as if nothing had happened.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.checkpoint.load import number_of_type, scalar_types
from fivefold.checkpoint.records import DTYPES
from fivefold.core.errors import first_line

_SHAPES = {1: (4,), 2: (4, 6)}  # tensors of a trial, by their number of dimensions
_AFTER = 30  # steps after a resume: periods of some steps have passed
_KEEP = "keep what its steps change in self.state of every parameter, as tensors and numbers: state['step'] = 0"
Build = Callable[[Tensor, Tensor], torch.optim.Optimizer]  # over a matrix and a vector


class Probe:
    """An optimizer over a vector and a matrix."""

    def __init__(self, build: Build, values: Mapping[int, Tensor] | None = None, taken: int = 0) -> None:
        """`values`: those of the tensors, after `taken` steps; None: at the start."""
        self._build, self._taken = build, taken
        start = {dims: torch.linspace(-1, 1, 4 * 6 ** (dims - 1)).view(shape) for dims, shape in _SHAPES.items()}
        self.tensors = {dims: nn.Parameter(value.detach().clone()) for dims, value in (values or start).items()}
        self.optimizer = build(self.tensors[2], self.tensors[1])

    def step(self) -> None:
        """Take one step, with gradients that differ from those of the last one."""
        self._taken += 1
        for dims, tensor in self.tensors.items():
            angles = torch.arange(tensor.numel(), dtype=tensor.dtype) * self._taken + dims
            tensor.grad = angles.sin().mul_(0.1).view_as(tensor)
        self.optimizer.step()

    def resumed(self) -> "Probe":
        """Another one, as a checkpoint restores it."""
        found, types = Probe(self._build, self.tensors, self._taken), scalar_types(self.optimizer)
        for dims, tensor in self.tensors.items():
            found.optimizer.state[found.tensors[dims]] = {
                key: value.clone()
                if isinstance(value, Tensor) and value.ndim
                else number_of_type(float(value), types[key], tensor.device)
                for key, value in self.optimizer.state.get(tensor, {}).items()
                if value is not None
            }
        return found

    def has_values_of(self, other: "Probe") -> bool:
        return all(torch.equal(tensor, other.tensors[dims]) for dims, tensor in self.tensors.items())

    @property
    def kinds(self) -> Mapping[int, list[str]]:
        """The kinds of state in the shape of their parameter, by the number of its dimensions."""
        states = {dims: self.optimizer.state.get(tensor, {}) for dims, tensor in self.tensors.items()}
        return {
            dims: [kind for kind, value in states[dims].items() if getattr(value, "shape", None) == _SHAPES[dims]]
            for dims in _SHAPES
        }


def why_unfit(probe: Probe) -> tuple[str, str] | None:
    """Why a run cannot use the class of `probe`, which has taken no step, and the fix; None if it can."""
    with torch.random.fork_rng(devices=[]):
        return next(_reasons(probe), None)


def _reasons(probe: Probe) -> Iterator[tuple[str, str]]:
    """The reasons, in an order in which a later check relies on the earlier ones."""
    optimizer, drawn = probe.optimizer, _generators()
    memory = [tensor.data_ptr() for tensor in probe.tensors.values()]
    probe.step()
    if wrong := _not_kept(optimizer):
        yield wrong, "keep tensors and numbers in self.state of a parameter"
    before = _counts(optimizer)
    probe.step()
    if changed := [where for where, number in _counts(optimizer).items() if number != before.get(where)]:
        yield f"it counts in {changed[0]}, which no checkpoint has", _KEEP
    if _generators() != drawn:
        yield (
            "it draws random numbers, and no checkpoint has the state of their generator",
            "draw from a generator of its own, seeded by a count: torch.Generator().manual_seed(state['step'])",
        )
    if [tensor.data_ptr() for tensor in probe.tensors.values()] != memory:
        yield (
            "it gives parameters other memory (p.data = ...), of which a parallelized model does not learn",
            "change them in place: p.add_(...), p.copy_(...)",
        )
    resumed = probe.resumed()
    try:
        for _ in range(_AFTER):
            probe.step()
            resumed.step()
    except Exception as error:  # any error of the user's code
        yield f"from a checkpoint its step raises {type(error).__name__}: {first_line(error)}", _KEEP
    if not resumed.has_values_of(probe):
        yield "from a checkpoint it goes on otherwise: it depends on more than self.state of the parameters", _KEEP
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    still = Probe(lambda *_: optimizer, probe.tensors)
    probe.step()
    if not still.has_values_of(probe):
        yield (
            "it changes weights although the lr of its groups is 0: the schedule would not reach it",
            "read group['lr'] in step",
        )


def _not_kept(optimizer: torch.optim.Optimizer) -> str:
    """State that no checkpoint has, in words; empty if there is none."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            return f"it keeps self.state[{parameter!r}], which belongs to no parameter, and no checkpoint has"
        for key, value in state.items():
            if not isinstance(value, Tensor | int | float | None):
                return f"it keeps {key} as a {type(value).__name__}, which no checkpoint holds"
            if isinstance(value, Tensor) and value.ndim and str(value.dtype).removeprefix("torch.") not in DTYPES:
                return f"it keeps {key} in {value.dtype}, which no checkpoint holds"
    return ""


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers of an optimizer beside its state, by where they stand."""
    places = [("its parameter groups", group) for group in optimizer.param_groups] + [("self", vars(optimizer))]
    return {
        f"{key} of {where}": float(value)
        for where, values in places
        for key, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _generators() -> tuple[Any, ...]:
    """The state of the generators that code draws from unless it makes its own."""
    numbers: Any = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numbers["key"].tobytes(), numbers["pos"]
