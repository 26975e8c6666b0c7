"""Matrices seen whole, whatever the layout: put together on one rank, worked on there, and dealt out again.

Each matrix has one owner among all ranks of the world, copies of the model included, so that nothing is computed
twice. They are taken in rounds of as many matrices as there are ranks, the most costly first: the matrices of a round
cost about the same, and no rank ever holds more than one whole.

    round of n matrices on n ranks     every rank's part -> all-to-all -> matrix i whole on rank i
                                       work on it        -> all-to-all -> every rank's part of the result
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.collectives import Collective
from fivefold.parallel.sharding import Region
from fivefold.parallel.spread import Spread


@dataclass(frozen=True)
class _Round:
    """What this rank sends and receives. Lists go by rank; a rank beyond the matrices of the round owns none."""

    names: tuple[str, ...]  # names[i] is put together on rank i
    sent: list[list[Region]]  # local regions of each matrix; none where the owner has them from another copy
    kept: list[list[Region]]  # local regions of each matrix
    gathered: list[list[Region]]  # of the matrix put together here: what each rank sends
    dealt: list[list[Region]]  # and what each rank keeps


class FullMatrices:
    """The 2-D parameters `names` of a spread model, each to be seen whole on one rank."""

    def __init__(self, spread: Spread, names: Sequence[str]) -> None:
        self._spread = spread
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        ordered = sorted(names, key=lambda name: -self._cost(name))
        self._rounds = [self._round(ordered[at : at + self._world]) for at in range(0, len(ordered), self._world)]

    def map(self, part: Callable[[str], Tensor], work: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name, this rank's part of `work(whole)`) for every matrix, `part(name)` being its part of what goes in.

        Every rank takes all that this yields, in its order. `work` keeps the shape and the type.
        """
        for each in self._rounds:
            parts = [part(name) for name in each.names]
            like = parts[0]
            received = self._exchange(like, _cut(parts, each.sent), each.gathered)
            if self._rank < len(each.names):
                whole = like.new_empty(self._spread.shards[each.names[self._rank]].shape)
                for regions, values in zip(each.gathered, received, strict=True):
                    _paste(whole, regions, values)
                whole = work(whole)
            else:
                whole = like  # not read: nothing is dealt
            received = self._exchange(like, _cut([whole] * self._world, each.dealt), each.kept)
            for name, own, regions, values in zip(each.names, parts, each.kept, received, strict=False):
                _paste(own, regions, values)
                yield name, own

    def declare(self, itemsize: int) -> list[Collective]:
        """The collectives of one `map`; `itemsize`: bytes of an element of the parts."""
        if self._world == 1:
            return []
        regions = [region for each in self._rounds for lists in (each.sent, each.dealt) for region in _flat(lists)]
        return [Collective("world", "all_to_all", 2 * len(self._rounds), sum(map(_numel, regions)) * itemsize)]

    def _cost(self, name: str) -> int:
        rows, columns = self._spread.shards[name].shape
        return rows * columns * min(rows, columns)

    def _round(self, names: Sequence[str]) -> _Round:
        kept = [self._regions(name, self._rank, local=True) for name in names]
        sent = [
            regions if self._sends(name, self._rank, owner) else []
            for owner, (name, regions) in enumerate(zip(names, kept, strict=True))
        ]
        none: list[list[Region]] = [[] for _ in range(self._world)]
        gathered, dealt = none, none
        if self._rank < len(names):
            mine = names[self._rank]
            dealt = [self._regions(mine, rank, local=False) for rank in range(self._world)]
            gathered = [regions if self._sends(mine, rank, self._rank) else [] for rank, regions in enumerate(dealt)]
        rest = none[len(names) :]
        return _Round(tuple(names), [*sent, *rest], [*kept, *rest], gathered, dealt)

    def _regions(self, name: str, rank: int, *, local: bool) -> list[Region]:
        return [pair[local] for pair in self._spread.regions(name, rank)]

    def _sends(self, name: str, rank: int, owner: int) -> bool:
        """Of the ranks that hold the same values, the first in the owner's own copy of the model."""
        spread = self._spread
        is_own_copy = spread.mesh.place(rank).replica == spread.mesh.place(owner).replica
        return is_own_copy and spread.shards[name].is_owner(spread.cut(name, rank).part)

    def _exchange(self, like: Tensor, outgoing: list[list[Tensor]], incoming: list[list[Region]]) -> list[Tensor]:
        """What every rank sends to this one, flat, for what this one sends to every rank."""
        pieces = [piece.reshape(-1) for to_rank in outgoing for piece in to_rank]
        flat = torch.cat(pieces) if pieces else like.new_empty(0)
        sizes = [sum(map(_numel, regions)) for regions in incoming]
        if self._world == 1:
            return [flat]
        received = like.new_empty(sum(sizes))
        dist.all_to_all_single(received, flat, sizes, [sum(p.numel() for p in to_rank) for to_rank in outgoing])
        return list(torch.split(received, sizes))


def _cut(tensors: Sequence[Tensor], regions: Sequence[Sequence[Region]]) -> list[list[Tensor]]:
    """Views of the regions of each tensor; a list without regions has no tensor of its own."""
    return [[tensors[i][region] for region in each] for i, each in enumerate(regions)]


def _paste(tensor: Tensor, regions: Sequence[Region], values: Tensor) -> None:
    """Fill the regions of `tensor` with `values`, which lie flat one after the other."""
    for region, part in zip(regions, torch.split(values, [_numel(region) for region in regions]), strict=True):
        tensor[region].copy_(part.view_as(tensor[region]))


def _flat(lists: Sequence[Sequence[Region]]) -> list[Region]:
    return [region for each in lists for region in each]


def _numel(region: Region) -> int:
    return prod(edge.stop - edge.start for edge in region)
