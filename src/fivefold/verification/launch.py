"""Run a proof on workers of its own, or in the world that this process is part of. Only the latter imports torch here;
otherwise the workers import it while this process waits."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.launch.failure import WorkerDied, said_once
from fivefold.launch.processes import Workers, kept_if_one_dies
from fivefold.launch.worker import imported
from fivefold.launch.workers import gpus, start_workers
from fivefold.launch.world import device_kind, find_world, join
from fivefold.verification.report import VerifyReport
from fivefold.verification.request import MORE, VerifyRequest
from fivefold.verification.scratch import report_on

Publish = Callable[[VerifyReport], object]


def start(config: RunConfig, request: VerifyRequest, publish: Publish) -> VerifyReport:
    """Prove the layouts of `request`, for the model of `config`; see `fivefold.verification.main`."""
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
