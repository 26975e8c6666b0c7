"""Matmuls with a precision of their own: what features ask of the one that gives it, in the plan and as a model runs.
No torch.

`lower` names the class of a `MatmulPlan`, `apply.py` makes the `MatmulScales`. `fp8/` is both.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from fivefold.models.facts import Experts, Matmul


class MatmulLinear(Protocol):
    """A linear that multiplies in this precision, by its weight's name."""

    @property
    def name(self) -> str: ...


class MatmulPlan(Protocol):
    """Linears and experts of a plan that multiply in a precision of their own.

    `key`: the key of the section `precision` that sets it. `kept_by`: the one that keeps layers out of it. `why`: the
    reason for a forward of these linears.
    """

    key: str
    kept_by: str
    why: str

    @property
    def is_used(self) -> bool:
        """True if the layout asks for it."""

    @property
    def linears(self) -> Sequence[MatmulLinear]:
        """Linears of this rank's layers, without the experts."""

    @property
    def inputs(self) -> Sequence[Sequence[MatmulLinear]]:
        """`linears` by their input, which they share."""

    @property
    def expert_modules(self) -> Sequence[Experts]:
        """Experts of this rank's layers."""

    @property
    def sent(self) -> Mapping[str, int]:
        """Weights of the whole model that FSDP gathers in this precision, and the bytes of a number."""

    @property
    def has_history(self) -> bool:
        """True if scales follow from earlier steps."""

    def covers(self, module: str) -> bool:
        """True if the layer of a module multiplies in this precision."""

    def matmuls(self, layers: Sequence[str]) -> Iterator[tuple[str, Matmul]]:
        """Yield the weights of `layers` that multiply in this precision, without the experts, by name."""


class MatmulScales(Protocol):
    """Scales of a live model's matmuls. A checkpoint keeps those of earlier steps."""

    def begin_passes(self) -> None:
        """Compute the scales of the weights as they are now. All ranks of the world call this together."""

    def recording(self) -> AbstractContextManager[None]:
        """Record the gradients of a step in this context, over all its micro batches; afterwards ranks agree."""

    def end_step(self) -> None:
        """Go on to the next step, when the weights have been updated. A skipped step changes nothing."""

    @property
    def had_history(self) -> bool:
        """True if the last gradients were computed with scales of earlier steps."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint's state keeps; empty without a history."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's state, of any run."""
