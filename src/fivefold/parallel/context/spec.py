"""Context parallelism: edits of modules, collectives between ranks, and bytes of a layer. No torch."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.core.model_limits import ModelLimits
from fivefold.models.facts import AttentionShape, ModelFacts
from fivefold.parallel.collectives import Call
from fivefold.parallel.context.ring import SharedRows, hops, tokens_of
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.ranks import Tokens
from fivefold.parallel.step import LayerNumbers, LayerStep, Step


def limited(limits: ModelLimits, facts: ModelFacts) -> ModelLimits:
    """Add the heads that attention sees."""
    attends = facts.attends.values()
    fewest = (min(heads.query for heads in attends), min(heads.kv for heads in attends)) if attends else None
    return replace(limits, attended=fewest)


def calls(step: Step) -> Iterator[Call]:
    """Collectives of attention. A ring or an all-gather brings keys and values to the queries of other ranks; Ulysses
    exchanges heads for tokens. `RxU` does both."""
    plan, shape = step.plan, step.shape
    u, rings = plan.cp_method.ulysses, plan.rings(shape.tokens)
    ring_axis, ulysses_axis = ("cp" if u == 1 else "cp_ring"), ("cp" if len(rings) == 1 else "cp_ulysses")
    token = shape.rows * shape.compute_bytes  # bytes of one feature of one token of every row
    for name, heads in plan.attends.items():
        layer = step.layer_of(name)
        kv = max(heads.kv, u)  # key/value heads that a rank sends
        size = 2 * kv // u * heads.size * shape.compute_bytes  # keys and values of one token
        if plan.cp_method.gathers:
            yield from _gathered(step, ring_axis, name, size * shape.rows, rings)
        else:
            yield from _ring(step, ring_axis, name, size, rings, heads)
        for features in ((heads.query + 2 * kv) * heads.size, heads.query * heads.size):
            size = features * shape.tokens * token
            yield from step.forwards(ulysses_axis, "all_to_all", size, name, is_kept=True)
            yield step.call(ulysses_axis, "all_to_all", size, "backward", layer)


def _ring(step: Step, axis: str, site: str, size: int, tokens: Tokens, heads: AttentionShape) -> Iterator[Call]:
    """Calls of a ring. Keys and values go round in forward, and once more in backward, when their gradients go back.
    Nothing is sent where no query attends. `size`: bytes of the keys and values of one token."""
    plan, layer = step.plan, step.layer_of(site)
    rank = plan.placement.coords.cp // plan.cp_method.ulysses
    length = sum(stop - start for blocks in tokens for start, stop in blocks)
    if not step.shape.documents:  # chunks count from where documents begin, which may be anywhere: at most as a window
        heads = replace(heads, window=heads.window or heads.chunk, chunk=None)
    for part, edges, rows in _by_documents(step, length):
        for hop in hops(SharedRows(tokens, edges, heads.window, heads.chunk), rank):
            for kind, back, pieces in (("send", "recv", hop.sent), ("recv", "send", hop.received)):
                if of_hop := tokens_of(pieces) * rows * size:
                    yield from part.forwards(axis, kind, of_hop, site, is_kept=True, overlaps=True)
                    yield part.call(axis, kind, of_hop, "backward", layer, overlaps=True)
                    yield part.call(axis, back, of_hop, "backward", layer, overlaps=True)


def _by_documents(step: Step, length: int) -> Iterator[tuple[Step, tuple[int, ...], int]]:
    """Yield the micro batches that have the same documents: (a step of these alone, bounds of the documents, rows for
    each row that the bounds are of). Where the documents are not known, one row of one document stands for all."""
    shape = step.shape
    if not shape.documents:
        yield step, (0, length), shape.rows
    for edges, times in Counter(shape.documents).items():
        yield Step(step.plan, replace(shape, documents=(edges,) * times, micro_batches=times)), edges, 1


def _gathered(step: Step, axis: str, site: str, size: int, tokens: Tokens) -> Iterator[Call]:
    """Calls of an all-gather of keys and values of whole rows. One all-to-all sends their gradients to the owners.
    `size`: bytes of the keys and values of one token of every row."""
    whole = sum(stop - start for blocks in tokens for start, stop in blocks) * size
    yield from step.forwards(axis, "all_gather", whole, site, is_kept=True, overlaps=True)
    yield step.call(axis, "all_gather", whole, "backward", step.layer_of(site), overlaps=True)
    yield step.call(axis, "all_to_all", whole, "backward", step.layer_of(site), overlaps=True)


@dataclass(frozen=True)
class CutRows(Edit):
    """Cut whole rows to this rank's tokens."""

    kind = "pre-hook"


@dataclass(frozen=True)
class WholeRows(Edit):
    """Gather the logits of whole rows behind the head."""

    kind = "hook"


@dataclass(frozen=True)
class Exchange(Edit):
    """Let an attention module exchange keys and values, or heads, with other ranks."""

    kind = "attribute"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Cut rows, and let attention communicate."""
    if plan.layout.cp == 1:
        return
    anatomy = plan.anatomy
    yield CutRows(anatomy.base, "cp", "whole rows become this rank's tokens")
    yield WholeRows(anatomy.head, "cp", "logits of whole rows leave it")
    for module in plan.facts.attends:
        yield Exchange(module, "cp", "attention exchanges keys and values, or heads")


# ---- bytes ---------------------------------------------------------------------------------------------------------


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Add the elements that an exchange of heads saves, and those that the backward of attention has at once if keys
    and values come from other ranks."""
    exchanged = _exchanged(step)
    gradients = max(numbers.gradients, _received(step))
    return replace(numbers, saved=numbers.saved + exchanged, exchanged=exchanged, gradients=gradients)


def _exchanged(step: LayerStep) -> float:
    """Elements that Ulysses saves in addition: keys and values once more, and the output of attention before it goes
    back to the ranks of its tokens."""
    if step.plan.cp_method.ulysses == 1:
        return 0.0
    sizes = (heads.query * heads.value_size + _kv_size(heads) for heads in step.cost.attention)
    return sum(sizes) / step.plan.layout.tp


def _received(step: LayerStep) -> float:
    """Elements that the backward of attention has at once: its own gradients in fp32; the received keys and values, of
    one rank in a ring or of all ranks, with their gradients in fp32; and those gradients in transit, sent and received.
    In a ring the next keys and values are arriving."""
    method = step.plan.cp_method
    if method.ring == 1:
        return 0.0
    wide = max(4, step.shape.compute_bytes) / step.shape.compute_bytes
    queries = sum(heads.query * heads.key_size for heads in step.cost.attention)
    keys = sum(map(_kv_size, step.cost.attention))
    received = method.ring * (3 + wide) if method.gathers else 4 + wide
    return ((queries + keys) * wide + keys * received) / step.plan.layout.tp


def _kv_size(heads: AttentionShape) -> int:
    """Features of the keys and values of one token."""
    return heads.kv * (heads.key_size + heads.value_size)
