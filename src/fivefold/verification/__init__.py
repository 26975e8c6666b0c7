"""`fivefold verify`: prove that layouts compute the same as one process, and name the first module that does not.

In order: on the ranks (`ranks`) `reduced_model`, `proof_case` (documents), `reference` (one process) and `proof` (a
layout, watched and compared by `observer`); `results` (tolerances and verdicts); `report`. Only the ranks load torch.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.core.errors import RunFailed, UserError
from fivefold.launch.failure import WorkerDied, one_voice, said_once
from fivefold.launch.model import check_model
from fivefold.launch.processes import Workers, kept_if_one_dies
from fivefold.launch.worker import imported
from fivefold.launch.workers import gpus, start_workers
from fivefold.launch.world import device_kind, find_world, join
from fivefold.parallel.layout import COMPUTE, Layout
from fivefold.verification.report import VerifyReport, report_on
from fivefold.verification.results import MORE, QUICK_STEPS, STEPS, VerifyRequest

Publish = Callable[[VerifyReport], object]


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
    publish: Publish | None = None,
) -> VerifyReport:
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
    return _start(config, request, publish or (lambda report: None))


def before_training(config: RunConfig, layout: Layout) -> None:
    """Prove the layout of a run on a thin model in fp64, and print the result. Raises `RunFailed` if it is wrong."""

    def say(report: VerifyReport) -> None:
        if report.ok:
            print(f"{text} is proved on thin weights: {len(report.rows)} comparisons with one process", flush=True)

    text = str(layout)
    layouts = {text: str(replace(layout, precision="fp64"))}
    request = VerifyRequest(config=config.to_yaml(), layouts=layouts, thin=True, steps=QUICK_STEPS, quiet=True)
    report = _start(config, request, say)
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


def _start(config: RunConfig, request: VerifyRequest, publish: Publish) -> VerifyReport:
    """Prove the layouts of `request`, for the model of `config`: on workers, or in the world of this process. Only the
    latter imports torch here; otherwise the workers import it while this process waits."""
    world = find_world("cpu")  # finds the world without importing torch
    if world is None:
        report = _over_workers(request, device_kind(config.train.device))
        publish(report)
        return report
    imported("fivefold.verification.ranks")
    from fivefold.verification.ranks import inside

    here = find_world(config.train.device) or world
    with join(here, timeout=config.launch.timeout), said_once(here):
        return inside(request, here, Path(config.run.dir), publish)


def _over_workers(request: VerifyRequest, kind: str) -> VerifyReport:
    """Start as many workers as the largest layout has ranks. Their logs are kept only after a failure, which names
    them. Raises `UserError` if there are fewer GPUs."""
    workers = max(layout.world for layout in request.parsed.values())
    devices = gpus() if kind == "cuda" else workers
    if workers > devices:
        raise UserError(
            f"a layout of {workers} ranks, but this machine has {devices} GPUs",
            fix="prove it on the CPU: train.device=cpu, with --thin for a large model",
            more=MORE,
        )
    if not request.quiet:
        print(f"starting {workers} worker{'s' * (workers > 1)} on {kind} ...", flush=True)
    with kept_if_one_dies("verify") as kept:
        scratch = kept / "scratch"
        scratch.mkdir()
        request = replace(request, scratch=str(scratch))
        body = {"verify": asdict(request), "device": kind}
        try:
            with Workers("fivefold.verification.ranks:on_worker", count=workers) as crew:
                start_workers(crew, body, logs=kept / "logs")
        except WorkerDied:
            shutil.rmtree(scratch)  # keep only the logs: models and references are large
            raise
        return report_on(request, request, workers)
