"""How a model initialises its parameters, read from its own `_init_weights` without drawing a number.

The model, on the meta device, runs its initialisation again with every initialiser intercepted. The calls on each
parameter and buffer become its recipe, a list of `Op` in which later ones overwrite earlier ones.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.models.random_stream import Distribution, Normal, RandomStream, Region, TruncatedNormal, Uniform, whole
from fivefold.torch_internals import Dispatch, storage_key


@dataclass(frozen=True)
class Constant:
    value: float


@dataclass(frozen=True, eq=False)
class Copy:
    """Values computed by the model itself (rotary frequencies)."""

    values: Tensor


@dataclass(frozen=True)
class Unknown:
    """An initialisation that cannot be drawn in pieces; `reason` is for the user."""

    reason: str


Fill = Distribution | Constant | Copy | Unknown


@dataclass(frozen=True)
class Op:
    """One initialiser applied to `region` (one slice per dim) of a parameter or buffer."""

    fill: Fill
    region: Region


Recipe = Mapping[str, tuple[Op, ...]]
Arguments = Mapping[str, Any]  # arguments of an initialiser, by name


def read_recipe(model: PreTrainedModel) -> Recipe:
    """{name of a parameter or buffer: its ops, in order}; tied parameters under their first name only.

    A tensor that `_init_weights` leaves to its constructor is a `Copy`; it has no ops if the constructor left it
    without a value or drew it. The model must be on the meta device (`UserError` otherwise: it would lose its weights)
    and is left unchanged.
    """
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    with hf_internals.untied(model):
        recorder = _Recorder(model)
        with hf_internals.intercepted_initialisers(recorder.receive), Dispatch(recorder.run):
            hf_internals.initialise_again(model)
    recipe = {name: tuple(recorder.ops[name]) for name in names}
    if not all(recipe.values()):
        constructed = hf_internals.constructed_values(model)
        for name in [name for name in names if not recipe[name] and name in constructed]:
            recipe[name] = (Op(Copy(constructed[name]), whole(constructed[name].shape)),)
    return recipe


def check_drawable(recipe: Recipe, names: Iterable[str]) -> None:
    """Raise `UserError` for the first of `names` that the recipe cannot produce."""
    for name in names:
        unknown = next((op.fill.reason for op in recipe[name] if isinstance(op.fill, Unknown)), None)
        if unknown or not recipe[name]:
            raise UserError(
                f"{name} is initialised by {unknown}, which cannot be drawn in pieces"
                if unknown
                else f"{name} is not initialised by the model's _init_weights",
                fix="start from pretrained weights (model.init: pretrained)",
            )


def draw(
    ops: Iterable[Op], name: str, *, seed: int, shape: Sequence[int], region: Region, dtype: torch.dtype
) -> Tensor:
    """The values of `region` of the parameter `name` of global `shape`; random ones are drawn in fp32, then cast."""
    bounds = [piece.indices(size)[:2] for piece, size in zip(region, shape, strict=True)]
    sizes, values = [stop - start for start, stop in bounds], None
    for op in ops:
        both = [(max(a, piece.start), min(b, piece.stop)) for (a, b), piece in zip(bounds, op.region, strict=True)]
        if any(start >= stop for start, stop in both):
            continue
        piece = _values(op, both, RandomStream(seed, name, tuple(shape))).to(dtype)
        if both == bounds and isinstance(op.fill, Distribution):
            values = piece  # the usual case, without a second copy
        else:
            values = torch.empty(sizes, dtype=dtype) if values is None else values
            values[_within(both, [start for start, _ in bounds])] = piece
    return torch.empty(sizes, dtype=dtype) if values is None else values


def buffer_values(model: PreTrainedModel) -> dict[str, Tensor]:
    """The values of every buffer of a model on meta, computed by the model's own initialisation."""
    recipe, buffers = read_recipe(model), dict(model.named_buffers())
    check_drawable(recipe, buffers)
    return {
        name: draw(recipe[name], name, seed=0, shape=buffer.shape, region=whole(buffer.shape), dtype=buffer.dtype)
        for name, buffer in buffers.items()
    }


def stored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """The buffers that a folder of the model stores next to its parameters; few models have any."""
    stored = model.state_dict()
    if not any(name in stored for name, _ in model.named_buffers()):
        return {}
    return {name: values for name, values in buffer_values(model).items() if name in stored}


def _values(op: Op, bounds: Sequence[tuple[int, int]], stream: RandomStream) -> Tensor:
    """The values of `op` inside `bounds`, which lie in its region."""
    if isinstance(op.fill, Constant):
        return torch.tensor(op.fill.value, dtype=torch.float64)
    if isinstance(op.fill, Copy):
        values = op.fill.values.reshape([piece.stop - piece.start for piece in op.region])
        return values[_within(bounds, [piece.start for piece in op.region])]
    assert not isinstance(op.fill, Unknown), f"check_drawable was not asked about {stream.name}"
    return stream.draw(tuple(slice(start, stop) for start, stop in bounds), op.fill)


