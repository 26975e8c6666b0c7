"""`fivefold verify`: prove that layouts compute what one process computes, and name the first module that does not.

No torch until a proof begins. In order: `reduced_model`, `proof_case` (documents), `reference` (one process),
`proof` (a layout, watched by `observer`), `results` (tolerances and verdicts), `report` and `page`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.config import RunConfig
from fivefold.core.errors import RunFailed
from fivefold.core.layout import Layout

if TYPE_CHECKING:
    from fivefold.verification.report import VerifyReport

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
    publish: "Callable[[VerifyReport], object] | None" = None,
) -> "VerifyReport":
    """Prove `layouts` (text forms, each as a run with `layout: TEXT` has it) for the model of a run file.

    `path` None: the demo's. `thin`: a narrow model with a layer of each kind; `quick`: that, and fewer steps.
    `precision`: fp64, fp32, bf16, or `run`, the run file's. Inside a world that is there already (torchrun), the
    layouts of its size run, and the others are listed as not run. `publish` is given the report, on the first rank
    only, before any rank goes on. Raises `UserError` for a request that cannot be met.
    """
    from fivefold.config import load_config
    from fivefold.launch.failure import one_voice
    from fivefold.launch.world import find_world
    from fivefold.verification.request import Options, resolve

    with one_voice(find_world("cpu")):
        config = load_config(path, overrides)
        asked = resolve(path, overrides, layouts, precision)
    options = Options(
        thin=thin or quick, steps=steps or (QUICK_STEPS if quick else STEPS), seq_length=seq_length, seed=seed,
        quiet=quiet,
    )  # fmt: skip
    from fivefold.verification.launch import start

    return start(config, asked, options, publish or (lambda report: None))


def before_training(config: RunConfig, layout: Layout) -> None:
    """Prove the layout of a run on a thin model, in fp64, and say so. Raises `RunFailed` where it is not proved."""
    from fivefold.verification.launch import start
    from fivefold.verification.report import first_sentence
    from fivefold.verification.request import Options

    def say(report: "VerifyReport") -> None:
        if report.ok:
            print(f"{text} is proved on thin weights: {len(report.rows)} comparisons with one process", flush=True)

    text = str(layout)
    options = Options(thin=True, steps=QUICK_STEPS, quiet=True)
    report = start(config, {text: replace(layout, precision="fp64")}, options, say)
    if not report.ok:
        raise RunFailed(
            f"{text} does not compute what one process computes: {first_sentence(report.found[0])}",
            fix=f"fivefold verify with --quick --layouts {text} --html verify.html shows everything",
            more="docs/verify.md",
        )
