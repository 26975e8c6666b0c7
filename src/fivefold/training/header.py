"""The lines around a run: what it is before the first step, where everything is after the last."""

from typing import TYPE_CHECKING

from fivefold.config import RunConfig
from fivefold.launch.world import multiplies_bf16
from fivefold.layout import MESH_AXES
from fivefold.parallel.spread import spread_of
from fivefold.training import length
from fivefold.units import human

if TYPE_CHECKING:
    from fivefold.training.keeper import Resumed
    from fivefold.training.run import Job


_FILES = ("metrics.jsonl", "samples.jsonl", "checkpoints/", "hf/", "tensorboard/", "logs/", "run.yaml")


def lines(job: "Job", *, compiled: bool, resumed: "Resumed") -> list[tuple[str, str]]:
    """(label, text) rows of the header."""
    config, layout, world = job.config, spread_of(job.model).layout, job.world
    on = " ".join(f"{axis} {getattr(layout, axis)}" for axis in MESH_AXES if getattr(layout, axis) > 1) or "one process"
    accumulation = layout.accumulation(config.train.global_batch_size)
    batch = f"{config.train.global_batch_size} rows = micro {layout.micro_batch_size} x accumulation {accumulation}"
    device = "cpu (gloo)" if world.device == "cpu" else f"{world.device.split(':')[0]} (nccl)"
    name = spread_of(job.model).anatomy.model_class
    rows = [
        ("run", f"{config.run_dir}   seed {config.train.seed}"),
        ("model", f"{name} {human(job.costs.parameters)} parameters, {config.model.init} weights"),
        *(("data" if i == 0 else "", line) for i, line in enumerate(job.data.counts.lines())),
        ("layout", f"{layout}   {on}   {world.size} worker{'s' if world.size > 1 else ''} on {device}"),
        ("batch", f"{batch} x data ranks {layout.data_ranks}   rows of {config.data.seq_length} tokens"),
        ("length", f"{length.epochs_text(config, job.data, job.total_steps)}   {_warmup(config)}"),
        (
            "compute",
            f"{layout.precision}, reduced in {config.precision.reduce}{', blocks compiled' if compiled else ''}",
        ),
        ("mfu", _mfu_line(job)),
    ]
    if layout.precision == "bf16" and not multiplies_bf16(world.device):
        rows.insert(-1, ("", "this device has no bf16 instructions: precision.compute=fp32 is up to 100 x faster here"))
    alone = [f"{line}: docs/data.md says how to train on both" for line in job.data.counts.answers_alone]
    too_long = length.warning(config, job.total_steps)
    rows += [("WARNING", line) for line in (*alone, too_long) if line]
    rows += [("DAMAGED", damage) for damage in resumed.damages]
    if resumed.where:
        rows.append(("resume", f"from {resumed.where}, step {job.step} of {job.total_steps}"))
    return rows


def _warmup(config: RunConfig) -> str:
    steps = int(config.scheduler.warmup_steps)
    return f"warm-up {steps:,} step{'s' * (steps != 1)}, then {config.scheduler.name}"


def _mfu_line(job: "Job") -> str:
    peak = job.peak_tflops
    formula = "6 x matmul weights x tokens + causal attention (halved), no recompute"
    return f"{formula}; peak {peak:g} TFLOP/s" if peak else f"n/a: the peak of this device is not known ({formula})"


def closing_lines(job: "Job", why: str | None) -> list[tuple[str, str]]:
    """(label, text) rows of the end: results, files, and what to type next."""
    run = job.config.run_dir
    val = f"validation loss {job.last_eval:.3f}   " if job.last_eval is not None else ""
    skipped = f"   {job.skipped} steps skipped" if job.skipped else ""
    prompt = next(iter(job.config.sample.prompts), "The")
    there = [name for name in _FILES if (run / name.rstrip("/")).exists()]
    export = [] if (run / "hf").exists() else [("", f"fivefold export {run} {run / 'hf'}")]
    return [
        ("done", why or f"{val}{job.step} steps, {job.tokens_seen:,} tokens{skipped}"),
        ("read", length.epochs_text(job.config, job.data, job.step)),
        ("files", f"{run}/  {'  '.join(there)}"),
        ("next", f'fivefold generate {run} --prompt "{prompt}"'),
        *export,
    ]
