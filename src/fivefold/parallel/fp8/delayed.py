"""fp8 linears with scales from earlier steps: see `parallel/fp8/amax.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fivefold.parallel.fp8.matmul import Float8, cast_to_fp8, scale_of
from fivefold.parallel.fp8.recipes import OPERANDS, Cast, Operand, Product
from fivefold.parallel.fp8.weight import Rounded


class History(Protocol):
    """Largest values of earlier steps, and a place to note those of this step."""

    def note(self, rows: Sequence[int], operand: Operand, largest: Tensor) -> None: ...

    def largest(self, row: int, operand: Operand) -> Tensor | None: ...


@dataclass(frozen=True)
class Delayed(Float8):
    """`Float8` with history scales of whole tensors. `rows`: the places of the linears in `history`, in order."""

    history: History
    rows: tuple[int, ...]

    def casts(
        self, which: Product, a_MK: Sequence[Tensor], b_NK: Sequence[Tensor]
    ) -> tuple[list[Rounded], list[Rounded]]:
        """Cast the first operands with scales from their histories; without a history cast as `Float8` does."""
        largest = self._known(OPERANDS[which][0], a_MK)
        if largest is None:
            return super().casts(which, a_MK, b_NK)
        cast, _ = getattr(self.recipe, which)
        return [_cast(x, cast, own) for x, own in zip(a_MK, largest, strict=True)], []

    def _known(self, operand: Operand, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Largest values of earlier steps, if all are known; notes those of now. All linears share the input."""
        groups = [self.rows] if operand == "input" else [(row,) for row in self.rows]
        found = []
        for tensor, rows in zip(tensors, groups, strict=True):
            now, before = tensor.detach().abs().amax(), self.history.largest(rows[0], operand)
            self.history.note(rows, operand, now)
            if before is not None:
                found.append(before + 0.0 * now)  # NaN where `now` is not finite, which a cast would hide
        return found if len(found) == len(groups) else None


def _cast(x: Tensor, cast: Cast, largest: Tensor) -> Rounded:
    scale = scale_of(largest.reshape(1, 1), cast, x)
    return cast_to_fp8(x, cast, scale), scale
