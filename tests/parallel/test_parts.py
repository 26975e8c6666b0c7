"""Parts of gradients in the hands of a user, on one of four ranks, of which the others are made up."""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.core.errors import UserError
from fivefold.parallel.parts import PartOfTensor

VALUES = torch.arange(1.0, 17.0).view(4, 4)


@pytest.fixture(autouse=True)
def four_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def part(values: Tensor) -> Any:
    made = DTensor.from_local(values, init_device_mesh("cpu", (2, 2)), [Replicate(), Replicate()], run_check=False)
    made.__class__ = PartOfTensor
    return made


READS: tuple[Callable[[Any], Any], ...] = (
    Tensor.item,
    float,
    int,
    bool,
    complex,
    operator.index,
    Tensor.tolist,
    Tensor.numpy,
    np.asarray,
    lambda p: p.full_tensor(),
)


@pytest.mark.parametrize("read", READS)
def test_a_number_of_a_part_is_not_read(read: Callable[[Any], Any]) -> None:
    with pytest.raises(UserError, match="of which this rank holds a part"):
        read(part(torch.tensor(1)))


TOGETHER: tuple[Callable[[Any], Any], ...] = (
    torch.sum, torch.norm, torch.mean, torch.prod, torch.std, torch.var_mean, torch.median, torch.argmax, torch.max,
    torch.aminmax, torch.histc, torch.logsumexp, torch.softmax, torch.cumsum, torch.sort, torch.all,
    lambda p: p @ p.T, lambda p: torch.dot(p[0], p[1]), lambda p: torch.einsum("ij,ij->", p, p),
    lambda p: p.quantile(0.9), lambda p: p.topk(2), lambda p: torch.bincount(p[0].long()), lambda p: p.roll(1),
    lambda p: p[0], lambda p: torch.cat([p, p]), lambda p: p[p > 2], lambda p: p.fill_diagonal_(0.0),
)  # fmt: skip


@pytest.mark.parametrize("call", TOGETHER)
def test_what_needs_the_parts_of_other_ranks_is_refused(call: Callable[[Any], Any]) -> None:
    given = (0,) if call in (torch.logsumexp, torch.softmax, torch.cumsum) else ()
    with pytest.raises(UserError, match="of which this rank holds a part"):
        call(part(VALUES.clone()), *given)
