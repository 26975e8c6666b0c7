"""Bugs of slow networks: collectives in two levels, secondary copies, gathers and reductions in eight bits,
rows that are shared out by cost, and replicas that train apart."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.data.batch import MicroBatch
from fivefold.parallel.fsdp import runtime
from fivefold.parallel.nodes import levels
from fivefold.parallel.nodes.levels import Int8Wire, UnitGather, UnitReduce, wide_dtype
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.training import step
from tests.verification.faults.fault import Model, fault


@fault(
    "a gather in two levels leaves the parts in the order of places",
    known="a second all-gather over what the first one gave",
    layout="shard4+hier2",
    expects=[("output", r"^model\.")],
)
def parts_in_the_order_of_places() -> Any:
    def in_two_levels(node: dist.ProcessGroup, across: dist.ProcessGroup) -> Callable[[Tensor, Tensor], None]:
        def exchange(received: Tensor, sent: Tensor) -> None:
            of_place = sent.new_empty(across.size() * sent.numel())
            dist.all_gather_into_tensor(of_place, sent, group=across)
            dist.all_gather_into_tensor(received, of_place, group=node)

        return exchange

    return patch.object(runtime, "in_two_levels", in_two_levels)


@fault(
    "gradients are summed within a node alone",
    known="the second level of a reduction that is left out",
    layout="shard4+hier2",
    expects=[("gradient, reduced", r"")],
)
def sums_of_a_node_alone() -> Any:
    plain = UnitReduce.__call__

    def of_this_node(self: UnitReduce, *given: Any, **named: Any) -> None:
        with patch.object(dist, "all_to_all_single", lambda received, sent, group: received.copy_(sent)):
            plain(self, *given, **named)

    return patch.object(UnitReduce, "__call__", of_this_node)


@fault(
    "every shard is decoded by the scales of the first rank",
    known="scales that are taken for one of the whole tensor",
    layout="shard2+qwz",
    expects=[("output", r"^model\.")],
)
def scales_of_the_first_rank() -> Any:
    plain = Int8Wire.decode

    def decode(self: Int8Wire, coded: Tensor, values: Tensor, dtype: torch.dtype) -> None:
        scales = wide_dtype(dtype).itemsize * sum(self._scales)
        plain(self, torch.cat([coded[:1, :scales].expand(len(coded), -1), coded[:, scales:]], 1), values, dtype)

    return patch.object(Int8Wire, "decode", decode)


@fault(
    "the rank that owns a shard computes with it as it is",
    known="a gather whose own part is not sent, and so not rounded",
    layout="shard2+qwz",
    expects=[("output", r"^model\.")],
)
def own_shard_is_not_rounded() -> Any:
    plain = UnitGather.__call__

    def gathered(self: UnitGather, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool) -> None:
        own = input_tensor.clone()  # of FSDP a view of its place in `output_tensor`
        plain(self, output_tensor, input_tensor, group, async_op)
        output_tensor.view(group.size(), -1)[group.rank()].copy_(own)

    return patch.object(UnitGather, "__call__", gathered)


@fault(
    "a sum of gradients in eight bits leaves out the last of those who sent some",
    known="a loop over the ranks that ends one too early",
    layout="shard2+qgz",
    expects=[("gradient, reduced", r"")],
)
def last_sender_left_out() -> Any:
    plain = levels.sum_in_order
    return patch.object(levels, "sum_in_order", lambda parts, out: plain(parts[:-1], out))


@fault(
    "the rank that owns a shard adds its own gradients as they are",
    known="a reduction whose own part is not sent, and so not rounded",
    layout="shard2+qgz",
    expects=[("gradient, reduced", r"")],
)
def own_gradients_are_not_rounded() -> Any:
    plain = UnitReduce.__call__

    def reduced(
        self: UnitReduce, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        plain(self, output_tensor, input_tensor, group, op, async_op)
        if self._node is None and self._wire is not None:
            own = input_tensor.view(group.size(), -1)[group.rank()].unsqueeze(0)
            self._wire.decode(self._wire.encode(own), rounded := torch.empty_like(own), own.dtype)
            output_tensor += (own - rounded).view_as(output_tensor)

    return patch.object(UnitReduce, "__call__", reduced)


@fault(
    "gradients are rounded before the sum within a node, too",
    known="qgZ of ZeRO++, which sends eight bits in both levels",
    layout="shard4+hier2+qgz",
    expects=[("gradient, reduced", r"")],
)
def gradients_rounded_twice() -> Any:
    plain = UnitReduce._within

    def within(self: UnitReduce, node: dist.ProcessGroup, parts: Tensor, numbers: int) -> Tensor:
        if self._wire is not None:
            shards = parts.reshape(-1, numbers)
            self._wire.decode(self._wire.encode(shards), rounded := torch.empty_like(shards), parts.dtype)
            parts = rounded.view_as(parts)
        return plain(self, node, parts, numbers)

    return patch.object(UnitReduce, "_within", within)


@fault(
    "dropout of rows that are shared out by cost is drawn as if they were in order",
    known="a place in the batch that is counted, not read",
    layout="dp2",
    model=Model("gpt2", balanced=True, changes=(("resid_pdrop", 0.1), ("embd_pdrop", 0.1), ("attn_pdrop", 0.1))),
    expects=[("output", r"^transformer\.drop")],
)
def drawn_as_if_in_order() -> Any:
    plain = step.to_device

    def to_device(batch: MicroBatch, *rest: Any, **options: Any) -> Any:
        return plain(replace(batch, places=None), *rest, **options)

    return patch.object(step, "to_device", to_device)


@fault(
    "replicas that train apart keep their weights when they meet",
    known="outer weights that are updated, and not copied back",
    layout="dp2+outer1",
    kind="run",
    expects=[("standing check", r" differs over dp_replicate")],
)
def replicas_keep_their_weights() -> Any:
    return patch.object(OuterSteps, "_take_up", lambda self: None)
