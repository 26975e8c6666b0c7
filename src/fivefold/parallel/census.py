"""Dtypes of a model's matmuls, by role. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.models.anatomy import is_within
from fivefold.models.facts import Matmul
from fivefold.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class Computed:
    """The linears of one role, of the whole model. `weights`: those used per token; a matmul takes 6 FLOPs for each of
    them, forward and backward. `why`: the reason if it is not the precision that the layout gives matmuls."""

    what: str
    dtype: str
    linears: int
    weights: int
    why: str = ""


def census(plan: ParallelPlan) -> tuple[Computed, ...]:
    """Matmuls with weights, those with a precision of their own first."""
    found: dict[tuple[str, str, str], Computed] = {}
    for what, dtype, why, matmul in _matmuls(plan):
        before = found.get((what, dtype, why), Computed(what, dtype, 0, 0, why))
        found[what, dtype, why] = replace(before, linears=before.linears + 1, weights=before.weights + matmul.weights)
    return tuple(sorted(found.values(), key=lambda part: part.dtype != plan.layout.matmul_words))


def own_part(plan: ParallelPlan) -> float:
    """Share of the FLOPs of matmuls with weights that has a precision of its own."""
    found = census(plan)
    own = sum(part.weights for part in found if part.dtype == plan.layout.matmul_words)
    return own / sum(part.weights for part in found)


def _matmuls(plan: ParallelPlan) -> Iterator[tuple[str, str, str, Matmul]]:
    own, facts = plan.matmuls, plan.facts
    words, high = plan.layout.matmul_words, plan.layout.precision
    routers = [block.router for block in facts.experts]
    covered = {name for name, _ in own.matmuls(facts.anatomy.layers)}
    for layer, cost in zip(facts.anatomy.layers, facts.layer_costs, strict=True):
        for matmul in cost.matmuls:
            name = f"{layer}.{matmul.name}"
            kind = facts.partition.roles[name].kind
            if is_within(name, routers):
                router = next(router for router in routers if is_within(name, [router]))
                yield "routers", "fp32" if router in plan.fp32_routers else high, "", matmul
            elif own.is_used and not own.covers(layer):
                yield "first and last layers", high, f"precision.{own.kept_by}", matmul
            elif kind == "experts":
                yield "experts", words if own.covers(name) else high, "", matmul
            elif kind == "latent":
                yield "latent projections", high, "ranks have parts of their gradients" * own.is_used, matmul
            else:
                yield "linears", words if name in covered else high, "", matmul
    yield "head", high, "", Matmul(facts.anatomy.head, facts.hidden_size, plan.whole_vocabulary)
