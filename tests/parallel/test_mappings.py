"""Collectives with gradients: what goes back, also where several ranks hold the same features."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.sharding import Block
from fivefold.parallel.tensor import mappings
from tests.pool import run_ranks

pytestmark = pytest.mark.full

Blocks = tuple[tuple[Block, ...], ...]
FEATURES = 12
APART: Blocks = (((0, 3),), ((3, 7),), ((7, 8),), ((8, 12),))
COPIES: Blocks = (((0, 5),), ((0, 5),), ((5, 8), (10, 12)), ((5, 8), (10, 12)))


def drawn(seed: int) -> Tensor:
    return torch.randn(2, 5, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gathered(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """All features as this rank has them, and the gradient of its own."""
    rank = dist.get_rank()
    mine = drawn(0)[..., mappings.feature_indices(blocks[rank])].requires_grad_()
    whole = mappings.gather_features(mine, dist.group.WORLD, blocks)
    whole.backward(drawn(1 + rank))
    assert mine.grad is not None
    return whole.detach(), mine.grad


@pytest.mark.parametrize(("blocks", "copies"), [(APART, 1), (COPIES, 2)], ids=["apart", "copies"])
def test_ranks_that_hold_the_same_features_share_their_gradient(blocks: Blocks, copies: int) -> None:
    """The gradients of the weights that made these features are summed over such ranks later."""
    total = torch.stack([drawn(1 + rank) for rank in range(4)]).sum(0)
    for (whole, gradient), own in zip(run_ranks(4, gathered, blocks), blocks, strict=True):
        held = mappings.feature_indices(tuple({each for some in blocks for each in some}))
        assert torch.equal(whole[..., held], drawn(0)[..., held])
        torch.testing.assert_close(gradient * copies, total[..., mappings.feature_indices(own)])
