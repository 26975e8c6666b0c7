"""Traits of each trainer: what it saves, gathers, overlaps and recomputes, as one record. No torch.

`estimate` reads these and has no branch for a trainer. `fivefold` is this runtime. The others made the published
measurements; `benchmarks/planner_accuracy.py` compares them with those.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from fivefold.hardware.chip import Chip
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import Layout
from fivefold.parallel.stage_plan import stage_plan

# This runtime on a CPU, uncompiled: CPU seconds of one thread, over Llamas that differ in width, layers, micro batches
# and tokens (torch 2.13). Operations of a layer and micro batch, FSDP's hooks included; operations of the model's ends;
# bytes of memory traffic per byte saved by a layer, gathered (copied in and out), or reduced (copied twice, reduced,
# added up), and per logit.
LAUNCHES, LAUNCHES_OF_ENDS = 1100, 2400
EAGER_TRAFFIC, GATHER_TRAFFIC, REDUCE_TRAFFIC, EAGER_LOGIT_BYTES = 7.0, 5.5, 13.0, 48.0

Splits = tuple[tuple[int, int], ...]  # [first, end) of each stage's layers


def as_planned(facts: ModelFacts, pipeline: Layout) -> Splits:
    """Stages of this runtime."""
    return stage_plan(facts, pipeline).splits


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


def evenly(facts: ModelFacts, pipeline: Layout) -> Splits:
    """Megatron's and torchtitan's split: equal numbers of layers; the first stages share the remainder."""
    each, more = divmod(len(facts.anatomy.layers), pipeline.stages)
    bounds = [stage * each + min(stage, more) for stage in range(pipeline.stages + 1)]
    return tuple(pairwise(bounds))


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The traits of a trainer.

    Memory.
    `moments`: its memory peaks at one of the moments of `parallel/moments.py`; else all of them are taken to coincide.
    `compiled`: layers are compiled, so fused kernels save what the traced layer's fused form does (`LayerCost.fused`).
    `shards`: what data ranks shard: the parameters with all their state (FSDP), or the optimizer's state (ZeRO-1).
    `over`: the ranks they are sharded over: those of dp_shard, or all data ranks (Megatron's distributed optimizer).
    `reduces_in_place`: reduced gradients take no memory beyond the unreduced.
    `fused`: a layer saves what fused kernels save (`compute.fused_saved`), not what the traced layer saves.
    `gathers_again`: under sequence parallelism, a column-parallel input is saved sharded and all-gathered again in
    backward. In this runtime compiled layers do so (`ParallelPlan.gathers_again`), and this gather is among their
    calls.
    `saved_scale`: saved activations, relative to a count of all saved numbers in the compute type.
    `recompute`, `sequence_parallel`: the trainer's defaults; None if unknown.
    `selective`: under selective recompute, the part of a layer's saved bytes that is kept, and the part of its forward
    that is recomputed; written scores are not kept.
    `spares`: keeps a gradient buffer for each shape of a weight, as TransformerEngine accumulates in the matmul.
    `score_memory`: bytes that a layer saves per attention score; 0 for FlashAttention, which writes none.
    `logit_memory`: bytes per logit if the loss is not chunked; None if it is.
    `slack`: reserved over allocated bytes. `kept_back`: the part of the largest buffers of unreduced gradients that the
    allocator reserves in addition, since no other tensor has their sizes.

    Time.
    `matmul`, `attention`: the part of the chip's rate that its layers reach. `grouped`: the part of that which the
    matmuls of experts reach.
    `traffic`: bytes of memory traffic outside matmuls and attention, forward and backward, per byte that the traced
    layer saves.
    `score_bytes`: traffic per attention score, forward and backward, if scores are written.
    `logit_bytes`: traffic of the loss per logit, forward and backward.
    `host_seconds`: Python and launches of a layer and micro batch, forward and backward.
    `host_across`: additional ones per rank of tp, times tp's nodes to the power of `host_power`, if there is tp and the
    pipeline leaves the node: the ranks of a stage then wait for each other at every collective of tp.
    `meet`: sharpness of the smooth maximum of device and host time (fitted on nanotron's eager runs); 1 adds them up.
    `host_of_ends`: host seconds of the model's ends. `gather_traffic`, `reduce_traffic`: bytes of memory traffic per
    byte that FSDP gathers or reduces.
    `sum_bytes`: traffic per weight and micro batch to accumulate its gradient.
    `cast_bytes`: traffic per number that is cast for a matmul of another dtype; 0 if norms and activations write it.
    `overlaps_data`: FSDP's collectives overlap compute. `overlaps_context`: so do those of cp that can.
    `overlaps_tensor`: the part of tp's that does, for at most as long as matmuls. `overlaps_sums`: the part of a step's
    last backward that hides sums of gradients over replicas.
    `tensor_seconds`: to launch and meet, per collective of tp. `tensor_across`: additional ones per doubling of nodes.
    `step_seconds`: fixed seconds of a step. `split`: the layers of each pipeline stage.
    """

    name: str
    moments: bool = False
    compiled: bool = False
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
    slack: float
    kept_back: float = 0.0
    matmul: float = 1.0
    attention: float = 1.0
    grouped: float = 1.0
    traffic: float
    score_bytes: float = 0.0
    logit_bytes: float
    host_seconds: float
    host_across: float = 0.0
    host_power: float = 0.0
    host_of_ends: float = 0.0
    meet: float = 8.0
    gather_traffic: float = 0.0
    reduce_traffic: float = 0.0
    sum_bytes: float = 0.0
    cast_bytes: float = 5.0
    overlaps_data: bool
    overlaps_sums: float = 1.0
    overlaps_context: bool = True
    overlaps_tensor: float = 0.0
    tensor_seconds: float = 0.0
    tensor_across: float = 0.0
    step_seconds: float
    split: Callable[[ModelFacts, Layout], Splits] = as_planned

    def laid(self, layout: Layout) -> Layout:
        """Translate a layout of the trainer to this runtime: its ZeRO stage, and the ranks that share states.

        Megatron's dp_replicate8 is dp_shard8 with zero1.
        """
        if self.over == "data":
            layout = replace(layout, dp_shard=layout.data_ranks, dp_replicate=1)
        return replace(layout, zero=1) if self.shards == "optimizer" else layout

    def on(self, chip: Chip) -> "Engine":
        """The trainer on a chip. On a CPU operations are not compiled, and nothing overlaps."""
        slack, host = chip.slack or self.slack, chip.host_scale
        if not chip.is_host:
            return replace(
                self, slack=slack, host_seconds=self.host_seconds * host, host_across=self.host_across * host
            )
        launch = chip.launch_us * 1e-6 * host
        return replace(
            self, slack=slack, traffic=EAGER_TRAFFIC, host_seconds=LAUNCHES * launch,
            host_of_ends=LAUNCHES_OF_ENDS * launch, meet=1.0, gather_traffic=GATHER_TRAFFIC,
            reduce_traffic=REDUCE_TRAFFIC, logit_bytes=EAGER_LOGIT_BYTES, compiled=False, overlaps_data=False,
            overlaps_sums=0.0, overlaps_context=False, overlaps_tensor=0.0,
        )  # fmt: skip


