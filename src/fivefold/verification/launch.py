"""Where a proof runs: over workers of its own, or in the world that this process is part of."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.launch.failure import WorkerDied, said_once
from fivefold.launch.processes import Workers, kept_if_one_dies
from fivefold.launch.workers import gpus, start_workers
from fivefold.launch.world import World, device_kind, find_world, join
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.ranks import SUBJECT, in_world, read_found, reference_file
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.report import VerifyReport, report_of
from fivefold.verification.request import MORE, Options, VerifyRequest
from fivefold.verification.results import LayoutResult


def start(
    config: RunConfig, layouts: Mapping[str, Layout], options: Options, publish: Callable[[VerifyReport], object]
) -> VerifyReport:
    """Prove `layouts`, by the names that they are called by; see `fivefold.verification.main`."""
    request = VerifyRequest(
        config=config.to_yaml(), layouts=tuple(map(str, layouts.values())), names=tuple(layouts), scratch="",
        **asdict(options),
    )  # fmt: skip
    world = find_world("cpu")  # the place is known before torch is
    if world is None:
        report = _over_workers(request, layouts, device_kind(config.train.device))
        publish(report)
        return report
    here = find_world(config.train.device) or world
    with join(here), said_once(here):
        return _inside(request, layouts, here, Path(config.run.dir), publish)


def _over_workers(request: VerifyRequest, layouts: Mapping[str, Layout], kind: str) -> VerifyReport:
    """As many workers as the largest layout has. Their logs stay only after a failure, whose message names them."""
    workers = max(layout.world for layout in layouts.values())
    devices = gpus() if kind == "cuda" else workers
    if workers > devices:
        raise UserError(
            f"a layout of {workers} ranks, but this machine has {devices} GPUs",
            fix="prove it on the CPU: train.device=cpu, with --thin for a large model",
            more=MORE,
        )
    if not request.quiet:
        print(f"starting {workers} worker{'s' * (workers > 1)} on {kind} ...", flush=True)
    with kept_if_one_dies("verify") as scratch:
        request = replace(request, scratch=str(scratch))
        body = {"verify": asdict(request), "device": kind}
        try:
            with Workers("fivefold.verification.ranks:on_worker", count=workers) as crew:
                start_workers(crew, body, logs=scratch / "logs")
        except WorkerDied:
            _remove_all_but(scratch / "logs")
            raise
        return _report(request)


def _remove_all_but(kept: Path) -> None:
    """What else lies beside `kept`: models and references are large."""
    for path in kept.parent.iterdir():
        if path.is_dir() and path != kept:
            shutil.rmtree(path)
        elif path != kept:
            path.unlink()


def _inside(
    request: VerifyRequest, layouts: Mapping[str, Layout], world: World, folder: Path,
    publish: Callable[[VerifyReport], object],
) -> VerifyReport:  # fmt: skip
    """The layouts of this world's size run, the others do not. The scratch folder lies where all ranks see it."""
    import torch.distributed as dist

    from fivefold.parallel import plain

    fits = [layout.world == world.size for layout in layouts.values()]
    where = plain.of_first(tempfile.mkdtemp(prefix=".verify-", dir=_made(folder)) if world.is_first else "")
    mine = replace(
        request, scratch=where, layouts=tuple(compress(request.layouts, fits)),
        names=tuple(compress(request.names, fits)),
    )  # fmt: skip
    if mine.layouts:
        in_world(mine, world)
    dist.barrier()
    others = [
        LayoutResult(name, refused=f"it is for {layout.world} ranks, and this world has {world.size}")
        for name, layout in layouts.items()
        if layout.world != world.size
    ]
    report = _report(mine, others, order=request.names)
    if world.is_first:
        publish(report)
    dist.barrier()  # whoever exits first with a failure has the others ended
    if world.is_first:
        shutil.rmtree(where)
    return report


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _report(request: VerifyRequest, not_run: Sequence[LayoutResult] = (), order: Sequence[str] = ()) -> VerifyReport:
    """What was found of the layouts of `request`, and of those that did not run, in the order of their names."""
    found = [*(read_found(request, number) for number in range(len(request.layouts))), *not_run]
    found.sort(key=lambda each: (order or request.names).index(each.layout))
    file = request.folder / SUBJECT
    losses = {
        precision: ReferenceTensors(reference_file(request, precision)).whole("losses").tolist()
        for precision in dict.fromkeys(Layout.parse(text).precision for text in request.layouts)
        if file.exists()
    }
    return report_of(found, ProofCase.load(file).describe() if file.exists() else "", losses)
