"""Context parallelism: edits of modules, collectives between ranks, and bytes of a layer. No torch."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from fivefold.core.model_limits import ModelLimits
from fivefold.models.facts import AttentionShape, ModelFacts
from fivefold.parallel.collectives import Call
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.ranks import Blocks, Tokens
from fivefold.parallel.step import LayerNumbers, LayerStep, Step

# ---- messages of a ring ----------------------------------------------------------------------------------------------
#
# A key goes to the ranks whose queries attend to it. Rows are cut by their length alone (`row_blocks`), and attention
# goes over the edge of a block only in the document that the edge cuts, under a sliding window for a few tokens. So a
# document within a block stays on one rank, one over one edge is sent to one rank, and long ones go round. The runtime
# sends, and the declared calls count, the pieces that `hops` lists. Both ends of a hop list them alike.
#
# Example: 16 tokens over 2 ranks, (0, 4) and (12, 16) on the first, (4, 12) on the second. Documents of 6 and 10 tokens
# are cut at 4 and at 12: the second rank gets the keys 0 to 3, and the first one gets 6 to 11. Documents of 4, 8 and 4
# tokens are not cut, and nothing is sent.

Piece = tuple[int, int, int]  # (row, start, stop) of tokens of a row, by their places among those that a rank has
Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class SharedRows:
    """Rows whose tokens the ranks of a group share, and what a query of them sees.

    `tokens`: the blocks of a row that each rank has. `edges`: bounds of the documents over the tokens of all rows
    (`cu_seqlens`). `window`, `chunk`: of the attention (`attention.Mask`).
    """

    tokens: Tokens
    edges: tuple[int, ...]
    window: int | None = None
    chunk: int | None = None

    @cached_property
    def length(self) -> int:
        return sum(stop - start for blocks in self.tokens for start, stop in blocks)

    @property
    def count(self) -> int:
        return self.edges[-1] // self.length


@dataclass(frozen=True)
class Hop:
    """Pieces whose keys and values a rank of a ring sends and receives in a hop. Their gradients go the other way."""

    sent: Pieces
    received: Pieces


@lru_cache(maxsize=64)
def hops(rows: SharedRows, rank: int) -> tuple[Hop, ...]:
    """The hops of a rank: in hop s, from 1, it sends to the rank s places before it what that one attends to, and
    receives of the rank s places behind it."""
    tokens, size = rows.tokens, len(rows.tokens)
    return tuple(
        Hop(
            _pieces(rows, tokens[rank], tokens[(rank - step) % size]),
            _pieces(rows, tokens[(rank + step) % size], tokens[rank]),
        )
        for step in range(1, size)
    )


def tokens_of(pieces: Pieces) -> int:
    return sum(stop - start for _, start, stop in pieces)


def width(pieces: Pieces) -> int:
    """Tokens of a row that hold all pieces, counted from the first that a rank has."""
    return max((stop for _, _, stop in pieces), default=0)


def _pieces(rows: SharedRows, keys: Blocks, queries: Blocks) -> Pieces:
    """Keys that blocks of `queries` see of the blocks of `keys` before them: the end of each. Of several blocks behind
    one, the first sees the earliest keys."""
    found, length = [], rows.length
    for row in range(rows.count):
        at = 0
        for start, stop in keys:
            query = min((first for first, _ in queries if first >= stop), default=None)
            if query is not None:
                seen = max(start, _first_seen(rows, row * length + query) - row * length)
                if seen < stop:
                    found.append((row, at + seen - start, at + stop - start))
            at += stop - start
    return tuple(found)


def _first_seen(rows: SharedRows, query: int) -> int:
    """The first token that a query sees, both counted over all rows."""
    first = rows.edges[bisect_right(rows.edges, query) - 1]
    if rows.chunk is not None:
        first += (query - first) // rows.chunk * rows.chunk
    return first if rows.window is None else max(first, query - rows.window + 1)


# ---- limits and calls ------------------------------------------------------------------------------------------------


def limited(limits: ModelLimits, facts: ModelFacts) -> ModelLimits:
    attends = facts.attends.values()
    fewest = (min(heads.query for heads in attends), min(heads.kv for heads in attends)) if attends else None
    return replace(limits, attended=fewest)


def calls(step: Step) -> Iterator[Call]:
    """Collectives of attention: a ring or an all-gather of keys and values, heads for tokens (Ulysses), or both."""
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
    kind = "pre-hook"


@dataclass(frozen=True)
class WholeRows(Edit):
    kind = "hook"


@dataclass(frozen=True)
class ExchangeKV(Edit):
    kind = "attribute"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    if plan.layout.cp == 1:
        return
    anatomy = plan.anatomy
    yield CutRows(anatomy.base, "cp", "whole rows become this rank's tokens")
    yield WholeRows(anatomy.head, "cp", "logits of whole rows leave it")
    for module in plan.facts.attends:
        yield ExchangeKV(module, "cp", "attention exchanges keys and values, or heads")


# ---- bytes ---------------------------------------------------------------------------------------------------------


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Add the elements that an exchange of heads saves, and those that the backward of attention has at once if keys
    and values come from other ranks."""
    exchanged = _exchanged(step)
    gradients = max(numbers.gradients, _received(step))
    return replace(numbers, saved=numbers.saved + exchanged, exchanged=exchanged, gradients=gradients)


def _exchanged(step: LayerStep) -> float:
    """Elements that Ulysses saves more: keys and values once more, and attention's output before its way back."""
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
    return heads.kv * (heads.key_size + heads.value_size)
