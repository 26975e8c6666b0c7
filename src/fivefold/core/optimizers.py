"""Facts about each optimizer: keys in the run file, state per parameter, dtypes of the state. No torch.

`training/optimizers/NAME.py` holds the update itself.

Dtypes of state: `fp32`: the type of the weights (fp64 in a run in fp64). `bf16`: two bytes. `8bit`: a code of one byte
into a table of 256 values, times the largest magnitude of its block (Dettmers et al., arXiv:2110.02861). Vectors
(norms, biases) stay in fp32: they are a thousandth of a model.

A block lies within one row of the whole parameter, so no layout that separates rows cuts a block. Its length depends
on the width of the parameter alone. It divides an eighth of the width if it can, so that tp 8 cuts between blocks too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerFacts:
    """One optimizer.

    `state`: kinds of state tensors, each in the shape of its parameter -> their names for people. `of_matrices`: kinds
    of state that only the matrices of layers have; the optimizer sees each of these matrices whole (Muon). None: the
    optimizer treats all parameters alike (AdamW). `keys`: its own keys of the run file -> default.
    """

    name: str
    state: Mapping[str, str]
    of_matrices: tuple[str, ...] | None = None
    keys: Mapping[str, Any] = field(default_factory=dict)

    def keeps(self, kind: str, *, is_matrix: bool) -> bool:
        """True if the optimizer keeps this kind of state for a parameter. `is_matrix`: it is a matrix of a layer."""
        return self.of_matrices is None or (kind in self.of_matrices) == is_matrix


DIVIDED_BY = frozenset({"exp_avg_sq"})  # never negative; an update is divided by its root
SCALE = "_scale"  # suffix of a kind of state: its block scales in 8 bits
_ADAMW = {"exp_avg": "first moment", "exp_avg_sq": "second moment"}

OPTIMIZERS: dict[str, OptimizerFacts] = {
    facts.name: facts
    for facts in (
        OptimizerFacts(name="adamw", state=_ADAMW),
        OptimizerFacts(
            name="muon", state=_ADAMW | {"momentum_buffer": "momentum"}, of_matrices=("momentum_buffer",),
            keys={"momentum": 0.95, "ns_steps": 5},
        ),
        OptimizerFacts(name="python", state={}, keys={"path": None, "options": {}}),  # its state is seen in a trial
    )
}  # fmt: skip


def with_key(key: str) -> list[str]:
    """Optimizers with this key of their own; none for a key that all have."""
    return [name for name, facts in OPTIMIZERS.items() if key in facts.keys]


def state_words() -> dict[str, str]:
    """Every kind of state of every optimizer -> its name for people; last the scales of those in 8 bits."""
    words = {kind: word for facts in OPTIMIZERS.values() for kind, word in facts.state.items()}
    return words | {kind + SCALE: f"scales of the {word}" for kind, word in words.items()}


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
