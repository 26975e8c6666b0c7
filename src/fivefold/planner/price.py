"""Price of one layer of each kind, and of the model's ends, under a layout: seconds and bytes of a rank. No torch.

Everything is derived from the layout's plan (`lower`), for a model with one layer of each kind and no pipeline. So it
costs a millisecond, and all layouts that differ only in the pipeline share it. Nothing about a collective, a shard or a
saved tensor is repeated here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import gcd, prod
from typing import Self

import numpy as np

from fivefold.hardware.chip import Chip
from fivefold.hardware.cluster import Cluster, Span
from fivefold.models.anatomy import is_within
from fivefold.models.facts import AttentionShape, LayerCost, ModelFacts
from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.features import calls, layer_calls
from fivefold.parallel.fsdp.spec import FsdpPlan, Unit, computes_in_copies
from fivefold.parallel.layout import KEYS, Layout
from fivefold.parallel.loss.spec import logit_bytes
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import layer_bytes
from fivefold.parallel.placement import stage_plan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.ranks import Axis, RankGrid
from fivefold.parallel.recompute.policy import Recompute
from fivefold.planner.parts import (
    ITEMS,
    NO_UNIT,
    Content,
    LayerPrice,
    Prices,
    RankShards,
    Seconds,
    Shard,
    Stages,
    UnitPrice,
    cached_method,
    nothing,
)
from fivefold.planner.timing import (
    Product,
    Traits,
    attention_seconds,
    collective_seconds,
    host_seconds,
    matmul_seconds,
    traffic_seconds,
)

# Bytes that one number of fp32 moves through memory when it is coded in eight bits, decoded, and added up
# (`parallel/nodes/levels.py`): each operation there reads and writes all numbers.
ENCODING, DECODING, SUMMING = 51, 25, 12
AXES = {"tp": "tp", "cp": "cp", "cp_ring": "cp", "cp_ulysses": "cp", "ep": "ep"}  # axis of a micro batch -> item
Forward = tuple[tuple[Product, ...], float, float, float]  # matmuls; seconds of matmuls, attention, memory traffic


@dataclass(frozen=True)
class Pricing:
    """Inputs of prices. `matmul_dtype`: of the matmuls in layers, if not the layout's precision, in which attention and
    the head stay. `forwards`: by layer, the results for its forward, which all modes of recompute share."""

    plan: ParallelPlan
    shape: StepShape
    prices: "PriceList"
    matmul_dtype: str = ""
    forwards: dict[str, Forward] = field(default_factory=dict)

    @property
    def traits(self) -> Traits:
        return self.prices.traits

    @property
    def chip(self) -> Chip:
        return self.prices.cluster.chip

    @cached_property
    def calls(self) -> tuple[Call, ...]:
        """Collectives of a micro batch, without FSDP's."""
        calls = self.prices.layer_calls(self.plan, self.shape)
        return tuple(call for call in calls if call.axis in AXES and call.phase != "step")

    @cached_property
    def calls_of(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.layer, []).append(call)
        return found

    @property
    def dtype(self) -> str:
        return self.plan.layout.precision

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch on a rank of cp."""
        return self.shape.rows * self.shape.tokens

    def seconds(self, call: Call) -> float:
        """Seconds of one of a call's collectives."""
        return self.prices.seconds(self.plan.placement.grid.axes[call.axis], call)

    # ---- compute -----------------------------------------------------------------------------------------------------

    def products(self, layer: str, cost: LayerCost) -> Iterable[Product]:
        """Matmuls of a layer on this rank. If tp or `expert_tp` splits a matrix, the rank has a part of it. Under
        sequence parallelism, a matrix that is whole sees a part of the tokens."""
        roles, layout = self.plan.partition.roles, self.plan.layout
        for matmul in cost.matmuls:
            name = f"{layer}.{matmul.name}"
            role = roles.get(name)
            kind, spec = role.kind if role else "", self.plan.placement.shards[name]
            local = self.plan.placement.gathered_shape(name)
            if spec.over == "ep":
                per_expert = prod(local[1:])
                share = per_expert / (matmul.inputs * matmul.outputs)
                rows = self.tokens * matmul.times // (1 if layout.expert_tp else layout.tp)
                yield _cut(
                    Product(max(1, rows // local[0]), matmul.inputs, matmul.outputs, local[0]),
                    share,
                    matmul.outputs > matmul.inputs,
                )
                continue
            share = prod(local) / (matmul.inputs * matmul.outputs)
            splits = self.plan.splits_sequence and kind in ("router", "norm", "replicated")
            rows = self.tokens // (layout.tp if splits else 1)
            yield _cut(Product(rows, matmul.inputs, matmul.outputs), share, kind != "row")

    def scores(self, attention: AttentionShape) -> float:
        """Number of attention scores on a rank, including masked ones. All ranks of cp have equal parts of a row's."""
        return attention.query / self.plan.layout.tp * self.tokens * self.shape.tokens * self.plan.layout.cp

    def attention_flops(self, cost: LayerCost) -> float:
        """Forward FLOPs of causal attention in whole rows."""
        return sum((heads.key_size + heads.value_size) * self.scores(heads) for heads in cost.attention)

    def layer(self, layer: str, cost: LayerCost) -> LayerPrice:
        if layer not in self.forwards:
            self.forwards[layer] = self.forward(layer, cost)
        forward, backward, weights = self.passes(self.forwards[layer])
        if self.matmul_dtype:
            self._cast(self.forwards[layer], forward, backward)
        self.recompute(layer, cost, forward, backward)
        calls = self.sent(layer, forward, backward)
        return LayerPrice(forward, backward, weights, self.host(layer), *self.kept(layer, cost), calls)

    def forward(self, layer: str, cost: LayerCost) -> Forward:
        products, layout = tuple(self.products(layer, cost)), self.plan.layout
        matmuls = sum(matmul_seconds(self.chip, product, self.matmul_dtype or self.dtype) for product in products)
        attention = attention_seconds(self.chip, self.attention_flops(cost), self.dtype)
        traced = cost.saved.on_rank(layout.tp, sequence_parallel=self.plan.splits_sequence, expert_tp=layout.expert_tp)
        moved = self.traits.traffic * traced * self.tokens * self.shape.compute_bytes
        return products, matmuls, attention, traffic_seconds(self.chip, moved) / 3

    def passes(self, of: Forward) -> tuple[Seconds, Seconds, Seconds]:
        """Seconds of a forward, of a backward, and of the backward's weight gradients. A backward does twice the
        matmuls of a forward, half of them for the weights (none for frozen weights), and 2.5 times the attention
        (FlashAttention recomputes the scores)."""
        products, matmuls, attention, traffic = of
        forward = nothing()
        forward[:3] = matmuls, attention, traffic
        weights = nothing() if self.plan.facts.has_adapter else self.weights(products, matmuls)
        backward = weights.copy()
        backward[:3] += matmuls, 2.5 * attention, 2 * traffic
        return forward, backward, weights

    def weights(self, products: Sequence[Product], matmuls: float) -> Seconds:
        """Seconds of the weight gradients of `products`. `matmuls`: of their forward."""
        found = nothing()
        found[ITEMS.index("matmuls")] = matmuls
        return found

    def _cast(self, of: Forward, forward: Seconds, backward: Seconds) -> None:
        """Add casts of the operands of matmuls, and of the gradients of their outputs."""
        products, *_ = of
        cast = sum(product.rows * product.inputs + product.inputs * product.outputs for product in products)
        gradients = sum(product.rows * product.outputs for product in products)
        forward[2] += traffic_seconds(self.chip, self.traits.cast_bytes * cast)
        backward[2] += traffic_seconds(self.chip, self.traits.cast_bytes * gradients)

    def recompute(self, layer: str, cost: LayerCost, forward: Seconds, backward: Seconds) -> None:
        """Add what a backward recomputes: a whole forward, or all but matmuls and attention."""
        match self.shape.recompute.of(layer):
            case "full":
                backward[:3] += forward[:3]
            case "selective":
                *_, traffic = self.forwards[layer]
                backward[2] += traffic

    def host(self, layer: str) -> tuple[float, float]:
        """Seconds of Python and launches of a layer's forward, and of its backward."""
        return of_passes(self.traits.host_seconds, float(self.shape.recompute.of(layer) == "full"))

    def kept(self, layer: str, cost: LayerCost) -> tuple[int, int]:
        """Bytes of a layer that stay until backward, and additional bytes of its backward."""
        found = layer_bytes(self.plan, layer, cost, self.shape)
        return found.kept, found.working

    def sent(self, layer: str, forward: Seconds, backward: Seconds) -> tuple[Call, ...]:
        """Add a layer's collectives in a micro batch, without FSDP's. Those of cp that may overlap compute are exposed
        as far as they outlast attention. Those of tp that may overlap the matmuls, for at most as long as they last."""
        beside = {"forward": 0.0, "backward": 0.0}
        tensor, hides = dict(beside), dict(beside)
        own = self.calls_in(layer)
        for call in own:
            took, hidden, axis = self.call_seconds(call), self.hidden(call), AXES[call.axis]
            if axis == "tp":
                tensor[call.phase] += took
                hides[call.phase] += took * hidden
            elif hidden:
                beside[call.phase] += took / 2  # a send and a receive overlap
            else:
                where = forward if call.phase == "forward" else backward
                where[ITEMS.index(axis)] += took
        for phase, where in (("forward", forward), ("backward", backward)):
            where[ITEMS.index("cp")] += max(0.0, beside[phase] - where[ITEMS.index("attention")])
            hidden = min(hides[phase], float(where[ITEMS.index("matmuls")]))
            where[ITEMS.index("tp")] += tensor[phase] - hidden
        return own

    def calls_in(self, layer: str) -> tuple[Call, ...]:
        """Those of `calls` that modules of a layer make."""
        return tuple(call for module, calls in self.calls_of.items() if _is_of(module, layer) for call in calls)

    def call_seconds(self, call: Call) -> float:
        return self.seconds(call) * call.times

    def hidden(self, call: Call) -> float:
        """Part of a call that compute can hide."""
        return float(call.overlaps and self.traits.overlaps)

    # ---- the ends ----------------------------------------------------------------------------------------------------

    def embedding(self) -> LayerPrice:
        forward, backward = nothing(), nothing()
        calls = self.sent(self.plan.anatomy.embedding, forward, backward)
        return LayerPrice(forward, backward, nothing(), calls=calls)

    def head(self) -> LayerPrice:
        products = [
            Product(self.tokens, matmul.inputs, self._outputs(matmul.name, matmul.outputs))
            for matmul in self.plan.facts.outside
        ]
        matmuls = self.head_matmuls(products)
        loss = traffic_seconds(self.chip, self.traits.logit_bytes * self.tokens * self.plan.vocabulary) / 2
        forward, weights = nothing(), self.weights(products, matmuls)
        forward[:3] = matmuls, 0, loss
        backward = forward + weights
        calls = self.sent(self.plan.anatomy.head, forward, backward)
        return LayerPrice(forward, backward, weights, of_passes(self.traits.host_of_ends), calls=calls)

    def head_matmuls(self, products: Iterable[Product]) -> float:
        return sum(matmul_seconds(self.chip, product, self.dtype) for product in products)

    def logits(self) -> int:
        return logit_bytes(self.plan, self.shape)

    def _outputs(self, module: str, outputs: int) -> int:
        return self.plan.vocabulary if module == self.plan.anatomy.head else outputs


@dataclass(frozen=True)
class Sharding(Pricing):
    def shard(self, modules: Sequence[str]) -> Shard:
        """Parameters of modules that have units of their own."""
        names = [name for name in self.plan.placement.shards if is_within(name, modules)]
        all_units = self.plan.feature(FsdpPlan).units
        units = tuple(self.unit(unit) for unit in all_units if unit.name and is_within(f"{unit.name}.", modules))
        if not units:  # a tied embedding is in the model's own unit
            return Shard()
        return Shard(units, self.plan.summed_bytes(self.shape.master_bytes, names))

    def rest(self) -> Shard:
        """Parameters of the model's own unit."""
        unit = self.plan.feature(FsdpPlan).units[-1]
        return Shard((self.unit(unit),), self.plan.summed_bytes(self.shape.master_bytes, unit.parameters))

    def unit(self, unit: Unit) -> UnitPrice:
        """Price a unit: its numbers, and its collectives, found among the calls by its name."""
        fsdp, placement, master = self.plan.feature(FsdpPlan), self.plan.placement, self.shape.master_bytes
        gathered, (_, reduced) = fsdp.gathered_bytes(unit), fsdp.padded_sizes(unit)
        held = sum(placement.held_bytes(name, placement.rests_in(name, master)) for name in unit.parameters) // master
        sent = fsdp.sends(unit, self.shape.reduce_bytes) if unit.parameters else NO_UNIT.calls
        calls = {what: tuple(call for call in sent[what] if placement.grid.size(call.axis) > 1) for what in sent}
        if not reduced:
            calls |= {"reduce": (), "replicas": ()}
        gather, reduce, near = (sum(map(self.seconds, calls[what])) for what in ("gather", "reduce", "near"))
        copy = traffic_seconds(self.chip, self.traits.gather_traffic * gathered)
        shards, node = placement.grid.fsdp_shards(unit.over), 1
        if fsdp.has_levels(unit):  # parts are put in order between the two levels
            node = placement.grid.size(placement.grid.node_axis(unit.over))
            gather += traffic_seconds(self.chip, 2 * fsdp.sent_bytes(unit))
            reduce += traffic_seconds(self.chip, 2 * reduced * self.shape.reduce_bytes)
        if fsdp.is_coded(unit):
            gather += traffic_seconds(self.chip, (ENCODING / shards + DECODING) * fsdp.padded_sizes(unit)[0])
        gather, near = gather + copy, near + copy
        reduce += traffic_seconds(self.chip, self.traits.reduce_traffic * reduced * self.shape.compute_bytes)
        if fsdp.reduces_coded(unit):
            reduce += traffic_seconds(self.chip, (ENCODING + DECODING + SUMMING) * reduced / node)
        if self.plan.layout.offload_parameters:
            gather += host_seconds(self.chip, held * self.shape.master_bytes)
        trained = [name for name in unit.parameters if name not in unit.frozen]
        return UnitPrice(
            held, sum(placement.held_bytes(name, 1) for name in trained), gathered, reduced, calls, gather, reduce,
            fsdp.largest(unit), sum(placement.state_bytes(name, master) for name in trained),
            shards, near, fsdp.copy_bytes(unit),
        )  # fmt: skip


def _cut(product: Product, share: float, cuts_outputs: bool) -> Product:
    rows, inputs, outputs, count = product.rows, product.inputs, product.outputs, product.count
    if cuts_outputs:
        return Product(rows, inputs, max(1, round(outputs * share)), count)
    return Product(rows, max(1, round(inputs * share)), outputs, count)


def _is_of(module: str, layer: str) -> bool:
    return module == layer or is_within(module, [layer])


def of_passes(seconds: float, again: float = 0.0) -> tuple[float, float]:
    """Split seconds of a forward and a backward, of which a backward takes two thirds. `again`: the part of a forward
    that it recomputes besides."""
    return seconds / 3, seconds * (2 + again) / 3


# Keys that make no difference to a micro batch of a rank, or are priced apart from it. Every other key is kept, so that
# its bytes and its collectives count.
_NOT_OF_WORK = {name: key.default for name, key in KEYS.items() if "work" not in key.priced}
_OF_SHARDS = [name for name, key in KEYS.items() if "shards" in key.priced]


def work_layout(layout: Layout) -> Layout:
    """The smallest layout whose ranks do the same in a micro batch, rows and recompute aside: one stage, and no more
    shards than `ep` needs."""
    shards = layout.ep // gcd(layout.ep, layout.cp * layout.tp // layout.etp)
    return replace(layout, **_NOT_OF_WORK, dp_shard=shards)


def shard_layout(layout: Layout) -> Layout:
    """A small layout whose ranks hold the same shards: two replicas stand for any number of data ranks and stages,
    except with tensor ranks alone. FSDP shards over cp too."""
    replicas, shards = min(2, layout.world // layout.tp), layout.dp_shard * layout.cp
    return Layout(dp_replicate=replicas, dp_shard=shards, **{name: getattr(layout, name) for name in _OF_SHARDS})


@dataclass(eq=False)
class PriceList:
    """All prices of a model on a cluster, each computed once. `whole_logits`: with a loss of the user's own.
    `compiled`: with compiled layers, on a GPU. `short`: the model with one layer of each kind. `ends`: the model with
    its first and its last layer."""

    facts: ModelFacts
    cluster: Cluster
    whole_logits: bool = False
    compiled: bool = True
    traits: Traits = field(init=False)
    short: ModelFacts = field(init=False)
    ends: ModelFacts = field(init=False)
    _modes: dict[tuple[Layout, int, int, bool], tuple[Pricing, Prices]] = field(init=False, default_factory=dict)
    _calls: dict[tuple[Layout, int, StepShape], tuple[Call, ...]] = field(init=False, default_factory=dict)
    _seconds: dict[tuple[Axis, str, int], float] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.traits = Traits(compiled=self.compiled).on(self.cluster.chip)
        kinds, layers = self.facts.kinds, self.facts.anatomy.layers
        self.short = self.facts.only([layers[kinds.index(kind)] for kind in sorted(set(kinds))])
        self.ends = self.facts.only([layers[0], layers[-1]])

    def repriced(self, cluster: Cluster) -> Self:
        """Prices of the same layouts on another cluster, from the same plans."""
        other = replace(self, cluster=cluster)
        other.plan, other._calls = self.plan, self._calls
        return other

    def of(self, layout: Layout, tokens: int) -> Prices:
        """Prices of a micro batch under a layout, with rows of `tokens` tokens, padded. Recompute is a mode;
        `under_budget` decides how a budget is spent. Raises `UserError` if the layout does not fit the model."""
        again = self._gathers_again(layout)
        return self._price(work_layout(layout), tokens, layout.micro_batch_size, layout.recompute, again)

    def _gathers_again(self, layout: Layout) -> bool:
        """True if layers may all-gather a column's input again."""
        splits_sequence = layout.tp > 1 and layout.sequence_parallel
        return self.traits.compiled and splits_sequence and not layout.schedule.splits_backward

    def shards(self, layout: Layout) -> RankShards:
        return self._shard(shard_layout(layout))

    @cached_method
    def span(self, axis: Axis) -> Span:
        """Placement of rank 0's group along an axis. Ranks fill nodes in order, so all groups are placed alike."""
        return self.cluster.tier_of(axis.members(0))

    def seconds(self, axis: Axis, call: Call) -> float:
        """Seconds of one of a call's collectives along an axis."""
        key = axis, call.kind, call.bytes
        if key not in self._seconds:
            self._seconds[key] = collective_seconds(self.cluster, self.span(axis), call)
        return self._seconds[key]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Kind of each layer, as a place in the layers of `short`."""
        places = {kind: place for place, kind in enumerate(sorted(set(self.facts.kinds)))}
        return tuple(places[kind] for kind in self.facts.kinds)

    @cached_property
    def world_calls(self) -> tuple[Call, ...]:
        """Collectives of all ranks, once a step. Routers' calls count all layers: the plan gets all experts."""
        plan = self.plan(Layout(dp_shard=self.cluster.world))
        routed = replace(self.short, experts=self.facts.experts)
        plan = replace(plan, placement=replace(plan.placement, facts=routed))
        return tuple(call for call in calls(plan, plan.step_shape(1, 2, 1)) if call.axis == "world")

    @cached_property
    def world_seconds(self) -> float:
        span = self.span(Axis(self.cluster.world, 1))
        return sum(collective_seconds(self.cluster, span, call) * call.times for call in self.world_calls)

    @cached_method
    def plan(self, layout: Layout) -> ParallelPlan:
        """Plan of the short model, seen from rank 0."""
        in_copies = computes_in_copies(self.facts, layout)  # of the whole model
        return replace(lower(self.short, layout, 0), in_copies=in_copies)

    def layer_calls(self, plan: ParallelPlan, shape: StepShape) -> tuple[Call, ...]:
        """Collectives that layers make in a step of one of these plans."""
        key = plan.layout, plan.placement.rank, shape
        if key not in self._calls:
            self._calls[key] = tuple(layer_calls(plan, shape))
        return self._calls[key]

    def grid(self, layout: Layout) -> RankGrid:
        return replace(self.plan(work_layout(layout)).placement.grid, layout=layout)

    @cached_method
    def _price(self, work: Layout, tokens: int, rows: int, recompute: str, again: bool) -> Prices:
        plan = self.plan(work)
        shape = replace(
            plan.step_shape(rows, tokens, 1, whole_logits=self.whole_logits), recompute=Recompute(recompute),
            compiled=self.traits.compiled, gathers_again=again,
        )  # fmt: skip
        shared = work, tokens, rows, again
        like = self._modes.get(shared)  # another mode of recompute: same ends and forwards
        pricing = self.pricing(plan, shape, work.matmul_dtype, like[0].forwards if like else {})
        costs = zip(plan.anatomy.layers, self.short.layer_costs, strict=True)
        layers = tuple(pricing.layer(layer, cost) for layer, cost in costs)
        if like:
            return replace(like[1], shape=shape, layers=layers)
        found = Prices(plan, shape, layers, pricing.embedding(), pricing.head(), pricing.logits())
        self._modes[shared] = pricing, found
        return found

    def pricing(self, plan: ParallelPlan, shape: StepShape, dtype: str, forwards: dict[str, Forward]) -> Pricing:
        return Pricing(plan, shape, self, dtype, forwards)

    @cached_method
    def _shard(self, layout: Layout) -> RankShards:
        plan = self.plan(layout)
        pricing = Sharding(plan, plan.step_shape(1, 2 * layout.tp, 1), self)
        layers = tuple(pricing.shard([layer]) for layer in plan.anatomy.layers)
        sums_tied = plan.tied and plan.facts.parameters[plan.tied].is_trained
        tied = plan.placement.held_bytes(plan.tied, pricing.shape.master_bytes) if plan.tied and sums_tied else 0

        @cache
        def rest(ends: tuple[bool, bool]) -> Shard:
            return pricing.rest() if all(ends) else self._rest(layout, *ends)

        embedding = pricing.shard([plan.anatomy.embedding])
        return RankShards(
            pricing.shape, plan.placement.grid, layers, embedding, rest, tied, plan.feature(FsdpPlan).is_used
        )

    def _rest(self, layout: Layout, has_embedding: bool, has_head: bool) -> Shard:
        """Parameters outside layers, on the first or the last rank of a pipeline, taken from a plan of two stages."""
        if not (has_embedding or has_head):
            return Shard((NO_UNIT,))
        layout = replace(layout, pp=2)
        plan = lower(self.ends, layout, layout.world // 2 if has_head else 0)
        return Sharding(plan, plan.step_shape(1, 2 * layout.tp, 1), self).rest()

    def splits(self, pipeline: Layout) -> Sequence[tuple[int, int]]:
        """First layer of each stage, and the one after its last."""
        return stage_plan(self.facts, pipeline).splits

    @cached_method
    def stages(self, pipeline: Layout) -> Stages:
        """Stages of a layout with only its pipeline set."""
        splits, pp = self.splits(pipeline), pipeline.pp
        kinds = len(self.short.anatomy.layers)
        layers, ranks = np.zeros((len(splits), kinds + 2)), np.zeros((pp, len(splits)))
        for stage, (first, last) in enumerate(splits):
            ranks[pipeline.schedule.rank_of(stage, pp), stage] = 1
            for kind in self.kinds[first:last]:
                layers[stage, kind] += 1
        layers[0, kinds] = layers[-1, kinds + 1] = 1
        own = ranks @ layers
        contents = tuple(
            Content(tuple((kind, int(row[kind])) for kind in range(kinds) if row[kind]), bool(row[-2]), bool(row[-1]))
            for row in own
        )
        return Stages(layers, ranks, contents, ranks.argmax(axis=1))
