"""Tensor parallelism: edits of modules, collectives between ranks, and elements that a rank saves. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from fivefold.core.model_limits import ModelLimits
from fivefold.models.anatomy import is_within
from fivefold.models.facts import FeatureGroups, ModelFacts, Partition, TPBlock, TPInput
from fivefold.parallel.collectives import Call
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.shard_rules import feature_blocks
from fivefold.parallel.sharding import Block
from fivefold.parallel.step import LayerNumbers, LayerStep, Step


def limited(limits: ModelLimits, facts: ModelFacts) -> ModelLimits:
    """Add the heads that ranks share, and the reasons why a model cannot be split."""
    partition = facts.partition
    counts = tuple(zip(*partition.heads, strict=True)) if not partition.refusal else ()
    query, kv = (gcd(*heads) for heads in counts) if counts else (None, None)  # layers may differ: tp fits all of them
    limits = replace(limits, query=query, kv=kv, fused=_fused(partition))
    return limits.refusing({"tp": partition.refusal, "sequence_parallel": partition.sequence_parallel_refusal})


def _fused(partition: Partition) -> str | None:
    """Parameter that makes query heads and key/value heads at once, if any."""
    fused = (name for name, role in partition.roles.items() if {"query", "kv"} <= {p.owner for p in role.groups or ()})
    return next(fused, None)


def calls(step: Step) -> Iterator[Call]:
    """Mappings of every column/row pair, the embedding and the head; once a step, sums of partial gradients."""
    plan, shape = step.plan, step.shape
    partition, anatomy = plan.partition.of_layers(plan.placement.layers), plan.anatomy
    first, last = plan.placement.has_ends
    if first:
        yield from _leave(step, anatomy.embedding, is_in_block=False)
    for block in partition.tp_blocks:
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


def _enter(step: Step, site: str, *, is_in_block: bool = True, again: bool = False) -> Iterator[Call]:
    """Calls into a column: an all-gather of tokens (nothing with `+nosp`); backward sums the gradients. `again`:
    backward gathers the tokens once more, overlapping the matmuls of the input gradient. The sum of that gradient
    overlaps the matmuls of the weight gradients."""
    size, layer = step.shape.hidden_bytes, step.layer_of(site) if is_in_block else site
    if step.plan.splits_sequence:
        yield from step.forwards("tp", "all_gather", size, site, layer=layer, is_last=not is_in_block)
        if again:
            yield step.call("tp", "all_gather", size, "backward", layer, overlaps=True)
        yield step.call("tp", "reduce_scatter", size, "backward", layer, overlaps=again)
    else:
        yield step.call("tp", "all_reduce", size, "backward", layer)


def _leave(step: Step, site: str, *, is_in_block: bool = True, is_last: bool = False) -> Iterator[Call]:
    """Calls out of a row: partial sums are reduced; backward gathers the gradients (nothing with `+nosp`)."""
    size, layer = step.shape.hidden_bytes, step.layer_of(site) if is_in_block else site
    kind, is_last = ("reduce_scatter" if step.plan.splits_sequence else "all_reduce"), is_last or not is_in_block
    yield from step.forwards("tp", kind, size, site, layer=layer, is_last=is_last, is_kept=True)
    if step.plan.splits_sequence:
        yield step.call("tp", "all_gather", size, "backward", layer)


def _across(step: Step, module: str, groups: FeatureGroups) -> Iterator[Call]:
    """Calls of a module that sees all features: forward gathers them, padded; backward sums their gradients."""
    placement, shape = step.plan.placement, step.shape
    feature = shape.rows * shape.tokens * shape.compute_bytes  # bytes of one feature of all tokens
    shares = feature_blocks(groups, placement.layout.tp)
    widest = max(sum(stop - start for start, stop in blocks) for blocks in shares)
    layer, features = step.layer_of(module), max(part.stop for part in groups)
    yield from step.forwards("tp", "all_gather", placement.layout.tp * widest * feature, module)
    yield step.call("tp", "all_reduce", features * feature, "backward", layer)


# ---- edits of modules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut(Edit):
    kind = "cut"
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Lookup(Edit):
    """Look up the ids of this rank's own `rows` in the embedding; partial results are summed."""

    kind = "forward"
    rows: Block


