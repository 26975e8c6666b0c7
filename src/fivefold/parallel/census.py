"""Dtypes of a model's matmuls, by role. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.models.anatomy import is_within
from fivefold.models.facts import Matmul
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class Computed:
    """The linears of one role, of the whole model. `weights`: those used per token; a matmul takes 6 FLOPs for each of
    them, forward and backward. `why`: the reason if the dtype is not the layout's `fp8`."""

    what: str
    dtype: str
    linears: int
    weights: int
    why: str = ""


def census(plan: ParallelPlan) -> tuple[Computed, ...]:
    """Matmuls with weights, those in fp8 first."""
    found: dict[tuple[str, str, str], Computed] = {}
    for what, dtype, why, matmul in _matmuls(plan):
        before = found.get((what, dtype, why), Computed(what, dtype, 0, 0, why))
        found[what, dtype, why] = replace(before, linears=before.linears + 1, weights=before.weights + matmul.weights)
    return tuple(sorted(found.values(), key=lambda each: not each.dtype.startswith("fp8")))


def fp8_part(plan: ParallelPlan) -> float:
    """Share of the FLOPs of matmuls with weights that is in fp8."""
    found = census(plan)
    return sum(each.weights for each in found if each.dtype.startswith("fp8")) / sum(each.weights for each in found)


def _matmuls(plan: ParallelPlan) -> Iterator[tuple[str, str, str, Matmul]]:
    layout, facts = plan.layout, plan.facts
    fp8, high = f"fp8 {layout.fp8}", layout.precision
    routers = [each.router for each in facts.experts]
    in_fp8 = {name for name, _ in plan.feature(Fp8Plan).matmuls(facts.anatomy.layers)}
    for layer, cost in zip(facts.anatomy.layers, facts.layer_costs, strict=True):
        for matmul in cost.matmuls:
            name = f"{layer}.{matmul.name}"
            kind = facts.partition.roles[name].kind
            if is_within(name, routers):
                router = next(each for each in routers if is_within(name, [each]))
                yield "routers", "fp32" if router in plan.fp32_routers else high, "", matmul
            elif layout.fp8 != "none" and not plan.feature(Fp8Plan).covers(layer):
                yield "first and last layers", high, "precision.fp8_high_layers", matmul
            elif kind == "experts":
                yield "experts", fp8 if plan.feature(Fp8Plan).covers(name) else high, "", matmul
            elif kind == "latent":
                yield "latent projections", high, "ranks have parts of their gradients" * (layout.fp8 != "none"), matmul
            else:
                yield "linears", fp8 if name in in_fp8 else high, "", matmul
    yield (
        "head",
        high,
        "",
        Matmul(facts.anatomy.head, facts.hidden_size, plan.placement.shards[plan.head_weight].shape[0]),
    )
