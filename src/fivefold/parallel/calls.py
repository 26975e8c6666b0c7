"""Every collective of an optimizer step on one rank, call by call, from the plan alone. No torch.

One function for each dimension of parallelism, in the order of a step. Tests hold the sums of these calls equal to the
collectives that a run is recorded to issue. A planner needs the calls one by one: the bytes of each, its ranks, and
whether compute can hide it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from fivefold.core.fp8 import KINDS, RECIPES, agreements
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.recompute import Site
from fivefold.core.schedule import Transfer
from fivefold.models.facts import Experts, FeatureGroups, TPBlock
from fivefold.parallel.chunks.spec import ChunkPlan
from fivefold.parallel.collectives import Call, Phase, StepShape
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.matrices.rounds import matrix_rounds
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.ranks import Tokens, ring_hops, tokens_by_rank
from fivefold.parallel.recompute.spec import RecomputePlan
from fivefold.parallel.shard_rules import feature_blocks


def calls(plan: ParallelPlan, shape: StepShape) -> tuple[Call, ...]:
    """Every collective of one optimizer step on this rank. Along an axis of one rank nothing is sent."""
    return tuple(_calls(plan, shape, _of_units, _of_stages, *IN_LAYERS, _of_world, _of_full_matrices))


def layer_calls(plan: ParallelPlan, shape: StepShape) -> Iterator[Call]:
    """Those of `calls` that layers and the model's ends make themselves, and what goes with them once a step."""
    return _calls(plan, shape, *IN_LAYERS)


def unit_calls(plan: ParallelPlan, shape: StepShape) -> Iterator[Call]:
    """Those of `calls` that FSDP makes."""
    return _calls(plan, shape, _of_units)


def _calls(plan: ParallelPlan, shape: StepShape, *parts: Callable[["_Step"], Iterator[Call]]) -> Iterator[Call]:
    step = _Step(plan, shape)
    for part in parts:
        yield from (call for call in part(step) if plan.placement.grid.size(call.axis) > 1)


@dataclass(frozen=True)
class _Step:
    """A step of a plan, and what several of its calls ask."""

    plan: ParallelPlan
    shape: StepShape

    def layer_of(self, module: str) -> str:
        """The layer of this rank that a module is in, "" where it is in none."""
        parts = module.split(".")
        outer = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        return next((name for name in outer if name in self._layers), "")

    @cached_property
    def _layers(self) -> frozenset[str]:
        return frozenset(self.plan.placement.layers)

    def call(
        self, axis: str, kind: str, size: int, phase: Phase, layer: str, *, times: int = 1, overlaps: bool = False
    ) -> Call:
        """A call that every micro batch makes `times` times."""
        times *= self.shape.micro_batches
        return Call(axis=axis, kind=kind, bytes=size, phase=phase, layer=layer, times=times, overlaps=overlaps)

    def forwards(
        self, axis: str, kind: str, size: int, site: str, *, layer: str | None = None, is_last: bool = False,
        is_kept: bool = False, overlaps: bool = False,
    ) -> Iterator[Call]:  # fmt: skip
        """A call that every forward of the module `site` makes. A recomputed forward counts as backward. `is_kept`:
        selective recompute keeps what it gives."""
        layer = self.layer_of(site) if layer is None else layer
        yield self.call(axis, kind, size, "forward", layer, overlaps=overlaps)
        if again := self.shape.recompute.forwards(Site(site, is_last, is_kept)) - 1:
            yield self.call(axis, kind, size, "backward", layer, times=again, overlaps=overlaps)


# ---- data parallelism ------------------------------------------------------------------------------------------------


def _of_units(step: _Step) -> Iterator[Call]:
    """FSDP gathers a unit before it is used and reduce-scatters its gradients. Replicas all-reduce their shards once a
    step."""
    plan, shape = step.plan, step.shape
    counts = plan.feature(FsdpPlan).unshards(shape.micro_batches)
    for unit in filter(lambda unit: unit.parameters, plan.feature(FsdpPlan).units):
        shards, axis = plan.placement.grid.fsdp_shards(unit.over), plan.placement.grid.fsdp_axis(unit.over)
        _, reduced = plan.feature(FsdpPlan).padded_sizes(unit)
        count, layer = counts[unit.name], unit.name
        both: tuple[tuple[Phase, int], ...] = (("forward", count.forward), ("backward", count.backward))
        size = plan.feature(FsdpPlan).gathered_bytes(unit)
        for phase, times in both:
            if times:
                yield Call(
                    axis=axis, kind="all_gather", bytes=size, phase=phase, layer=layer, times=times, overlaps=True
                )
        if reduced:
            size = reduced * shape.reduce_bytes
            yield Call(
                axis=axis, kind="reduce_scatter", bytes=size, phase="backward", layer=layer, times=count.reductions,
                overlaps=True,
            )  # fmt: skip
            size = reduced // shards * shape.reduce_bytes
            yield Call(axis="dp_replicate", kind="all_reduce", bytes=size, phase="backward", layer=layer, overlaps=True)


