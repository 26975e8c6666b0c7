"""Numbers that selective recompute saves of a layer. No torch."""

from fivefold.models.anatomy import is_within
from fivefold.models.facts import LayerCost, Matmul
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.context.spec import exchanged_numbers
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.spec import RecomputePlan


def dear_numbers(plan: ParallelPlan, layer: str, cost: LayerCost, shape: StepShape) -> float:
    """Elements per token that selective recompute saves in a layer: outputs of its linears and of attention, with one
    fp32 statistic of each query, and rows of experts. The last linear's output is saved only in fp8, because those
    linears save their own products."""
    tp, splits, partition = plan.layout.tp, plan.splits_sequence, plan.facts.partition
    in_fp8 = set() if plan.reduces_rows else {linear.name for linear in plan.feature(Fp8Plan).linears}
    inside = sum(
        each.query * (each.value_size + max(4, shape.compute_bytes) / shape.compute_bytes) for each in cost.attention
    )
    found = exchanged_numbers(plan, cost)
    if found:  # queries, too, are saved before and after the exchange
        found += sum(each.query * each.key_size for each in cost.attention) / tp
    for matmul in cost.matmuls:
        name, sizes = f"{layer}.{matmul.name}", (matmul.outputs, matmul.inputs)
        role = partition.roles.get(name)
        if role is not None and role.kind == "experts":
            found += _dear_rows(plan, name, matmul, shape)
        elif name in in_fp8 and not plan.feature(RecomputePlan).keeps(name):
            found += matmul.outputs
        elif plan.feature(RecomputePlan).keeps(name) and role is not None and role.kind == "column":
            inside += sizes[role.dim or 0]
        elif plan.feature(RecomputePlan).keeps(name) and role is not None and role.kind == "row":
            found += sizes[1 - (role.dim or 0)] / (tp if splits else 1)
        elif plan.feature(RecomputePlan).keeps(name):
            found += matmul.outputs
    return found + inside / tp


def _dear_rows(plan: ParallelPlan, name: str, matmul: Matmul, shape: StepShape) -> float:
    """Elements per token saved for the expert matrices `name`. The first ones make features. The second ones make rows
    as wide as hidden states; rows that are sent are saved when they arrive, and when they come back."""
    layout = plan.layout
    features = next((each.features for each in plan.facts.experts if is_within(name, [each.name])), None)
    if features is not None and name.endswith(features.first):
        return (matmul.outputs, matmul.inputs)[features.made - 1] * matmul.times / layout.tp
    rows = 3 if plan.placement.grid.size("ep") > 1 else 1
    return rows * shape.hidden * matmul.times / (1 if layout.expert_tp else layout.tp)
