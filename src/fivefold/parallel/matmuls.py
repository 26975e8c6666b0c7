"""Matmuls with a precision of their own: what features ask of the one that gives it. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fivefold.models.facts import Matmul


@dataclass(frozen=True)
class MatmulLinear:
    """A linear that multiplies in this precision: its weight's name, its gathered size on this rank, and the axes that
    split its dimensions."""

    name: str
    inputs: int
    outputs: int
    axes: Mapping[Literal["tokens", "inputs", "outputs"], str]


class MatmulPlan(Protocol):
    """Linears and experts of a plan that multiply in a precision of their own. `lower` names the class.

    `key`: the key of the section `precision` that sets it. `kept_by`: the one that keeps layers out of it. `why`: the
    reason for a forward of these linears. `is_used`: the layout asks for it. `linears`: of this rank's layers, without
    the experts. `inputs`: `linears` by the input that they share. `sent`: weights of the whole model that FSDP gathers
    in this precision, and the bytes of a number.
    """

    key: str
    kept_by: str
    why: str

    @property
    def is_used(self) -> bool: ...
    @property
    def linears(self) -> Sequence[MatmulLinear]: ...
    @property
    def inputs(self) -> Sequence[Sequence[MatmulLinear]]: ...
    @property
    def sent(self) -> Mapping[str, int]: ...

    def covers(self, module: str) -> bool:
        """True if the layer of a module multiplies in this precision."""

    def multiplies(self, module: str) -> bool:
        """True if this linear, or these experts, of this rank's layers multiply in this precision."""

    def matmuls(self, layers: Sequence[str]) -> Iterator[tuple[str, Matmul]]:
        """Yield the weights of `layers` that multiply in this precision, without the experts, by name."""
