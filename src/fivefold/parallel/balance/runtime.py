"""Balance of experts: a loss for uneven load, one for large router logits, and a bias moved after the step.

Both losses are computed per layer and per packed row, then averaged over the layers with experts and over the rows of
the global batch. So they are the same for every layout. (`transformers` pools the tokens of all rows; that form would
depend on which rows share a rank.) For one row, f_e is the number of tokens that go to expert e over the number of
tokens, and P_e the mean probability of e (https://arxiv.org/abs/2101.03961):

    load of a row, a layer      E * sum_e f_e * P_e
    z of a row, a layer         mean of logsumexp(logits)^2

Gradients enter at the router, in addition to those of the cross entropy, which alone is the training loss. Padding is
not counted. Picks beyond a capacity are dropped here as well: they get expert E, which does not exist.

Legend: B rows, T tokens of a row (those of this rank), E experts, K experts per token.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.models.anatomy import is_within
from fivefold.models.facts import Experts
from fivefold.models.offdiagonal import Blocks
from fivefold.parallel.balance.spec import WatchRouter, router_numbers
from fivefold.parallel.collectives import Collective, StepShape
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.ranks import tokens_by_rank
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.parallel.tensor.mappings import gather
from fivefold.parallel.tensor.runtime import TensorParallel

BIAS = "e_score_correction_bias"

# ---- capacity --------------------------------------------------------------------------------------------------------

SHORTEST = 10**6  # largest denominator of a factor, which is taken as it is written


@dataclass(frozen=True)
class Shares:
    """Token blocks of a row: `own` of this rank, and `everyone`, of all ranks with a part of the row, in the order of a
    gather over one of `groups` after the other."""

    own: Blocks
    everyone: tuple[Blocks, ...]
    groups: tuple[dist.ProcessGroup, ...]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # exact fractions
def capacity(factor: float, top_k: int, experts: int, tokens_B: Tensor) -> Tensor:
    """Tokens that an expert takes of rows with `tokens_B` real ones, int64 [B]: ceil(factor * K * n / E) of a row of n,
    the first by position, exact for `factor` as written."""
    over, under = Fraction(str(factor)).limit_denominator(SHORTEST).as_integer_ratio()
    return -((-over * top_k * tokens_B) // (under * experts))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # collectives, as in attention
@torch.no_grad()
def beyond(chosen_BTE: Tensor, index_BTK: Tensor, capacity_B: Tensor, shares: Shares) -> Tensor:
    """Find the picks whose expert is full, bool [B, T, K]. `chosen_BTE`: 1 where a real token goes to an expert."""
    before_BTE = _before(chosen_BTE.long(), shares)
    return before_BTE.gather(-1, index_BTK) >= capacity_B[:, None, None]


def _before(chosen_BTE: Tensor, shares: Shares) -> Tensor:
    """Count, for each token and expert, the earlier tokens of the row that go to this expert, int64 [B, T, E]. Ranks
    with parts of a row (sequence or context parallelism) gather the picks of each expert in each of their blocks."""
    parts = torch.split(chosen_BTE, [stop - start for start, stop in shares.own], 1)
    before = [part.cumsum(1) - part for part in parts]
    if not shares.groups:
        return torch.cat(before, 1)
    slots = max(map(len, shares.everyone))  # blocks that each rank sends counts for
    counts_BSE = torch.stack([part.sum(1) for part in parts], 1)
    counts_BSE = F.pad(counts_BSE, (0, 0, 0, slots - len(parts)))
    for group in shares.groups:
        counts_BSE = gather(counts_BSE, group)
    none = [(None, None)]  # in place of the blocks that a rank has less than others
    starts = [start for blocks in shares.everyone for start, _ in (*blocks, *none * (slots - len(blocks)))]
    for at, (first, _) in enumerate(shares.own):
        earlier = [slot for slot, start in enumerate(starts) if start is not None and start < first]
        before[at] = before[at] + counts_BSE[:, earlier].sum(1, keepdim=True)
    return torch.cat(before, 1)


# ---- losses and biases -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BalanceOptions:
    """Options of the balance. `load`, `z`: coefficients of the two losses; `bias_rate`: what a step adds to or takes
    from a router's bias; `capacity_factor`: for what an expert takes of a row, None: all."""

    load: float = 0.0
    z: float = 0.0
    bias_rate: float = 0.0
    capacity_factor: float | None = None