# ---- pipeline parallelism --------------------------------------------------------------------------------------------


def _of_stages(step: _Step) -> Iterator[Call]:
    """Hidden states to the next stage, their gradients back, and the sum of a tied embedding's gradients."""
    plan, shape = step.plan, step.shape
    tokens = shape.tokens // plan.layout.tp if plan.splits_sequence else shape.tokens
    size = shape.rows * tokens * shape.hidden * shape.compute_bytes
    actions = plan.feature(PipelinePlan).schedule(shape.micro_batches).actions[plan.placement.coords.pp]
    transfers = [action for action in actions if isinstance(action, Transfer)]
    sides = {(each.way, each.of, each.stage): 0 for each in transfers}
    for each in transfers:
        sides[each.way, each.of, each.stage] += 1
    for (way, of, stage), times in sides.items():
        phase: Phase = "forward" if of == "F" else "backward"
        yield Call(axis="pp", kind=way, bytes=size, phase=phase, layer=f"stage {stage}", times=times, overlaps=True)
    if plan.tied and plan.placement.holds(plan.tied) and plan.facts.parameters[plan.tied].is_trained:
        size = plan.placement.held_bytes(plan.tied, shape.master_bytes)
        yield Call(axis="pp_ends", kind="all_reduce", bytes=size, phase="step", layer=plan.tied)


# ---- tensor parallelism ----------------------------------------------------------------------------------------------


def _of_tensor_parallel(step: _Step) -> Iterator[Call]:
    """The mappings into and out of every column/row pair, the embedding and the head; then, once a step, the sum of the
    gradients that each tp rank holds in part."""
    plan, shape = step.plan, step.shape
    partition, anatomy = plan.partition.of_layers(plan.placement.layers), plan.anatomy
    first, last = plan.placement.has_ends
    if first:
        yield from _leave(step, anatomy.embedding, is_in_block=False)
    for block in partition.tp_blocks:
        if block.owner in plan.feature(ChunkPlan).mlps:
            yield from _in_pieces(step, block)
            continue
        for entry in block.entries:
            again = plan.feature(GraphPlan).gathers_again(step.layer_of(block.row), entry, shape)
            yield from _enter(step, entry.modules[0], again=again)
        yield from _leave(step, block.row, is_last=block.is_last)
    if last:
        yield from _enter(step, anatomy.head, is_in_block=False)
    for name, groups in partition.across.items():
        yield from _across(step, name, groups)
    for axis, size in plan.summed_bytes(shape.master_bytes, plan.gradient_sums).items():
        if size:
            yield Call(axis=axis, kind="all_reduce", bytes=size, phase="step")


def _enter(step: _Step, site: str, *, is_in_block: bool = True, again: bool = False) -> Iterator[Call]:
    """Into a column: an all-gather of tokens (nothing with `+nosp`); backward sums the gradients. `again`: backward
    gathers the tokens once more, beside the products that give the gradient of what entered; that is summed beside
    those that give the gradients of weights."""
    size, layer = step.shape.hidden_bytes, step.layer_of(site) if is_in_block else site
    if step.plan.splits_sequence:
        yield from step.forwards("tp", "all_gather", size, site, layer=layer, is_last=not is_in_block)
        if again:
            yield step.call("tp", "all_gather", size, "backward", layer, overlaps=True)
        yield step.call("tp", "reduce_scatter", size, "backward", layer, overlaps=again)
    else:
        yield step.call("tp", "all_reduce", size, "backward", layer)


