"""The text around a run: a description before the first step, and where everything is after the last."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from fivefold.config import RunConfig
from fivefold.core import history
from fivefold.core.history import History, changes
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.run_folder import steps
from fivefold.core.units import GIB, human, human_bytes, many
from fivefold.launch.folder import next_commands
from fivefold.launch.world import multiplies_bf16, threads_warning
from fivefold.models import hf_internals
from fivefold.ops import gpu_attention
from fivefold.parallel.adapters.spec import adapter_lines
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.dtypes import COMPUTE_DTYPES, PRECISION_OF
from fivefold.parallel.fp8.runtime import fp8_lines
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.state import state_of
from fivefold.torch_internals import carried_by
from fivefold.training import preflight, record, schedule
from fivefold.training.display import Line
from fivefold.training.optimizers import rule_for
from fivefold.training.part import LiveRun, OwnPart

_FILES = ("metrics.jsonl", "samples.jsonl", "checkpoints/", "hf/", "tensorboard/", "logs/", "run.yaml")


def open_log(run: LiveRun, stack: ExitStack, *, attention: str) -> None:
    """Open the display and the files, on rank 0, and show the header. `stack` closes them."""
    about = _about_this_start(run)
    run.log.open(
        stack, run.config, lines(run, about, attention=attention), about, step=run.step,
        total_steps=run.total_steps, total_tokens=schedule.total_tokens(run.config, run.data, run.total_steps),
        is_unfinished=run.resumed.unfinished is not None,
    )  # fmt: skip


def _about_this_start(run: LiveRun) -> dict[str, Any]:
    """The history's record of a start: machine, versions, layout, schedule and data."""
    return {
        **history.surroundings(),
        "device": record.device_name(run.world.device),
        "layout": str(state_of(run.model).plan.layout),
        "world": run.world.size,
        "devices_per_node": run.world.local_size,
        "nodes": run.world.nodes,
        "resumed": run.resumed.where,
        "damages": list(run.resumed.damages),
        "schedule": run.schedule,
        "code": {key: digest for key, digest in _digests(run) if digest},
        "data": asdict(run.data.counts) | {"vocabulary": run.data.tokenizer.vocab_size},
    }


def _digests(run: LiveRun) -> Iterator[tuple[str, str]]:
    """The hashes of the files of the user's own, as they were run; "" where there is none."""
    yield "objective.path", run.specs.loss.digest if run.specs.loss else ""
    yield "optimizer.path", rule_for(run.config.optimizer).digest
    yield from ((part.key, part.digest) for part in run.parts if isinstance(part, OwnPart))


