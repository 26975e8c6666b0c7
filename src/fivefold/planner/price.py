"""The price of one layer of each kind, and of the model's ends, under a layout: seconds and bytes of a rank. No torch.

Everything comes from the plan of the layout (`lower`), for a model with one layer of each kind and no pipeline: so it
costs a millisecond, and all layouts that differ only in the pipeline share it. Nothing about a collective, a shard or a
saved tensor is said here a second time.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from fivefold.core.layout import Layout
from fivefold.models.anatomy import is_within
from fivefold.models.facts import LayerCost, ModelFacts
from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.plan import ParallelPlan, Unit, lower
from fivefold.parallel.ranks import Axis, RankGrid
from fivefold.parallel.stage_plan import stage_plan
from fivefold.planner.chips import Chip
from fivefold.planner.cluster import Cluster, Span
from fivefold.planner.compute import Product, attention_seconds, matmul_seconds, traffic_seconds
from fivefold.planner.engines import Engine
from fivefold.planner.links import seconds

# What the time of a slot is made of. `host`: what Python and launches take beyond the device's own time.
ITEMS = ("matmuls", "attention", "element-wise", "host", "tp", "cp", "ep", "data")
AXES = {"tp_kv": "tp", "cp_ring": "cp", "cp_ulysses": "cp", "ep_shard": "data", "dp_shard": "data"}
Seconds = NDArray[np.float64]  # one number for each of ITEMS


def nothing() -> Seconds:
    return np.zeros(len(ITEMS))


@dataclass(frozen=True)
class UnitPrice:
    """One FSDP unit. `held`: numbers of it at rest on a rank; `gathered`, `reduced`: numbers, with padding.
    `gather_seconds`, `reduce_seconds`: one collective each; `replicate_seconds`: the all-reduce over replicas."""

    held: int
    trained: int
    gathered: int
    reduced: int
    gather_seconds: float
    reduce_seconds: float
    replicate_seconds: float


@dataclass(frozen=True)
class LayerPrice:
    """One layer of a kind, or one of the model's ends, in one micro batch.

    `forward`, `backward`: seconds by item, without FSDP's collectives; `weights`: of the backward, what gives the
    gradients of weights. `saved`: bytes that forward leaves; `kept`: the same with recompute. `units`: its parameters.
    `step_seconds`: its collectives once a step.
    """

    forward: Seconds
    backward: Seconds
    weights: Seconds
    saved: int = 0
    kept: int = 0
    units: tuple[UnitPrice, ...] = ()
    step_seconds: float = 0.0


@dataclass(frozen=True)
class Prices:
    """Of all kinds of layers, of the embedding, and of the head with what belongs to neither (the model's own unit).

    `logits`: bytes of one chunk of the loss. `boundary`: one transfer between pipeline ranks, seconds.
    """

    plan: ParallelPlan
    shape: StepShape
    layers: tuple[LayerPrice, ...]
    embedding: LayerPrice
    head: LayerPrice
    root: UnitPrice
    logits: int
    buffers: int
    edges: float


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage has: (kind, layers of it), and the model's ends."""

    kinds: tuple[tuple[int, int], ...]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True)
