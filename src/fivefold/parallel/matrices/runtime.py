"""Whole matrices for Muon, whatever the layout: gathered on one rank, updated there, and sent back as shards.

Each matrix has one owner among all ranks of the world, replicas included, so that nothing is computed twice. A round
takes as many matrices as there are ranks, the most costly first. So the matrices of a round cost about the same, and no
rank ever holds more than one whole matrix. Example: 10 matrices on 4 ranks are rounds of 4, 4 and 2.

    round of n matrices on n ranks     every rank's part -> all-to-all -> matrix i whole on rank i
                                       work on it        -> all-to-all -> every rank's part of the result
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.matrices.spec import matrix_rounds
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.sharding import Region, numel


class FullMatrices:
    """2-D parameters `names` of a parallelized model, each assembled on one rank."""

    def __init__(self, plan: ParallelPlan, names: Sequence[str]) -> None:
        self._shards, self._rank, self._world = plan.placement.shards, plan.placement.rank, plan.placement.world
        self._rounds = matrix_rounds(plan.placement, names)

    @property
    def names(self) -> list[str]:
        """Matrices in the order in which `map` asks for their parts."""
        return [name for one in self._rounds for name in one.names]

    def map(self, part: Callable[[str], Tensor], work: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, this rank's part of `work(whole)`) for every matrix; `part(name)`: its part of the input.

        Every rank takes all items, in their order. `work` keeps the shape and the type.
        """
        for one in self._rounds:
            parts = [part(name) for name in one.names]
            like = parts[0]
            received = self._exchange(like, _cut(parts, one.sent), one.gathered)
            if self._rank < len(one.names):
                whole = like.new_empty(self._shards[one.names[self._rank]].shape)
                for regions, values in zip(one.gathered, received, strict=True):
                    _paste(whole, regions, values)
                whole = work(whole)
            else:
                whole = like  # not read: nothing is distributed
            received = self._exchange(like, _cut([whole] * self._world, one.dealt), one.kept)
            for name, own, regions, values in zip(one.names, parts, one.kept, received, strict=False):
                _paste(own, regions, values)
                yield name, own

    def _exchange(self, like: Tensor, outgoing: list[list[Tensor]], incoming: list[list[Region]]) -> list[Tensor]:
        """Send `outgoing` to every rank, and return what every rank sends to this one, flat."""
        pieces = [piece.reshape(-1) for to_rank in outgoing for piece in to_rank]
        flat = torch.cat(pieces) if pieces else like.new_empty(0)
        sizes = [sum(map(numel, regions)) for regions in incoming]
        if self._world == 1:
            return [flat]
        received = like.new_empty(sum(sizes))
        dist.all_to_all_single(received, flat, sizes, [sum(p.numel() for p in to_rank) for to_rank in outgoing])
        return list(torch.split(received, sizes))


def _cut(tensors: Sequence[Tensor], regions: Sequence[Sequence[Region]]) -> list[list[Tensor]]:
    return [[tensors[i][region] for region in regions_] for i, regions_ in enumerate(regions)]


def _paste(tensor: Tensor, regions: Sequence[Region], values: Tensor) -> None:
    for region, part in zip(regions, torch.split(values, [numel(region) for region in regions]), strict=True):
        tensor[region].copy_(part.view_as(tensor[region]))
