"""MLPs that process a long sequence in pieces, so that their intermediate activations exist for one piece only.

An MLP computes token by token. Forward runs its pieces one after the other and saves the input of each; backward runs
a piece again, takes its gradients, and frees it before the next (TiledMLP of Arctic Long Sequence Training,
arXiv:2506.13996). Gradients of weights add up over the pieces. A piece is one of this rank's own tokens: under sequence
parallelism the ranks of tp gather theirs into one, and each gets its own back.

Example: 65,536 tokens in 8 pieces under tp2. A rank has 32,768 of them, and runs 4,096 at a time, gathered 8,192.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.parallel.chunks.spec import InPieces
from fivefold.parallel.edits import Builders


def builders(model: nn.Module, enter: Callable[[Tensor], Tensor]) -> Builders:
    """Builders of MLPs in pieces. `enter`: applied to the hidden states of an MLP on their way in."""

    def in_pieces(edit: InPieces) -> None:
        mlp = model.get_submodule(edit.path)
        forward = partial(_in_pieces, mlp.forward, enter, edit.pieces)
        mlp.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]

    return {InPieces: in_pieces}


def _in_pieces(
    plain: Callable[..., Tensor], enter: Callable[[Tensor], Tensor], pieces: int, *args: Tensor, **named: Tensor
) -> Tensor:
    """Forward of an MLP with one argument, hidden states [B, T, D]."""
    assert len(args) + len(named) == 1, "an MLP that is given more than hidden states is not run in pieces"
    hidden, name = next(iter((*args, *named.values()))), next(iter(named), None)

    def piece(part: Tensor) -> Tensor:  # holds no tensor: each piece keeps it until backward
        return plain(enter(part)) if name is None else plain(**{name: enter(part)})

    run = partial(checkpoint, piece, use_reentrant=False) if torch.is_grad_enabled() else piece
    return torch.cat([run(part) for part in torch.split(hidden, -(-hidden.shape[1] // pieces), dim=1)], dim=1)
