"""`fivefold verify`: prove that layouts compute what one process computes, and name the first module that does not.

No torch until a proof begins. In order: `thin` (the model), `subject` (documents), `reference` (one process),
`proof` (a layout, watched by `observer`), `rows` (tolerances and verdicts), `report` and `page`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.verify.report import VerifyReport

QUICK_STEPS, STEPS = 5, 20


def main(
    path: Path | None,
    overrides: Sequence[str] = (),
    *,
    layouts: Sequence[str],
    thin: bool = False,
    quick: bool = False,
    steps: int | None = None,
    precision: str = "fp64",
    seq_length: int | None = None,
    seed: int = 1234,
    quiet: bool = False,
) -> "VerifyReport":
    """Prove `layouts` (text forms; options that one does not state are the run file's) for the model of a run file.

    `path` None: the demo's. `thin`: a narrow model with a layer of each kind; `quick`: that, and fewer steps.
    `precision`: fp64, fp32, bf16, or `run`, the run file's. Inside a world that is there already (torchrun), the
    layouts of its size run, and the others are listed as not run. Raises `UserError` for a request that cannot be met.
    """
    from fivefold.verify.launch import start

    return start(
        path, overrides, layouts=layouts, thin=thin or quick, steps=steps or (QUICK_STEPS if quick else STEPS),
        precision=precision, seq_length=seq_length, seed=seed, quiet=quiet,
    )  # fmt: skip
