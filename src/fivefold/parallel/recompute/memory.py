"""Bytes that a recomputed layer keeps. No torch."""

from dataclasses import replace

from fivefold.models.anatomy import is_within
from fivefold.models.facts import Matmul
from fivefold.parallel.recompute.spec import RecomputePlan
from fivefold.parallel.step import LayerBytes, LayerNumbers, LayerStep


def kept_bytes(step: LayerStep, numbers: LayerNumbers, layer: LayerBytes) -> LayerBytes:
    """Keep only the input of a recomputed layer, and with selective recompute its expensive results. The rest of what
    it saves exists while its backward runs."""
    shape, expensive = step.shape, 0
    if not shape.recompute.wraps(step.name):
        return layer
    if shape.recompute.keeps(step.name):
        expensive = step.bytes_of(expensive_numbers(step, numbers.exchanged))
    entered = shape.hidden_bytes // step.plan.sequence_ranks
    # A compiled norm reads the input itself, and saves no cast of it.
    again = layer.kept - expensive - entered * shape.compiled
    return replace(layer, kept=entered + expensive, working=layer.working + max(0, again))


def expensive_numbers(step: LayerStep, exchanged: float) -> float:
    """Elements per token that selective recompute saves in a layer: outputs of its linears and of attention, with one
    fp32 statistic of each query, and rows of experts. The last linear's output is saved only if it multiplies in a
    precision of its own, because such linears save their own products. `exchanged`: see `LayerNumbers`; queries are
    then saved twice, too."""
    plan, shape, recompute = step.plan, step.shape, step.plan.feature(RecomputePlan)
    tp, roles, attention = plan.layout.tp, plan.facts.partition.roles, step.cost.attention
    save_own = set() if plan.reduces_rows else {linear.name for linear in plan.matmuls.linears}
    statistic = max(4, shape.compute_bytes) / shape.compute_bytes
    inside = sum(heads.query * (heads.value_size + statistic) for heads in attention)
    outside = exchanged
    if exchanged:
        outside += sum(heads.query * heads.key_size for heads in attention) / tp
    for matmul in step.cost.matmuls:
        name, sizes = f"{step.name}.{matmul.name}", (matmul.outputs, matmul.inputs)
        role = roles.get(name)
        kind, dim = (role.kind, role.dim or 0) if role else ("", 0)
        if kind == "experts":
            outside += _expert_rows(step, name, matmul)
        elif not recompute.keeps(name):
            outside += matmul.outputs * (name in save_own)
        elif kind == "column":
            inside += sizes[dim]
        elif kind == "row":
            outside += sizes[1 - dim] / plan.sequence_ranks
        else:
            outside += matmul.outputs
    return outside + inside / tp


def _expert_rows(step: LayerStep, name: str, matmul: Matmul) -> float:
    """Elements per token saved for the expert matrices `name`. The first ones make features. The second ones make rows
    as wide as hidden states; rows that are sent are saved when they arrive, and when they come back."""
    plan, layout = step.plan, step.plan.layout
    features = next((experts.features for experts in plan.facts.experts if is_within(name, [experts.name])), None)
    if features is not None and name.endswith(features.first):
        return (matmul.outputs, matmul.inputs)[features.made - 1] * matmul.times / layout.tp
    rows = 3 if plan.placement.grid.size("ep") > 1 else 1
    return rows * step.shape.hidden * matmul.times / (1 if layout.expert_tp else layout.tp)
