"""Where a proof runs: over workers of its own, or in the world that this process is part of."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.launch.processes import kept_if_one_dies
from fivefold.launch.report_once import said_once
from fivefold.launch.restart import WorkerDied
from fivefold.launch.workers import gpus, start_workers
from fivefold.launch.world import World, device_kind, find_world, join
from fivefold.verification import MORE, VerifyRequest
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.ranks import SUBJECT, in_world, read_found, reference_file
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.report import VerifyReport, report_of
from fivefold.verification.results import LayoutResult

Publish = Callable[[VerifyReport], object]


def start(config: RunConfig, request: VerifyRequest, publish: Publish) -> VerifyReport:
    """Prove the layouts of `request`, for the model of `config`; see `fivefold.verification.main`."""
    world = find_world("cpu")  # the place is known before torch is
    if world is None:
        report = _over_workers(request, device_kind(config.train.device))
        publish(report)
        return report
    here = find_world(config.train.device) or world
    with join(here), said_once(here):
        return _inside(request, here, Path(config.run.dir), publish)


def _over_workers(request: VerifyRequest, kind: str) -> VerifyReport:
    """As many workers as the largest layout has. Their logs stay only after a failure, whose message names them."""
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
            start_workers("fivefold.verification.ranks:on_worker", body, workers=workers, logs=kept / "logs")
        except WorkerDied:
            shutil.rmtree(scratch)  # models and references are large
            raise
        return _report(request, request, workers)


def _inside(request: VerifyRequest, world: World, folder: Path, publish: Publish) -> VerifyReport:
    """The layouts of this world's size run, the others do not. The scratch folder lies where all ranks see it."""
    import torch.distributed as dist

    from fivefold.parallel import plain

    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    scratch = plain.of_first(tempfile.mkdtemp(prefix=".verify-", dir=folder) if world.is_first else "")
    fitting = {name: str(layout) for name, layout in request.parsed.items() if layout.world == world.size}
    own = replace(request, scratch=scratch, layouts=fitting)
    if own.layouts:
        in_world(own, world)
    dist.barrier()
    report = _report(request, own, world.size)
    if world.is_first:
        publish(report)
    dist.barrier()  # whoever exits first with a failure has the others ended
    if world.is_first:
        shutil.rmtree(scratch)
    return report


def _report(request: VerifyRequest, ran: VerifyRequest, size: int) -> VerifyReport:
    """What was found of the layouts of `ran`. The others of `request` are not for a world of this size."""
    found = {
        name: LayoutResult(name, refused=f"it is for {layout.world} ranks, and this world has {size}")
        for name, layout in request.parsed.items()
    } | read_found(ran)
    precisions = dict.fromkeys(layout.precision for layout in ran.parsed.values())
    losses = {each: ReferenceTensors(reference_file(ran, each)).whole("losses").tolist() for each in precisions}
    subject = ProofCase.load(ran.folder / SUBJECT).describe() if ran.layouts else ""
    return report_of(list(found.values()), subject, losses)
