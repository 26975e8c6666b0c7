"""`fivefold verify`: prove that layouts compute the same as one process, and name the first module that does not.

In order: `launch`; on the ranks (`ranks`) `reduced_model`, `proof_case` (documents), `reference` (one process) and
`proof` (a layout, watched by `observer`); `results` (tolerances and verdicts), `report` and `page`. Only the ranks load
torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.core.errors import RunFailed, UserError
from fivefold.launch.failure import one_voice
from fivefold.launch.model import check_model
from fivefold.launch.world import find_world
from fivefold.parallel.layout import COMPUTE, Layout
from fivefold.verification.request import MORE, QUICK_STEPS, STEPS, VerifyRequest

if TYPE_CHECKING:
    from fivefold.verification.report import VerifyReport


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
    """Prove `layouts` (texts, each read like `layout: TEXT` in a run file) for the model of a run file.

    `path` None: the demo's. `thin`: a narrow model with a layer of each kind; `quick`: that, and fewer steps.
    `precision`: fp64, fp32, bf16, or `run`, the run file's. Under torchrun, only layouts of the world's size run; the
    others are listed as not run. `publish` receives the report, on the first rank only, before any rank continues.
    Raises `UserError` for a request that cannot be met.
    """
    with one_voice(find_world("cpu")):
        config = load_config(path, overrides)
        found = resolve(path, overrides, layouts, precision)
    request = VerifyRequest(
        config=config.to_yaml(), layouts={name: str(layout) for name, layout in found.items()}, thin=thin or quick,
        steps=steps or (QUICK_STEPS if quick else STEPS), seq_length=seq_length, seed=seed, quiet=quiet,
    )  # fmt: skip
    from fivefold.verification.launch import start

    return start(config, request, publish or (lambda report: None))


def before_training(config: RunConfig, layout: Layout) -> None:
    """Prove the layout of a run on a thin model in fp64, and print the result. Raises `RunFailed` if it is wrong."""
    from fivefold.verification.launch import start

    def say(report: "VerifyReport") -> None:
        if report.ok:
            print(f"{text} is proved on thin weights: {len(report.rows)} comparisons with one process", flush=True)

    text = str(layout)
    layouts = {text: str(replace(layout, precision="fp64"))}
    request = VerifyRequest(config=config.to_yaml(), layouts=layouts, thin=True, steps=QUICK_STEPS, quiet=True)
    report = start(config, request, say)
    if not report.ok:
        raise RunFailed(
            f"{text} does not compute what one process computes: {report.found[0].why}",
            fix=f"fivefold verify with --quick --layouts {text} --html verify.html shows everything",
            more=MORE,
        )


def resolve(path: Path | None, overrides: Sequence[str], texts: Sequence[str], precision: str) -> dict[str, Layout]:
    """The layouts to prove, each read like `layout: TEXT` in a run file, in `precision` unless the text states one.

    Raises `UserError` for a text that is not a layout, a layout named twice, or one that does not fit the model.
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
        if layout.matmul_words:  # scales span a micro batch, but the reference computes row by row
            layout = replace(layout, micro_batch_size=1)
        if layout.rest:
            raise UserError(f"layout {text}: how many ranks is -1?", fix="write a number: shard2", more=MORE)
        if layout in found.values():
            raise UserError(f"layout {text} is named twice", fix="name each layout once", more=MORE)
        found[text] = layout
    return found
