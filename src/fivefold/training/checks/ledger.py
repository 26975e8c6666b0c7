"""Compare the rows that the ranks read at a step with the order of the run."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from xxhash import xxh3_64

from fivefold.data.batch import MicroBatch
from fivefold.data.rows import RowSource
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training.checks.findings import Finding, gather, listed, ranks_text
from fivefold.training.checks.state import device_of


def ledger(
    model: nn.Module, batch: Sequence[MicroBatch], rows: RowSource, *, step: int, global_batch_size: int,
    balance: bool = False,
) -> list[Finding]:  # fmt: skip
    """Findings for rows that ranks read wrongly at `step` (from 0), by content. `batch`: the rows this rank trained on.
    `balance`: they are shared out by cost.

    The first rank reads the global batch itself, in order. All ranks of a data rank have its places of the batch.
    """
    layout, device = state_of(model).plan.layout, device_of(model)
    places = range(step * global_batch_size, (step + 1) * global_batch_size)
    wanted = torch.zeros(global_batch_size, dtype=torch.int64, device=device)
    if dist.get_rank() == 0:
        own_reading = [rows.rows([row], row_multiple=layout.row_multiple) for row in rows.in_order(places)]
        wanted.copy_(torch.tensor([row_hash(reading, 0) for reading in own_reading]))
    dist.broadcast(wanted, 0)
    share = global_batch_size // layout.data_ranks
    read = [row_hash(rows, b) for rows in batch for b in range(len(rows.input_ids))]
    mine = torch.tensor([len(read), *(read + [0] * share)[:share]], device=device)  # the count shows excess rows
    shared = rows.shares(
        step, global_batch_size=global_batch_size, data_ranks=layout.data_ranks,
        micro_batch_size=layout.micro_batch_size, balance=balance,
    )  # fmt: skip
    return _misread(gather(mine).tolist(), wanted.tolist(), shared, layout, first=places.start)


def _misread(
    gathered: Sequence[Sequence[int]], wanted: Sequence[int], shared: NDArray[np.int64], layout: Layout, *, first: int
) -> list[Finding]:
    """Findings from `gathered`, each rank's row count and row hashes, against `wanted`, the hashes of the batch, and
    `shared`, which says who has which."""
    place_of = {hash_: first + at for at, hash_ in reversed(list(enumerate(wanted)))}  # equal rows: the first one
    inner = layout.tp * layout.cp  # consecutive ranks that read the same rows
    own = [shared[:, data_rank].flatten().tolist() for data_rank in range(layout.data_ranks)]
    found: dict[str, list[int]] = {}
    for rank, (count, *read) in enumerate(gathered):
        mine = own[rank // inner % layout.data_ranks]
        wrong = {at: hash_ for at, hash_ in zip(mine, read, strict=True) if hash_ != wanted[at]}
        if count != len(mine):
            found.setdefault(f"read {count} rows, not {len(mine)}", []).append(rank)
        elif wrong:
            known = listed("row", [place_of[hash_] for hash_ in wrong.values() if hash_ in place_of])
            instead = (
                f"{known or 'what is no row of this step'} in place of {listed('row', [first + at for at in wrong])}"
            )
            found.setdefault(f"read {instead}", []).append(rank)
    readers = gathered[: inner * layout.data_ranks : inner]  # in a pipeline, those of the first stage
    taken = Counter(hash_ for _, *read in readers for hash_ in read)
    uneven = (("more than once", taken - Counter(wanted)), ("by nobody", Counter(wanted) - taken))
    by_row = [
        (listed("row", sorted(place_of[hash_] for hash_ in few if hash_ in place_of)), how) for how, few in uneven
    ]
    misreaders = tuple(sorted({rank for ranks in found.values() for rank in ranks}))
    return [
        *(Finding("ledger", ranks_text(ranks), text, tuple(ranks)) for text, ranks in found.items()),
        *(Finding("ledger", where, f"read {how}", misreaders) for where, how in by_row if where),
    ]


def row_hash(batch: MicroBatch, b: int) -> int:
    """A hash of row `b`, int64, over its tokens, labels, positions and document boundaries."""
    length = batch.input_ids.shape[1]
    inside = (batch.cu_seqlens >= b * length) & (batch.cu_seqlens <= (b + 1) * length)
    hasher = xxh3_64((batch.cu_seqlens[inside] - b * length).tobytes())
    for array in (batch.input_ids, batch.labels, batch.position_ids):
        hasher.update(np.ascontiguousarray(array[b]).data)
    return hasher.intdigest() - 2**63