# Constants of the other trainers are fitted on half of each one's published rows and tested on the other half
# (benchmarks/planner_accuracy.py, docs/evidence/planner_accuracy.md); those of memory follow from what a trainer keeps.
ENGINES = {
    engine.name: engine
    for engine in (
        # Rehearsals of the real step count launches, syncs and allocator peaks: an 8B takes 0.15 s of host time for 32
        # compiled layers; `slack` and `kept_back` are least squares of the cells of docs/evidence/planned_memory.md.
        # Logits in bf16 are written, read three times and overwritten by their gradient (`parallel/loss/runtime.py`).
        # The others are judgement: compiled element-wise work reads and writes each saved number about once, and FSDP
        # overlaps compute.
        Engine(
            name="fivefold", moments=True, compiled=True, gathers_again=True, traffic=3.5, logit_bytes=10,
            host_seconds=2.4e-3, overlaps_data=True, slack=1.03, kept_back=0.49, step_seconds=2e-3,
        ),
        # Megatron-LM: fused kernels of TransformerEngine, the distributed optimizer, gradients summed in fp32. Its
        # loss is fused: 4 bytes a logit. `slack`: 43 runs of SimuMax reserved 2.8 to 9.3 % more than they allocated.
        # Overlapping gradient sums is an option, off by default. Its recipes use sequence parallelism wherever there is
        # tp. `grouped`: .302 of SimuMax's .488 on B200.
        Engine(
            name="megatron", shards="optimizer", over="data", reduces_in_place=True, fused=True, gathers_again=True,
            spares=True, split=evenly, sequence_parallel=True, matmul=0.85, attention=0.9, grouped=0.62, traffic=3.5,
            cast_bytes=0, logit_bytes=24, host_seconds=2.4e-3, host_across=1e-4, tensor_seconds=1e-5,
            overlaps_data=False, overlaps_sums=0.0, slack=1.05, step_seconds=0.02, logit_memory=4,
        ),
        # Megatron-FSDP: the same kernels, with sharded parameters, gathered during compute.
        Engine(
            name="megatron-fsdp", fused=True, gathers_again=True, split=evenly, sequence_parallel=True, matmul=0.85,
            attention=0.9, grouped=0.62, traffic=3.5, cast_bytes=0, logit_bytes=24, host_seconds=2.4e-3,
            tensor_seconds=1e-5, overlaps_data=True, slack=1.05, step_seconds=0.02, logit_memory=4,
        ),
        # Megatron-LM of 2021 and 2022, before FlashAttention and TransformerEngine. A score is saved three times, with
        # dropout's mask: 2 + 1 + 2 bytes (Korthikanti et al., arXiv 2205.05198). Matmuls accumulate their gradients:
        # `sum_bytes` is 0. Its later configs recompute scores alone by default.
        Engine(
            name="megatron-2022", shards="optimizer", over="data", reduces_in_place=True, fused=True, split=evenly,
            gathers_again=True, recompute="selective", matmul=0.88, traffic=3.1, score_memory=5, score_bytes=29,
            logit_bytes=88, host_seconds=2.7e-3, host_across=1e-4, tensor_seconds=0.11e-3, overlaps_data=False,
            overlaps_sums=0.0, slack=1.05, step_seconds=0.002, logit_memory=4,
        ),
        # Megatron-DeepSpeed of these years: DeepSpeed accumulates gradients outside the matmuls.
        Engine(
            name="megatron-deepspeed", shards="optimizer", over="data", reduces_in_place=True, fused=True, split=evenly,
            gathers_again=True, matmul=0.85, traffic=3.1, score_memory=5, score_bytes=29, logit_bytes=88,
            host_seconds=2.7e-3, host_across=1e-4, tensor_seconds=0.11e-3, sum_bytes=8, overlaps_data=False,
            overlaps_sums=0.0, slack=1.05, step_seconds=0.002, logit_memory=4,
        ),
        # torchtitan: FSDP2, and by default selective recompute of operations, which keeps the outputs of every second
        # matmul and of attention.
        Engine(
            name="torchtitan", split=evenly, recompute="selective", selective=(0.33, 0.5), sequence_parallel=True,
            matmul=0.92, attention=0.9, traffic=17, logit_bytes=48, host_seconds=1e-3, overlaps_data=True, slack=1.1,
            step_seconds=0.02, logit_memory=10,
        ),
        # torchtitan without torch.compile: unfused element-wise kernels save more.
        Engine(
            name="torchtitan-eager", split=evenly, recompute="selective", selective=(0.33, 0.5), sequence_parallel=True,
            matmul=0.92, attention=0.9, traffic=20, logit_bytes=48, host_seconds=1e-3, overlaps_data=True, slack=1.1,
            step_seconds=0.02, logit_memory=10, saved_scale=1.15,
        ),
        # FSDP1, as Composer and LLM Foundry run it, uncompiled.
        Engine(
            name="fsdp1", matmul=0.83, attention=0.74, traffic=4.8, logit_bytes=48, host_seconds=4e-3,
            overlaps_data=True, slack=1.2, step_seconds=0.02, logit_memory=10,
        ),
        # nanotron: eager kernels, bf16 parameters, gradients summed in fp32, ZeRO-1 at most. Its scaling scripts use
        # sequence parallelism, and overlap tp's collectives with matmuls.
        Engine(
            name="nanotron", shards="optimizer", reduces_in_place=True, gathers_again=True, split=dealt_until_full,
            sequence_parallel=True, matmul=0.916, attention=0.65, traffic=8.5, logit_bytes=52, host_seconds=4.5e-3,
            host_across=2.09e-3, host_power=0.364, meet=32, overlaps_data=False, overlaps_sums=0.69, sum_bytes=10.3,
            overlaps_tensor=0.462, tensor_seconds=0.072e-3, tensor_across=0.696e-3, slack=1.04, step_seconds=0.064,
            logit_memory=14,
            saved_scale=1.12,
        ),
    )
}  # fmt: skip
