"""Bugs of MLPs that run piece by piece."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.parallel.chunks import runtime as chunked_mlp
from tests.verification.faults.fault import fault

CHUNKED = "single+mlp2"


def _cat(change: Callable[[list[Tensor]], list[Tensor]]) -> Any:
    """The pieces are put together as `change(pieces)`."""
    plain = chunked_mlp._in_pieces

    def in_pieces(*args: Any, **named: Any) -> Tensor:
        put_together = torch.cat
        with patch.object(torch, "cat", lambda parts, dim: put_together(change([*parts]), dim=dim)):
            return plain(*args, **named)

    return patch.object(chunked_mlp, "_in_pieces", in_pieces)


@fault(
    "the pieces of an MLP come back in another order",
    known="ranks' tokens and pieces dealt in different orders",
    layout=CHUNKED,
    expects=[("output", r"mlp")],
)
def pieces_in_another_order() -> Any:
    return _cat(lambda parts: [parts[-1], *parts[1:-1], parts[0]])


@fault(
    "only the last piece of an MLP has a gradient",
    known="a tiled MLP that sets gradients of weights instead of adding them up",
    layout=CHUNKED,
    expects=[("gradient.*", r"")],
)
def gradient_of_the_last_piece_alone() -> Any:
    return _cat(lambda parts: [*(part.detach() for part in parts[:-1]), parts[-1]])
