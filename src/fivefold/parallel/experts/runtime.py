"""Expert parallelism: every rank holds some experts of a layer; tokens are sent to their experts and back.

The `ep` ranks are taken innermost first from dp_shard, cp and tp. These ranks have different tokens already, so the
world does not grow: `shard4.ep2` has 4 ranks. FSDP shards the experts' parameters over the rest of the three
(`fsdp/runtime.py`). Routing is dropless: ranks exchange counts first, then as many rows as the routers asked for.

With `expert_tp`, ep takes no ranks from tp. Each tp rank holds some features of every expert (`shard_rules.py`), sees
 the tokens of all tp ranks, and computes a partial sum.

    tokens [N, D] --sort--> rows [S, D] by expert --all-to-all--> rows of this rank's experts --grouped matmuls-->
    --all-to-all--> rows [S, D] --weights, sum--> tokens [N, D]

Without `expert_tp` but with replicated activations (tp, `+nosp`), each tp rank takes its share of the tokens, and the
results are gathered. With one expert rank, nothing is sent.

Legend: N tokens of this rank, K experts per token, S = N * K rows, D hidden size, E experts, n expert ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.models.experts import Permute, RowKernels, expert_mlp, inverse, routed
from fivefold.models.facts import Experts
from fivefold.ops.keep import kept
from fivefold.ops.linear import Linears
from fivefold.parallel.balance.runtime import Balance
from fivefold.parallel.experts import spec
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.linears.runtime import LinearsOfModel
from fivefold.parallel.sharding import Block, split_even
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.parallel.tensor.mappings import exchange, gather, mapping
from fivefold.parallel.tensor.runtime import TensorParallel

# ---- experts in a model ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertParallel(LivePart):
    """Expert parallelism of one model on this rank. `group`: None if every rank has all experts. With `expert_tp` this
    rank has part `part` of the `parts` = tp parts of each of its experts; else part 0 of 1. `drops`: tells if routers
    may drop picks now. `names`: of modules."""

    modules: tuple[Experts, ...]
    group: dist.ProcessGroup | None
    rank: int
    tensor: TensorParallel
    part: int
    parts: int
    drops: Callable[[], bool]
    linears: Linears
    kernels: RowKernels
    names: dict[nn.Module, str] = field(default_factory=dict)

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        grid, parts = state.placement.grid, state.plan.layout.etp
        cut = grid.shard_index(state.placement.rank, "ep").part
        tensor, drops = state.live(TensorParallel), state.live(Balance).drops
        linears, kernels = state.live(LinearsOfModel).linears, RowKernels().built(state.live(Compiled).block)
        group, modules = state.mesh.groups.get("ep"), state.plan.facts.experts
        return cls(modules, group, cut // parts, tensor, cut % parts, parts, drops, linears, kernels)

    def forward(self, module: nn.Module, experts: int, *given: Any, **named: Any) -> Tensor:
        """Replace a module's own forward, in any of its signatures: hidden states, indices, weights."""
        hidden_ND, index_NK, weights_NK = _arguments(given, named)
        if weights_NK.dtype != torch.float64:
            weights_NK = weights_NK.float()
        if self.parts > 1:
            return self._add_up(module, experts, hidden_ND, index_NK, weights_NK)
        if self.tensor.is_replicated:
            return self._share(module, experts, hidden_ND, index_NK, weights_NK)
        return self._routed(module, experts, hidden_ND, index_NK, weights_NK)

    def _routed(self, module: nn.Module, experts: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return routed(hidden, index, weights, experts, partial(self.compute, module), self.kernels)

    def _add_up(self, module: nn.Module, experts: int, *given: Tensor) -> Tensor:
        """Run on all tokens on every tp rank, each of which makes its part of their results; add these up."""
        out = self._routed(module, experts, *map(self.tensor.enter, given))
        return self.tensor.leave(out).clone()  # FSDP cannot hook a view

    def _share(self, module: nn.Module, experts: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run on a share of the tokens, which all tp ranks have: each sends its own."""
        group, blocks = self.tensor.group, split_even(len(hidden), self.tensor.size)
        own = (take_share(tensor, group, blocks) for tensor in (hidden, index, weights))
        return join_shares(self._routed(module, experts, *own), group, blocks)

    def compute(self, module: nn.Module, rows_SD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply the experts to rows sorted by expert. Rows that no expert counts stand last, and are skipped."""
        if self.group is None:
            taken = int(counts_E.sum()) if self.drops() else len(rows_SD)
            return self._made(module, _first(rows_SD, taken), counts_E)
        # Rows that arrive for this rank's experts, by sender, and rows that go to each rank.
        counts_nE, sent, received = kept(lambda: self._counts(counts_E))
        order, counts = by_expert(counts_nE, sum(received))
        back = inverse(order)
        # As in `routed`, no name holds rows in an order that is no longer needed.
        rows = _permuted(all_to_all(_first(rows_SD, sum(sent)), received, sent, self.group), order, back)
        return all_to_all(_permuted(self._made(module, rows, counts), back, order), sent, received, self.group)

    def _counts(self, counts_E: Tensor) -> tuple[Tensor, list[int], list[int]]:
        """Rows from each rank to each of this rank's experts, int64 [n, experts held here]; to each rank; from each."""
        assert self.group is not None, "rows stay here"
        held = [stop - start for start, stop in split_even(len(counts_E), dist.get_world_size(self.group))]
        counts_nE = exchange_counts(counts_E, held, self.rank, self.group)
        own, come = counts_on_host(counts_E, counts_nE)
        ends = list(accumulate(held))
        sent = [sum(own[end - size : end]) for size, end in zip(held, ends, strict=True)]
        return counts_nE, sent, [sum(row) for row in come]

    def _made(self, module: nn.Module, rows_SD: Tensor, counts_E: Tensor) -> Tensor:
        first, _ = split_even(rows_SD.shape[1], self.parts)[self.part]
        return expert_mlp(module, rows_SD, counts_E, biased_from=first, linears=self.linears.of(self.names[module]))


def builders(state: ParallelState) -> Builders:
    fold = state.live(ExpertParallel)

    def send_rows(module: Any, edit: spec.SendRows) -> None:
        fold.names[module] = edit.path
        forward = partial(fold.forward, module, edit.experts.experts)
        module.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]

    return {spec.SendRows: send_rows, spec.RouteInFp32: lambda router, _: route_in_fp32(router)}


def _arguments(given: Sequence[Any], named: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, indices and weights. Models name and order the last two freely: the integers are the indices."""
    hidden, *others = (value for value in (*given, *named.values()) if isinstance(value, Tensor))
    weights, index = sorted(others, key=lambda value: not value.is_floating_point())
    return hidden, index, weights


# ---- sending rows ----------------------------------------------------------------------------------------------------


def exchange_counts(counts_E: Tensor, held: Sequence[int], rank: int, group: dist.ProcessGroup) -> Tensor:
    """Exchange the rows' counts from each of n ranks to each of this rank's experts, int64 [n, experts held here]."""
    mine = held[rank]
    received = exchange(counts_E, [mine] * len(held), list(held), group)
    return received.view(len(held), mine)


def counts_on_host(counts_E: Tensor, counts_nE: Tensor) -> tuple[list[int], list[list[int]]]:
    """Copy the counts of outgoing and of incoming rows to the host, which waits for this one copy."""
    flat = torch.cat([counts_E, counts_nE.flatten()]).tolist()
    own, experts = len(counts_E), counts_nE.shape[1]
    return flat[:own], [flat[own + at * experts :][:experts] for at in range(len(counts_nE))]


def by_expert(counts_nE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sort received rows, which are in the order of senders and then of experts. Returns the order that sorts them by
    expert, then by sender, and the rows of each expert. `rows`: their number, which the host knows. Example: 2 senders
    and 2 experts with counts [[1, 2], [1, 0]] give the order [0, 3, 1, 2] and the rows [2, 2]."""
    experts = torch.arange(counts_nE.shape[1], device=counts_nE.device).repeat(len(counts_nE))
    return experts.repeat_interleave(counts_nE.flatten(), output_size=rows).argsort(stable=True), counts_nE.sum(0)


def _first(rows_SD: Tensor, count: int) -> Tensor:
    """Take the first `count` rows. All are returned as they are: the gradient of a slice is copied into one of all."""
    return rows_SD if count == len(rows_SD) else rows_SD[:count]


def _permuted(rows_SD: Tensor, order_S: Tensor, back_S: Tensor) -> Tensor:
    return Permute.apply(rows_SD, order_S, back_S)  # type: ignore[no-any-return,no-untyped-call]


def _joined(x: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
    """Join the shares of all tp ranks to [N, ...] on each."""
    longest = max(stop - start for start, stop in blocks)
    padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, longest - len(x)))
    parts = torch.split(gather(padded[None], group)[0], longest)
    return torch.cat([part[: stop - start] for part, (start, stop) in zip(parts, blocks, strict=True)])


def _share(x: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
    """Take this rank's share of rows [N, ...] that all tp ranks have."""
    return x[slice(*blocks[dist.get_rank(group)])]


# Sends rows to other ranks, `sent[r]` to rank r, for `received[r]` of theirs; backward sends gradients back.
all_to_all = mapping(exchange, lambda grad, received, sent, group: exchange(grad, sent, received, group), is_kept=True)
take_share = mapping(_share, _joined)
join_shares = mapping(_joined, _share, is_kept=True)


# ---- routers in fp32 -------------------------------------------------------------------------------------------------


def route_in_fp32(router: nn.Module) -> None:
    """Let a router compute in fp32, in a model that computes in a type of 16 bits.

    A router decides where tokens go, and with which weights. Its gathered parameters and its input are 16-bit; both are
    cast to fp32. So different logits are not rounded to a tie, and the weights reach the experts in fp32. (Megatron:
    `moe_router_dtype`.) The router keeps its class and its forward; only the arguments of the forward change.
    """
    router.forward = torch.compiler.disable(partial(_forward, _Own(router)))  # type: ignore[no-untyped-call]


class _Own(nn.Module):
    """A router's own forward without its hooks, which run around it, once."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router, self.plain = router, router.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.plain(*args, **kwargs)


def _forward(own: _Own, *args: Any, **kwargs: Any) -> Any:
    parameters = {name: _in_fp32(parameter) for name, parameter in own.named_parameters()}
    args, kwargs = tuple(map(_in_fp32, args)), {name: _in_fp32(value) for name, value in kwargs.items()}
    return torch.func.functional_call(own, parameters, args, kwargs)


def _in_fp32(value: Any) -> Any:
    is_short = isinstance(value, Tensor) and value.is_floating_point() and value.dtype.itemsize == 2
    return value.float() if is_short else value
