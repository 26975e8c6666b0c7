"""Other trainers as the planner prices them: what each saves, gathers, overlaps and recomputes, as one record.

They made the published measurements with which `benchmarks/planner_accuracy.py` compares the planner. A trainer has the
planner's plans, links and kernels, and changes what `Pricing`, `PriceList` and `PricedStep` say of this runtime.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import log2
from typing import Self

import numpy as np

from fivefold.core.errors import UserError
from fivefold.hardware.chip import Chip
from fivefold.hardware.cluster import Cluster
from fivefold.models.facts import LayerCost, ModelFacts, Partition, Saved
from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import layer_bytes
from fivefold.parallel.placement import stage_plan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.policy import budget_bytes
from fivefold.planner.estimate import Estimate, Parts, PricedStep, Workload, resolved
from fivefold.planner.parts import ITEMS, Content, Prices, RankShards, Seconds, cached_method
from fivefold.planner.price import AXES, Forward, PriceList, Pricing, of_passes
from fivefold.planner.rank_memory import GATHERED, SAVED, WAITING, all_units, in_flight_bytes, state_bytes
from fivefold.planner.timing import Product, Traits, attention_seconds, matmul_seconds, traffic_seconds

Splits = tuple[tuple[int, int], ...]  # [first, end) of each stage's layers
TP = ITEMS.index("tp")


def dealt_until_full(facts: ModelFacts, pipeline: Layout) -> Splits:
    """nanotron's split: deal layers in order, until a stage has its share of all weights that a token is multiplied
    with, including the head's. The layer that reaches the share still belongs to the stage.

    16 layers of 1 and a head of 4 in 3 stages, of 6.7 each: 7 layers, 7 layers, then 2 and the head.
    """
    costs = [cost.active for cost in facts.layer_costs]
    part = (sum(costs) + facts.head_cost) / pipeline.stages
    bounds, dealt = [0], 0.0
    for layer, cost in enumerate(costs):
        dealt += cost
        if dealt >= part * len(bounds) and len(bounds) < pipeline.stages:
            bounds.append(layer + 1)
    bounds += [len(costs)] * (pipeline.stages + 1 - len(bounds))
    return tuple(pairwise(bounds))


def as_planned(facts: ModelFacts, pipeline: Layout) -> Splits:
    """Stages of this runtime."""
    return stage_plan(facts, pipeline).splits


def evenly(facts: ModelFacts, pipeline: Layout) -> Splits:
    """Megatron's and torchtitan's split: equal numbers of layers; the first stages share the remainder."""
    each, more = divmod(len(facts.anatomy.layers), pipeline.stages)
    bounds = [stage * each + min(stage, more) for stage in range(pipeline.stages + 1)]
    return tuple(pairwise(bounds))


@dataclass(frozen=True, kw_only=True)
class Engine(Traits):
    """The traits of a trainer, beside those that this runtime has.

    `split`: the layers of each pipeline stage.

    Memory. All moments of a step are taken to coincide.
    `shards`: what data ranks shard: the parameters with all their state (FSDP), or the optimizer's state (ZeRO-1).
    `over`: the ranks they are sharded over: those of dp_shard, or all data ranks (Megatron's distributed optimizer).
    `reduces_in_place`: reduced gradients take no memory beyond the unreduced.
    `fused`: a layer saves what fused kernels save (`fused_saved`), not what the traced layer saves.
    `gathers_again`: under sequence parallelism, a column-parallel input is saved sharded and all-gathered again in
    backward.
    `saved_scale`: saved activations, relative to a count of all saved numbers in the compute type.
    `recompute`, `sequence_parallel`: the trainer's defaults; None if unknown.
    `selective`: under selective recompute, the part of a layer's saved bytes that is kept, and the part of its forward
    that is recomputed; written scores are not kept.
    `spares`: keeps a gradient buffer for each shape of a weight, as TransformerEngine accumulates in the matmul.
    `score_memory`: bytes that a layer saves per attention score; 0 for FlashAttention, which writes none.
    `logit_memory`: bytes per logit if the loss is not chunked; None if it is.

    Time.
    `matmul`, `attention`: the part of the chip's rate that its layers reach. `grouped`: the part of that which the
    matmuls of experts reach.
    `score_bytes`: traffic per attention score, forward and backward, if scores are written.
    `host_across`: host seconds of a layer and micro batch per rank of tp, times tp's nodes to the power of
    `host_power`, if there is tp and the pipeline leaves the node: the ranks of a stage then wait for each other at
    every collective of tp.
    `sum_bytes`: traffic per weight and micro batch to accumulate its gradient.
    `cast_bytes`: 0 if norms and activations write what matmuls read.
    `overlaps`: FSDP's collectives overlap compute. `overlaps_context`: so do those of cp that can.
    `overlaps_tensor`: the part of tp's that does, for at most as long as matmuls. `overlaps_sums`: the part of a step's
    last backward that hides sums of gradients over replicas.
    `tensor_seconds`: to launch and meet, per collective of tp. `tensor_across`: additional ones per doubling of nodes.
    """

    name: str
    split: Callable[[ModelFacts, Layout], Splits] = as_planned
    compiled: bool = False
    kept_back: float = 0.0
    shards: str = "parameters"
    over: str = "dp_shard"
    reduces_in_place: bool = False
    fused: bool = False
    gathers_again: bool = False
    saved_scale: float = 1.0
    recompute: str = "none"
    sequence_parallel: bool | None = None
    selective: tuple[float, float] = (1.0, 0.0)
    spares: bool = False
    score_memory: float = 0.0
    logit_memory: float | None = None
    matmul: float = 1.0
    attention: float = 1.0
    grouped: float = 1.0
    score_bytes: float = 0.0
    host_across: float = 0.0
    host_power: float = 0.0
    sum_bytes: float = 0.0
    overlaps_sums: float = 1.0
    overlaps_context: bool = True
    overlaps_tensor: float = 0.0
    tensor_seconds: float = 0.0
    tensor_across: float = 0.0

    def laid(self, layout: Layout) -> Layout:
        """Translate a layout of the trainer to this runtime: its ZeRO stage, and the ranks that share states.

        Megatron's dp_replicate8 is dp_shard8 with zero1.
        """
        if self.over == "data":
            layout = replace(layout, dp_shard=layout.data_ranks, dp_replicate=1)
        return replace(layout, zero=1) if self.shards == "optimizer" else layout

    def on(self, chip: Chip) -> Self:
        """The trainer on a chip. On a CPU nothing overlaps."""
        own = super().on(chip)
        if not chip.is_host:
            return replace(own, host_across=self.host_across * chip.host_scale)
        return replace(own, overlaps_sums=0.0, overlaps_context=False, overlaps_tensor=0.0)

    def again(self, mode: str) -> float:
        """The part of a layer's forward that its backward recomputes."""
        return self.selective[1] if mode == "selective" else float(mode == "full")


# ---- prices ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerPricing(Pricing):
    """Prices of a trainer's layers."""

    prices: "TrainerPrices"

    @property
    def engine(self) -> Engine:
        return self.prices.traits

    def forward(self, layer: str, cost: LayerCost) -> Forward:
        """Matmuls and attention at the trainer's rates; attention may write its scores."""
        chip, engine, layout = self.chip, self.engine, self.plan.layout
        products = tuple(self.products(layer, cost))
        matmuls = sum(map(self._matmul_seconds, products))
        attention = attention_seconds(chip, self.attention_flops(cost), self.dtype) / engine.attention
        traced = cost.saved.on_rank(layout.tp, sequence_parallel=self.plan.splits_sequence, expert_tp=layout.expert_tp)
        token = self.tokens * self.shape.compute_bytes
        traffic = engine.traffic * traced * token + engine.score_bytes * self._all_scores(cost)
        return products, matmuls, attention, traffic_seconds(chip, traffic) / 3

    def _matmul_seconds(self, product: Product) -> float:
        part = self.engine.matmul * (self.engine.grouped if product.count > 1 else 1.0)
        return matmul_seconds(self.chip, product, self.matmul_dtype or self.dtype) / part

    def _all_scores(self, cost: LayerCost) -> float:
        return sum(map(self.scores, cost.attention))

    def weights(self, products: Sequence[Product], matmuls: float) -> Seconds:
        """Also those to accumulate a micro batch's gradients."""
        found = super().weights(products, matmuls)
        numbers = sum(product.inputs * product.outputs * product.count for product in products)
        found[ITEMS.index("element-wise")] = traffic_seconds(self.chip, self.engine.sum_bytes * numbers)
        return found

    def recompute(self, layer: str, cost: LayerCost, forward: Seconds, backward: Seconds) -> None:
        """Add what a backward recomputes: where attention writes its scores, selective recompute is of these alone."""
        mode, engine = self.shape.recompute.of(layer), self.engine
        backward[:3] += forward[:3] * engine.again(mode)
        if mode == "selective" and engine.score_bytes:
            scores = traffic_seconds(self.chip, engine.score_bytes * self._all_scores(cost)) / 3
            backward[1:3] += self.forwards[layer][2], scores

    def host(self, layer: str) -> tuple[float, float]:
        return of_passes(self.engine.host_seconds, self.engine.again(self.shape.recompute.of(layer)))

    def kept(self, layer: str, cost: LayerCost) -> tuple[int, int]:
        """Bytes of a layer, all of one type. Under full recompute its backward needs them besides."""
        engine, mode = self.engine, self.shape.recompute.of(layer)
        saved = self._saved(layer, cost) * self.tokens * self.shape.compute_bytes * engine.saved_scale
        saved = round(saved + (0 if mode == "selective" else engine.score_memory) * self._all_scores(cost))
        own = layer_bytes(self.plan, layer, cost, self.shape).kept
        keeps = engine.selective[0] if mode == "selective" else 1.0
        return (own, saved) if mode == "full" and own < saved else (round(saved * keeps), 0)

    def _saved(self, layer: str, cost: LayerCost) -> float:
        """Numbers that a token saves on a rank."""
        tp, splits, engine = self.plan.layout.tp, self.plan.splits_sequence, self.engine
        saved = fused_saved(layer, cost, self.plan.facts.partition, self.shape.hidden) if engine.fused else cost.saved
        if engine.gathers_again and splits:
            saved = replace(saved, residual=saved.residual + saved.entered, entered=0.0)
        return saved.on_rank(tp, sequence_parallel=splits, expert_tp=self.plan.layout.expert_tp)

    def sent(self, layer: str, forward: Seconds, backward: Seconds) -> tuple[Call, ...]:
        """Also what collectives of tp take to be launched."""
        for call in self.calls_in(layer):
            if AXES[call.axis] == "tp":
                where = forward if call.phase == "forward" else backward
                where[TP] += call.times * self.engine.tensor_seconds
        return super().sent(layer, forward, backward)

    def call_seconds(self, call: Call) -> float:
        """Ranks of tp on several nodes wait for each other."""
        took = super().call_seconds(call)
        if AXES[call.axis] != "tp":
            return took
        nodes = self.prices.span(self.plan.placement.grid.axes[call.axis]).nodes
        return took + call.times * (self.engine.tensor_across * log2(nodes))

    def hidden(self, call: Call) -> float:
        if AXES[call.axis] == "tp":
            return 1.0 if call.overlaps else self.engine.overlaps_tensor
        return float(call.overlaps and self.engine.overlaps_context)

    def head_matmuls(self, products: Iterable[Product]) -> float:
        return super().head_matmuls(products) / self.engine.matmul

    def logits(self) -> int:
        """Bytes of the loss: one chunk, or all logits if the trainer does not chunk them."""
        if self.engine.logit_memory is None:
            return super().logits()
        return round(self.engine.logit_memory * self.tokens * self.plan.vocabulary)


@dataclass(eq=False, kw_only=True)
class TrainerPrices(PriceList):
    """Prices of a trainer, `engine`; `traits` are its traits on the chip. Its plans have neither this runtime's scales
    of fp8, and gathers in it, nor its copies of small models (`computes_in_copies`)."""

    engine: Engine
    traits: Engine = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.traits = self.engine.on(self.cluster.chip)

    def changed(self, cluster: Cluster, engine: Engine) -> "TrainerPrices":
        """Prices of the same layouts on another cluster and for a trainer of other traits, from the same plans."""
        other = replace(self, cluster=cluster, engine=engine)
        other.plan, other._calls = self.plan, self._calls
        return other

    @cached_method
    def plan(self, layout: Layout) -> ParallelPlan:
        return replace(lower(self.short, _plainly(layout), 0), in_copies=False)

    def shards(self, layout: Layout) -> RankShards:
        return super().shards(_plainly(layout))

    def of(self, layout: Layout, tokens: int) -> Prices:
        """Prices of a micro batch. In a pipeline over nodes, ranks of tp wait for each other."""
        found, engine = super().of(layout, tokens), self.traits
        is_across = engine.host_across > 0 and layout.pp > 1 and self.cluster.world > self.cluster.domain
        if not is_across or layout.tp == 1:
            return found
        nodes = self.span(found.plan.placement.grid.axes["tp"]).nodes
        seconds = engine.host_seconds + engine.host_across * layout.tp * float(nodes**engine.host_power)
        modes = map(found.shape.recompute.of, found.plan.anatomy.layers)
        layers = zip(found.layers, modes, strict=True)
        return replace(
            found, layers=tuple(replace(layer, host=of_passes(seconds, engine.again(mode))) for layer, mode in layers)
        )

    def pricing(self, plan: ParallelPlan, shape: StepShape, dtype: str, forwards: dict[str, Forward]) -> TrainerPricing:
        return TrainerPricing(plan, shape, self, dtype, forwards)

    def splits(self, pipeline: Layout) -> Splits:
        return self.traits.split(self.facts, pipeline)


def _plainly(layout: Layout) -> Layout:
    """The same layout without fp8."""
    return replace(layout, fp8="none", fp8_high_layers=0)


def fused_saved(layer: str, cost: LayerCost, partition: Partition, hidden: int) -> Saved:
    """Activations that a token saves in a decoder layer with fused kernels: the input of each norm and of each linear,
    and what attention and the activation read, once each.

    Llama-3-70B: 2 inputs of norms and 2 of columns, of 8,192 each; then q, k, v and attention's output, 18,432 in all;
    gate, up and their product, 86,016. (Korthikanti et al., arXiv 2205.05198, without dropout and scores.)
    """
    inside = 0.0
    for matmul in cost.matmuls:
        role = partition.roles.get(f"{layer}.{matmul.name}")
        inside += (matmul.inputs if role is not None and role.kind == "row" else matmul.outputs) * matmul.times
    pairs = sum(block.row.startswith(f"{layer}.") for block in partition.tp_blocks)
    return Saved(residual=pairs * hidden, entered=pairs * hidden, inside=inside)


# ---- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainerStep(PricedStep):
    """One layout's step under a trainer. The layout is one of this runtime: see `Engine.laid`."""

    price_list: TrainerPrices

    @property
    def engine(self) -> Engine:
        return self.price_list.traits

    @cached_property
    def parts(self) -> Parts:
        """Parts that the step adds up. Raises `UserError` for a budget of recompute, which other trainers lack."""
        if budget_bytes(self.layout.recompute) is not None:
            raise UserError(
                f"{self.engine.name} has no budget of recompute, such as {self.layout.recompute}",
                fix="name a layout with +selective, with +full, or with neither",
            )
        return super().parts

    @cached_property
    def edge_seconds(self) -> float:
        backward = self.stages.ranks[self.busiest] @ self.passes[1] * self.engine.overlaps_sums
        return float(self.edges.seconds(backward)) + self.price_list.world_seconds + self.engine.step_seconds

    def tensors(self, rank: int) -> tuple[dict[str, float], float]:
        """Bytes of a pipeline rank by item, all moments at once, and its unreduced gradients."""
        content, shards, layout = self.stages.contents[rank], self.shards, self.layout
        found: dict[str, float] = dict(
            state_bytes(
                self.price_list, shards, content, away=layout.rests_in_host, state_dtype=layout.state_dtype,
                apart=bool(layout.outer_every),
            )
        )  # fmt: skip
        sizes = [(unit.gathered, unit.reduced) for unit in all_units(shards, content)]
        found[GATHERED], found[WAITING] = unit_bytes(sizes, shards.stage(layout.zero), shards.shape)
        if self.engine.reduces_in_place:
            found["gradients"] = 0
        if self.engine.spares:
            found["spare gradients"] = spare_bytes(shards, content)
        work = replace(self.work, edges=np.zeros_like(self.work.edges))  # layers alone save anything
        in_flight = in_flight_bytes(
            work, self.stages, self.in_flight, self.prices.logits, offloads=layout.offload_activations
        )
        moving = {SAVED: in_flight.saved, "working memory": in_flight.working, "loss": in_flight.loss}
        found |= {item: float(size[rank]) for item, size in moving.items()}
        return found, found[WAITING]


def estimate(prices: TrainerPrices, layout: Layout, workload: Workload) -> Estimate:
    """Estimate a layout, written as the trainer's users write it. Raises `UserError` as the planner does."""
    return TrainerStep(prices, prices.engine.laid(resolved(prices, layout, workload)), workload).estimate()


def unit_bytes(sizes: Sequence[tuple[int, int]], zero: int, shape: StepShape) -> tuple[int, int]:
    """Bytes of gathered parameters, and of unreduced gradients. `sizes`: bytes gathered and
    numbers reduced of each unit; the model's own unit is the last.

    ZeRO-3 holds the model's own unit and two more: the one that runs and the next. ZeRO-1 and 2 hold all units. ZeRO-1
    keeps every unreduced gradient until the last micro batch; ZeRO-2 and 3 those of one unit.
    """
    *inner, (root, _) = sizes
    largest = sorted((size for size, _ in inner), reverse=True)[:2]
    everything = sum(size for size, _ in sizes)
    gathered = everything if zero < 3 else root + sum(largest)
    reduced = [size for _, size in sizes]
    waiting = sum(reduced) * shape.reduce_bytes if zero == 1 else max(reduced) * shape.compute_bytes
    return gathered, waiting


def spare_bytes(shards: RankShards, content: Content) -> int:
    """One gradient in the compute type for each shape of a weight on a pipeline rank."""
    units = [unit for kind, _ in content.kinds for unit in shards.layers[kind].units]
    if content.has_head:
        units += shards.rest((content.has_embedding, True)).units
    return sum(unit.gathered for unit in units)


# ---- the trainers ----------------------------------------------------------------------------------------------------

# Constants of the other trainers are fitted on half of each one's published rows and tested on the other half
# (benchmarks/planner_accuracy.py, docs/evidence/planner_accuracy.md); those of memory follow from what a trainer keeps.
ENGINES = {
    engine.name: engine
    for engine in (
        # Megatron-LM: fused kernels of TransformerEngine, the distributed optimizer, gradients summed in fp32. Its
        # loss is fused: 4 bytes a logit. `slack`: 43 runs of SimuMax reserved 2.8 to 9.3 % more than they allocated.
        # Overlapping gradient sums is an option, off by default. Its recipes use sequence parallelism wherever there is
        # tp. `grouped`: .302 of SimuMax's .488 on B200.
        Engine(
            name="megatron", shards="optimizer", over="data", reduces_in_place=True, fused=True, gathers_again=True,
            spares=True, split=evenly, sequence_parallel=True, matmul=0.85, attention=0.9, grouped=0.62, traffic=3.5,
            cast_bytes=0, logit_bytes=24, host_seconds=2.4e-3, host_across=1e-4, tensor_seconds=1e-5,
            overlaps=False, overlaps_sums=0.0, slack=1.05, step_seconds=0.02, logit_memory=4,
        ),
        # Megatron-FSDP: the same kernels, with sharded parameters, gathered during compute.
        Engine(
            name="megatron-fsdp", fused=True, gathers_again=True, split=evenly, sequence_parallel=True, matmul=0.85,
            attention=0.9, grouped=0.62, traffic=3.5, cast_bytes=0, logit_bytes=24, host_seconds=2.4e-3,
            tensor_seconds=1e-5, overlaps=True, slack=1.05, step_seconds=0.02, logit_memory=4,
        ),
        # Megatron-LM of 2021 and 2022, before FlashAttention and TransformerEngine. A score is saved three times, with
        # dropout's mask: 2 + 1 + 2 bytes (Korthikanti et al., arXiv 2205.05198). Matmuls accumulate their gradients:
        # `sum_bytes` is 0. Its later configs recompute scores alone by default.
        Engine(
            name="megatron-2022", shards="optimizer", over="data", reduces_in_place=True, fused=True, split=evenly,
            gathers_again=True, recompute="selective", matmul=0.88, traffic=3.1, score_memory=5, score_bytes=29,
            logit_bytes=88, host_seconds=2.7e-3, host_across=1e-4, tensor_seconds=0.11e-3, overlaps=False,
            overlaps_sums=0.0, slack=1.05, step_seconds=0.002, logit_memory=4,
        ),
        # Megatron-DeepSpeed of these years: DeepSpeed accumulates gradients outside the matmuls.
        Engine(
            name="megatron-deepspeed", shards="optimizer", over="data", reduces_in_place=True, fused=True, split=evenly,
            gathers_again=True, matmul=0.85, traffic=3.1, score_memory=5, score_bytes=29, logit_bytes=88,
            host_seconds=2.7e-3, host_across=1e-4, tensor_seconds=0.11e-3, sum_bytes=8, overlaps=False,
            overlaps_sums=0.0, slack=1.05, step_seconds=0.002, logit_memory=4,
        ),
        # torchtitan: FSDP2, and by default selective recompute of operations, which keeps the outputs of every second
        # matmul and of attention.
        Engine(
            name="torchtitan", split=evenly, recompute="selective", selective=(0.33, 0.5), sequence_parallel=True,
            matmul=0.92, attention=0.9, traffic=17, logit_bytes=48, host_seconds=1e-3, overlaps=True, slack=1.1,
            step_seconds=0.02, logit_memory=10,
        ),
        # torchtitan without torch.compile: unfused element-wise kernels save more.
        Engine(
            name="torchtitan-eager", split=evenly, recompute="selective", selective=(0.33, 0.5), sequence_parallel=True,
            matmul=0.92, attention=0.9, traffic=20, logit_bytes=48, host_seconds=1e-3, overlaps=True, slack=1.1,
            step_seconds=0.02, logit_memory=10, saved_scale=1.15,
        ),
        # FSDP1, as Composer and LLM Foundry run it, uncompiled.
        Engine(
            name="fsdp1", matmul=0.83, attention=0.74, traffic=4.8, logit_bytes=48, host_seconds=4e-3,
            overlaps=True, slack=1.2, step_seconds=0.02, logit_memory=10,
        ),
        # nanotron: eager kernels, bf16 parameters, gradients summed in fp32, ZeRO-1 at most. Its scaling scripts use
        # sequence parallelism, and overlap tp's collectives with matmuls.
        Engine(
            name="nanotron", shards="optimizer", reduces_in_place=True, gathers_again=True, split=dealt_until_full,
            sequence_parallel=True, matmul=0.916, attention=0.65, traffic=8.5, logit_bytes=52, host_seconds=4.5e-3,
            host_across=2.09e-3, host_power=0.364, meet=32, overlaps=False, overlaps_sums=0.69, sum_bytes=10.3,
            overlaps_tensor=0.462, tensor_seconds=0.072e-3, tensor_across=0.696e-3, slack=1.04, step_seconds=0.064,
            logit_memory=14,
            saved_scale=1.12,
        ),
    )
}  # fmt: skip
