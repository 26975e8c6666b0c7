"""Collectives as data: what a fold declares, and what a run issued.

Each fold declares its collectives beside the code that issues them (`declare` in data.py, tensor.py, loss.py,
full_matrix.py, training/step.py). `record` observes the dispatcher; a test holds the two equal. Bytes are those of the
larger buffer, the gathered or the unreduced one, on one rank; of an all-to-all, of what the rank sends; of a `send` or
`recv` between two ranks, of the message.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fivefold.core.recompute import Recompute
from fivefold.parallel.mesh import Mesh
from fivefold.torch_internals import TorchDispatchMode, group_among


@dataclass(frozen=True, order=True)
class Collective:
    """`count` collectives of one kind over one mesh axis, `bytes` in all, per rank and optimizer step."""

    axis: str
    kind: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What the folds need to know of an optimizer step to declare their collectives.

    `rows` x `tokens` is what a rank of cp has of a micro batch, `loss_rows` the tokens of each loss chunk; sizes in
    bytes.
    """

    rows: int
    tokens: int
    hidden: int
    micro_batches: int
    loss_chunks: tuple[int, ...]
    compute_bytes: int
    master_bytes: int
    reduce_bytes: int
    zero: int
    sequence_parallel: bool
    recompute: Recompute

    @property
    def hidden_bytes(self) -> int:
        """One micro batch's hidden states over all tokens."""
        return self.rows * self.tokens * self.hidden * self.compute_bytes


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


def by_group(declared: Iterable[Collective], mesh: Mesh) -> tuple[Collective, ...]:
    """Declared collectives under the names a recording gives them: an axis that spans the world is the world."""
    spanning = mesh.spanning_axes
    return total(Collective("world", c.kind, c.count, c.bytes) if c.axis in spanning else c for c in declared)


def differing(ran: Sequence[Sequence[Collective]], declared: Sequence[Sequence[Collective]]) -> list[str]:
    """What ran otherwise than declared, given both of every rank: kind, count and bytes on each.

    The bytes of all-to-alls are held equal in their sum over ranks: what one sends depends on where tokens go.
    """
    wrong: set[str] = set()
    for found, expected in zip(ran, declared, strict=True):
        wrong |= {f"{axis}/{kind}" for axis, kind, *_ in set(map(_fixed, found)) ^ set(map(_fixed, expected))}
    sums: Counter[str] = Counter()
    for each, sign in [*((each, 1) for each in ran), *((each, -1) for each in declared)]:
        for row in each:
            sums[f"{row.axis}/{row.kind}"] += sign * row.bytes
    return sorted(wrong | {name for name, difference in sums.items() if difference})


def _fixed(row: Collective) -> tuple[str, str, int, int]:
    """What is fixed on each rank."""
    return row.axis, row.kind, row.count, 0 if row.kind == "all_to_all" else row.bytes


# Operator name (namespaces c10d and _c10d_functional) -> (kind, which buffer is the larger one).
_KINDS = {
    "_allgather_base_": ("all_gather", "first"),
    "all_gather_into_tensor": ("all_gather", "result"),
    "_reduce_scatter_base_": ("reduce_scatter", "second"),
    "reduce_scatter_tensor": ("reduce_scatter", "first"),
    "allreduce_": ("all_reduce", "first"),
    "all_reduce": ("all_reduce", "first"),
    "all_reduce_": ("all_reduce", "first"),
    "broadcast_": ("broadcast", "first"),
    "alltoall_base_": ("all_to_all", "second"),
    "all_to_all_single": ("all_to_all", "first"),
    "send": ("send", "first"),
    "recv_": ("recv", "first"),
}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mesh: Mesh, found: list[Collective]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mesh, self.found = mesh, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional") and name in _KINDS:
            self._note(name, args, result)
        return result

    def _note(self, name: str, args: Any, result: Any) -> None:
        kind, which = _KINDS[name]
        group_name, size = group_among(args)
        if size == 1:
            return
        buffer = {"first": args[0], "second": args[1], "result": result}[which]
        tensors = buffer if isinstance(buffer, (list, tuple)) else [buffer]
        volume = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        self.found.append(Collective(self.mesh.axis_of(group_name), kind, 1, volume))


@contextmanager
def record(mesh: Mesh) -> Iterator[list[Collective]]:
    """Collect every collective that this rank issues inside the block (groups of one rank left out)."""
    found: list[Collective] = []
    with _Recorder(mesh, found):
        yield found