def lines(run: LiveRun, about: Mapping[str, Any], *, attention: str) -> list[Line]:
    """(label, text) rows. `about`: this start, as the history has it. `attention`: see `kernels.choose`."""
    state, config, world = state_of(run.model), run.config, run.world
    layout = state.plan.layout
    on = " ".join(f"{axis} {size}" for axis, size in layout.degrees.items()) or "one process"
    accumulation = layout.accumulation(config.train.global_batch_size)
    batch = f"{config.train.global_batch_size} rows = micro {layout.micro_batch_size} x accumulation {accumulation}"
    carried = "shared memory" if carried_by(dist.group.WORLD) else "gloo"
    device = f"cpu ({carried})" if world.device == "cpu" else f"{world.device.split(':')[0]} (nccl)"
    scheduler, warmup = config.scheduler, many(int(config.scheduler.warmup_steps), "step")
    name = state.plan.anatomy.model_class
    rows = [
        ("run", f"{config.run_dir}   seed {config.train.seed}"),
        ("model", f"{name} {human(run.costs.parameters)} parameters, {config.model.init} weights"),
        *adapter_lines(state.plan, config.adapter.lora, config.adapter.path),
        *(("data" if i == 0 else "", line) for i, line in enumerate(run.data.counts.lines())),
        *_tokenizer_lines(run),
        *([("loss", f"{config.objective.path}   {run.specs.loss.digest}")] if run.specs.loss else []),
        ("layout", f"{layout}   {on}   {world.size} worker{'s' if world.size > 1 else ''} on {device}"),
        ("batch", f"{batch} x data ranks {layout.data_ranks}   {_rows(config)}"),
        *_outer_lines(config),
        (
            "length",
            f"{schedule.epochs_text(config, run.data, run.total_steps)}   warm-up {warmup}, then {scheduler.name}",
        ),
        (
            "compute",
            f"{layout.precision}, reduced in {PRECISION_OF[state.reduce_dtype]}"
            f"{', blocks compiled' if state.plan.compiled else ''}{_attention(run, attention)}",
        ),
        *([("recompute", f"{state.plan.recompute}")] if layout.recompute != "none" else []),
        *fp8_lines(state.plan, config.data.seq_length, world.device),
        *_offload_lines(run),
        *_states_lines(run),
        *_mfu_lines(run),
    ]
    if layout.precision == "bf16" and not multiplies_bf16(world.device):
        rows.append(("", "this device has no bf16 instructions: precision.compute=fp32 is up to 100 x faster here"))
    alone = [f"{line}: fivefold docs howto/data says how to train on both" for line in run.data.counts.answers_alone]
    too_long = schedule.warning(config, run.total_steps)
    rows += [("WARNING", line) for line in (*alone, too_long, threads_warning(world)) if line]
    rows += [("DAMAGED", damage) for damage in run.resumed.damages]
    if run.resumed.where:
        rows.append(("resume", f"from {run.resumed.where}, step {run.step} of {run.total_steps}"))
        rows += changed(history.load(config.run_dir), about, step=run.step)
    if run.specs.told:
        rows.append(("compared", run.specs.told))
    if run.specs.teacher is not None:
        rows.append(("teacher", run.specs.teacher.told))
    return rows + [line for part in run.parts for line in part.lines(run)]


def _rows(config: RunConfig) -> str:
    by_cost = ", shared out by cost" if config.data.balance_rows else ""
    ranks = config.data.balance_documents
    ordered = f", documents ordered for {ranks} ranks of cp" if ranks > 1 else ""
    return f"rows of {config.data.seq_length} tokens{by_cost}{ordered}"


def _outer_lines(config: RunConfig) -> list[tuple[str, str]]:
    outer = config.outer
    meet = f"replicas train apart and meet every {many(outer.every, 'step')}"
    how = f"SGD of rate {outer.learning_rate:g} and {'Nesterov ' * outer.nesterov}momentum {outer.momentum:g}"
    return [("outer", f"{meet}: {how}")] if outer.every else []


def _attention(run: LiveRun, kernel: str) -> str:
    """The attention kernel, if there is a choice; else an empty string."""
    by = {"fa3": "FlashAttention 3", "fa2": "FlashAttention 2", "compiled": "a kernel for this CPU"}
    return f", attention by {by[kernel]}{_not_flash(run)}" if kernel in by else ""


def _not_flash(run: LiveRun) -> str:
    """The fallback for attention on a GPU for which FlashAttention lacks a kernel; an empty string if none is used."""
    state, device, config = state_of(run.model), torch.device(run.world.device), run.model.config.get_text_config()
    is_capped, window = hf_internals.has_softcap(config), getattr(config, "sliding_window", None)
    if device.type != "cuda" or not (is_capped or (window and state.live(ContextParallel).row_groups)):
        return ""
    dtype, sizes = (
        COMPUTE_DTYPES[state.plan.layout.precision],
        {heads.size for heads in state.plan.facts.attends.values()},
    )
    whys = [gpu_attention.lacks(device, dtype, size, is_capped=is_capped) for size in sorted(sizes)]
    why = next(filter(None, whys), "")
    of = "soft-capped scores" if is_capped else "windows between ranks"
    return f", of {of} block by block ({why})" if why else f", of {of} by FlexAttention"


def _tokenizer_lines(run: LiveRun) -> list[tuple[str, str]]:
    """A warning if `AutoTokenizer` forces another tokenizer class in the folder of this kind of model."""
    kind = run.model.config.get_text_config().model_type
    taken = hf_internals.forced_tokenizer_class(kind)
    if taken in (None, run.data.tokenizer.kind):
        return []
    return [
        ("", f"AutoTokenizer reads any tokenizer beside a {kind} model by {taken}: a saved one may get other tokens")
    ]


