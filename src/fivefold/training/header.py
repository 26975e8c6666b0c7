"""The text around a run: a description before the first step, and where everything is after the last."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fivefold.config import RunConfig
from fivefold.core.history import History, changes
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.step_folders import steps
from fivefold.core.units import GIB, human, human_bytes, many
from fivefold.launch.folder import next_commands
from fivefold.launch.world import multiplies_bf16, threads_warning
from fivefold.models import hf_internals
from fivefold.ops import gpu_attention
from fivefold.parallel import shared_memory
from fivefold.parallel.adapters import header as adapters
from fivefold.parallel.fp8 import header as fp8
from fivefold.parallel.fsdp.runtime import COMPUTE_DTYPES, PRECISION_OF
from fivefold.parallel.state import state_of
from fivefold.training import preflight, schedule
from fivefold.training.job import Job

if TYPE_CHECKING:
    from fivefold.training.checkpoints import Resumed


_FILES = ("metrics.jsonl", "samples.jsonl", "checkpoints/", "hf/", "tensorboard/", "logs/", "run.yaml")


def lines(job: Job, *, compiled: bool, resumed: "Resumed") -> list[tuple[str, str]]:
    """(label, text) rows of the header."""
    state, config, world = state_of(job.model), job.config, job.world
    layout = state.plan.layout
    on = " ".join(f"{axis} {size}" for axis, size in layout.degrees.items()) or "one process"
    accumulation = layout.accumulation(config.train.global_batch_size)
    batch = f"{config.train.global_batch_size} rows = micro {layout.micro_batch_size} x accumulation {accumulation}"
    carried = "shared memory" if shared_memory.is_connected(dist.group.WORLD) else "gloo"
    device = f"cpu ({carried})" if world.device == "cpu" else f"{world.device.split(':')[0]} (nccl)"
    scheduler, warmup = config.scheduler, many(int(config.scheduler.warmup_steps), "step")
    name = state.plan.anatomy.model_class
    rows = [
        ("run", f"{config.run_dir}   seed {config.train.seed}"),
        ("model", f"{name} {human(job.costs.parameters)} parameters, {config.model.init} weights"),
        *adapters.lines(state.plan, config.adapter.lora, config.adapter.path),
        *(("data" if i == 0 else "", line) for i, line in enumerate(job.data.counts.lines())),
        *_tokenizer_lines(job),
        *([("loss", f"{config.objective.path}   {job.loss.digest}")] if job.loss else []),
        ("layout", f"{layout}   {on}   {world.size} worker{'s' if world.size > 1 else ''} on {device}"),
        ("batch", f"{batch} x data ranks {layout.data_ranks}   {_rows(config)}"),
        *_outer_lines(config),
        (
            "length",
            f"{schedule.epochs_text(config, job.data, job.total_steps)}   warm-up {warmup}, then {scheduler.name}",
        ),
        (
            "compute",
            f"{layout.precision}, reduced in {PRECISION_OF[state.reduce_dtype]}"
            f"{', blocks compiled' if compiled else ''}{_attention(job)}",
        ),
        *([("recompute", f"{state.plan.recompute}")] if layout.recompute != "none" else []),
        *fp8.lines(state.plan, config.data.seq_length, world.device),
        *_offload_lines(job),
        *_states_lines(job),
        *_mfu_lines(job),
    ]
    if layout.precision == "bf16" and not multiplies_bf16(world.device):
        rows.append(("", "this device has no bf16 instructions: precision.compute=fp32 is up to 100 x faster here"))
    alone = [f"{line}: docs/howto/data.md says how to train on both" for line in job.data.counts.answers_alone]
    too_long = schedule.warning(config, job.total_steps)
    rows += [("WARNING", line) for line in (*alone, too_long, threads_warning(world)) if line]
    rows += [("DAMAGED", damage) for damage in resumed.damages]
    if resumed.where:
        rows.append(("resume", f"from {resumed.where}, step {job.step} of {job.total_steps}"))
    return rows


def _rows(config: RunConfig) -> str:
    """The rows of a batch."""
    by_cost = ", shared out by cost" if config.data.balance_rows else ""
    ranks = config.data.balance_documents
    ordered = f", documents ordered for {ranks} ranks of cp" if ranks > 1 else ""
    return f"rows of {config.data.seq_length} tokens{by_cost}{ordered}"


def _outer_lines(config: RunConfig) -> list[tuple[str, str]]:
    """How replicas meet that train apart."""
    outer = config.outer
    meet = f"replicas train apart and meet every {many(outer.every, 'step')}"
    how = f"SGD of rate {outer.learning_rate:g} and {'Nesterov ' * outer.nesterov}momentum {outer.momentum:g}"
    return [("outer", f"{meet}: {how}")] if outer.every else []


def _attention(job: Job) -> str:
    """The attention kernel, if there is a choice; else an empty string."""
    by = {"fa3": "FlashAttention 3", "fa2": "FlashAttention 2", "compiled": "a kernel for this CPU"}
    return f", attention by {by[job.attention]}{_not_flash(job)}" if job.attention in by else ""


def _not_flash(job: Job) -> str:
    """The fallback for attention on a GPU for which FlashAttention lacks a kernel; an empty string if none is used."""
    state, device, config = state_of(job.model), torch.device(job.world.device), job.model.config.get_text_config()
    is_capped, window = hf_internals.has_softcap(config), getattr(config, "sliding_window", None)
    if device.type != "cuda" or not (is_capped or (window and state.context.row_groups)):
        return ""
    dtype, sizes = (
        COMPUTE_DTYPES[state.plan.layout.precision],
        {heads.size for heads in state.plan.facts.attends.values()},
    )
    whys = [gpu_attention.lacks(device, dtype, size, is_capped=is_capped) for size in sorted(sizes)]
    why = next(filter(None, whys), "")
    of = "soft-capped scores" if is_capped else "windows between ranks"
    return f", of {of} block by block ({why})" if why else f", of {of} by Triton kernels"


def _tokenizer_lines(job: Job) -> list[tuple[str, str]]:
    """A warning if `AutoTokenizer` forces another tokenizer class in the folder of this kind of model."""
    kind = job.model.config.get_text_config().model_type
    taken = hf_internals.forced_tokenizer_class(kind)
    if taken in (None, job.data.tokenizer.kind):
        return []
    return [
        ("", f"AutoTokenizer reads any tokenizer beside a {kind} model by {taken}: a saved one may get other tokens")
    ]


def memory_line(job: Job, peaks: Mapping[str, float | None]) -> str:
    """Memory of the trial before the first step on the fullest rank, with the GPU's total and the planned amount."""
    taken, reserved = peaks["memory/peak_gib"], peaks.get("memory/peak_reserved_gib")
    if taken is None:
        return ""
    on_gpu = job.world.device != "cpu"
    has = torch.cuda.get_device_properties(job.world.device).total_memory / GIB if on_gpu else None
    planned = preflight.planned_gib(job.config, job.world, state_of(job.model).plan.facts)
    beside = [f"{reserved:.1f} reserved" if reserved else "", f"planned {planned:.1f}" if planned else ""]
    brackets = ", ".join(filter(None, beside))
    of = f" of {has:.1f}" if has else ""
    return f"tried: {taken:.1f}{of} GiB in a step, an evaluation and a save{f' ({brackets})' if brackets else ''}"


