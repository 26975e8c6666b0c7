"""LoRA settings of a run file. No torch."""

from dataclasses import dataclass
from math import isfinite, sqrt

from fivefold.core.errors import UserError

AUTO = "auto"
NF4_BLOCK = 64  # numbers in a row that share a scale


def nf4_bytes(numbers: int) -> int:
    """Bytes of a row of so many weights in four bits: codes, and a scale in fp32 for each block."""
    return numbers // 2 + 4 * (numbers // NF4_BLOCK)


def nf4_numbers(size: int) -> int:
    """Weights in a row of so many bytes: the inverse of `nf4_bytes`."""
    return size * 16 // 9


@dataclass(frozen=True)
class Lora:
    """Settings of an adapter. `targets`: linears by the ends of their names (one, or several); `auto` alone: those of
    the layers, except routers and experts. `target_parameters`: matrices of experts, in the same way.
    `quantize`: storage of the frozen weights of linears, `nf4` (`nf4.py`) or `none`: in the compute dtype. `dropout`:
    probability with which an element of the input of A is dropped in training.

    Raises `UserError` for values that no adapter has.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (AUTO,)
    rslora: bool = False
    quantize: str = "none"
    target_parameters: tuple[str, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in ("targets", "target_parameters"):
            names = getattr(self, field)
            object.__setattr__(self, field, (names,) if isinstance(names, str) else tuple(names))
        wrong = {
            "rank": type(self.rank) is not int or self.rank < 1,
            "alpha": not (isinstance(self.alpha, int | float) and isfinite(self.alpha) and self.alpha > 0),
            "targets": not (self.targets or self.target_parameters) or not _are_names(self.targets),
            "rslora": not isinstance(self.rslora, bool),
            "quantize": self.quantize not in ("none", "nf4"),
            "target_parameters": not _are_names(self.target_parameters),
            "dropout": not (isinstance(self.dropout, int | float) and 0 <= self.dropout < 1),
        }
        if self.dropout and self.target_parameters:
            raise UserError(
                f"an adapter of experts ({self.target_parameters[0]}) with dropout {self.dropout}, which peft does not "
                "have either",
                fix="adapter.dropout: 0, or leave adapter.target_parameters out",
                more="fivefold docs howto/adapters",
            )
        if bad := next((key for key, is_wrong in wrong.items() if is_wrong), None):
            raise UserError(
                f"an adapter with {bad}={getattr(self, bad)!r}",
                fix='ff.Lora(rank=16, alpha=32, targets="auto"): whole rank, alpha above 0, names of linears; '
                "rslora True or False, quantize none or nf4",
                more="fivefold docs howto/adapters",
            )

    @property
    def scale(self) -> float:
        """Factor of B (A x)."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)


def _are_names(values: tuple[object, ...]) -> bool:
    return all(isinstance(value, str) and value for value in values)