class _Pricing:
    """What prices are computed from."""

    plan: ParallelPlan
    shape: StepShape
    prices: "PriceList"

    @property
    def engine(self) -> Engine:
        return self.prices.engine

    @property
    def chip(self) -> Chip:
        return self.prices.cluster.chip

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        return self.plan.calls(self.shape)

    @property
    def dtype(self) -> str:
        return self.plan.layout.precision

    @property
    def tokens(self) -> int:
        """Of a micro batch on a rank of cp."""
        return self.shape.rows * self.shape.tokens

    def seconds(self, call: Call) -> float:
        """One of a call's collectives."""
        return seconds(self.prices.cluster, self.prices.span(self.plan.grid, call.axis), call)

    # ---- compute -----------------------------------------------------------------------------------------------------

    def products(self, layer: str, cost: LayerCost) -> Iterable[Product]:
        """The matmuls of a layer on this rank. Of a matrix that tp or `expert_tp` splits, the rank has a part; behind a
        norm whose tokens are split (sequence parallelism), a matrix that is whole sees a part of the tokens."""
        roles, layout = self.plan.partition.roles, self.plan.layout
        for each in cost.matmuls:
            name = f"{layer}.{each.name}"
            role = roles.get(name)
            kind, spec = role.kind if role else "", self.plan.shards[name]
            local = self.plan.gathered_shape(name)
            if spec.over == "ep":
                per_expert = prod(local[1:])
                share = per_expert / (each.inputs * each.outputs)
                rows = self.tokens * each.times // (1 if layout.expert_tp else layout.tp)
                yield _cut(
                    Product(max(1, rows // local[0]), each.inputs, each.outputs, local[0]),
                    share,
                    each.outputs > each.inputs,
                )
                continue
            share = prod(local) / (each.inputs * each.outputs)
            splits = self.plan.splits_sequence and kind in ("router", "norm", "replicated")
            rows = self.tokens // (layout.tp if splits else 1)
            yield _cut(Product(rows, each.inputs, each.outputs), share, kind != "row")

    def attention_flops(self, cost: LayerCost) -> float:
        """Forward, of causal attention in whole rows; every rank of cp has an equal part of a row's work."""
        length = self.shape.tokens * self.plan.layout.cp
        return sum(
            each.query / self.plan.layout.tp * (each.key_size + each.value_size) * self.tokens * length
            for each in cost.attention
        )

    def layer(self, layer: str, cost: LayerCost) -> LayerPrice:
        """One layer. A backward does twice the matmuls of a forward, half of them for the weights, and 2.5 times the
        attention (FlashAttention computes the scores again)."""
        chip, dtype, recompute = self.chip, self.dtype, self.shape.recompute.wraps(layer)
        matmuls = sum(matmul_seconds(chip, each, dtype) for each in self.products(layer, cost))
        attention = attention_seconds(chip, self.attention_flops(cost), dtype)
        numbers = cost.saved.on_rank(self.plan.layout.tp, sequence_parallel=self.plan.splits_sequence) * self.tokens
        saved = round(numbers * self.shape.compute_bytes * self.engine.saved_scale)
        traffic = traffic_seconds(chip, self.engine.traffic * saved) / 3
        forward, weights = nothing(), nothing()
        forward[:3] = matmuls, attention, traffic
        weights[:3] = matmuls, 0.0, 0.0
        backward = weights.copy()
        backward[:3] += matmuls, 2.5 * attention, 2 * traffic
        backward[:3] += forward[:3] * recompute
        self._launch(forward, backward, recompute=recompute)
        step = self._sent(layer, forward, backward)
        kept = self.shape.hidden_bytes // (self.plan.layout.tp if self.plan.splits_sequence else 1)
        units = tuple(self.unit(unit) for unit in self.plan.units if _is_of(unit.name, layer))
        return LayerPrice(forward, backward, weights, saved, kept if recompute else saved, units, step)

    def _launch(self, forward: Seconds, backward: Seconds, *, recompute: bool) -> None:
        """A device that is done before Python has issued its kernels waits. The two times meet smoothly."""
        host = self.engine.host_seconds / 3
        for seconds_, passes in ((forward, 1), (backward, 2 + recompute)):
            device = seconds_.sum()
            seconds_[ITEMS.index("host")] = (device**4 + (host * passes) ** 4) ** 0.25 - device

    def _sent(self, layer: str, forward: Seconds, backward: Seconds) -> float:
        """Add a layer's collectives, but for FSDP's. Those that may run beside compute are exposed as far as they
        outlast attention. The seconds of those once a step."""
        once, beside = 0.0, {"forward": 0.0, "backward": 0.0}
        for call in self.calls:
            axis = AXES.get(call.axis, call.axis)
            if axis not in ("tp", "cp", "ep") or not (call.layer == layer or is_within(call.layer, [layer])):
                continue
            took = self.seconds(call) * call.times
            if call.phase == "step":
                once += took
            elif call.overlaps:
                beside[call.phase] += took / 2  # a send and a receive go at once
            else:
                hidden = self.engine.overlaps_tensor if axis == "tp" else 0.0
                (forward if call.phase == "forward" else backward)[ITEMS.index(axis)] += took * (1 - hidden)
        for where, took in ((forward, beside["forward"]), (backward, beside["backward"])):
            where[ITEMS.index("cp")] += max(0.0, took - where[ITEMS.index("attention")])
        return once

    # ---- FSDP --------------------------------------------------------------------------------------------------------

    def unit(self, unit: Unit) -> UnitPrice:
        """Its numbers, and its collectives, found among the calls by its name."""
        gathered, reduced = self.plan.padded_sizes(unit)
        held = sum(self.plan.held_bytes(name, 1) for name in unit.parameters)
        frozen = sum(self.plan.held_bytes(name, 1) for name in unit.frozen)
        found = {call.kind: self.seconds(call) for call in self.calls if _is_unit(call, unit.name)}
        return UnitPrice(
            held, held - frozen, gathered, reduced,
            found.get("all_gather", 0.0), found.get("reduce_scatter", 0.0), found.get("all_reduce", 0.0),
        )  # fmt: skip

    # ---- the ends ----------------------------------------------------------------------------------------------------

    def embedding(self) -> LayerPrice:
        """A lookup: its collectives alone."""
        forward, backward = nothing(), nothing()
        name = self.plan.anatomy.embedding
        step = self._sent(name, forward, backward)
        units = tuple(self.unit(unit) for unit in self.plan.units if unit.name == name)
        return LayerPrice(forward, backward, nothing(), units=units, step_seconds=step)

    def head(self) -> LayerPrice:
        """The head's matmul and the loss."""
        chip, outside = self.chip, self.plan.facts.outside
        matmuls = sum(
            matmul_seconds(chip, Product(self.tokens, each.inputs, self._outputs(each.name, each.outputs)), self.dtype)
            for each in outside
        )
        loss = traffic_seconds(chip, self.engine.logit_bytes * self.tokens * self.plan.vocabulary) / 2
        forward, backward, weights = nothing(), nothing(), nothing()
        forward[:3], backward[:3], weights[0] = (matmuls, 0, loss), (2 * matmuls, 0, loss), matmuls
        return LayerPrice(
            forward, backward, weights, step_seconds=self._sent(self.plan.anatomy.head, forward, backward)
        )

    def _outputs(self, module: str, outputs: int) -> int:
        return self.plan.vocabulary if module == self.plan.anatomy.head else outputs


def _cut(product: Product, share: float, cuts_outputs: bool) -> Product:
    """A part of a matmul: of its outputs, or of its inputs."""
    if cuts_outputs:
        return replace(product, outputs=max(1, round(product.outputs * share)))
    return replace(product, inputs=max(1, round(product.inputs * share)))


def _is_of(unit: str, layer: str) -> bool:
    return unit == layer or is_within(unit, [layer])


def _is_unit(call: Call, name: str) -> bool:
    return call.layer == name and call.axis in ("dp_shard", "ep_shard", "dp_replicate")


def without_pipeline(layout: Layout) -> Layout:
    """The layout of one stage."""
    return replace(layout, pp=1, pp_schedule="1f1b", pp_virtual=1, pp_split="auto")


@dataclass(eq=False)
class PriceList:
    """All prices of a model on a cluster, each computed once. `short`: the model with one layer of each kind."""

    facts: ModelFacts
    cluster: Cluster
    engine: Engine
    short: ModelFacts = field(init=False)
    _found: dict[tuple[Layout, int], Prices] = field(init=False, default_factory=dict)
    _stages: dict[Layout, tuple[Stage, ...]] = field(init=False, default_factory=dict)
    _spans: dict[Axis, Span] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        kinds, layers = self.facts.kinds, self.facts.anatomy.layers
        self.short = self.facts.only([layers[kinds.index(kind)] for kind in sorted(set(kinds))])

    def of(self, layout: Layout, tokens: int) -> Prices:
        """Under a layout whose pipeline does not matter, for rows of `tokens` tokens, padded. Raises `UserError` where
        the layout does not fit the model."""
        key = without_pipeline(layout), tokens
        if key not in self._found:
            self._found[key] = self._price(*key)
        return self._found[key]

    def span(self, grid: RankGrid, axis: str) -> Span:
        """Where the ranks of rank 0's group along an axis stand. In order, nodes are filled: all groups stand alike."""
        place = Axis(grid.world, 1) if axis == "world" else grid.axes[axis]
        if place not in self._spans:
            self._spans[place] = self.cluster.tier_of(place.members(0))
        return self._spans[place]

    def stages(self, pipeline: Layout) -> tuple[Stage, ...]:
        """The stages of a layout that says its pipeline alone."""
        if pipeline not in self._stages:
            plan, kinds = stage_plan(self.facts, pipeline), self.facts.kinds
            numbers = {kind: number for number, kind in enumerate(sorted(set(kinds)))}
            counts = [Counter(numbers[kind] for kind in kinds[first:last]) for first, last in plan.splits]
            self._stages[pipeline] = tuple(
                Stage(tuple(count.items()), stage == 0, stage == plan.count - 1) for stage, count in enumerate(counts)
            )
        return self._stages[pipeline]

    def _price(self, layout: Layout, tokens: int) -> Prices:
        plan = lower(self.short, layout, 0)
        shape = plan.step_shape(layout.micro_batch_size, tokens, 1)
        pricing, needs = _Pricing(plan, shape, self), plan.bytes(shape)
        costs = zip(plan.anatomy.layers, self.short.layer_costs, strict=True)
        root = next(unit for unit in plan.units if unit.name == "")
        world = [call for call in pricing.calls if call.axis == "world"]
        return Prices(
            plan, shape, tuple(pricing.layer(layer, cost) for layer, cost in costs), pricing.embedding(),
            pricing.head(), pricing.unit(root), needs.logits, needs.buffers,
            sum(pricing.seconds(call) * call.times for call in world),
        )  # fmt: skip
