"""What keeps experts busy: a loss for uneven load, one for large router logits, and a bias moved after the step.

The losses are per layer and per packed row, averaged over the layers with experts and over the rows of the global
batch: the same number for every layout. (The pooled form of `transformers` is not linear in the set of tokens, so that
it would depend on how they are dealt.) With f_e the number of times that a token of the row goes to expert e, over its
tokens, and P_e the mean of its probability (https://arxiv.org/abs/2101.03961):

    load of a row, a layer      E * sum_e f_e * P_e
    z of a row, a layer         mean of logsumexp(logits)^2

Gradients enter at the router, beside the cross entropy, which stays the training loss alone. Padding counts nowhere.

Legend: B rows, T tokens of a row (those of this rank), E experts, K experts per token.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.errors import UserError
from fivefold.models.anatomy import is_within
from fivefold.models.trace import Experts
from fivefold.parallel.collectives import Collective, StepShape
from fivefold.parallel.context import ContextParallel, row_blocks
from fivefold.parallel.tensor import TensorParallel

BIAS = "e_score_correction_bias"


@dataclass(frozen=True)
class BalanceOptions:
    """`load`, `z`: coefficients of the two losses; `bias_rate`: what a step adds to or takes from a router's bias."""

    load: float = 0.0
    z: float = 0.0
    bias_rate: float = 0.0


@dataclass(frozen=True)
class BalanceResult:
    """Of one step, over the global batch: the two losses, without their coefficients, and rows per expert [layers, E]
    (ragged where layers differ)."""

    load: float
    z: float
    rows: tuple[tuple[int, ...], ...]

    def metrics(self) -> dict[str, float]:
        """The largest load of an expert over the mean of its layer, and the part of experts without a token."""
        means = [max(sum(each) / len(each), 1e-9) for each in self.rows]
        idle = sum(count == 0 for each in self.rows for count in each) / sum(map(len, self.rows))
        largest = max(max(each) / mean for each, mean in zip(self.rows, means, strict=True))
        return {"moe/aux_loss": self.load, "moe/z_loss": self.z, "moe/load_max": largest, "moe/idle_pct": 100 * idle}


