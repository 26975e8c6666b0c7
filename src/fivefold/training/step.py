"""One optimizer step, read downwards: count, forward and backward per micro batch, sum, norm, clip, update. Also the
loss alone, by the same passes."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite, nan, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.optimizers import OPTIMIZERS, OptimizerFacts
from fivefold.data.batch import MicroBatch
from fivefold.parallel import passes, plain
from fivefold.parallel.balance.runtime import Balance, BalanceResult, dropped
from fivefold.parallel.collectives import Collective, StepShape, summed, total
from fivefold.parallel.dtensor import local
from fivefold.parallel.features import calls
from fivefold.parallel.loss.own import TokenLoss
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.state import ParallelState, state_of
from fivefold.torch_internals import norms, scale_
from fivefold.training.inputs import evaluating, squared_lengths, to_device
from fivefold.training.preference import ObjectiveSpec, Pairs, divisor, outcome, pairs_of_step

_PIECE = 2**14  # values of a gradient whose squares a CPU sums at once


@dataclass(frozen=True)
class StepResult:
    """The result of a step. `loss`: nats per target token over the global batch; `grad_norm`: before clipping, the root
    mean square over replicas that train apart."""

    loss: float
    grad_norm: float
    tokens: int  # real input tokens of the global batch
    targets: int
    squared_lengths: int  # of the documents, for the FLOPs of attention
    skipped: bool  # loss or gradient was not finite: nothing was updated
    stop: bool  # a rank was asked to stop
    balance: BalanceResult
    metrics: Mapping[str, float] = field(default_factory=dict)  # of a preference objective, means over its pairs
    why: str = ""  # of a skipped step: losses of the user's own function that are not finite


def train_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batch: Sequence[MicroBatch],
    *,
    learning_rate: float | None,
    max_grad_norm: float,
    stop: bool = False,
    spec: ObjectiveSpec | None = None,
    loss: TokenLoss | None = None,
    read: Callable[[Tensor], list[float]] = Tensor.tolist,
    before_update: Callable[[], None] = lambda: None,
) -> StepResult:
    """Train on this rank's micro batches of one global batch. `stop`: this rank was asked to stop; all ranks learn it.

    The loss is summed and divided by the global count of target tokens, or by the divisor of `spec` (the sum of target
    weights, the number of pairs); every reduction is a plain sum.
    `loss`: one of the user's own, in place of cross entropy. `learning_rate` is set in every parameter group;
    None: each keeps its own. `read`: copies the summed loss and squared norm to the host.
    `before_update`: called before anything changes that a checkpoint holds.
    """
    state = state_of(model)
    if loss:
        loss.not_finite = None  # of this step alone
    begun = _begin(model, batch, stop, spec)
    inputs = inputs_of_step(model, batch, begun.scale, begun.pairs, loss)
    share, balance, metrics = _end(
        model, begun, passes.gradients(model, inputs, rows=begun.rows, drops=not begun.pairs)
    )
    del inputs  # or they would stay in memory beside the update
    summed, *squares = read(all_reduce_sum(torch.cat([share.reshape(1), _squared_norms(model)])))
    norms = [_root(square) for square in squares]
    norm = _root(sum(squares) / len(squares))
    skipped = not (isfinite(summed) and isfinite(norm))
    before_update()
    if not skipped:
        clip_(model, norms[_own_copy(state)], max_grad_norm)
        for group in optimizer.param_groups if learning_rate is not None else ():
            group["lr"] = learning_rate
        state.live(Offload).states.update(optimizer)
        state.live(Balance).move_biases(model, balance)
    state.after_step(skipped=skipped)
    optimizer.zero_grad(set_to_none=True)
    reasons = plain.everywhere(loss.why()) if loss and skipped else []
    return StepResult(
        loss=summed,
        grad_norm=norm,
        tokens=begun.tokens,
        targets=begun.targets,
        squared_lengths=begun.squared_lengths,
        skipped=skipped,
        stop=begun.stops > 0,
        balance=balance,
        metrics=metrics,
        why=next(filter(None, reasons), ""),
    )


def accumulate(
    model: Any, batch: Sequence[MicroBatch], *, spec: ObjectiveSpec | None = None, loss: TokenLoss | None = None
) -> Tensor:
    """Add the gradients of one global batch to the existing ones, as a backward pass does. Returns the loss in nats per
    target token of the global batch, an fp64 scalar, the same on every rank."""
    earlier = [(parameter, parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    for parameter, _ in earlier:
        parameter.grad = None  # already summed over ranks; the reduction below must not sum them again
    begun = _begin(model, batch, spec=spec)
    inputs = inputs_of_step(model, batch, begun.scale, begun.pairs, loss)
    own, *_ = _end(model, begun, passes.gradients(model, inputs, rows=begun.rows, drops=not begun.pairs))
    state_of(model).after_step()
    for parameter, gradient in earlier:
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    return all_reduce_sum(own)


@dataclass(frozen=True)
class _Begun:
    """Counts of a step over all ranks, before its passes. `pairs`: of each micro batch, if the objective
    has pairs. `total`: by which the loss sum is divided, as `scale` has it."""

    targets: int
    tokens: int
    squared_lengths: int
    rows: int
    stops: int
    spec: ObjectiveSpec | None
    pairs: list[Pairs]
    total: float
    scale: Tensor


def _begin(model: Any, batch: Sequence[MicroBatch], stop: bool = False, spec: ObjectiveSpec | None = None) -> _Begun:
    """Count over all ranks, and read the pairs of an objective on them."""
    state = state_of(model)
    device = next(model.parameters()).device
    targets, tokens, squared, rows, stops = _count(batch, state, device, stop).tolist()
    total = targets if spec is None else divisor(model, batch, spec)
    pairs = [] if spec is None else pairs_of_step(model, batch, spec)
    # The mean of the gradients of replicas that train apart is the gradient of the global batch.
    copies = state.plan.layout.copies_apart
    scale = torch.tensor(copies / total if total else 1.0, dtype=torch.float64, device=device)
    return _Begun(targets, tokens, squared, rows, stops, spec, pairs, total, scale)


def inputs_of_step(
    model: Any,
    batch: Sequence[MicroBatch],
    scale: Tensor,
    pairs: Sequence[Pairs] = (),
    loss: TokenLoss | None = None,
) -> list[passes.Inputs]:
    """Copy this rank's micro batches of a step to its device; their losses are multiplied by `scale`. `pairs`: of each
    micro batch, or none. `loss`: one of the user's own."""
    device, state = next(model.parameters()).device, state_of(model)
    ranks, rank = state.plan.layout.data_ranks, state.placement.data_rank
    weights = [each.weights for each in pairs] if pairs else [None] * len(batch)
    before = itertools.accumulate([0, *(len(micro.input_ids) for micro in batch)])  # rows of this rank
    return [
        to_device(micro, device, scale, weigh=weigh, loss=loss, first_row=earlier * ranks + rank * len(micro.input_ids))
        for micro, weigh, earlier in zip(batch, weights, before, strict=False)
    ]


