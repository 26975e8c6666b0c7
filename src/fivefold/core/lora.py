"""LoRA, as a run file asks for it. No torch."""

from dataclasses import dataclass
from math import sqrt

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
    """`targets`: the linears, by the ends of their names; `auto` alone: those of the layers, but for routers and
    experts. `target_parameters`: matrices of experts, by the ends of theirs. `quantize`: how the frozen weights of
    linears rest, `nf4` (`ops/nf4.py`) or `none`: in the compute type."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (AUTO,)
    rslora: bool = False
    quantize: str = "none"
    target_parameters: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)
