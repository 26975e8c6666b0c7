"""Collectives as data: those that a plan declares for a step, and those that a run sent. No torch.

`features.py` lists every call of a step, `mesh.record` observes the dispatcher; a test compares the sums of the two.
Bytes are those of the larger buffer, the gathered or the unreduced one, on one rank. For an all-to-all they are what
the rank sends; for a `send` or `recv` between two ranks, the message.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fivefold.core.optimizers import OPTIMIZERS, OptimizerFacts
from fivefold.parallel.ranks import RankGrid
from fivefold.parallel.recompute.policy import Recompute, Site

Phase = Literal["forward", "backward", "step"]
CACHE_BYTES, MOST_BYTES = 8 * 2**20, 2**30  # fp32 logits of one chunk under `loss_chunks: auto`


@dataclass(frozen=True, kw_only=True)
class Call:
    """One place of a step that communicates: `times` equal collectives, of `bytes` each.

    `phase`: forward; backward, including recompute; or once a step, after all of them. `layer`: the one that sends, or
    the module outside of layers, or "". `overlaps`: it can overlap compute.
    """

    axis: str
    kind: str
    bytes: int
    phase: Phase
    layer: str = ""
    times: int = 1
    overlaps: bool = False


@dataclass(frozen=True, order=True)
class Collective:
    """`count` collectives of one kind over one mesh axis, `bytes` in all, per rank and optimizer step."""

    axis: str
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The sizes of an optimizer step, which determine its collectives (`features.py`) and its memory (`memory.py`).

    `rows` x `tokens`: a cp rank's part of a micro batch. `loss_chunks`: the tokens of each chunk of the loss.
    `..._bytes`: bytes of one number. `compiled`: layers are compiled. `gathers_again`: compiled layers may gather the
    input of a column again in backward, because no schedule defers weight gradients. `balances_load`: routers have a
    loss for uneven load. `answers`: the number of judged answers in the loss of each micro batch, none for an objective
    without them; `metrics`: the number of metrics of such an objective. `has_capacity`: experts have a capacity.
    `whole_logits`: a loss of the user's own has the logits of the whole vocabulary on every rank of tp.
    `has_history`: scales of matmuls that follow from earlier steps have some. `documents`: bounds of the documents in
    the whole rows of each micro batch (`cu_seqlens`), on which it depends what a ring sends; none: each row is one
    document, with which it sends the most. Example: 2 rows of 4096 tokens under cp2 are `rows` 2 and `tokens` 2048.
    """

    rows: int
    tokens: int
    hidden: int
    micro_batches: int
    loss_chunks: tuple[int, ...]
    compute_bytes: int
    master_bytes: int
    reduce_bytes: int
    recompute: Recompute
    optimizer: OptimizerFacts = OPTIMIZERS["adamw"]
    compiled: bool = False
    gathers_again: bool = False
    balances_load: bool = False
    has_capacity: bool = False
    answers: tuple[int, ...] = ()
    metrics: int = 0
    whole_logits: bool = False
    has_history: bool = True
    documents: tuple[tuple[int, ...], ...] = ()

    @property
    def hidden_bytes(self) -> int:
        return self.rows * self.tokens * self.hidden * self.compute_bytes

    def forwards(self, module: str, *, is_last: bool = False, is_kept: bool = False) -> int:
        """Number of times that a module runs forward in a micro batch (see `Site`)."""
        return self.recompute.forwards(Site(module, is_last, is_kept))


def chunk_sizes(tokens: int, vocabulary: int, hidden: int, loss_chunks: int | None) -> tuple[int, ...]:
    """Tokens of each chunk, for `tokens` of one micro batch.

    `loss_chunks` None: chunks whose fp32 logits stay in cache (`CACHE_BYTES`), but at least 4 * hidden tokens each,
    because every chunk accumulates a gradient of [vocabulary, hidden]; and never more logits than `MOST_BYTES`.
    """
    row = 4 * vocabulary
    most = max(1, min(max(CACHE_BYTES // row, 4 * hidden), MOST_BYTES // row))
    chunks = loss_chunks or -(-tokens // most)
    size = -(-tokens // min(chunks, tokens))
    return tuple(min(size, tokens - start) for start in range(0, tokens, size))


def total(parts: Iterable[Collective]) -> tuple[Collective, ...]:
    """Sum by (axis, kind), dropping empty rows."""
    counts: Counter[tuple[str, str]] = Counter()
    volume: Counter[tuple[str, str]] = Counter()
    for part in parts:
        counts[part.axis, part.kind] += part.count
        volume[part.axis, part.kind] += part.bytes
    return tuple(
        Collective(axis, kind, counts[axis, kind], volume[axis, kind])
        for axis, kind in sorted(counts)
        if counts[axis, kind]
    )


def summed(calls: Iterable[Call]) -> tuple[Collective, ...]:
    return total(Collective(call.axis, call.kind, call.times, call.times * call.bytes) for call in calls)


def by_group(declared: Iterable[Collective], grid: RankGrid) -> tuple[Collective, ...]:
    """Rename declared collectives as a recording names them: an axis that spans the world is the world."""
    return total(
        Collective("world", c.kind, c.count, c.bytes) if c.axis != "world" and grid.spans_world(c.axis) else c
        for c in declared
    )


def differing(ran: Sequence[Sequence[Collective]], declared: Sequence[Sequence[Collective]]) -> list[str]:
    """Names of the collectives that ran differently than declared, given both for every rank: kind, count, bytes.

    Bytes of all-to-alls are compared in their sum over ranks, because one rank's part depends on where tokens go.
    """
    wrong: set[str] = set()
    for found, expected in zip(ran, declared, strict=True):
        wrong |= {f"{axis}/{kind}" for axis, kind, *_ in set(map(_fixed, found)) ^ set(map(_fixed, expected))}
    sums: Counter[str] = Counter()
    for calls, sign in [*((calls, 1) for calls in ran), *((calls, -1) for calls in declared)]:
        for row in calls:
            sums[f"{row.axis}/{row.kind}"] += sign * row.bytes
    return sorted(wrong | {name for name, difference in sums.items() if difference})


def _fixed(row: Collective) -> tuple[str, str, int, int]:
    """The values that must be equal on each rank."""
    return row.axis, row.kind, row.count, 0 if row.kind == "all_to_all" else row.bytes
