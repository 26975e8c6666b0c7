"""Where a proof runs: over workers of its own, or in the world that this process is part of."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import compress
from pathlib import Path

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.errors import UserError
from fivefold.launch.local import gpus, start_workers
from fivefold.launch.model import check_model
from fivefold.launch.voice import said_once
from fivefold.launch.world import World, device_kind, find_world, join
from fivefold.layout import COMPUTE, Layout
from fivefold.verification.evidence import Evidence
from fivefold.verification.ranks import SUBJECT, VerifyRequest, evidence_file, in_world, read_found
from fivefold.verification.report import VerifyReport, report_of
from fivefold.verification.rows import Found
from fivefold.verification.subject import Subject

MORE = "docs/verify.md"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a proof is done: on a narrow model or not, over how many steps, on rows of how many tokens (None: short)."""

    thin: bool
    steps: int
    seq_length: int | None = None
    seed: int = 1234
    quiet: bool = False


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
    scratch = Path(tempfile.mkdtemp(prefix="fivefold-verify-"))
    request = replace(request, scratch=str(scratch))
    if not request.quiet:
        print(f"starting {workers} worker{'s' * (workers > 1)} on {kind} ...", flush=True)
    body = {"verify": asdict(request), "device": kind}
    start_workers("fivefold.verification.ranks:on_worker", body, workers=workers, logs=scratch / "logs")
    report = _report(request)
    shutil.rmtree(scratch)
    return report


def _inside(
    request: VerifyRequest, layouts: Mapping[str, Layout], world: World, folder: Path,
    publish: Callable[[VerifyReport], object],
) -> VerifyReport:  # fmt: skip
    """The layouts of this world's size run, the others do not. The scratch folder lies where all ranks see it."""
    import torch.distributed as dist

    fits = [layout.world == world.size for layout in layouts.values()]
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
        for name, layout in layouts.items()
        if layout.world != world.size
    ]
    report = _report(mine, others, order=request.names)
    if world.is_first:
        publish(report)
    dist.barrier()  # whoever exits first with a failure has the others ended
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