def _end(model: Any, begun: _Begun, loss: Tensor) -> tuple[Tensor, BalanceResult, Mapping[str, float]]:
    """The result of passes with this summed `loss`: this rank's share of it, fp64, NaN without targets; and metrics of
    a preference objective. Gradients are summed already."""
    state = state_of(model)
    balance = state.live(Balance).end_step()
    if not state.placement.owns_loss:
        loss.zero_()
    metrics: Mapping[str, float] = {}
    if begun.spec is not None and begun.pairs:
        # The weighted cross entropy has the objective's gradient, but not its value.
        own, metrics = outcome(model, begun.pairs, begun.spec.objective)
        loss = own * begun.scale
    copies = state.plan.layout.copies_apart
    loss = loss if copies == 1 else loss / copies
    if not begun.total:
        loss.fill_(nan)  # like cross entropy over no targets
    return loss, balance, metrics


def _count(batch: Sequence[MicroBatch], state: ParallelState, device: torch.device, stop: bool) -> Tensor:
    """Global counts, int64 [5]: target tokens, real input tokens, squared document lengths, rows with a token, and
    ranks asked to stop.

    Ranks that share rows count them once.
    """
    targets, tokens = sum(b.targets for b in batch), sum(b.tokens for b in batch)
    counts = targets, tokens, squared_lengths(batch), sum(map(_rows, batch))
    mine = counts if state.placement.is_first_of_row else (0, 0, 0, 0)
    return all_reduce_sum(torch.tensor((*mine, int(stop)), dtype=torch.int64, device=device))


def _rows(batch: MicroBatch) -> int:
    return len(batch.input_ids) if batch.row_tokens is None else int((batch.row_tokens > 0).sum())


