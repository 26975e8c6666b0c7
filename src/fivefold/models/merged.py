"""Tensors that are merged in the model and stored expert by expert in its files.

`transformers` merges `experts.0.w1.weight`, `experts.0.w3.weight`, `experts.1.w1.weight`... into one
`experts.gate_up_proj` [E, 2I, D] when it loads. Here a region is read only from the tensors that it lies in, in numeric
order of the experts (sorted as text, 10 would come before 2).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.models.random_stream import Region

Read = Callable[[str, Region], Tensor]  # a tensor of a file by its name there, and a region of it


@dataclass(frozen=True)
class ExpertPiece:
    """A tensor [R, ...] of a file: expert `expert`, rows [part * R, (part + 1) * R) of `parts` * R."""

    stored: str
    expert: int
    part: int
    parts: int


Pieces = Mapping[str, tuple[ExpertPiece, ...]]  # name in the model -> its pieces, by expert and part


def merged(found: Sequence[tuple[str, ExpertPiece]]) -> dict[str, tuple[ExpertPiece, ...]]:
    """Pieces by the model's name, in order; incomplete sets (not experts 0 to E - 1, each part once) are left out."""
    by_name: dict[str, list[ExpertPiece]] = {}
    for name, piece in found:
        by_name.setdefault(name, []).append(piece)
    ordered = {name: sorted(pieces, key=lambda piece: (piece.expert, piece.part)) for name, pieces in by_name.items()}
    return {name: tuple(pieces) for name, pieces in ordered.items() if _is_full(pieces)}


def _is_full(pieces: Sequence[ExpertPiece]) -> bool:
    parts = pieces[0].parts
    return [(piece.expert, piece.part) for piece in pieces] == [divmod(at, parts) for at in range(len(pieces))] and (
        len(pieces) % parts == 0
    )


def shape_of(pieces: Sequence[ExpertPiece], shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
    """The merged shape, from the shapes in the files; None if those differ."""
    different = {shapes[piece.stored] for piece in pieces}
    if len(different) != 1 or not (one := different.pop()):
        return None
    return (len(pieces) // pieces[0].parts, pieces[0].parts * one[0], *one[1:])


def read(pieces: Sequence[ExpertPiece], rows: int, region: Region, stored: Read) -> Tensor:
    """Read a region of the merged tensor. `rows`: the rows of one piece."""
    experts, inner, *rest = region
    parts = pieces[0].parts
    whole = []
    for expert in range(experts.start, experts.stop):
        of_expert = []
        for part in range(parts):
            first, last = max(inner.start, part * rows), min(inner.stop, (part + 1) * rows)
            if first < last:
                place = (slice(first - part * rows, last - part * rows), *rest)
                of_expert.append(stored(pieces[expert * parts + part].stored, place))
        whole.append(torch.cat(of_expert))
    return torch.stack(whole)


def split(pieces: Sequence[ExpertPiece], tensor: Tensor) -> dict[str, Tensor]:
    """Split a merged tensor into the tensors of its files: name there -> tensor."""
    rows = tensor.shape[1] // pieces[0].parts
    return {
        piece.stored: tensor[piece.expert, piece.part * rows : (piece.part + 1) * rows].contiguous() for piece in pieces
    }