def _within(bounds: Sequence[tuple[int, int]], origin: Sequence[int]) -> Region:
    return tuple(slice(start - zero, stop - zero) for (start, stop), zero in zip(bounds, origin, strict=True))


class _Recorder:
    """Receives intercepted initialisers (`receive`) and every operator (`run`). Other writes to parameters are
    recorded, not run; among these, copied values and plain numbers are known."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.device.type != "meta":
                raise UserError(f"{name} is not on the meta device; initialising it again would erase it")
            self._owners[storage_key(tensor)] = (name, tensor)
        self.ops: dict[str, list[Op]] = {name: [] for name, _ in self._owners.values()}
        self._numbers: list[tuple[Tensor, float]] = []  # tensors on meta, each with its number

    def receive(self, function: str, given: Arguments) -> None:
        translate = _TRANSLATIONS.get(function)
        self._record(given["tensor"], translate(given) if translate else Unknown(function))

    def run(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, or record what it would write to a parameter."""
        target = args[0] if args else None
        writes = operator.overloadpacket.__name__.endswith("_")
        if writes and isinstance(target, Tensor) and storage_key(target) in self._owners:
            self._record(target, self._written(operator, target, args[1:]))
            return target
        made = operator(*args, **kwargs)
        if operator.overloadpacket is torch.ops.aten.scalar_tensor:
            self._numbers.append((made, float(args[0])))
        return made

    def _record(self, target: Tensor, fill: Fill) -> None:
        """Add an op. Later ops overwrite earlier ones, so an op over the whole tensor restarts its recipe."""
        if (owner := self._owners.get(storage_key(target))) is None:
            return
        name, tensor = owner
        region = _region(target, tensor)
        if region is None:
            fill, region = Unknown("a view that is no region of slices"), whole(tensor.shape)
        if target.shape == tensor.shape:
            self.ops[name].clear()
        self.ops[name].append(Op(fill, region))

    def _written(self, operator: Any, target: Tensor, args: Sequence[Any]) -> Fill:
        """The fill of an operator that is no initialiser."""
        kind, source = operator.overloadpacket, args[0] if args else 0.0
        if kind is torch.ops.aten.copy_ and isinstance(source, Tensor):
            number = next((value for made, value in self._numbers if made is source), None)
            return _copy(target, source) if number is None else Constant(number)
        if kind in (torch.ops.aten.fill_, torch.ops.aten.zero_) and isinstance(source, int | float):
            return Constant(float(source))
        return Unknown(f"{operator} outside of an initialiser")


def _region(view: Tensor, tensor: Tensor) -> Region | None:
    """The region of `tensor` (contiguous) that `view` covers, a selected dim as a slice of length 1; else None."""
    offset, left = int(view.storage_offset()), list(zip(view.shape, view.stride(), strict=True))
    region = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        start, offset = divmod(offset, stride)
        length = 1
        if left and left[0][1] == stride and left[0][0] <= size - start:
            length, _ = left.pop(0)
        region.append(slice(start, start + length))
    return None if any(length != 1 for length, _ in left) else tuple(region)


# Initialiser -> distribution. The fans of the variance-scaling ones come from the whole tensor argument. --------------


def _fans(tensor: Tensor) -> tuple[int, int]:
    field = math.prod(tensor.shape[2:])
    return tensor.shape[1] * field, tensor.shape[0] * field


def _xavier(given: Arguments) -> float:
    gain: float = given["gain"]
    return gain * math.sqrt(2.0 / sum(_fans(given["tensor"])))


def _kaiming(given: Arguments) -> float:
    fan_in, fan_out = _fans(given["tensor"])
    gain = nn.init.calculate_gain(given["nonlinearity"], given["a"])
    return float(gain) / math.sqrt(fan_in if given["mode"] == "fan_in" else fan_out)


def _symmetric(std: float) -> Uniform:
    """The uniform distribution around 0 of this standard deviation."""
    return Uniform(-math.sqrt(3.0) * std, math.sqrt(3.0) * std)


def _copy(target: Tensor, source: Tensor) -> Copy | Unknown:
    if source.device.type == "meta":
        return Unknown("a copy of values that were computed on the meta device")
    return Copy(source.detach().clone().expand(target.shape))


_TRANSLATIONS: Mapping[str, Callable[[Arguments], Fill]] = {
    "uniform_": lambda given: Uniform(given["a"], given["b"]),
    "normal_": lambda given: Normal(given["mean"], given["std"]),
    "trunc_normal_": lambda given: TruncatedNormal(given["mean"], given["std"], given["a"], given["b"]),
    "xavier_uniform_": lambda given: _symmetric(_xavier(given)),
    "xavier_normal_": lambda given: Normal(0.0, _xavier(given)),
    "kaiming_uniform_": lambda given: _symmetric(_kaiming(given)),
    "kaiming_normal_": lambda given: Normal(0.0, _kaiming(given)),
    "constant_": lambda given: Constant(float(given["val"])),
    "ones_": lambda _: Constant(1.0),
    "zeros_": lambda _: Constant(0.0),
    "copy_": lambda given: _copy(given["tensor"], given["other"]),
}
