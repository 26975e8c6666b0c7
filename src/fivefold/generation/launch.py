"""Where generation runs: in this process, over workers of its own, or in the world that this process is part of."""

from dataclasses import asdict

from fivefold.core.layout import Layout
from fivefold.generation import GenerateRequest
from fivefold.launch.processes import Workers, kept_if_one_dies
from fivefold.launch.workers import gpus, start_workers, worker_count
from fivefold.launch.world import alone, device_kind, find_world, join


def start(request: GenerateRequest, *, device: str = "auto", quiet: bool = False) -> str:
    """Continue a prompt, over as many workers as the layout says; the new text, also on the screen unless `quiet`.

    `device`: auto, cpu or cuda. Inside a world that is there already (torchrun), uses that world. Raises `UserError`
    when the model, the layout or an option does not fit.
    """
    layout = Layout.parse(request.layout)
    world = find_world(device)
    if world is None:
        kind = device_kind(device)
        devices = gpus() if kind == "cuda" else 0
        workers = worker_count(layout, kind=kind, devices=devices, nproc=None, on_cpu="--device cpu")
        if workers > 1:
            return _over_workers(request, workers, kind, quiet=quiet)
    from fivefold.generation.run import shown_to_user

    with join(world or alone(device)) as here:
        return shown_to_user(request, here, quiet=quiet)


def _over_workers(request: GenerateRequest, workers: int, device: str, *, quiet: bool) -> str:
    """The folder of the workers' logs stays only after a failure, whose message names it."""
    with kept_if_one_dies("generate") as logs:
        result = logs / "text"
        body = {"generate": asdict(request), "result": str(result), "quiet": quiet, "device": device}
        with Workers("fivefold.generation.run:on_worker", count=workers) as crew:
            start_workers(crew, body, logs=logs)
        return result.read_text(encoding="utf-8")