@dataclass(frozen=True)
class BalanceResult:
    """Router results of one step, over the global batch. `load`, `z`: the two losses, without their coefficients.
    `tokens_per_expert`: picks of each router [layers, E], with dropped ones, without padding (ragged if layers differ,
    empty without routers). `dropped`: picks beyond the capacity; None without a capacity."""

    load: float
    z: float
    tokens_per_expert: tuple[tuple[int, ...], ...]
    dropped: int | None = None

    def metrics(self) -> dict[str, Any]:
        """Metrics of a step: the busiest expert over the mean of its layer, the share of experts without a token, the
        tokens of every expert, and the dropped picks. Empty without routers."""
        if not self.tokens_per_expert:
            return {}
        means = [max(sum(counts) / len(counts), 1e-9) for counts in self.tokens_per_expert]
        counts = [count for layer in self.tokens_per_expert for count in layer]
        idle = counts.count(0) / len(counts)
        largest = max(max(counts) / mean for counts, mean in zip(self.tokens_per_expert, means, strict=True))
        found = {"moe/aux_loss": self.load, "moe/z_loss": self.z, "moe/load_max": largest, "moe/idle_pct": 100 * idle}
        if self.dropped is not None:
            picks = sum(map(sum, self.tokens_per_expert))
            found |= {"moe/dropped": self.dropped, "moe/dropped_pct": 100 * self.dropped / max(picks, 1)}
        return found | {"moe/load": [list(counts) for counts in self.tokens_per_expert]}


