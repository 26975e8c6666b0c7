"""The request of `fivefold verify`. No torch."""

from dataclasses import dataclass
from pathlib import Path

from fivefold.parallel.layout import Layout

QUICK_STEPS, STEPS = 5, 20
MORE = "docs/howto/verify.md"


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """The layouts to prove, and how. `layouts`: name -> text; `thin`: on a narrow model; `seq_length` None: short rows;
    `scratch`: an empty folder that all ranks see. Plain data: workers read it as JSON.
    """

    config: str  # a run file
    layouts: dict[str, str]
    thin: bool = False
    steps: int = STEPS
    seq_length: int | None = None
    seed: int = 1234
    quiet: bool = False
    scratch: str = ""

    @property
    def parsed(self) -> dict[str, Layout]:
        """The layouts by name."""
        return {name: Layout.parse(text) for name, text in self.layouts.items()}

    @property
    def folder(self) -> Path:
        """`scratch` as a path."""
        return Path(self.scratch)