@dataclass
class Balance:
    """Watches the routers of one model, on this rank. `options` may be set until the first step."""

    modules: tuple[Experts, ...]
    tensor: TensorParallel | None
    context: ContextParallel | None
    world: int
    options: BalanceOptions = field(default_factory=BalanceOptions)
    _scale: float = 0.0  # of a row's loss: one over rows and layers
    _tokens_B: Tensor | None = None  # real tokens of the rows under way
    _is_again: bool = False  # they were counted before
    _seen: dict[str, Tensor] = field(default_factory=dict)  # of the micro batch under way, by router: counts, load, z
    _summed: dict[str, Tensor] = field(default_factory=dict)

    @property
    def _is_split(self) -> bool:
        return self.tensor is not None and self.tensor.sequence_parallel

    @property
    def _row_groups(self) -> list[tuple[str, dist.ProcessGroup]]:
        """The ranks that have other tokens of the same rows, by axis."""
        found = [("tp", self.tensor.group)] if self.tensor and self._is_split else []
        return found + ([("cp", self.context.group)] if self.context else [])

    def begin_step(self, rows: int) -> None:
        """`rows`: of the global batch."""
        self._scale = 1.0 / (rows * len(self.modules))
        self._seen, self._summed = {}, {}

    def begin_micro_batch(self, tokens_B: Tensor | None, *, again: bool = False) -> None:
        """`tokens_B`: real tokens of each row; None: all. `again`: its backward pass, which may compute it again, comes
        after another's forward (in a pipeline); where it comes before the next one, nothing need be said."""
        for name, each in self._seen.items():
            self._summed[name] = self._summed[name] + each if name in self._summed else each
        self._seen, self._tokens_B, self._is_again = {}, tokens_B, again

    def end_step(self) -> BalanceResult:
        """What the routers of all ranks did. Every rank calls this."""
        self.begin_micro_batch(None)
        device = next(iter(self._summed.values())).device
        elsewhere = [torch.zeros(each.experts + 2, dtype=torch.float64, device=device) for each in self.modules]
        parts = [self._summed.get(each.router, zeros) for each, zeros in zip(self.modules, elsewhere, strict=True)]
        flat = torch.cat(parts)
        if self.tensor is not None and not self._is_split and self.tensor.rank:
            flat.zero_()  # all tp ranks saw the same
        dist.all_reduce(flat)
        rows, load, z = [], 0.0, 0.0
        for part in torch.split(flat.cpu(), [len(each) for each in parts]):
            *counts, of_load, of_z = part.tolist()
            rows.append(tuple(int(count) for count in counts))
            load, z = load + of_load, z + of_z
        return BalanceResult(load, z, tuple(rows))

    def move_biases(self, model: nn.Module, result: BalanceResult) -> None:
        """After the step: up for experts below the mean load, down for those above (https://arxiv.org/abs/2408.15664)."""
        if not self.options.bias_rate:
            return
        buffers = dict(model.named_buffers())
        for each, counts in zip(self.modules, result.rows, strict=True):
            bias = buffers.get(f"{each.router}.{BIAS}")
            if bias is None:  # on another pipeline rank
                continue
            load = torch.tensor(counts, dtype=torch.float64, device=bias.device)
            bias += self.options.bias_rate * torch.sign(load.mean() - load).to(bias.dtype)

    # ---- at a router -------------------------------------------------------------------------------------------------

    def watch(self, model: nn.Module, experts: Experts) -> None:
        """Hook a router that gives logits, weights and indices; another is not watched."""
        router = model.get_submodule(experts.router)
        router.register_forward_hook(self._after(experts.router, has_bias=hasattr(router, BIAS)))

    def _after(self, name: str, *, has_bias: bool) -> Callable[..., Any]:
        def hook(_: nn.Module, args: Any, output: Any) -> Any:
            if not torch.is_grad_enabled() or not self._scale:
                return None
            logits, weights, index = _parts(output)
            loss = self._note(name, logits, index, sigmoid=has_bias)
            if loss is None:
                return None
            return tuple(AddLoss.apply(each, loss) if each is weights else each for each in output)  # type: ignore[no-untyped-call]

        return hook

    def _note(self, name: str, logits: Tensor, index: Tensor, *, sigmoid: bool) -> Tensor | None:
        """Count, and the loss of this rank's tokens as it enters the gradient (None: without coefficients)."""
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
        for _, group in self._row_groups if self.options.load else ():
            dist.all_reduce(counts_BE, group=group)  # f of the whole row: it has no gradient
        per_token_B = 1.0 / tokens_B.clamp(min=1).double()
        mean_BE = probability_BTE.sum(1) * per_token_B.unsqueeze(-1).to(precise)
        load = (counts_BE * per_token_B.unsqueeze(-1)).to(precise).mul(mean_BE).sum() * experts * self._scale
        z = (logits_BTE.logsumexp(-1).square() * real_BT).sum(1).mul(per_token_B.to(precise)).sum() * self._scale
        if not self._is_again:
            self._seen[name] = torch.cat([mine_E, torch.stack([load.detach().double(), z.detach().double()])])
        if not (self.options.load or self.options.z):
            return None
        return self.options.load * load + self.options.z * z

    def _real(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Which of this rank's tokens are no padding, [B, T]; how many a row has over all ranks, [B]."""
        tokens_B = self._tokens_B
        assert tokens_B is not None, "a micro batch is begun before it runs"
        length = logits.numel() // logits.shape[-1] // len(tokens_B)
        cp, cp_rank = (self.context.size, self.context.rank) if self.context else (1, 0)
        tp, tp_rank = (self.tensor.size, self.tensor.rank) if self.tensor and self._is_split else (1, 0)
        blocks = row_blocks(length * cp * tp, cp, cp_rank, tp, tp_rank)
        places_T = torch.cat([torch.arange(*block, device=logits.device) for block in blocks])
        tokens_B = tokens_B.to(logits.device)
        return places_T < tokens_B.unsqueeze(-1), tokens_B


class AddLoss(torch.autograd.Function):
    """`x` as it is; backward gives `loss` a gradient of one, as if it had been added to the training loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=ctx.dtype, device=grads[0].device)


def _parts(output: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, weights and indices of a router's output."""
    floats = [each for each in output if isinstance(each, Tensor) and each.is_floating_point()]
    index = next(each for each in output if isinstance(each, Tensor) and not each.is_floating_point())
    return floats[0], floats[1], index


def watch_routers(
    model: nn.Module, modules: Sequence[Experts], tensor: TensorParallel | None, context: ContextParallel | None
) -> Balance | None:
    """Watch every router of `model`; None where there are none, or where they say less than a router says."""
    watched = Balance(tuple(modules), tensor, context, dist.get_world_size())
    if not modules or any(_is_linear(model.get_submodule(each.router)) for each in modules):
        return None
    for each in modules:
        watched.watch(model, each)
    return watched


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def configure(model: nn.Module, balance: Balance | None, options: BalanceOptions, buffers: Collection[str]) -> None:
    """Set what a run asks for. `buffers`: of the model's routers. Raises `UserError` for what its model cannot do."""
    if options != BalanceOptions() and balance is None:
        raise UserError(
            f"the experts of {type(model).__name__} cannot be balanced: it has no routers that are known",
            fix="leave balance.aux_loss, balance.z_loss and balance.bias_rate at their defaults",
        )
    if balance is None:
        return
    if options.bias_rate and not all(f"{each.router}.{BIAS}" in buffers for each in balance.modules):
        raise UserError(
            f"balance.bias_rate {options.bias_rate}: the routers of {type(model).__name__} have no bias to move",
            fix="set balance.aux_loss instead",
        )
    balance.options = options


def declare(balance: Balance, shape: StepShape, layers: Sequence[str]) -> list[Collective]:
    """One all-reduce of what all routers saw, once a step; with a loss for uneven load, where a row's tokens are on
    several ranks, one of its counts per router of `layers`."""
    numbers = sum(each.experts + 2 for each in balance.modules)
    found = [Collective("world", "all_reduce", 1, 8 * numbers)] if balance.world > 1 else []
    count = shape.micro_batches * (2 if shape.recompute == "full" else 1)
    own = [each for each in balance.modules if is_within(each.name, layers)]
    for axis, _ in balance._row_groups if balance.options.load else ():
        found += [Collective(axis, "all_reduce", count, count * 8 * shape.rows * each.experts) for each in own]
    return found