def local_gradients(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Pairs of name and this rank's part of the gradient, for every parameter that has one."""
    return [(name, local(p.grad)) for name, p in model.named_parameters() if p.grad is not None]


def _root(square: float) -> float:
    return sqrt(square) if square >= 0 else nan


def _own_copy(state: ParallelState) -> int:
    """Number of this rank's copy among replicas that train apart."""
    return state.placement.coords.dp_replicate if state.plan.layout.copies_apart > 1 else 0


def _squared_norms(model: nn.Module) -> Tensor:
    """This rank's share of the squared gradient norm of each replica that trains apart, fp64 [replicas]."""
    state, own = state_of(model), squared_norm(model)
    found = own.new_zeros(state.plan.layout.copies_apart)
    found[_own_copy(state)] = own
    return found


def squared_norm(model: nn.Module) -> Tensor:
    """This rank's share of the squared gradient norm, an fp64 scalar. Each element of the model counts on one rank; of
    replicas that train apart, on one of each.

    The sum over the world is the squared norm of the whole gradient, replicated parameters counted once
    (Megatron-LM once counted them per rank; the stock `clip_grad_norm_` fails on mixed meshes).
    """
    state = state_of(model)
    within_copy = state.plan.layout.copies_apart > 1
    owned = [
        gradient
        for name, gradient in local_gradients(model)
        if state.placement.is_owner(name, within_copy=within_copy) and gradient.numel()
    ]
    device = next(model.parameters()).device
    if not owned:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cpu":  # sums squares one by one in fp32: the norm of 15 million values was 6e-4 too small
        owned = [piece for gradient in owned for piece in torch.split(gradient.flatten(), _PIECE)]
    return torch.stack(norms(owned)).double().square().sum()


def clip_(model: nn.Module, norm: float, max_norm: float) -> None:
    """Scale the gradients so that their global norm is at most `max_norm` (0: no clipping), by torch's own rule."""
    factor = max_norm / (norm + 1e-6)
    gradients = [gradient for _, gradient in local_gradients(model)]
    if max_norm > 0 and factor < 1.0 and gradients:
        scale_(gradients, factor)


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over the world, in place; a no-op on one rank."""
    if dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


# ---- the loss alone --------------------------------------------------------------------------------------------------


def mean_loss(model: Any, batches: Iterable[MicroBatch], own: TokenLoss | None = None) -> float:
    """Mean cross entropy, or mean of a loss of the user's `own`, of the micro batches of all ranks, which must have
    equally many; NaN without targets."""
    loss, targets = summed_loss(model, batches, own)
    return loss / targets if targets else nan


def summed_loss(model: Any, batches: Iterable[MicroBatch], own: TokenLoss | None = None) -> tuple[float, int]:
    """Summed cross entropy in nats, or a loss of the user's `own`, of all ranks, and the number of targets."""
    state = state_of(model)
    device = next(model.parameters()).device
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(model):
        for batch in batches:
            totals[0] += passes.loss(model, to_device(batch, device, loss=own))
            totals[1] += batch.targets
    if not state.placement.owns_loss:
        totals[0] = 0
    if not state.placement.is_first_of_row:
        totals[1] = 0
    loss, targets = all_reduce_sum(totals).tolist()
    return float(loss), int(targets)


# ---- what a step sends -----------------------------------------------------------------------------------------------


def step_shape(
    model: Any,
    rows: int,
    tokens: int,
    micro_batches: int,
    loss_chunks: int | None = None,
    *,
    whole_logits: bool = False,
    batch: Sequence[MicroBatch] = (),
) -> StepShape:
    """The shape with which to ask a parallelized model's plan about one step of [rows, tokens] micro batches.
    `whole_logits`: with a loss of the user's own. `batch`: these micro batches, whose documents decide what a ring
    sends."""
    state = state_of(model)
    shape = state.plan.step_shape(
        rows, tokens, micro_batches, loss_chunks=loss_chunks, reduce_bytes=state.reduce_dtype.itemsize,
        whole_logits=whole_logits,
    )  # fmt: skip
    for part in state.parts:
        shape = part.shaped(shape)
    return replace(shape, documents=tuple(tuple(part.cu_seqlens.tolist()) for part in batch))


def declare(model: Any, shape: StepShape, *, optimizer: OptimizerFacts = OPTIMIZERS["adamw"]) -> tuple[Collective, ...]:
    """Every collective of `train_step` on this rank: the plan's, less the rows dropped for capacity in the last one."""
    state = state_of(model)
    planned = summed(calls(state.plan, replace(shape, optimizer=optimizer)))
    return total([*planned, *dropped(state.live(Balance), shape, state.placement.layers)])
