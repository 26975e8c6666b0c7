"""Rules for which layouts can run, each with its arithmetic and the nearest values that fit. No torch.

The command line checks before it starts a process, `parallelize` once it has seen the model. A search for a layout can
check each candidate. Every rule is a generator of `Violation`s; `violations` runs all rules.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold.core.folder_config import LAYERS
from fivefold.core.heads import context_method, legal_degrees
from fivefold.core.violation import Violation
from fivefold.parallel.layout import Layout

_BATCH = "micro batches are train.global_batch_size / (micro_batch_size x data ranks)"


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Limits that a model sets. A number that is None is not known, and nothing is refused for it.

    `query`, `kv`: attention heads. `attended`: the heads that the attention function sees, if different (multi-head
    latent attention makes a key/value head for every query head). `fused`: a parameter that makes all heads at once, so
    that tp ranks cannot share a key/value head. `experts`: of the layer with the fewest; 0 in a dense model.
    `expert_features`: of an expert's hidden layer. `refusals`: axis (`tp`, `sequence_parallel`, `pp`, `expert_tp`) ->
    why the structure of the model does not allow it."""

    name: str = "the model"
    query: int | None = None
    kv: int | None = None
    attended: tuple[int, int] | None = None
    fused: str | None = None
    layers: int | None = None
    experts: int | None = None
    expert_features: int | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of_config(values: Mapping[str, Any], name: str) -> "ModelLimits":
        """Read the limits from a config.json."""
        query, kv = (_count(values.get(key)) for key in ("num_attention_heads", "num_key_value_heads"))
        layers = next((_count(values[key]) for key in LAYERS if key in values), None)
        experts = None if any("experts" in key for key in values) else 0
        return ModelLimits(name=name, query=query, kv=kv or query, layers=layers, experts=experts)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


UNKNOWN = ModelLimits()


def violations(
    layout: Layout, limits: ModelLimits = UNKNOWN, *, world: int | None = None, batch: int | None = None,
    micro_batches: int | None = None,
) -> list[Violation]:  # fmt: skip
    """List all that keeps `layout` from running a model, the most basic first; empty if it can run.

    `world`: devices. `batch`: rows of an optimizer step, over all devices. `micro_batches`: of a data rank in a step,
    if `batch` is not known. A `dp_shard` of -1 counts as not known yet.
    """
    found = [*of_cp_method(layout), *of_pipeline(layout), *of_fp8(layout), *of_mlp_chunks(layout)]
    if world is not None:
        found += layout.against_world(world)
    if batch is not None and layout.dp_shard != -1:
        uneven = list(layout.against_batch(batch))
        found += uneven
        micro_batches = None if uneven else batch // (layout.micro_batch_size * layout.data_ranks)
    if micro_batches is not None:
        found += of_micro_batches(layout, micro_batches)
    return [*found, *of_heads(layout, limits, world), *of_layers(layout, limits), *of_experts(layout, limits)]


# ---- the layout by itself --------------------------------------------------------------------------------------------


def of_cp_method(layout: Layout) -> Iterator[Violation]:
    """A method RxU needs R x U = `cp` ranks."""
    cp, sizes = layout.cp, re.fullmatch(r"(\d+)x(\d+)", layout.cp_method)
    if sizes and int(sizes[1]) * int(sizes[2]) != cp:
        product = f"{sizes[1]} x {sizes[2]} = {int(sizes[1]) * int(sizes[2])}"
        fits = " or ".join(f"{cp // n}x{n}" for n in range(1, cp + 1) if cp % n == 0)
        what = f"cp_method {sizes[0]} is {product} ranks, but cp is {cp}"
        yield Violation("cp_method", what, f"use auto, or {fits}", more="docs/explain/context.md")


def of_pipeline(layout: Layout) -> Iterator[Violation]:
    """A schedule needs its number of stages per rank, and a split names every stage."""
    text, virtual = layout.pp_split, layout.pp_virtual
    if layout.pp == 1:
        if virtual > 1:
            yield Violation("pp", f"pp_virtual {virtual} needs a pipeline", "set pp to 2 or more")
        return
    yield from _of_virtual(layout)
    if text != "auto" and not re.fullmatch(r"\d+(-\d+)*", text):
        yield Violation("pp_split", f"pp_split {text!r} is not understood", "write auto, or as 8-8-8-6")
    elif (split := layout.split) and (len(split) != layout.stages or min(split) < 1):
        what = f"pp_split {text} names {len(split)} stages, and there are {layout.stages}, of a layer or more each"
        yield Violation("pp_split", what, f"write {layout.stages} numbers of 1 or more, or auto")