@dataclass(frozen=True)
class EnterHead(Edit):
    """Give all tokens to the head, or to the module that changes hidden states for it."""

    kind = "pre-hook"


@dataclass(frozen=True)
class WholeVocabulary(Edit):
    kind = "hook"


@dataclass(frozen=True)
class Positions(Edit):
    kind = "pre-hook"


@dataclass(frozen=True)
class Enter(Edit):
    """Give all tokens to a module; those of one `entry` share them. `gathers_again`: in backward, saving none."""

    kind = "pre-hook"
    entry: TPInput
    gathers_again: bool


@dataclass(frozen=True)
class CountHeads(Edit):
    kind = "attribute"
    block: TPBlock


@dataclass(frozen=True)
class AllFeatures(Edit):
    """Gather all features of a split projection for a module, such as a norm over all heads."""

    kind = "forward"
    blocks: tuple[tuple[Block, ...], ...]


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    if plan.layout.tp == 1:
        return
    anatomy, partition, rank = plan.anatomy, plan.partition, plan.placement.coords.tp
    for name, spec in plan.placement.shards.items():
        if spec.splits and spec.over == "tp":
            module, _, leaf = name.rpartition(".")
            yield Cut(module, "tp", f"{leaf}: {partition.roles[name].reason}", name, spec.local_shape(rank))
    rows = plan.placement.shards[anatomy.embedding_weight].held[rank][0][0]
    yield Lookup(anatomy.embedding, "tp", "looks up the ids of its own rows; partial sums added", rows)
    yield EnterHead(partition.to_logits, "tp", "all tokens enter it")
    yield WholeVocabulary(anatomy.head, "tp", "logits of the whole vocabulary leave it")
    yield Positions(anatomy.base, "tp", "positions are those of the whole sequence")
    for block in partition.tp_blocks:
        for entry in block.entries:
            again = _gathers_again(plan, block, entry)
            for module in entry.modules:
                yield Enter(module, "tp", "all tokens enter it", entry, again)
        if block.heads:
            yield CountHeads(block.owner, "tp", "counts this rank's heads", block)
    for module, groups in partition.across.items():
        blocks = feature_blocks(groups, plan.layout.tp)
        yield AllFeatures(module, "tp", "all features are gathered for it", blocks)


def _gathers_again(plan: ParallelPlan, block: TPBlock, entry: TPInput) -> bool:
    layer = next((name for name in plan.placement.layers if is_within(block.row, [name])), None)
    shape = plan.step_shape(1, plan.layout.cp, 1)  # its sizes do not matter
    return layer is not None and plan.feature(GraphPlan).gathers_again(layer, entry, shape)


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Add the elements that the modules of a layer save on one of the tp ranks, which may be the only one.

    If backward gathers the inputs of all column/row pairs again, forward saves none of them: backward recomputes this
    rank's tokens from what the preceding norm saves, and has the gathered input.
    """
    layout, made = step.plan.layout, step.cost.kept(step.shape.compute_bytes, compiled=step.shape.compiled)
    gathered = 0
    if _gathers_all_again(step):
        made, gathered = replace(made, entered=0.0), step.shape.hidden
    saved = made.on_rank(layout.tp, sequence_parallel=step.plan.splits_sequence, expert_tp=layout.expert_tp)
    return replace(numbers, saved=numbers.saved + saved, gathered=numbers.gathered + gathered)


def _gathers_all_again(step: LayerStep) -> bool:
    """True if backward gathers the inputs of all column/row pairs of a layer again."""
    plan, graphs = step.plan, step.plan.feature(GraphPlan)
    blocks = (block for block in plan.facts.partition.tp_blocks if is_within(block.row, [step.name]))
    entries = [entry for block in blocks for entry in block.entries]
    return bool(entries) and all(graphs.gathers_again(step.name, entry, step.shape) for entry in entries)
