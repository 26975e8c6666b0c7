"""Dtypes in which an optimizer keeps its state between steps: bytes of a number, and which numbers share a scale. No
torch.

`fp32`: the type of the weights (fp64 in a run in fp64). `bf16`: two bytes. `8bit`: a code of one byte into a table of
256 values, times the largest magnitude of its block (Dettmers et al., arXiv:2110.02861). Vectors (norms, biases) stay
in fp32: they are a thousandth of a model.

A block lies within one row of the whole parameter, so no layout that separates rows cuts a block. Its length depends
on the width of the parameter alone. It divides an eighth of the width if it can, so that tp 8 cuts between blocks too.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

StateDtype = Literal["fp32", "bf16", "8bit"]

AT_ONCE = 2**22  # numbers of a parameter whose state an update converts at a time
# Bytes per converted number besides the stored state: moments and their rounding. Measured on a CPU.
RESTORED: Mapping[str, int] = {"fp32": 0, "bf16": 16, "8bit": 42}

LONGEST, SHORTEST, PIECES = 256, 16, 8  # block lengths in numbers; pieces of a width between whose blocks tp may cut


def block_length(width: int) -> int:
    """Number of neighbours that share a scale in a row of `width` numbers; 0 if the row has no blocks.

    Example: 4096 has blocks of 256; 11008 = 256 x 43 has blocks of 32, so that tp 8 has 43 of them; 50 has none.
    """
    power = width & -width  # the largest power of two that divides it
    return min(LONGEST, max(SHORTEST, power // PIECES)) if power >= SHORTEST else 0


def kept_in(dtype: str, shape: Sequence[int], dims: int) -> StateDtype:
    """Dtype of one parameter's state. `dims`: dimensions of the matrix or vector that the model means."""
    if dims < 2 or (dtype == "8bit" and not block_length(shape[-1])):
        return "fp32"
    return cast(StateDtype, dtype)


def restored_bytes(dtype: str, numbers: int) -> int:
    """Bytes that an update converts at a time, if the largest parameter has so many numbers."""
    return RESTORED[dtype] * min(AT_ONCE, numbers)


def state_bytes(numbers: int, kept: StateDtype, width: int, master_bytes: int) -> int:
    """Bytes of so many numbers of one kind of state, with their scales. `master_bytes`: of a weight, and of a scale.
    `width`: numbers in a row of the whole parameter."""
    if kept == "8bit":
        return numbers + numbers // block_length(width) * master_bytes
    return numbers * (2 if kept == "bf16" else master_bytes)