def _of_virtual(layout: Layout) -> Iterator[Violation]:
    """`pp_virtual` is a number of stages that the schedule has."""
    virtual, name, (fewest, most) = layout.pp_virtual, f"pp_schedule {layout.pp_schedule}", layout.schedule.stages
    if most == 1 and virtual > 1:
        what, fix = f"has one stage a rank, so pp_virtual is 1, not {virtual}", "use interleaved or zb, or leave"
        yield Violation("pp_virtual", f"{name} {what}", f"{fix} pp_virtual out", (1,))
    elif most is not None and virtual > most:
        yield Violation("pp_virtual", f"{name} has two stages a rank, not {virtual}", "leave pp_virtual out", (most,))
    elif layout.stages_per_rank < fewest:
        what, fix = f"{name} has two stages a rank or more", f"set pp_virtual to {fewest} (+v{fewest})"
        yield Violation("pp_virtual", what, fix, (fewest,))


def of_fp8(layout: Layout) -> Iterator[Violation]:
    """`fp8_high_layers` needs fp8."""
    if layout.fp8_high_layers and layout.fp8 == "none":
        what = f"fp8_high_layers {layout.fp8_high_layers} without fp8"
        yield Violation(
            "fp8_high_layers", what, "set precision.fp8, or leave fp8_high_layers out", more="docs/explain/fp8.md"
        )


def of_mlp_chunks(layout: Layout) -> Iterator[Violation]:
    """`mlp_chunks` excludes fp8 (scales over all tokens) and recompute policies that save parts of an MLP."""
    if layout.mlp_chunks == 1:
        return
    if layout.fp8 != "none":
        what = f"mlp_chunks {layout.mlp_chunks}: fp8 {layout.fp8} has scales that span the tokens of a linear"
        yield Violation("mlp_chunks", what, "set memory.mlp_chunks: 1", (1,), more="docs/explain/memory.md")
    if layout.recompute not in ("none", "full"):
        what = f"mlp_chunks {layout.mlp_chunks}: recompute {layout.recompute} says what of an MLP is kept"
        yield Violation("mlp_chunks", what, "set memory.recompute: full, or none", (1,), more="docs/explain/memory.md")


def of_micro_batches(layout: Layout, count: int) -> Iterator[Violation]:
    """The schedule must take this number of micro batches."""
    name, pp, schedule = f"pp_schedule {layout.pp_schedule}", layout.pp, layout.schedule
    fewest = schedule.fewest(pp)
    if pp > 1 and count < fewest:
        what = f"{name} needs {schedule.fewest_per_rank} x pp = {fewest} micro batches or more, and a step has {count}"
        fix = f"raise train.global_batch_size, or lower micro_batch_size, for {fewest} or more"
        yield Violation("micro_batch_size", what, fix, more=_BATCH)
    if pp > 1 and not schedule.takes(count, pp):
        what = f"{name} runs micro batches in rounds of pp = {pp}, and a step has {count}"
        fix = f"a multiple of {pp}, such as {count // pp * pp} or {-(-count // pp) * pp}"
        yield Violation("micro_batch_size", what, fix, more=_BATCH)


# ---- the layout and a model ------------------------------------------------------------------------------------------


