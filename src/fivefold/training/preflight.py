"""Checks before the first step: every rank was given the same run, and memory and disk have room for it by its plan."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fivefold.config import RunConfig
from fivefold.core.alike import UNREAD, WHOLE, digests, program
from fivefold.core.errors import UserError
from fivefold.core.named_code import NamedCode
from fivefold.core.run_folder import step_folder, steps
from fivefold.core.units import GIB, human_bytes
from fivefold.data.prepare import PreparedData
from fivefold.data.tokenizer import tokenizer_files
from fivefold.launch.cluster import cluster_here
from fivefold.launch.memory import Needs, room
from fivefold.launch.world import World
from fivefold.models import hf_internals
from fivefold.models.build import config_values, load_model_config, weights_folder
from fivefold.models.facts import ModelFacts
from fivefold.models.sources import folder_digests
from fivefold.parallel import plain
from fivefold.parallel.adapters.peft_folder import adapter_digests
from fivefold.parallel.dtypes import master_dtype
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import StepBytes, step_bytes
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.plain import check_alike
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.budget import within_budget
from fivefold.parallel.state import state_of
from fivefold.training import advice
from fivefold.training.optimizers import rule_for


def check_ranks_agree(config: RunConfig, data: PreparedData, world: World) -> None:
    """Raise `UserError`, the same on every rank, naming the first field that differs from rank 0's, and where. Files
    are compared if ranks have disks of their own, unless the launcher of nodes has done so (`training/nodes.py`)."""
    are_apart = not (world.is_local or world.round)
    begins = plain.of_first(begins_anew(config))  # another node may have an earlier run's checkpoints
    check_alike(lambda: agreed_fields(config, data, agreed_files(config, data, begins=begins) if are_apart else None))


def check_memory(facts: ModelFacts, config: RunConfig, layout: Layout, world: World) -> str | None:
    """A warning if the run will likely need more memory than is free; else None.

    Raises `UserError`, the same on every rank of a machine, if weights, gradients and optimizer state alone exceed the
    total memory.
    """
    needs = needs_of(facts, config, layout, ranks=world.local_ranks, is_host=world.device == "cpu")
    if world.device != "cpu":
        total, free = (torch.cuda.mem_get_info(world.device)[at] * world.local_size for at in (1, 0))
        where = f"{world.local_size} GPUs" if world.local_size > 1 else "the GPU"
    elif (there := room()) is not None:
        total, free, where = there.total, there.free, "this machine"
    else:
        return None
    if needs.state > total:
        raise UserError(
            f"this run does not fit: {needs}, and {where} has {total / GIB:.2f} GiB",
            fix=needs.advice(total),
            more="fivefold docs explain/layouts",
        )
    if needs.state + needs.activations <= free:
        return None
    return f"memory may run out: {free / GIB:.2f} GiB of {where} are free, and the run needs {needs}"


def needs_of(
    facts: ModelFacts, config: RunConfig, layout: Layout, *, ranks: Sequence[int], is_host: bool = False
) -> Needs:
    """Memory of `ranks` of a resolved layout together, from their plans. Activations: those saved for backward, and the
    logits of one chunk of the loss. `is_host`: the device is the CPU, so offloading frees nothing.
    """
    of_ranks = [bytes_of(lower(facts, layout, rank), config) for rank in ranks]
    away = 0 if is_host else 1  # 1: host memory is separate from the device's
    return Needs(
        parameters=facts.size,
        ranks=len(ranks),
        weights=sum(bytes_.parameters for bytes_ in of_ranks),
        gradients=sum(bytes_.gradients for bytes_ in of_ranks),
        optimizer=sum(bytes_.optimizer - away * bytes_.host["optimizer state"] for bytes_ in of_ranks),
        activations=sum(
            bytes_.logits + sum(bytes_.saved.values()) + (1 - away) * bytes_.host["saved activations"]
            for bytes_ in of_ranks
        ),
    )


def bytes_of(plan: ParallelPlan, config: RunConfig) -> StepBytes:
    layout = plan.layout
    tokens, micro_batches = layout.padded(config.data.seq_length), layout.accumulation(config.train.global_batch_size)
    plan = within_budget(plan, (tokens, micro_batches))
    shape = plan.step_shape(
        layout.micro_batch_size, tokens, micro_batches, loss_chunks=config.memory.chunks,
        whole_logits=config.objective.is_own,
    )  # fmt: skip
    return step_bytes(plan, replace(shape, optimizer=rule_for(config.optimizer).facts))


def planned_gib(config: RunConfig, world: World, facts: ModelFacts) -> float | None:
    """GiB of tensors of the fullest rank according to the planner; None if it does not know the devices."""
    kind = "cpu" if world.device == "cpu" else "cuda"
    try:
        cluster = cluster_here(kind, world.size, world.local_size, config.hardware)
        return advice.planned_gib(config, cluster, facts)
    except UserError:
        return None


def optimizer_bytes(model: nn.Module, config: RunConfig) -> tuple[int, int]:
    """Bytes of the optimizer state that this rank will have after its first step: in total, and on the device."""
    found = bytes_of(state_of(model).plan, config)
    return found.optimizer, found.optimizer - found.host["optimizer state"]


def reserve_host_memory(model: nn.Module, config: RunConfig) -> None:
    """Reserve room for offloaded optimizer state before the first step."""
    state = state_of(model)
    states = state.live(Offload).states
    if states.is_on:
        tensors = sum(map(len, rule_for(config.optimizer).state(state.placement).values()))
        states.reserve(bytes_of(state.plan, config).host["optimizer state"], tensors)


def check_disk(model: nn.Module, config: RunConfig, *, step: int, total_steps: int) -> str:
    """A warning if the disk is too small for all checkpoints of the steps after `step`; else "".

    Raises `UserError` if not even one more fits, or if it could not be read back: the training could never be saved.
    """
    folder = config.run_dir / "checkpoints"
    files = ((folder / step_folder(step)).rglob("*") for step in steps(folder))
    held = [sum(path.stat().st_size for path in each if path.is_file()) for each in files]
    saves, size = saves_left(config, step, total_steps), checkpoint_bytes(model, config)
    best, keep = config.checkpoint.keep_best, config.checkpoint.keep + config.checkpoint.keep_best
    disk = shutil.disk_usage(config.run_dir)
    if not saves or not disk.total:  # some network filesystems do not say
        return ""
    where = f"{human_bytes(disk.free)} are free at {config.run_dir}"
    if disk.free < size:
        raise UserError(
            f"a checkpoint takes {human_bytes(size)} (weights and optimizer state), and {where}",
            fix="free space, or set run.dir to a larger disk",
            more="fivefold docs explain/checkpoints",
        )
    needed = more_bytes(size, held, keep=keep, saves=saves)
    if disk.free >= needed:
        return ""
    fitting = [
        fewer for fewer in range(1, keep - best) if more_bytes(size, held, keep=fewer + best, saves=saves) <= disk.free
    ]
    advice = f"set checkpoint.keep: {fitting[-1]}, free space, " if fitting else "free space "
    return (
        f"saving will fail: {keep} checkpoint{'s' * (keep != 1)} of {human_bytes(size)}, and the next beside them, "
        f"take {human_bytes(needed)} more, and {where}; {advice}or set run.dir to a larger disk"
    )


def checkpoint_bytes(model: nn.Module, config: RunConfig) -> int:
    plan = state_of(model).plan
    kept = [name for names in rule_for(config.optimizer).state(plan.placement).values() for name in names]
    return plan.placement.checkpoint_bytes(kept, master_dtype(plan.layout.precision).itemsize)


def saves_left(config: RunConfig, step: int, total_steps: int) -> int:
    """The largest number of checkpoints still to be written: one every `checkpoint.every` steps, and the last one; with
    `checkpoint.keep_best` one at each validation, too."""
    every = config.checkpoint.every
    on_time = total_steps // every - step // every if every else 0
    at_best = total_steps // config.eval.every - step // config.eval.every if config.checkpoint.keep_best else 0
    return on_time + at_best + int(step < total_steps and not (every and total_steps % every == 0))


def more_bytes(size: int, held: list[int], *, keep: int, saves: int) -> int:
    """The most bytes that checkpoints will take beyond those `held`: an old one goes once a new one is complete."""
    there, most = list(held), 0
    for _ in range(min(saves, keep + 1)):  # from then on all are new ones
        there.append(size)
        most = max(most, sum(there) - sum(held))
        there = there[-keep:]
    return most


# ---- the fields on which all ranks, and all nodes, of a run must agree -----------------------------------------------


def agreed_keys(config: RunConfig) -> dict[str, Any]:
    """The keys of the run file, and the code that it names. Raises `UserError`."""
    tree = config.model_dump(mode="json", by_alias=True)
    return {
        **{f"{section}.{key}": value for section, values in tree.items() for key, value in values.items()},
        **{f"the hash of {key}": NamedCode.read(text, key).digest for key, text in config.code.items()},
    }


def agreed_fields(config: RunConfig, data: PreparedData, of_disk: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields by name: `agreed_keys`, those of `agreed_files` as `of_disk`, the rows. Of two that differ, the first
    is the cause. Plain data."""
    return {
        **agreed_keys(config),
        **(of_disk or {}),
        "the hash of the tokenizer": data.tokenizer.digest,
        "the fingerprint of the rows": {**data.files, WHOLE: data.fingerprint},
    }


