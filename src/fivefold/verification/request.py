"""What is asked of a proof, checked before anything is started. No torch here."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fivefold.config import check_supported, load_config
from fivefold.core.errors import UserError
from fivefold.core.layout import COMPUTE, Layout
from fivefold.launch.model import check_model

MORE = "docs/verify.md"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a proof is done: on a narrow model or not, over how many steps, on rows of how many tokens (None: short)."""

    thin: bool
    steps: int
    seq_length: int | None = None
    seed: int = 1234
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """What to prove: `layouts` in their text form, called `names`, all of which run here.

    `scratch`: an empty folder that all ranks see. `seq_length` None: short rows.
    """

    config: str  # a run file
    layouts: tuple[str, ...]
    names: tuple[str, ...]
    scratch: str
    thin: bool = False
    steps: int = 20
    seq_length: int | None = None
    seed: int = 1234
    quiet: bool = False

    @property
    def folder(self) -> Path:
        """`scratch` as a path."""
        return Path(self.scratch)


def resolve(path: Path | None, overrides: Sequence[str], texts: Sequence[str], precision: str) -> dict[str, Layout]:
    """The layouts to prove: each as a run with `layout: TEXT` has it, in `precision` where the text states none.

    Raises `UserError` for a text that is not a layout, a layout named twice, or one that this model cannot have.
    """
    if not texts:
        raise UserError("no layouts to prove", fix="name some: --layouts tp2,shard2.tp2", more=MORE)
    if precision not in (*COMPUTE, "run"):
        raise UserError(f"precision {precision!r} is not known", fix=f"one of {', '.join(COMPUTE)}, run", more=MORE)
    found: dict[str, Layout] = {}
    for text in texts:
        config = load_config(path, [*overrides, f"layout={text}"])
        check_supported(config)
        check_model(config, weights=False)
        layout = config.layout
        if precision != "run" and Layout.parse(text).precision == Layout().precision:
            layout = replace(layout, precision=precision)
        if layout.dp_shard == -1:
            raise UserError(f"layout {text}: how many ranks is shard-1?", fix="write a number: shard2", more=MORE)
        if layout in found.values():
            raise UserError(f"layout {text} is named twice", fix="name each layout once", more=MORE)
        found[text] = layout
    return found