def memory_line(run: LiveRun, peaks: Mapping[str, float | None]) -> str:
    """Memory of the trial before the first step on the fullest rank, with the GPU's total and the planned amount."""
    taken, reserved = peaks["memory/peak_gib"], peaks.get("memory/peak_reserved_gib")
    if taken is None:
        return ""
    on_gpu = run.world.device != "cpu"
    has = torch.cuda.get_device_properties(run.world.device).total_memory / GIB if on_gpu else None
    planned = preflight.planned_gib(run.config, run.world, state_of(run.model).plan.facts)
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


def _offload_lines(run: LiveRun) -> list[tuple[str, str]]:
    """Bytes that this rank offloads to host memory, by kind."""
    state = state_of(run.model)
    if state.live(Offload).memory is None:
        return []
    sizes = {what: size for what, size in preflight.bytes_of(state.plan, run.config).host.items() if size}
    what = " and ".join(f"{human_bytes(size)} of {kind}" for kind, size in sizes.items()) or "nothing"
    rows = [("offload", f"{what} of this rank to host memory")]
    if run.world.device == "cpu":
        rows.append(("", "the device is the CPU, whose memory that is: nothing is saved"))
    return rows


def _states_lines(run: LiveRun) -> list[tuple[str, str]]:
    """The type in which the optimizer keeps its state, if it is not that of the weights."""
    placement, kinds = state_of(run.model).placement, OPTIMIZERS[run.config.optimizer.name].state.values()
    if placement.layout.state_dtype == "fp32":
        return []
    held = [name for name in placement.shards if placement.holds(name)]
    master, numbers = next(run.model.parameters()).element_size(), sum(placement.held_bytes(name, 1) for name in held)
    each = sum(placement.state_bytes(name, master) for name in held) / numbers
    what = f"{', '.join(kinds)}: {each:.3g} bytes a number, not {master}; vectors stay as they were"
    return [("states", f"{placement.layout.state_dtype} {what}")]


def _mfu_lines(run: LiveRun) -> list[tuple[str, str]]:
    """The peak that MFU is measured against, and which FLOPs count; no row on a CPU."""
    if run.world.device == "cpu":
        return []
    if run.peak_tflops is None:
        return [("mfu", "not shown: the peak of this device is not known")]
    counted = "6 x matmul weights x tokens + causal attention (halved), no recompute"
    return [("mfu", f"of {run.peak_tflops:g} TFLOP/s; counted: {counted}")]


def close(run: LiveRun, why: str = "") -> None:
    """Show where everything is, and what to type next. `why`: why the run ends before its last step."""
    if run.world.is_first:  # `closing_lines` looks for files
        run.log.display.closing(closing_lines(run, why))


def closing_lines(run: LiveRun, why: str) -> list[Line]:
    """(label, text) rows shown at the end: results, files, and what to type next."""
    folder = run.config.run_dir
    val = f"validation loss {run.progress.last_eval:.3f}   " if run.progress.last_eval is not None else ""
    skipped = f"   {run.progress.skipped} steps skipped" if run.progress.skipped else ""
    there = [name for name in _FILES if (folder / name.rstrip("/")).exists()]
    best, is_kept = run.progress.best.step, run.progress.best.step in steps(folder / "checkpoints")
    by_own_part = any(part.why_over(run) for part in run.parts if isinstance(part, OwnPart))
    commands = next_commands(
        run.config, step=run.step, total_steps=run.total_steps, best=best if is_kept else None,
        converses=run.data.converses, stopped_early=bool(run.why_stopped), by_own_part=by_own_part,
    )  # fmt: skip
    return [
        ("done", why or f"{val}{run.step} steps, {run.progress.tokens_seen:,} tokens{skipped}"),
        *([("best", f"{run.progress.best}{'' if is_kept else '; not kept (checkpoint.keep_best)'}")] if best else []),
        ("read", schedule.epochs_text(run.config, run.data, run.step)),
        ("files", f"{folder}/  {'  '.join(there)}"),
        *(("" if number else "next", line) for number, line in enumerate(commands)),
    ]
