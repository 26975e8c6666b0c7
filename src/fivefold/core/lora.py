"""LoRA, as a run file asks for it. No torch."""

from dataclasses import dataclass
from math import isfinite, sqrt

from fivefold.core.errors import UserError

AUTO = "auto"
NF4_BLOCK = 64  # numbers in a row that share a scale


def nf4_bytes(numbers: int) -> int:
    """Of a row of weights in four bits: codes, and a scale in fp32 for each block."""
    return numbers // 2 + 4 * (numbers // NF4_BLOCK)


def nf4_numbers(size: int) -> int:
    """Of a row of so many bytes."""
    return size * 16 // 9


@dataclass(frozen=True)
class Lora:
    """`targets`: the linears, by the ends of their names (one, or several); `auto` alone: those of the layers, but for
    routers and experts. `target_parameters`: matrices of experts, by the ends of theirs. `quantize`: how the frozen
    weights of linears rest, `nf4` (`ops/nf4.py`) or `none`: in the compute type.

    Raises `UserError` for values that no adapter has.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (AUTO,)
    rslora: bool = False
    quantize: str = "none"
    target_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        named = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", named)
        object.__setattr__(self, "target_parameters", tuple(self.target_parameters))
        wrong = {
            "rank": not isinstance(self.rank, int) or self.rank < 1,
            "alpha": not (isinstance(self.alpha, int | float) and isfinite(self.alpha) and self.alpha > 0),
            "targets": not (named or self.target_parameters)
            or not all(isinstance(each, str) and each for each in named),
            "quantize": self.quantize not in ("none", "nf4"),
        }
        if bad := next((key for key, is_wrong in wrong.items() if is_wrong), None):
            raise UserError(
                f"an adapter with {bad}={getattr(self, bad)!r}",
                fix='ff.Lora(rank=16, alpha=32, targets="auto"): whole rank, alpha above 0, names of linears; '
                "quantize none or nf4",
                more="docs/howto/adapters.md",
            )

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)
