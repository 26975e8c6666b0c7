"""Rectangles with a label each: what a page draws of parameters, of a pipeline's step and of experts."""

from collections.abc import Sequence
from dataclasses import dataclass

CHARACTER, LINE = 6.4, 11.0  # pixels of a label
WIDTH = 1000.0  # pixels of a figure as wide as the page


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels. `fill`: a colour of the page, or stripes of several ranks: `ranks-0-1`, `ranks-many`."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""  # shown under the pointer
    text: str = ""
    opacity: float = 1.0

    @property
    def label(self) -> str:
        """Its text, "" where that would not fit."""
        return self.text if len(self.text) * CHARACTER <= self.width and self.height >= LINE else ""

    @property
    def is_busy(self) -> bool:
        """Whether a label needs a ground of its own."""
        return self.fill.startswith("ranks-") or (self.fill.startswith("series-") and self.opacity > 0.75)


@dataclass(frozen=True)
class Figure:
    """Boxes as wide as the page, `names` at the left as (y, name), and what the colours mean as (fill, word)."""

    title: str
    says: str
    height: float
    names: Sequence[tuple[float, str]]
    boxes: Sequence[Box]
    words: Sequence[tuple[str, str]]
