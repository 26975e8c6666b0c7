"""What is done to a model's modules: a list, in the order in which `parallelize` does it. No torch.

The model stays the class of `transformers`; from outside, parameters are cut, forwards are replaced and hooks stand
around modules. Nothing else changes how a module computes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fivefold.parallel.chunks.spec import ChunkPlan
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.plan import ParallelPlan

Kind = Literal["cut", "pre-hook", "hook", "forward", "attribute", "stub", "shard"]


@dataclass(frozen=True)
class Intervention:
    """One thing done to the module at `path` ("" is the model).

    `kind`: its parameters are `cut`; a hook stands before it or after it; its `forward` is replaced; it is told a
    number (`attribute`); it gives way to a `stub`; FSDP takes its parameters as one unit (`shard`). `by`: the dimension
    of parallelism, or what else asks for it.
    """

    path: str
    kind: Kind
    by: str
    why: str


def interventions(plan: ParallelPlan) -> Iterator[Intervention]:
    """All of them, on this rank."""
    facts, anatomy = plan.facts, plan.anatomy
    if facts.counted:
        yield Intervention(anatomy.base, "pre-hook", "rows", f"{facts.counted.name} counts the tokens of a row")
    if plan.layout.tp > 1:
        yield from _of_tensor_parallel(plan)
    if plan.layout.cp > 1:
        yield from _of_context_parallel(plan)
    if plan.layout.schedule.splits_backward:
        yield from _of_weight_gradients(plan)
    for mlp in plan.feature(ChunkPlan).mlps:
        yield Intervention(mlp, "forward", "chunks", f"runs {plan.layout.mlp_chunks} pieces of the sequence in turn")
    for linear in plan.feature(Fp8Plan).linears:
        yield Intervention(
            linear.name.removesuffix(".weight"), "forward", "fp8", "its products are those of eight bits"
        )
    for each in facts.experts:
        yield Intervention(each.name, "forward", "ep", "rows of tokens go to the ranks of their experts")
    for router in plan.fp32_routers:
        yield Intervention(router, "forward", "router", "scores are computed in fp32")
    for each in facts.experts if plan.watches_routers else ():
        yield Intervention(each.router, "hook", "balance", "what experts get is counted, and held even")
    for layer in dict.fromkeys(layer for layer, _ in facts.forgetful):
        yield Intervention(layer, "forward", "documents", "its attention is given the bounds of packed documents")
    yield from _of_stages(plan)
    recompute = plan.recompute
    why = {
        "selective": "all but products and attention is computed again in backward",
        "full": "its activations are computed again in backward",
    }
    for layer in filter(recompute.wraps, plan.placement.layers):
        yield Intervention(layer, "forward", "recompute", why[recompute.of(layer)])
    for layer in plan.placement.layers if plan.layout.offload_activations else ():
        yield Intervention(layer, "forward", "offload", "what it saves for backward lies in host memory")
    if plan.feature(FsdpPlan).stood_in_for and plan.feature(FsdpPlan).rests_in_dtensors:
        yield Intervention("", "hook", "tp", "parameters, which rest as DTensors, give way to plain tensors")
    if plan.feature(FsdpPlan).copied:
        yield Intervention("", "hook", "bf16", "parameters give way to copies in bf16 until backward is done")
        for layer in plan.placement.layers:
            yield Intervention(layer, "pre-hook", "bf16", "what enters it is cast to bf16")
    for unit in plan.feature(FsdpPlan).sharded:
        axis = plan.placement.grid.fsdp_axis(unit.over)
        yield Intervention(unit.name, "shard", axis, "parameters gathered and reduced as one")


def _of_tensor_parallel(plan: ParallelPlan) -> Iterator[Intervention]:
    anatomy, partition = plan.anatomy, plan.partition
    for name, spec in plan.placement.shards.items():
        if spec.splits and spec.over == "tp":
            module, _, leaf = name.rpartition(".")
            yield Intervention(module, "cut", "tp", f"{leaf}: {partition.roles[name].reason}")
    yield Intervention(anatomy.embedding, "forward", "tp", "looks up the ids of its own rows; partial sums added")
    yield Intervention(partition.to_logits, "pre-hook", "tp", "all tokens enter it")
    yield Intervention(anatomy.head, "hook", "tp", "logits of the whole vocabulary leave it")
    yield Intervention(anatomy.base, "pre-hook", "tp", "positions are those of the whole sequence")
    for block in partition.tp_blocks:
        for entry in block.entries if block.owner not in plan.feature(ChunkPlan).mlps else ():
            for module in entry.modules:
                yield Intervention(module, "pre-hook", "tp", "all tokens enter it")
        yield Intervention(block.row, "forward", "tp", "partial sums are added up, then the bias")
        if block.heads:
            yield Intervention(block.owner, "attribute", "tp", "counts this rank's heads")
    for module in partition.across:
        yield Intervention(module, "forward", "tp", "all features are gathered for it")


def _of_context_parallel(plan: ParallelPlan) -> Iterator[Intervention]:
    anatomy = plan.anatomy
    yield Intervention(anatomy.base, "pre-hook", "cp", "whole rows become this rank's tokens")
    yield Intervention(anatomy.head, "hook", "cp", "logits of whole rows leave it")
    for module in plan.facts.attends:
        yield Intervention(module, "attribute", "cp", "attention exchanges keys and values, or heads")


def _of_stages(plan: ParallelPlan) -> Iterator[Intervention]:
    own = set(plan.placement.own_stages)
    for module, stages in plan.placement.stages.stages_of_module.items():
        if not own & set(stages):
            yield Intervention(module, "stub", "pp", f"it runs in stage {', '.join(map(str, stages))}")


def _of_weight_gradients(plan: ParallelPlan) -> Iterator[Intervention]:
    """Linears inside layers, whose weight gradients a schedule that splits backward computes later."""
    routers = {each.router for each in plan.facts.experts}
    rows = {block.row for block in plan.partition.tp_blocks}
    for layer, cost in zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True):
        for matmul in cost.matmuls:
            module = f"{layer}.{matmul.name.removesuffix('.weight')}"
            if matmul.times == 1 and module not in routers | rows and module != layer:
                yield Intervention(module, "forward", "pp", "gradients of its weight are put off")
