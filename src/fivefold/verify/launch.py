"""Where a proof runs: over workers of its own, or in the world that this process is part of."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path

from fivefold.config import RunConfig, load_config
from fivefold.errors import UserError
from fivefold.launch.local import gpus, start_workers
from fivefold.launch.model import check_model
from fivefold.launch.world import World, device_kind, find_world, join
from fivefold.layout import COMPUTE, Layout
from fivefold.verify.evidence import Evidence
from fivefold.verify.ranks import SUBJECT, VerifyRequest, evidence_file, in_world, read_found
from fivefold.verify.report import VerifyReport, report_of
from fivefold.verify.rows import Found
from fivefold.verify.subject import Subject

MORE = "docs/verify.md"


def start(
    path: Path | None, overrides: Sequence[str], *, layouts: Sequence[str], thin: bool, steps: int, precision: str,
    seq_length: int | None, seed: int, quiet: bool,
) -> VerifyReport:  # fmt: skip
    """See `fivefold.verify.main`."""
    config = load_config(path, overrides)
    check_model(config)
    asked = resolve(layouts, config, precision)
    request = VerifyRequest(
        config=config.to_yaml(), layouts=tuple(map(str, asked)), names=tuple(layouts), scratch="", thin=thin,
        steps=steps, seq_length=seq_length, seed=seed, quiet=quiet,
    )  # fmt: skip
    world = find_world(config.train.device)
    if world is None:
        return _over_workers(request, asked, device_kind(config.train.device))
    return _inside(request, asked, world, Path(config.run.dir))


def resolve(texts: Sequence[str], config: RunConfig, precision: str) -> list[Layout]:
    """The layouts to prove. What a text does not state is as in the run file, but for the degrees; a precision that it
    does not state is `precision`.

    Raises `UserError` for a text that is not a layout, a layout named twice, or one without a definite world.
    """
    if not texts:
        raise UserError("no layouts to prove", fix="name some: --layouts tp2,shard2.tp2", more=MORE)
    if precision not in (*COMPUTE, "run"):
        raise UserError(f"precision {precision!r} is not known", fix=f"one of {', '.join(COMPUTE)}, run", more=MORE)
    default = config.precision.compute if precision == "run" else precision
    found = []
    for text in texts:
        layout = _with_options(Layout.parse(text), config.layout)
        if layout.precision == Layout().precision:
            layout = replace(layout, precision=default)
        if layout.dp_shard == -1:
            raise UserError(f"layout {text}: how many ranks is shard-1?", fix="write a number: shard2", more=MORE)
        if texts.count(text) > 1 or layout in found:
            raise UserError(f"layout {text} is named twice", fix="name each layout once", more=MORE)
        found.append(layout)
    return found


def _with_options(layout: Layout, run: Layout) -> Layout:
    """`layout`, with the run file's options where it has a default."""
    default, options = Layout(), ("zero", "sequence_parallel", "recompute", "micro_batch_size")
    unset = {name: getattr(run, name) for name in options if getattr(layout, name) == getattr(default, name)}
    return replace(layout, **unset)


def _over_workers(request: VerifyRequest, layouts: Sequence[Layout], kind: str) -> VerifyReport:
    """As many workers as the largest layout has. Their logs stay only after a failure, whose message names them."""
    workers = max(layout.world for layout in layouts)
    devices = gpus() if kind == "cuda" else workers
    if workers > devices:
        raise UserError(
            f"a layout of {workers} ranks, but this machine has {devices} GPUs",
            fix="prove it on the CPU: train.device=cpu, with --thin for a large model",
            more=MORE,
        )
    scratch = Path(tempfile.mkdtemp(prefix="fivefold-verify-"))
    request = replace(request, scratch=str(scratch))
    if not request.quiet:
        print(f"starting {workers} worker{'s' * (workers > 1)} on {kind} ...", flush=True)
    body = {"verify": asdict(request), "device": kind}
    start_workers("fivefold.verify.ranks:on_worker", body, workers=workers, logs=scratch / "logs")
    report = _report(request)
    shutil.rmtree(scratch)
    return report


def _inside(request: VerifyRequest, layouts: Sequence[Layout], world: World, folder: Path) -> VerifyReport:
    """The layouts of this world's size run, the others do not. The scratch folder lies where all ranks see it."""
    import torch.distributed as dist

    fits = [layout.world == world.size for layout in layouts]
    with join(world):
        where = [tempfile.mkdtemp(prefix=".verify-", dir=_made(folder)) if world.is_first else ""]
        dist.broadcast_object_list(where, src=0)
        mine = replace(
            request, scratch=where[0], layouts=tuple(compress(request.layouts, fits)),
            names=tuple(compress(request.names, fits)),
        )  # fmt: skip
        if mine.layouts:
            in_world(mine, world)
        dist.barrier()
        others = [
            Found(name, refused=f"it is for {layout.world} ranks, and this world has {world.size}")
            for name, layout in zip(request.names, layouts, strict=True)
            if layout.world != world.size
        ]
        report = _report(mine, others, order=request.names)
        dist.barrier()
        if world.is_first:
            shutil.rmtree(where[0])
    return report


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _report(request: VerifyRequest, not_run: Sequence[Found] = (), order: Sequence[str] = ()) -> VerifyReport:
    """What was found of the layouts of `request`, and of those that did not run, in the order of their names."""
    found = [*(read_found(request, number) for number in range(len(request.layouts))), *not_run]
    found.sort(key=lambda each: (order or request.names).index(each.layout))
    file = request.folder / SUBJECT
    losses = {
        precision: Evidence(evidence_file(request, precision)).whole("losses").tolist()
        for precision in dict.fromkeys(Layout.parse(text).precision for text in request.layouts)
        if file.exists()
    }
    return report_of(found, Subject.load(file).describe() if file.exists() else "", losses)