@dataclass
class Balance(LivePart):
    """Balance of the routers of one model, on this rank. Every model has one; without `modules` it does nothing.

    `options` may be set until the first step. `senders`: number of tp ranks that send the same token to its experts: tp
    with `expert_tp`, else 1. `unsent`: router -> this rank's picks that the last step dropped.
    """

    modules: tuple[Experts, ...]
    senders: int
    tensor: TensorParallel
    context: ContextParallel
    device: torch.device
    options: BalanceOptions = field(default_factory=BalanceOptions)
    _scale: float = 0.0  # of a row's loss: one over rows and layers
    _tokens_B: Tensor | None = None  # real tokens of the current rows
    unsent: dict[str, int] = field(default_factory=dict)
    _is_again: bool = False  # a recomputed forward, counted before
    _seen: dict[str, Tensor] = field(default_factory=dict)  # of the current micro batch: see `_note`
    _summed: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        plan = state.plan
        modules = plan.facts.experts if plan.watches_routers else ()  # every router, if all of them return logits
        return cls(modules, plan.layout.etp, state.live(TensorParallel), state.live(ContextParallel), state.device)

    @property
    def _row_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups of the ranks that have other tokens of the same rows."""
        return (*self.tensor.row_groups, *self.context.row_groups)

    def drops(self) -> bool:
        """True if routers may drop picks now: during a step alone."""
        return self._scale > 0 and self.options.capacity_factor is not None

    def begin_step(self, rows: int) -> None:
        """Begin a step; `rows`: of the global batch."""
        self._scale = 1.0 / (max(rows, 1) * max(len(self.modules), 1))
        self._seen, self._summed = {}, {}

    def begin_micro_batch(self, row_tokens: Tensor | None, *, again: bool = False) -> None:
        """Begin a micro batch. `row_tokens`: real tokens of each row, int64 [B] on the device; None: no rows. `again`:
        backward recomputes the forward, whose tokens are already counted. Only pipelines pass it, because there other
        micro batches run in between."""
        for name, numbers in self._seen.items():
            self._summed[name] = self._summed[name] + numbers if name in self._summed else numbers
        self._seen, self._tokens_B, self._is_again = {}, row_tokens, again

    def in_gradients(self, state: ParallelState, rows: int) -> AbstractContextManager[None]:
        self.begin_step(rows)
        return nullcontext()

    def shaped(self, shape: StepShape) -> StepShape:
        options = self.options
        return replace(shape, balances_load=bool(options.load), has_capacity=options.capacity_factor is not None)

    def end_step(self) -> BalanceResult:
        """End the step, and return what the routers of all ranks did. Every rank calls this."""
        self.begin_micro_batch(None)
        self._scale = 0.0  # routers are not watched between steps
        if not self.modules:
            return BalanceResult(0.0, 0.0, ())
        elsewhere = [
            torch.zeros(router_numbers(block), dtype=torch.float64, device=self.device) for block in self.modules
        ]
        parts = [self._summed.get(block.router, zeros) for block, zeros in zip(self.modules, elsewhere, strict=True)]
        flat = torch.cat(parts)
        if self.tensor.is_replicated and self.tensor.rank:
            flat.zero_()  # all tp ranks saw the same
        sizes = [len(part) for part in parts]
        drops = self.options.capacity_factor is not None
        if drops:
            mine = [int(part[-1]) for part in torch.split(flat.cpu(), sizes)]
            self.unsent = {block.router: count for block, count in zip(self.modules, mine, strict=True)}
        dist.all_reduce(flat)
        rows, load, z, dropped = [], 0.0, 0.0, 0
        for part in torch.split(sums_on_host(flat), sizes):
            *counts, of_load, of_z, of_dropped = part.tolist()
            rows.append(tuple(int(count) for count in counts))
            load, z, dropped = load + of_load, z + of_z, dropped + int(of_dropped)
        return BalanceResult(load, z, tuple(rows), dropped if drops else None)

    def move_biases(self, model: nn.Module, result: BalanceResult) -> None:
        """Move biases up for experts below the mean load, down for those above (https://arxiv.org/abs/2408.15664)."""
        if not self.options.bias_rate:
            return
        buffers = dict(model.named_buffers())
        for block, counts in zip(self.modules, result.tokens_per_expert, strict=True):
            bias = buffers.get(f"{block.router}.{BIAS}")
            if bias is None:  # on another pipeline rank
                continue
            load = torch.tensor(counts, dtype=torch.float64, device=bias.device)
            bias += self.options.bias_rate * torch.sign(load.mean() - load).to(bias.dtype)

    # ---- at a router -------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module, experts: Experts) -> None:
        router = model.get_submodule(experts.router)
        hook = self._after(experts.router, has_bias=hasattr(router, BIAS))
        # Not compiled: it knows its router by name, so it would be recompiled for every layer.
        router.register_forward_hook(torch.compiler.disable(hook))  # type: ignore[no-untyped-call]

    def _after(self, name: str, *, has_bias: bool) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            if not torch.is_grad_enabled() or not self._scale:
                return None
            logits, weights, index = _parts(output)
            loss, taken = self._note(name, logits, index, sigmoid=has_bias)
            if loss is None and taken is index:
                return None
            valued = weights if loss is None else AuxLossScaler.apply(weights, loss)  # type: ignore[no-untyped-call]
            return tuple(taken if item is index else valued if item is weights else item for item in output)

        return hook

    def _note(self, name: str, logits: Tensor, index: Tensor, *, sigmoid: bool) -> tuple[Tensor | None, Tensor]:
        """Count this router's tokens. Returns the loss of this rank's tokens, which enters the gradient (None if both
        coefficients are 0), and the indices without the picks that the capacity drops."""
        experts = logits.shape[-1]
        precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
        real_BT, tokens_B = self._real(logits)
        logits_BTE = logits.reshape(*real_BT.shape, experts).to(precise)
        scores = logits_BTE.sigmoid() if sigmoid else logits_BTE.softmax(-1)
        probability_BTE = scores / scores.sum(-1, keepdim=True) * real_BT.unsqueeze(-1)
        chosen_BTE = torch.zeros_like(logits_BTE).scatter_add_(
            -1, index.reshape(*real_BT.shape, -1), real_BT.unsqueeze(-1).expand(-1, -1, index.shape[-1]).to(precise)
        )
        counts_BE = chosen_BTE.sum(1).double()
        mine_E = counts_BE.sum(0)
        for group in self._row_groups if self.options.load else ():
            dist.all_reduce(counts_BE, group=group)  # f of the whole row: it has no gradient
        per_token_B = 1.0 / tokens_B.clamp(min=1).double()
        mean_BE = probability_BTE.sum(1) * per_token_B.unsqueeze(-1).to(precise)
        load = (counts_BE * per_token_B.unsqueeze(-1)).to(precise).mul(mean_BE).sum() * experts * self._scale
        z = (logits_BTE.logsumexp(-1).square() * real_BT).sum(1).mul(per_token_B.to(precise)).sum() * self._scale
        taken, dropped = self._within(index, chosen_BTE, real_BT, tokens_B)
        if not self._is_again:
            terms = torch.stack([tensor.detach().double() for tensor in (load, z, dropped)])
            self._seen[name] = torch.cat([mine_E, terms])
        if not (self.options.load or self.options.z):
            return None, taken
        return self.options.load * load + self.options.z * z, taken

    def _within(self, index: Tensor, chosen_BTE: Tensor, real_BT: Tensor, tokens_B: Tensor) -> tuple[Tensor, Tensor]:
        """Replace every pick whose expert is full by E (no expert). Also returns the number of these picks."""
        factor, experts = self.options.capacity_factor, chosen_BTE.shape[-1]
        if factor is None:
            return index, tokens_B.new_zeros(())
        index_BTK = index.reshape(*real_BT.shape, -1)
        most_B = capacity(factor, index.shape[-1], experts, tokens_B)
        full_BTK = beyond(chosen_BTE, index_BTK, most_B, self._shares(real_BT.shape[1]))
        full_BTK &= real_BT.unsqueeze(-1)
        return index_BTK.masked_fill(full_BTK, experts).view_as(index), full_BTK.sum()

    def _real(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """True where this rank's tokens are not padding, [B, T]; real tokens of each whole row, over all ranks, [B]."""
        tokens_B = self._tokens_B
        assert tokens_B is not None, "a micro batch is begun before it runs"
        blocks = self._shares(logits.numel() // logits.shape[-1] // len(tokens_B)).own
        positions_T = torch.cat([torch.arange(*block, device=logits.device) for block in blocks])
        return positions_T < tokens_B.unsqueeze(-1), tokens_B

    def _shares(self, length: int) -> Shares:
        """Token blocks of every cp x tp rank, for rows of which this rank has `length` tokens."""
        cp, cp_rank = self.context.size, self.context.rank
        tp, tp_rank = (self.tensor.size, self.tensor.rank) if self.tensor.sequence_parallel else (1, 0)
        everyone = tokens_by_rank(length * cp * tp, cp, tp)
        return Shares(everyone[cp_rank * tp + tp_rank], everyone, self._row_groups)


class AuxLossScaler(torch.autograd.Function):
    """Pass `x` on; backward gives `loss` a gradient of one, as if it had been added to the training loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)


def _parts(output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Split a router's output into logits, weights and indices."""
    floats = [tensor for tensor in output if isinstance(tensor, Tensor) and tensor.is_floating_point()]
    index = next(tensor for tensor in output if isinstance(tensor, Tensor) and not tensor.is_floating_point())
    return floats[0], floats[1], index


def builders(state: ParallelState) -> Builders:
    balance = state.live(Balance)
    return {WatchRouter: lambda _, edit: balance.watch(state.model, edit.experts)}


def configure(model: nn.Module, balance: Balance, options: BalanceOptions, buffers: Collection[str]) -> None:
    """Set the options of a run. `buffers`: of the model's routers. Raises `UserError` for what its model cannot do."""
    if options != BalanceOptions() and not balance.modules:
        raise UserError(
            f"the experts of {type(model).__name__} cannot be balanced: it has no routers that give logits",
            fix="set balance.aux_loss: 0, and leave z_loss, bias_rate and capacity_factor at their defaults",
        )
    if options.bias_rate and not movable_biases([block.router for block in balance.modules], buffers):
        raise UserError(
            f"balance.bias_rate {options.bias_rate}: the routers of {type(model).__name__} have no bias to move",
            fix="set balance.aux_loss instead",
        )
    balance.options = options


def movable_biases(routers: Sequence[str], buffers: Collection[str]) -> list[str]:
    """Name the bias of each of `routers`; none if one of them has no bias to move. `buffers`: of the model's."""
    names = [f"{router}.{BIAS}" for router in routers]
    return names if all(name in buffers for name in names) else []


def dropped(balance: Balance, shape: StepShape, layers: Sequence[str]) -> list[Collective]:
    """Negative bytes of all-to-alls, of the picks that the last step dropped: a plan cannot know them."""
    found = []
    for block in balance.modules:
        if is_within(block.name, layers):
            passes = 2 * shape.forwards(block.name, is_kept=True) + 2
            unsent = balance.senders * balance.unsent.get(block.router, 0) * shape.hidden * shape.compute_bytes
            found.append(Collective("ep", "all_to_all", 0, -passes * unsent))
    return found


def sums_on_host(numbers: Tensor) -> Tensor:
    return numbers.cpu()