def _leave(step: _Step, site: str, *, is_in_block: bool = True, is_last: bool = False) -> Iterator[Call]:
    """Out of a row: partial sums are reduced; backward gathers the gradients (nothing with `+nosp`)."""
    size, layer = step.shape.hidden_bytes, step.layer_of(site) if is_in_block else site
    kind, is_last = ("reduce_scatter" if step.plan.splits_sequence else "all_reduce"), is_last or not is_in_block
    yield from step.forwards("tp", kind, size, site, layer=layer, is_last=is_last, is_kept=True)
    if step.plan.splits_sequence:
        yield step.call("tp", "all_gather", size, "backward", layer)


def _in_pieces(step: _Step, block: TPBlock) -> Iterator[Call]:
    """Into an MLP that runs in pieces, and out of it. Each piece enters once more in backward, and stops before its
    sum. Where its layer is computed again, all pieces run then too; the last one of an MLP that ends the layer does
    not."""
    plan, shape, layer = step.plan, step.shape, step.layer_of(block.row)
    split = plan.layout.tp if plan.splits_sequence else 1
    pieces, again = plan.feature(ChunkPlan).pieces(shape.tokens // split), shape.recompute.wraps(layer)
    there, back = ("all_gather", "reduce_scatter") if plan.splits_sequence else ("all_reduce", "all_reduce")
    for at, tokens in enumerate(pieces):
        size = shape.hidden_bytes // shape.tokens * tokens * split
        recomputed = int(again and not (block.is_last and at == len(pieces) - 1))
        if plan.splits_sequence:
            yield step.call("tp", there, size, "forward", layer)
            yield step.call("tp", there, size, "backward", layer, times=recomputed + 1)
            yield step.call("tp", there, size, "backward", layer)  # of the gradients of what leaves
        yield step.call("tp", back, size, "forward", layer)
        if recomputed:
            yield step.call("tp", back, size, "backward", layer)
        yield step.call("tp", back, size, "backward", layer)  # of the gradients of what enters


def _across(step: _Step, module: str, groups: FeatureGroups) -> Iterator[Call]:
    """A module that sees all features, such as a norm over all heads. Forward gathers them, padded to the widest rank;
    backward sums their gradients."""
    placement, shape = step.plan.placement, step.shape
    feature = shape.rows * shape.tokens * shape.compute_bytes  # bytes of one feature of all tokens
    shares = feature_blocks(groups, placement.layout.tp)
    widest = max(sum(stop - start for start, stop in blocks) for blocks in shares)
    layer, features = step.layer_of(module), max(part.stop for part in groups)
    yield from step.forwards("tp", "all_gather", placement.layout.tp * widest * feature, module)
    yield step.call("tp", "all_reduce", features * feature, "backward", layer)


def _of_fp8(step: _Step) -> Iterator[Call]:
    """Ranks that split a dimension of a linear agree on the largest values that its regions have, together with those
    of linears that are given the same input."""
    plan, shape = step.plan, step.shape
    if plan.feature(Fp8Plan).amax_names and shape.has_amax:
        return
    for group in plan.feature(Fp8Plan).inputs:
        first, outputs = group[0], [linear.outputs for linear in group]
        recipe = RECIPES[plan.layout.fp8]
        for product, dim, numbers in agreements(recipe, shape.rows * shape.tokens, first.inputs, outputs):
            if axis := first.axes.get(dim):
                size = numbers * shape.compute_bytes
                if product == "output":
                    yield from step.forwards(
                        axis, "all_reduce", size, first.name, is_kept=plan.feature(RecomputePlan).keeps(first.name)
                    )
                else:
                    yield step.call(axis, "all_reduce", size, "backward", step.layer_of(first.name))


def _of_loss(step: _Step) -> Iterator[Call]:
    """Two all-reduces for each chunk of N tokens, in fp32 (fp64): N largest logits; then N sums of exponentials and N
    logits of the targets. Where answers are judged, their log-probabilities need the same once before, and a sum over
    cp of one fp64 number for each answer of a micro batch."""
    if not step.plan.placement.has_ends[1]:
        return
    head = step.plan.facts.anatomy.head
    for tokens in step.shape.loss_chunks:
        size = tokens * max(4, step.shape.compute_bytes)
        times = 2 if step.shape.answers else 1
        yield step.call("tp", "all_reduce", size, "forward", head, times=times)
        yield step.call("tp", "all_reduce", 2 * size, "forward", head, times=times)
    for number in step.shape.answers:
        yield Call(axis="cp", kind="all_reduce", bytes=8 * max(1, number), phase="forward", layer=head)


# ---- context parallelism ---------------------------------------------------------------------------------------------


def _of_attention(step: _Step) -> Iterator[Call]:
    """A ring or an all-gather brings keys and values to the queries of other ranks; Ulysses exchanges heads for tokens.
    `RxU` does both."""
    plan, shape = step.plan, step.shape
    u, rings = plan.cp_method.ulysses, plan.rings(shape.tokens)
    ring_axis, ulysses_axis = ("cp" if u == 1 else "cp_ring"), ("cp" if len(rings) == 1 else "cp_ulysses")
    exchange = _gathered if plan.cp_method.gathers else _ring
    token = shape.rows * shape.compute_bytes  # bytes of one feature of one token of every row
    for name, heads in plan.attends.items():
        layer = step.layer_of(name)
        kv = max(heads.kv, u)  # key/value heads that a rank sends
        size = 2 * kv // u * heads.size * token  # keys and values of one token
        yield from exchange(step, ring_axis, name, size, rings, plan.placement.coords.cp // u)
        for features in ((heads.query + 2 * kv) * heads.size, heads.query * heads.size):
            size = features * shape.tokens * token
            yield from step.forwards(ulysses_axis, "all_to_all", size, name, is_kept=True)
            yield step.call(ulysses_axis, "all_to_all", size, "backward", layer)


def _ring(step: _Step, axis: str, site: str, size: int, tokens: Tokens, rank: int) -> Iterator[Call]:
    """Keys and values go round the ring in forward, and once more in backward, when their gradients go straight to the
    owners. `size`: bytes of the keys and values of one token."""
    for keys, gradients in ring_hops(tokens, rank):
        for kind, of_keys, of_gradients in zip(("send", "recv"), keys, gradients, strict=True):
            yield from step.forwards(axis, kind, of_keys * size, site, is_kept=True, overlaps=True)
            yield step.call(axis, kind, of_keys * size, "backward", step.layer_of(site), overlaps=True)
            yield step.call(axis, kind, of_gradients * size, "backward", step.layer_of(site), overlaps=True)


def _gathered(step: _Step, axis: str, site: str, size: int, tokens: Tokens, rank: int) -> Iterator[Call]:
    """Every rank gathers the keys and values of whole rows. One all-to-all sends their gradients to the owners."""
    whole = sum(stop - start for blocks in tokens for start, stop in blocks) * size
    yield from step.forwards(axis, "all_gather", whole, site, is_kept=True, overlaps=True)
    yield step.call(axis, "all_gather", whole, "backward", step.layer_of(site), overlaps=True)
    yield step.call(axis, "all_to_all", whole, "backward", step.layer_of(site), overlaps=True)


# ---- experts ---------------------------------------------------------------------------------------------------------


def _of_experts(step: _Step) -> Iterator[Call]:
    """Tokens go to the ranks of their experts, and the results come back.

    The bytes of the all-to-alls assume balanced routing. They are exact only when summed over ranks.
    """
    plan, shape = step.plan, step.shape
    layout = plan.layout
    for each in plan.experts:
        layer = step.layer_of(each.name)
        tokens = shape.rows * shape.tokens // (1 if layout.expert_tp else layout.tp)
        rows = tokens * each.top_k * shape.hidden * shape.compute_bytes
        yield from step.forwards("ep", "all_to_all", each.experts * 8, each.name, is_kept=True)  # how many rows come
        for _ in ("there", "back"):
            yield from step.forwards("ep", "all_to_all", rows, each.name, is_kept=True)
            yield step.call("ep", "all_to_all", rows, "backward", layer)
        if layout.expert_tp:
            yield from _summed_over_tp(step, each, layer)
        elif not plan.splits_sequence:
            yield from _shared_over_tp(step, each, layer)


def _summed_over_tp(step: _Step, experts: Experts, layer: str) -> Iterator[Call]:
    """With `expert_tp`: the tokens that enter, their gradients, and the sum over tp. A recomputed forward stops before
    the sum if nothing follows it in the layer."""
    shape, site = step.shape, experts.name
    tokens, hidden = shape.rows * shape.tokens, shape.hidden_bytes
    weights = tokens * experts.top_k * max(4, shape.compute_bytes)
    if not step.plan.splits_sequence:
        yield from step.forwards("tp", "all_reduce", hidden, site, is_last=experts.is_last, is_kept=True)
        yield step.call("tp", "all_reduce", hidden, "backward", layer)
        yield step.call("tp", "all_reduce", weights, "backward", layer)
        return
    for size in (hidden, weights, tokens * experts.top_k * 8):  # the last: which experts, int64
        yield from step.forwards("tp", "all_gather", size, site)
    yield step.call("tp", "all_gather", hidden, "backward", layer)
    yield from step.forwards("tp", "reduce_scatter", hidden, site, is_last=experts.is_last, is_kept=True)
    yield step.call("tp", "reduce_scatter", hidden, "backward", layer)
    yield step.call("tp", "reduce_scatter", weights, "backward", layer)


def _shared_over_tp(step: _Step, experts: Experts, layer: str) -> Iterator[Call]:
    """With `+nosp` all tp ranks have the same tokens. Each sends its share of them, and the results are gathered,
    padded to the longest share."""
    shape, tp = step.shape, step.plan.layout.tp
    longest = -(-shape.rows * shape.tokens // tp) * tp
    rows = longest * shape.hidden * shape.compute_bytes
    yield from step.forwards("tp", "all_gather", rows, experts.name, is_last=experts.is_last, is_kept=True)
    yield step.call("tp", "all_gather", rows, "backward", layer)
    yield step.call("tp", "all_gather", longest * experts.top_k * max(4, shape.compute_bytes), "backward", layer)


def _of_routers(step: _Step) -> Iterator[Call]:
    """One all-reduce a step sums the counts of all routers. If the tokens of a row lie on several ranks (sequence or
    context parallelism), a loss for uneven load or a capacity also needs a collective for each router."""
    plan, shape = step.plan, step.shape
    if not plan.watches_routers:
        return
    numbers = sum(router_numbers(each) for each in plan.facts.experts)
    yield Call(axis="world", kind="all_reduce", bytes=8 * numbers, phase="step")
    axes = [*([("tp", plan.layout.tp)] if plan.splits_sequence else []), ("cp", plan.layout.cp)]
    for each in plan.experts:
        for axis, _ in axes if shape.balances_load else ():
            yield from step.forwards(axis, "all_reduce", 8 * shape.rows * each.experts, each.name)
        size = 8 * shape.rows * each.experts * _slots(plan, shape)
        for axis, ranks in axes if shape.has_capacity else ():
            size *= ranks
            yield from step.forwards(axis, "all_gather", size, each.name)


def router_numbers(experts: Experts) -> int:
    """Numbers counted for one router: tokens of each expert, two losses, dropped picks."""
    return experts.experts + 3


def _slots(plan: ParallelPlan, shape: StepShape) -> int:
    """The most blocks of a row that a rank has."""
    cp, tp = plan.layout.cp, plan.layout.tp if plan.splits_sequence else 1
    return max(map(len, tokens_by_rank(shape.tokens * cp, cp, tp)))


# ---- once a step -----------------------------------------------------------------------------------------------------


def _of_world(step: _Step) -> Iterator[Call]:
    """Counts of tokens before the passes, and the largest values of weights that travel in fp8, where no history says
    them; the largest values of linears with a history, the loss and the gradients' norm after them. Where answers are
    judged, their pairs are counted before, and the means of each metric taken after."""
    plan = step.plan
    judged = (8, 8 + 16 * step.shape.metrics) if step.shape.answers else ()
    weights = 0 if plan.feature(Fp8Plan).amax_names and step.shape.has_amax else 8 * len(plan.feature(Fp8Plan).gathers)
    amax = 8 * len(KINDS) * len(plan.feature(Fp8Plan).amax_names)
    for size in filter(None, (40, *judged, weights, amax, 16)):
        yield Call(axis="world", kind="all_reduce", bytes=size, phase="step")


def _of_full_matrices(step: _Step) -> Iterator[Call]:
    """Muon: all-to-alls put each matrix together on one rank, and send the shards of its update back."""
    placement, optimizer = step.plan.placement, OPTIMIZERS[step.shape.optimizer]
    for each in matrix_rounds(placement, placement.block_matrices if optimizer.of_matrices is not None else ()):
        for numbers in each.numbers:
            size = numbers * step.shape.compute_bytes
            yield Call(axis="world", kind="all_to_all", bytes=size, phase="step")


IN_LAYERS = (_of_tensor_parallel, _of_fp8, _of_loss, _of_attention, _of_experts, _of_routers)
