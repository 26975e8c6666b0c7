"""Parts of matrices that each rank sends to their owners, for Muon, and back. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fivefold.parallel.collectives import Call
from fivefold.parallel.placement import Placement
from fivefold.parallel.sharding import Region, numel
from fivefold.parallel.step import Step


@dataclass(frozen=True)
class MatrixRound:
    """Transfers of this rank. Lists go by rank; a rank beyond the matrices of the round owns none."""

    names: tuple[str, ...]  # names[i] is assembled on rank i
    sent: list[list[Region]]  # local regions of each matrix; none if the owner has them from another copy
    kept: list[list[Region]]  # local regions of each matrix
    gathered: list[list[Region]]  # of the matrix assembled here: what each rank sends
    dealt: list[list[Region]]  # and what each rank keeps

    @property
    def numbers(self) -> tuple[int, int]:
        """Numbers that this rank sends, to assemble matrices and to distribute results."""
        return tuple(sum(numel(region) for regions in lists for region in regions) for lists in (self.sent, self.dealt))  # type: ignore[return-value]


def matrix_rounds(placement: Placement, names: Sequence[str]) -> tuple[MatrixRound, ...]:
    """Rounds that assemble the 2-D parameters `names`, the most costly first."""
    ordered = sorted(names, key=lambda name: -_cost(placement, name))
    return tuple(
        _round(placement, ordered[at : at + placement.world]) for at in range(0, len(ordered), placement.world)
    )


def _cost(placement: Placement, name: str) -> int:
    rows, columns = placement.shards[name].shape
    return rows * columns * min(rows, columns)


def _round(placement: Placement, names: Sequence[str]) -> MatrixRound:
    kept = [_regions(placement, name, placement.rank, local=True) for name in names]
    sent = [
        regions if _sends(placement, name, placement.rank, owner) else []
        for owner, (name, regions) in enumerate(zip(names, kept, strict=True))
    ]
    none: list[list[Region]] = [[] for _ in range(placement.world)]
    gathered, dealt = none, none
    if placement.rank < len(names):
        own = names[placement.rank]
        dealt = [_regions(placement, own, rank, local=False) for rank in range(placement.world)]
        gathered = [
            regions if _sends(placement, own, rank, placement.rank) else [] for rank, regions in enumerate(dealt)
        ]
    rest = none[len(names) :]
    return MatrixRound(tuple(names), [*sent, *rest], [*kept, *rest], gathered, dealt)


def _regions(placement: Placement, name: str, rank: int, *, local: bool) -> list[Region]:
    return [pair[local] for pair in placement.regions(name, rank)]


def _sends(placement: Placement, name: str, rank: int, owner: int) -> bool:
    """True if `rank` sends its part to `owner`: the first rank with these values in the owner's replica does."""
    is_own_copy = placement.grid.coords(rank).dp_replicate == placement.grid.coords(owner).dp_replicate
    return is_own_copy and placement.shards[name].is_owner(placement.shard_index(name, rank).part)


def calls(step: Step) -> Iterator[Call]:
    """All-to-alls of Muon, which assemble each matrix on one rank, and send the shards of its update back."""
    placement, optimizer = step.plan.placement, step.shape.optimizer
    for one in matrix_rounds(placement, placement.block_matrices if optimizer.of_matrices is not None else ()):
        for numbers in one.numbers:
            size = numbers * step.shape.compute_bytes
            yield Call(axis="world", kind="all_to_all", bytes=size, phase="step")
