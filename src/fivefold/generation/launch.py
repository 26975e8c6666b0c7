"""Where generation runs: in this process, over workers of its own, or in the world that this process is part of."""

import shutil
from collections.abc import Mapping
from typing import Any

from fivefold.core.layout import Layout
from fivefold.launch.processes import is_scratch, keep, scratch_folder
from fivefold.launch.restart import WorkerDied
from fivefold.launch.workers import gpus, start_workers, worker_count
from fivefold.launch.world import alone, device_kind, find_world, join


def start(options: Mapping[str, Any], *, device: str, quiet: bool = False) -> str:
    """Generate with the `GenerateRequest` of `options`; the text comes back, and goes to the screen unless `quiet`."""
    layout = Layout.parse(options["layout"])
    world = find_world(device)
    if world is None:
        kind = device_kind(device)
        devices = gpus() if kind == "cuda" else 0
        workers = worker_count(layout, kind=kind, devices=devices, nproc=None, on_cpu="--device cpu")
        if workers > 1:
            return _over_workers(options, workers, kind, quiet=quiet)
    from fivefold.generation.run import GenerateRequest, generate, to_screen

    with join(world or alone(device)) as here:
        text = generate(GenerateRequest(**options), here, write=None if quiet else to_screen)
        if not quiet and here.is_first:
            print(flush=True)
        return text


def _over_workers(options: Mapping[str, Any], workers: int, device: str, *, quiet: bool) -> str:
    """The folder of the workers' logs stays only after a failure, whose message names it."""
    logs = scratch_folder("generate")
    result = logs / "text"
    request = {"generate": dict(options), "result": str(result), "quiet": quiet, "device": device}
    try:
        start_workers("fivefold.generation.run:on_worker", request, workers=workers, logs=logs)
        return result.read_text(encoding="utf-8")
    except WorkerDied:
        keep(logs)
        raise
    finally:
        if is_scratch(logs):
            shutil.rmtree(logs)
