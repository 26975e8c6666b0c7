"""Tensor parallelism: what is done to modules, and what ranks send. No torch."""

from collections.abc import Iterator

from fivefold.models.facts import FeatureGroups
from fivefold.parallel.chunks import spec as chunks
from fivefold.parallel.chunks.spec import ChunkPlan
from fivefold.parallel.collectives import Call
from fivefold.parallel.edits import Edit
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.shard_rules import feature_blocks
from fivefold.parallel.step import Step


def calls(step: Step) -> Iterator[Call]:
    """The mappings into and out of every column/row pair, the embedding and the head; then, once a step, the sum of the
    gradients that each tp rank holds in part."""
    plan, shape = step.plan, step.shape
    partition, anatomy = plan.partition.of_layers(plan.placement.layers), plan.anatomy
    first, last = plan.placement.has_ends
    if first:
        yield from _leave(step, anatomy.embedding, is_in_block=False)
    for block in partition.tp_blocks:
        if block.owner in plan.feature(ChunkPlan).mlps:
            yield from chunks.calls(step, block)
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


def _enter(step: Step, site: str, *, is_in_block: bool = True, again: bool = False) -> Iterator[Call]:
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


def _leave(step: Step, site: str, *, is_in_block: bool = True, is_last: bool = False) -> Iterator[Call]:
    """Out of a row: partial sums are reduced; backward gathers the gradients (nothing with `+nosp`)."""
    size, layer = step.shape.hidden_bytes, step.layer_of(site) if is_in_block else site
    kind, is_last = ("reduce_scatter" if step.plan.splits_sequence else "all_reduce"), is_last or not is_in_block
    yield from step.forwards("tp", kind, size, site, layer=layer, is_last=is_last, is_kept=True)
    if step.plan.splits_sequence:
        yield step.call("tp", "all_gather", size, "backward", layer)


def _across(step: Step, module: str, groups: FeatureGroups) -> Iterator[Call]:
    """A module that sees all features, such as a norm over all heads. Forward gathers them, padded to the widest rank;
    backward sums their gradients."""
    placement, shape = step.plan.placement, step.shape
    feature = shape.rows * shape.tokens * shape.compute_bytes  # bytes of one feature of all tokens
    shares = feature_blocks(groups, placement.layout.tp)
    widest = max(sum(stop - start for start, stop in blocks) for blocks in shares)
    layer, features = step.layer_of(module), max(part.stop for part in groups)
    yield from step.forwards("tp", "all_gather", placement.layout.tp * widest * feature, module)
    yield step.call("tp", "all_reduce", features * feature, "backward", layer)


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Parameters are cut, and tokens or partial sums pass between ranks."""
    if plan.layout.tp == 1:
        return
    anatomy, partition = plan.anatomy, plan.partition
    for name, spec in plan.placement.shards.items():
        if spec.splits and spec.over == "tp":
            module, _, leaf = name.rpartition(".")
            yield Edit(module, "cut", "tp", f"{leaf}: {partition.roles[name].reason}")
    yield Edit(anatomy.embedding, "forward", "tp", "looks up the ids of its own rows; partial sums added")
    yield Edit(partition.to_logits, "pre-hook", "tp", "all tokens enter it")
    yield Edit(anatomy.head, "hook", "tp", "logits of the whole vocabulary leave it")
    yield Edit(anatomy.base, "pre-hook", "tp", "positions are those of the whole sequence")
    for block in partition.tp_blocks:
        for entry in block.entries if block.owner not in plan.feature(ChunkPlan).mlps else ():
            for module in entry.modules:
                yield Edit(module, "pre-hook", "tp", "all tokens enter it")
        yield Edit(block.row, "forward", "tp", "partial sums are added up, then the bias")
        if block.heads:
            yield Edit(block.owner, "attribute", "tp", "counts this rank's heads")
    for module in partition.across:
        yield Edit(module, "forward", "tp", "all features are gathered for it")
