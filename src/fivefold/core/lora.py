"""LoRA, as a run file asks for it. No torch."""

from dataclasses import dataclass
from math import sqrt

AUTO = "auto"


@dataclass(frozen=True)
class Lora:
    """`targets`: the linears, by the ends of their names; `auto` alone: those of the layers, but for routers and
    experts."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (AUTO,)
    rslora: bool = False

    @property
    def scale(self) -> float:
        """What B (A x) is multiplied by."""
        return self.alpha / (sqrt(self.rank) if self.rslora else self.rank)