def of_heads(layout: Layout, limits: ModelLimits, world: int | None = None) -> Iterator[Violation]:
    """Every tp rank needs the same number of whole query heads, and the key/value heads that these attend to. So does
    every Ulysses rank of context parallelism. `world`: devices, which tp divides."""
    tp, query, kv = layout.tp, limits.query, limits.kv
    legal: tuple[int, ...] = ()
    if tp > 1 and (refusal := limits.refusals.get("tp")):
        yield Violation("tp", f"tp {tp} is refused: {refusal}", "use dp_shard instead (FSDP needs no roles)", (1,))
        return
    if tp > 1 and layout.sequence_parallel and (refusal := limits.refusals.get("sequence_parallel")):
        what, fix = f"sequence parallel is refused: {refusal}", "set layout.sequence_parallel: false"
        yield Violation("sequence_parallel", what, fix)
    if query is not None and kv is not None and tp not in (legal := tuple(legal_degrees(query, kv))):
        what = f"tp={tp} does not fit num_attention_heads={query}, num_key_value_heads={kv}"
        rule = "tp must divide the first, and divide or be a multiple of the second"
        legal = tuple(each for each in legal if not (world and world % each))
        yield Violation("tp", f"{what}: {rule}", f"try tp {', '.join(map(str, legal))}", legal)
        return
    if limits.fused and kv is not None and tp > kv:
        what = f"tp={tp} is more than num_key_value_heads={kv} of {limits.name}, and {limits.fused} makes all heads"
        yield Violation("tp", f"{what} at once", f"use tp {kv} or less", tuple(each for each in legal if each <= kv))
    attended = limits.attended or ((query, kv) if query is not None and kv is not None else None)
    if attended is not None and not any(of_cp_method(layout)):
        yield from _of_ulysses(layout, attended[0] // tp, max(1, attended[1] // tp))


def _of_ulysses(layout: Layout, query: int, kv: int) -> Iterator[Violation]:
    """Ulysses ranks need whole heads. `query`, `kv`: heads of a tp rank."""
    cp, u = layout.cp, context_method(layout.cp_method, layout.cp, query, kv).ulysses
    if query % u or (kv % u and u % kv):
        fits = " or ".join(f"{cp // n}x{n}" for n in legal_degrees(query, kv) if cp % n == 0)
        what = f"cp_method {layout.cp_method} deals {query} query and {kv} key/value heads of a rank out to {u}"
        rule = f"{u} must divide the first, and divide or be a multiple of the second"
        yield Violation("cp_method", f"{what}: {rule}", f"use auto, ring, or {fits}", more="docs/explain/context.md")


def of_layers(layout: Layout, limits: ModelLimits) -> Iterator[Violation]:
    """Every stage needs a layer, and a split adds up to all layers."""
    pp, each, layers = layout.pp, layout.stages_per_rank, limits.layers
    if pp > 1 and (refusal := limits.refusals.get("pp")):
        yield Violation("pp", f"pp {pp} is refused: {refusal}", "use dp_shard and tp instead", (1,))
    if pp == 1 or layers is None:
        return
    if layout.stages > layers:
        what = f"pp {pp} x {each} stages a rank = {layout.stages}, but the model has {layers} layers"
        yield Violation("pp", what, f"at most {layers} stages", tuple(range(1, layers // each + 1)))
    elif not any(of_pipeline(layout)) and layout.split and sum(layout.split) != layers:
        what = f"pp_split {layout.pp_split} has {sum(layout.split)} layers, but the model has {layers}"
        yield Violation("pp_split", what, f"numbers that add up to {layers}, or auto")


def of_experts(layout: Layout, limits: ModelLimits) -> Iterator[Violation]:
    """`ep` needs a model with experts, at least one for each rank. `expert_tp` needs at least one feature of every
    expert for each tp rank."""
    ep, etp, experts, features = layout.ep, layout.etp, limits.experts, limits.expert_features
    whole = "set layout.expert_tp: false"
    if ep > 1 and experts == 0:
        yield Violation("ep", f"ep {ep}: {limits.name} has no experts to deal to ranks", "set layout.ep: 1", (1,))
    elif experts and ep > experts:
        what = f"ep {ep} is more than the {experts} experts of {limits.name}"
        yield Violation("ep", what, f"use ep {experts} or less", tuple(range(1, experts + 1)))
    if etp > 1 and experts == 0:
        yield Violation("expert_tp", f"expert_tp: {limits.name} has no experts to split over tp", whole)
    elif etp > 1 and (refusal := limits.refusals.get("expert_tp")):
        yield Violation("expert_tp", f"expert_tp: {refusal}", whole)
    elif features is not None and etp > features:
        what = f"expert_tp: an expert of {limits.name} has {features} features, and they cannot be split over {etp}"
        yield Violation("tp", what, f"use tp {features} or less", tuple(range(1, features + 1)))


# ---- sizes of a proof ------------------------------------------------------------------------------------------------


def micro_batches_for(layout: Layout) -> tuple[int, int]:
    """(fewest micro batches, a divisor of their number) that the schedule of a layout surely takes."""
    return layout.schedule.fewest(layout.pp), layout.schedule.multiple(layout.pp)


def layers_for(layout: Layout) -> int:
    """Fewest layers, and at least 2, of the small model on which the pipeline of a layout is proved."""
    return max(2, layout.stages if layout.pp == 1 or layout.split is None else sum(layout.split))
