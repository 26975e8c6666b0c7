"""FSDP's collectives in two levels or in eight bits, for nodes whose links are slower than those inside.

Rank r of FSDP's R x N ranks has place r % N in node r // N. The slow link of a node carries (R - 1) / R of a buffer. In
one level a ring through all ranks carries (R N - 1) / (R N) of it, and gloo, whose reduce-scatter is an all-reduce,
twice that.

    gather      nodes: all-gather of the shards of a place     [R, shard]
                node:  all-gather of these                     [N, R, shard], and put in order
    reduction   node:  reduce-scatter of the parts of a place  [R, shard]
                nodes: all-to-all, and a sum in the order of nodes

A reduction in eight bits rounds what the all-to-all sends. In one level it is an all-to-all over all ranks, of each
rank's own gradients, and a sum in the order of ranks.

FSDP2 calls these objects in place of its own (`set_custom_all_gather`, `set_custom_reduce_scatter`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# ---- sums in the order of ranks: the same bits on every rank, whatever a backend's all-reduce does ------------------


def sum_in_order(parts: Iterable[Tensor], out: Tensor) -> None:
    """Add `parts` one after the other into `out`. (`torch.sum` adds in an order that follows from the shape.)"""
    for at, part in enumerate(parts):
        out.copy_(part) if at == 0 else out.add_(part)


def mean_in_order(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The mean of a vector over a group. Each rank sums a part, and all gather these: the bytes of an all-reduce."""
    ranks = group.size()
    sent = torch.nn.functional.pad(values, (0, -len(values) % ranks))
    received, mean = torch.empty_like(sent), sent.new_empty(len(sent) // ranks)
    dist.all_to_all_single(received, sent, group=group)
    sum_in_order(received.view(ranks, -1), mean)
    mean /= ranks
    dist.all_gather_into_tensor(received, mean, group=group)
    return received[: len(values)]


# ---- eight bits ------------------------------------------------------------------------------------------------------

MOST, TINY = 127, torch.finfo(torch.float32).tiny  # in place of the scale of a block of zeros
# What the largest magnitude of a block becomes. Half of it, which sums of a few coarse numbers often are, is then no
# tie that the last bit of a sum decides, and so the order of that sum.
STEPS = MOST + 2**-12


@dataclass(frozen=True)
class WirePart:
    """A parameter's part of what a rank sends: so many `numbers`, in blocks of so many; 0: sent as they are."""

    numbers: int
    block: int


class Int8Wire:
    """Code of a unit whose shard on every rank has these `parts`, one after the other.

    A block is a part of a row of the whole parameter (`block_length`), so that no layout that separates rows cuts one,
    and a weight is the same under all of them. What a rank sends to another:

        scales    one for each block, in fp32 (fp64 where that is computed in): the largest magnitude / 127 (`STEPS`)
        others    parameters without blocks, in the dtype of what is coded
        codes     int8
    """

    def __init__(self, parts: Sequence[WirePart]) -> None:
        self._parts, self._sizes = parts, [part.numbers for part in parts]
        self._coded = [part.numbers for part in parts if part.block]
        self._scales = [part.numbers // part.block for part in parts if part.block]

    def encode(self, values: Tensor) -> Tensor:
        """Code shards, [shards, numbers], one by one: uint8 [shards, bytes]."""
        wide, scales, others, codes = wide_dtype(values.dtype), list[Tensor](), list[Tensor](), list[Tensor]()
        for part, own in zip(self._parts, torch.split(values, self._sizes, 1), strict=True):
            if not part.block:
                others.append(own.contiguous())
                continue
            blocks = own.reshape(len(own), -1, part.block).to(wide)
            scale = blocks.abs().amax(2, keepdim=True) / STEPS
            blocks = blocks / scale.clamp(min=TINY)
            codes.append(blocks.round_().clamp_(-MOST, MOST).to(torch.int8).view(len(own), -1))
            scales.append(scale.view(len(own), -1))
        return torch.cat([part.view(torch.uint8) for part in (*scales, *others, *codes)], 1)

    def decode(self, coded: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        """Write what each rank has coded, [ranks, bytes], to `values` [ranks, numbers]. `dtype`: of what was coded."""
        ranks, wide = len(values), wide_dtype(dtype)
        ends = [wide.itemsize * sum(self._scales), coded.shape[1] - sum(self._coded)]
        scales, others, codes = (section.contiguous() for section in coded.tensor_split(ends, 1))
        of_scales = iter(torch.split(scales.view(wide), self._scales, 1))
        of_codes = iter(torch.split(codes.view(torch.int8), self._coded, 1))
        plain = [part.numbers for part in self._parts if not part.block]
        of_others = iter(torch.split(others.view(dtype), plain, 1))
        for part, own in zip(self._parts, torch.split(values, self._sizes, 1), strict=True):
            if part.block:
                blocks = next(of_codes).reshape(ranks, -1, part.block).to(wide)
                own.copy_((blocks * next(of_scales).unsqueeze(-1)).view(ranks, -1))
            else:
                own.copy_(next(of_others))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scales and of sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- collectives -----------------------------------------------------------------------------------------------------

Exchange = Callable[[Tensor, Tensor], None]  # (what is received, what is sent)


class Buffers:
    """How FSDP allocates what is sent and received."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(Buffers):
    """All-gather of a unit over `ranks` by `exchange`, coded by `wire`; None: as it is. Over other ranks, as from a
    secondary copy, it is a plain one."""

    def __init__(self, ranks: int, exchange: Exchange, wire: Int8Wire | None) -> None:
        self._ranks, self._exchange, self._wire = ranks, exchange, wire

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool) -> None:
        if group.size() != self._ranks:
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)
        elif self._wire is None:
            self._exchange(output_tensor, input_tensor)
        else:
            coded = self._wire.encode(input_tensor.view(1, -1)).view(-1)
            received = coded.new_empty(self._ranks, coded.numel())
            self._exchange(received.view(-1), coded)
            self._wire.decode(received, output_tensor.view(self._ranks, -1), input_tensor.dtype)


def in_two_levels(node: dist.ProcessGroup, across: dist.ProcessGroup) -> Exchange:
    """Make an all-gather between nodes, and then within them."""
    nodes, ranks = across.size(), node.size()

    def exchange(received: Tensor, sent: Tensor) -> None:
        of_place, by_place = sent.new_empty(nodes * sent.numel()), torch.empty_like(received)
        dist.all_gather_into_tensor(of_place, sent, group=across)
        dist.all_gather_into_tensor(by_place, of_place, group=node)
        received.view(nodes, ranks, -1).copy_(by_place.view(ranks, nodes, -1).transpose(0, 1))

    return exchange


class UnitReduce(Buffers):
    """Reduce-scatter of a unit's gradients. `node`: the ranks of this node, which sum first; None: each rank's own are
    exchanged. `across`: the ranks that exchange; in two levels those with the same place in each node. `wire`: codes
    what they exchange; None: as it is."""

    def __init__(self, node: dist.ProcessGroup | None, across: dist.ProcessGroup, wire: Int8Wire | None) -> None:
        self._node, self._across, self._wire = node, across, wire

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op
        of_place = input_tensor.view(self._across.size(), -1)
        if self._node is not None:
            of_place = self._within(self._node, of_place, output_tensor.numel())
        if self._wire is None:
            sum_in_order(self._exchange(of_place), output_tensor)
            return
        received = self._exchange(self._wire.encode(of_place))
        parts = of_place.new_empty(of_place.shape, dtype=wide_dtype(of_place.dtype))
        self._wire.decode(received, parts, of_place.dtype)
        sum_in_order(parts, summed := torch.empty_like(parts[0]))
        output_tensor.copy_(summed)

    def _within(self, node: dist.ProcessGroup, parts: Tensor, numbers: int) -> Tensor:
        """Sum within the node the parts of this rank's place, [nodes, numbers]."""
        by_place = parts.view(len(parts), node.size(), -1).transpose(0, 1).contiguous()
        of_place = parts.new_empty(len(parts), numbers)
        dist.reduce_scatter_tensor(of_place.view(-1), by_place.view(-1), group=node)
        return of_place

    def _exchange(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=self._across)
        return received
