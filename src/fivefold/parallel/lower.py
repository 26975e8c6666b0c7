"""`lower(facts, layout, rank)`: from a layout to its plan, before any device is touched. No torch."""

from collections.abc import Iterator

from fivefold.core.errors import Violation, refuse
from fivefold.core.model_limits import CPMethod, context_method
from fivefold.core.optimizers import block_length
from fivefold.models.facts import ModelFacts
from fivefold.parallel import features, legality
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fsdp.spec import computes_in_copies
from fivefold.parallel.layout import Layout
from fivefold.parallel.placement import Placement, stage_plan
from fivefold.parallel.plan import ParallelPlan, on_tp_rank
from fivefold.parallel.ranks import RankGrid
from fivefold.parallel.recompute.policy import Recompute
from fivefold.parallel.shard_rules import gradient_sums, kv_copies, partition_of, shard_specs


def lower(facts: ModelFacts, layout: Layout, rank: int, *, compiled: bool = False) -> ParallelPlan:
    """Make the plan of `layout` for `rank`; `layout` is resolved, with its world. `compiled`: layers are compiled.

    Raises `UserError`, with the arithmetic, if the layout does not fit the model.
    """
    refuse(legality.violations(layout, features.limits_of(facts)))
    partition, shards = partition_of(facts, layout.tp), shard_specs(facts, layout)
    stages = stage_plan(facts, layout)
    pp_ranks = {name: stages.holders(name) for name in (*shards, *facts.router_buffers)}
    method = _cp_method(facts, layout)
    grid = RankGrid(
        layout,
        kv_copies=kv_copies(facts, layout.tp),
        has_experts=bool(facts.experts),
        embedding_ranks=pp_ranks[facts.anatomy.embedding_weight] if facts.anatomy.tied else (),
        ulysses=method.ulysses,
    )
    placement = Placement(facts, layout, rank, grid, shards, stages, pp_ranks)
    sums = gradient_sums(partition, shards, sequence_parallel=layout.sequence_parallel)
    # Frozen ones too: a user's own loop may train them later.
    own = {name: axis for name, axis in sums.items() if placement.holds(name)}
    in_copies = computes_in_copies(facts, layout)
    plan = ParallelPlan(placement, partition, own, method, Recompute(layout.recompute), Fp8Plan, in_copies, compiled)
    refuse([*_of_states(plan), *(violation for rule in features.RULES for violation in rule(plan))])
    return plan


def _of_states(plan: ParallelPlan) -> Iterator[Violation]:
    """A block of the optimizer's state shares a scale, so it must lie on one rank."""
    for name, spec in plan.placement.shards.items():
        if plan.placement.kept_in(name) != "8bit":
            continue
        if spec.cuts(block := block_length(spec.shape[-1])):
            what = f"8bit states of {name} have blocks of {block} in a row of {spec.shape[-1]}, and tp {plan.layout.tp}"
            fix = "use less tp, or optimizer.state_dtype: bf16"
            yield Violation("tp", f"{what} cuts one", fix, more="fivefold docs explain/memory")


def _cp_method(facts: ModelFacts, layout: Layout) -> CPMethod:
    """Attention method of the cp ranks, for the attention with the fewest heads."""
    if layout.cp == 1:
        return CPMethod(1, 1)
    of_rank = [on_tp_rank(shape, layout.tp) for shape in facts.attends.values()]
    query, kv = min(shape.query for shape in of_rank), min(shape.kv for shape in of_rank)
    return context_method(layout.cp_method, layout.cp, query, kv)
