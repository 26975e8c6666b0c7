"""Collectives that assemble matrices for Muon. No torch."""

from collections.abc import Iterator

from fivefold.parallel.collectives import Call
from fivefold.parallel.matrices.rounds import matrix_rounds
from fivefold.parallel.step import Step


def calls(step: Step) -> Iterator[Call]:
    """All-to-alls of Muon, which assemble each matrix on one rank, and send the shards of its update back."""
    placement, optimizer = step.plan.placement, step.shape.optimizer
    for one in matrix_rounds(placement, placement.block_matrices if optimizer.of_matrices is not None else ()):
        for numbers in one.numbers:
            size = numbers * step.shape.compute_bytes
            yield Call(axis="world", kind="all_to_all", bytes=size, phase="step")