def begins_anew(config: RunConfig) -> bool:
    """True if no checkpoint is here to go on from, so that first weights are read."""
    return not steps(config.run_dir / "checkpoints")


def has_first_weights(config: RunConfig) -> bool:
    """True if the weights that a run begins with lie in folders here. Nodes that come and go compare them in a run that
    goes on, too: it starts again if its checkpoints are removed meanwhile."""
    named = filter(None, (config.model.name_or_path, config.adapter.path))
    return all(any(Path(folder).glob("*.safetensors")) for folder in named)


def agreed_files(config: RunConfig, data: PreparedData, *, begins: bool) -> dict[str, Any]:
    """The fields that only machines with disks of their own can differ in: the versions and files of packages, the
    files of the tokenizer, of the model and of the others that the objective names. `begins`: as the first rank sees
    it. Raises `UserError`."""
    model, given = config.model, config.objective
    base = f"model.name_or_path {model.name_or_path}"
    folder = data.tokenizer.folder
    read: dict[str, Any] = {
        **program(),
        "the tokenizer": digests(folder, tokenizer_files(folder)),
        f"{base}: config.json": config_values(load_model_config(model.name_or_path, model.overrides)),
    }
    if model.init == "pretrained":
        place = weights_folder(model.name_or_path, files=("*.json",))
        read[f"{base}: generation_config.json"] = config_values(hf_internals.generation_config(place))
        is_read = begins or config.adapter.lora or given.compares
        read[f"{base}: weights"] = folder_digests(weights_folder(model.name_or_path)) if is_read else UNREAD
    if config.adapter.path:
        read[f"adapter.path {config.adapter.path}"] = adapter_digests(config.adapter.path) if begins else UNREAD
    if given.compares and given.reference not in ("auto", "base"):
        read[f"objective.reference {given.reference}"] = folder_digests(weights_folder(given.reference))
    if given.name == "distill":
        teacher = weights_folder(given.teacher)
        read[f"objective.teacher {given.teacher}: config.json"] = config_values(load_model_config(teacher))
        read[f"objective.teacher {given.teacher}: the tokenizer"] = digests(teacher, tokenizer_files(teacher))
        read[f"objective.teacher {given.teacher}"] = folder_digests(teacher)
    return read