def changed(before: History, about: Mapping[str, Any], *, step: int) -> list[tuple[str, str]]:
    """At most one row: the differences between this start, described by `about`, and the previous one."""
    if not before.starts:
        return []
    was = before.starts[-1].about
    found = changes(was, about)
    try:
        old, new = schedule.learning_rate(step, **was["schedule"]), schedule.learning_rate(step, **about["schedule"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # the record of an earlier version
        old = new = 0.0
    if abs(new - old) > 0.01 * max(old, new):
        found.append(f"the learning rate of step {step + 1} is {new:.2e}; it would have been {old:.2e}")
    return [("changed", "; ".join(found))] if found else []


def _offload_lines(job: Job) -> list[tuple[str, str]]:
    """Bytes that this rank offloads to host memory, by kind."""
    state = state_of(job.model)
    if state.offload.memory is None:
        return []
    sizes = {what: size for what, size in preflight.bytes_of(state.plan, job.config).host.items() if size}
    what = " and ".join(f"{human_bytes(size)} of {kind}" for kind, size in sizes.items()) or "nothing"
    rows = [("offload", f"{what} of this rank to host memory")]
    if job.world.device == "cpu":
        rows.append(("", "the device is the CPU, whose memory that is: nothing is saved"))
    return rows


def _states_lines(job: Job) -> list[tuple[str, str]]:
    """The type in which the optimizer keeps its state, if it is not that of the weights."""
    placement, kinds = state_of(job.model).placement, OPTIMIZERS[job.config.optimizer.name].state.values()
    if placement.layout.state_dtype == "fp32":
        return []
    held = [name for name in placement.shards if placement.holds(name)]
    master, numbers = next(job.model.parameters()).element_size(), sum(placement.held_bytes(name, 1) for name in held)
    each = sum(placement.state_bytes(name, master) for name in held) / numbers
    what = f"{', '.join(kinds)}: {each:.3g} bytes a number, not {master}; vectors stay as they were"
    return [("states", f"{placement.layout.state_dtype} {what}")]


def _mfu_lines(job: Job) -> list[tuple[str, str]]:
    """The peak that MFU is measured against, and which FLOPs count; no row on a CPU."""
    if job.world.device == "cpu":
        return []
    if job.peak_tflops is None:
        return [("mfu", "not shown: the peak of this device is not known")]
    counted = "6 x matmul weights x tokens + causal attention (halved), no recompute"
    return [("mfu", f"of {job.peak_tflops:g} TFLOP/s; counted: {counted}")]


def closing_lines(job: Job, why: str | None) -> list[tuple[str, str]]:
    """(label, text) rows shown at the end: results, files, and what to type next."""
    run = job.config.run_dir
    val = f"validation loss {job.last_eval:.3f}   " if job.last_eval is not None else ""
    skipped = f"   {job.skipped} steps skipped" if job.skipped else ""
    there = [name for name in _FILES if (run / name.rstrip("/")).exists()]
    best, is_kept = job.best.step, job.best.step in steps(run / "checkpoints")
    commands = next_commands(
        job.config, step=job.step, total_steps=job.total_steps, best=best if is_kept else None,
        converses=job.data.converses,
        stopped_early=job.step < job.total_steps and job.best.is_over(job.config.eval.stop.patience),
    )  # fmt: skip
    return [
        ("done", why or f"{val}{job.step} steps, {job.tokens_seen:,} tokens{skipped}"),
        *([("best", f"{job.best}{'' if is_kept else '; not kept (checkpoint.keep_best)'}")] if best else []),
        ("read", schedule.epochs_text(job.config, job.data, job.step)),
        ("files", f"{run}/  {'  '.join(there)}"),
        *(("" if number else "next", line) for number, line in enumerate(commands)),
    ]
