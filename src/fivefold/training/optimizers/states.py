"""Optimizer state in a smaller type: restored before an update, rounded and stored after it, both piece by piece.

The update itself is computed in the type of the weights from the restored state. The rounding mode matters:

- First moments and momentum are rounded to nearest: a step changes them by a tenth, which every type can represent.
- Second moments are rounded stochastically, so that on average nothing is lost. With beta2 0.999 a step changes them by
  a thousandth; bf16, whose numbers are 0.4 to 0.8 % apart, would round it away for ever.

The random numbers depend on parameter, step and position in the whole parameter, so every layout draws the same.
8 bits: table and blocks are those of Dettmers et al., "8-bit Optimizers via Block-wise Quantization"
(arXiv:2110.02861, `core/optimizers.py`), with one exception: a nonzero second moment is never rounded to zero,
because it is a divisor.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.optimizers import AT_ONCE, DIVIDED_BY, SCALE, StateDtype, block_length
from fivefold.parallel.dtensor import local, zeros_by_block
from fivefold.parallel.placement import Placement
from fivefold.parallel.state import state_of

_GOLDEN, _MIX, _MIX_AGAIN = 0x9E3779B9 - 2**32, 0x7FEB352D, 0x846CA68B - 2**32  # as int32; the last two: lowbias32's
_FRACTION = 2**16  # random integers are below it: as many bits as bf16 drops from fp32


def kept_states(model: nn.Module) -> "dict[Tensor, KeptState]":
    """Storage of the optimizer state of a parallelized model, by parameter."""
    placement = state_of(model).placement
    return {parameter: KeptState(placement, name) for name, parameter in model.named_parameters()}


def restored_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """The optimizer state of a parameter, restored to the type of the weights; empty if it is not updated."""
    state, states = optimizer.state.get(parameter), getattr(optimizer, "kept", None)
    return states[parameter].restored(parameter, state) if state and states else dict(state or {})


class KeptState:
    """The state of one parameter: its type, and the position of this rank's part in the whole.

    A kind of state is a tensor in the shape of its parameter, of numbers or of 8-bit codes. The scales of codes, one
    for each block of a row, have the kind plus `SCALE` as their key.
    """

    def __init__(self, placement: Placement, name: str) -> None:
        spec = placement.shards[name]
        self.dtype: StateDtype = placement.kept_in(name)
        self.block = block_length(spec.shape[-1]) if self.dtype == "8bit" else 0
        digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
        self._key = int.from_bytes(digest, "little", signed=True)
        self._places: tuple[Tensor, Tensor] | None = None
        self._regions, self._shape, self._local = placement.regions(name), spec.shape, placement.local_shape(name)

    def new(self, parameter: Tensor, kind: str) -> dict[str, Tensor]:
        """The state before the first step: zeros, sharded like the parameter."""
        if self.dtype != "8bit":
            dtype = torch.bfloat16 if self.dtype == "bf16" else None
            return {kind: torch.zeros_like(parameter, dtype=dtype, device=parameter.device)}
        scales = zeros_by_block(parameter, self.block, parameter.dtype)
        return {kind: zeros_by_block(parameter, 1, torch.uint8), kind + SCALE: scales}

    def pieces(self, parameter: Tensor) -> Iterator[slice]:
        """Slices of the rows of this rank's part, each small enough to be restored at once."""
        rows, width = rows_of(local(parameter)).shape
        at_once = max(1, AT_ONCE // max(1, width))
        return (slice(first, first + at_once) for first in range(0, rows, at_once))

    def read(self, state: Mapping[str, Any], kind: str, rows: slice, dtype: torch.dtype) -> Tensor:
        """Rows [rows, width] of a kind of state in `dtype`: a view of the state if it has that type."""
        kept = rows_of(local(state[kind]))[rows]
        if self.dtype != "8bit":
            return kept.to(dtype)
        values = _table(kind in DIVIDED_BY, dtype, kept.device)[kept.int()]
        scales = rows_of(local(state[kind + SCALE]))[rows]
        return self._blocks(values).mul_(scales[:, :, None]).flatten(1)

    def write(self, state: Mapping[str, Any], kind: str, rows: slice, values: Tensor) -> None:
        """Store rows of a kind of state. `state["step"]` counts the updates, this one included."""
        into = rows_of(local(state[kind]))[rows]
        if self.dtype == "fp32":
            if into.data_ptr() != values.data_ptr():
                into.copy_(values)
            return
        at_random = self._random(state["step"], rows, values.device) if kind in DIVIDED_BY else None
        if self.dtype == "bf16":
            into.copy_(values if at_random is None else _rounded(values, at_random))
            return
        blocks = self._blocks(values)
        largest = blocks.abs().amax(-1)
        rows_of(local(state[kind + SCALE]))[rows] = largest
        parts = (blocks / torch.where(largest > 0, largest, 1)[:, :, None]).flatten(1)
        into.copy_(_nearest(parts) if at_random is None else _codes(parts, at_random))

    def restored(self, parameter: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of each kind of state, in the type of the weights; scalars and non-tensors as they are."""
        if self.dtype == "fp32":
            return dict(state)
        own = local(parameter)
        found: dict[str, Any] = {}
        for kind, value in state.items():
            if not isinstance(value, Tensor) or not value.ndim:
                found[kind] = value
            elif not kind.endswith(SCALE):
                everything = slice(0, None)
                found[kind] = self.read(state, kind, everything, own.dtype).view_as(own) if own.numel() else own
        return found

    def _blocks(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), -1, self.block)

    def _random(self, step: Tensor, rows: slice, device: torch.device) -> Tensor:
        """Random integers from 0 to 2^16 - 1 for these rows of this rank's part, int32 [rows, width]."""
        if self._places is None:
            self._places = _places(self._regions, self._local, self._shape, device)
        row, column = self._places
        key = _mixed(step.to(device, torch.int32) * _GOLDEN ^ self._key)
        return _mixed(_mixed(row[rows] ^ key)[:, None] ^ column) & (_FRACTION - 1)


def rows_of(tensor: Tensor) -> Tensor:
    """View a tensor as rows [rows, width]; a vector is one row."""
    return tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1)


def _places(
    regions: Sequence[tuple[Sequence[slice], Sequence[slice]]], own: Sequence[int], whole: Sequence[int],
    device: torch.device,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Row indices, and column indices times `_GOLDEN`, of this rank's part in the whole, int32 [rows] and [width]."""
    rows = torch.zeros(tuple(own[:-1]), dtype=torch.int32)
    columns = torch.zeros(own[-1], dtype=torch.int32)
    for of_whole, here in regions:
        place = torch.zeros((), dtype=torch.int32)
        for size, one in zip(whole[:-1], of_whole[:-1], strict=True):
            place = (place * size)[..., None] + torch.arange(one.start, one.stop, dtype=torch.int32)
        rows[tuple(here[:-1])] = place
        columns[here[-1]] = torch.arange(of_whole[-1].start, of_whole[-1].stop, dtype=torch.int32)
    return rows.flatten().to(device), (columns * _GOLDEN).to(device)


def _mixed(x: Tensor) -> Tensor:
    """A hash of each int32: lowbias32 (C. Wellons, "Prospecting for Hash Functions")."""
    x = x ^ (x >> 16 & 0xFFFF)
    x.mul_(_MIX)
    x.bitwise_xor_(x >> 15 & 0x1FFFF)
    x.mul_(_MIX_AGAIN)
    return x.bitwise_xor_(x >> 16 & 0xFFFF)


def _rounded(values: Tensor, at_random: Tensor) -> Tensor:
    """Round stochastically to fp32 numbers that bf16 has: up with the probability that the dropped bits give."""
    bits = torch.empty_like(values, dtype=torch.float32).copy_(values).view(torch.int32)
    return bits.add_(at_random).bitwise_and_(-_FRACTION).view(torch.float32)


def _nearest(parts: Tensor) -> Tensor:
    table = _table(False, parts.dtype, parts.device)
    return torch.bucketize(parts, (table[1:] + table[:-1]) / 2, out_int32=True)


def _codes(parts: Tensor, at_random: Tensor) -> Tensor:
    """The codes of numbers from 0 to 1, rounded stochastically; at least 1 for a nonzero number."""
    table = _table(True, parts.dtype, parts.device)
    below = torch.bucketize(parts, table[1:-1], out_int32=True, right=True)
    low, high = table[below], table[below + 1]
    up = (parts - low) * _FRACTION > (high - low) * (at_random + 0.5)
    return torch.maximum(below + up, (parts > 0).int())


@lru_cache
def _table(is_unsigned: bool, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The 256 numbers of the dynamic tree, in order (arXiv:2110.02861, section 1.2 and appendix C).

    Seven decades: each has twice as many numbers as the one below it, at the middles of equal parts of 0.1 to 1. Plus 0
    and 1.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2 ** (decade + is_unsigned)
        middles = [0.1 + 0.9 * (at + 0.5) / count for at in range(count)]
        found += [
            sign * 10.0 ** (decade - 6) * middle for middle in middles for sign in ((1,) if is_unsigned else (1, -1))
        ]
    return torch.tensor(sorted(found), dtype=torch.float64).to(device, dtype)


def begin(state: dict[str, Any], kept: KeptState, parameter: Tensor, kinds: Sequence[str]) -> None:
    """Create the state of a parameter, if it has none: `kinds`, zero, and a count of updates in fp32, on its device."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
        for kind in kinds:
            state |= kept.new(parameter, kind)
