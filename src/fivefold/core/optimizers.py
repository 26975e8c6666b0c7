"""Facts about each optimizer: its keys in the run file, and its state per parameter. No torch.

`training/optimizers/NAME.py` holds the update itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
