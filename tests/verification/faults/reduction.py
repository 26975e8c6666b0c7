"""Bugs of what happens to gradients between backward and the optimizer: micro batches, data ranks, norms, clipping."""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from fivefold.data.batch import MicroBatch
from fivefold.parallel import passes
from fivefold.parallel.fsdp import runtime as data
from fivefold.parallel.pipeline import runtime as pipeline
from fivefold.parallel.state import ParallelState
from fivefold.training import step
from fivefold.training.step import local_gradients, squared_norm
from tests.verification.faults.fault import fault

# 8 rows of which every data rank of two has four micro batches.
REDUCED = [("gradient, reduced", r"")]


def _gradients(after: Callable[[Any, Sequence[passes.Inputs]], None]) -> Any:
    """`after(model, batch)` happens when gradients are there."""
    plain = passes.gradients

    def gradients(model: Any, batch: Sequence[passes.Inputs], **options: Any) -> Tensor:
        loss = plain(model, batch, **options)
        after(model, batch)
        return loss

    return patch.object(passes, "gradients", gradients)


def _before_each(prepare: Callable[[Any, int], None]) -> Any:
    """`prepare(model, index)` happens before the backward of each micro batch."""
    plain = pipeline._Flags.before_backward

    def before_backward(flags: Any, slot: Any) -> None:
        plain(flags, slot)
        root, *_ = flags._units[-1]  # the model's own unit
        prepare(root, slot.micro_batch)

    return patch.object(pipeline._Flags, "before_backward", before_backward)


# ---- the loss's share ------------------------------------------------------------------------------------------------


@fault(
    "the loss is a mean of data ranks' means",
    known="transformers #34191, over data ranks",
    layout="shard2",
    expects=[("counts of a step", r"targets")],
)
def loss_is_a_mean_of_means() -> Any:
    def count(batch: Any, state: ParallelState, device: torch.device, stop: bool) -> Tensor:
        mine = sum(b.targets for b in batch) * state.plan.layout.data_ranks
        rows = sum(len(b.input_ids) for b in batch) * state.plan.layout.data_ranks
        return torch.tensor([mine, sum(b.tokens for b in batch), 0, rows, int(stop)], device=device)

    return patch.object(step, "_count", count)


@fault(
    "target tokens counted on every tensor parallel rank: the loss is divided by too many",
    known="a scale that Adam and clipping hide",
    layout="tp2",
    expects=[("counts of a step", r"targets")],
)
def targets_counted_on_every_tensor_rank() -> Any:
    plain = step._count

    def count(batch: Any, state: ParallelState, device: torch.device, stop: bool) -> Tensor:
        return plain(batch, state, device, stop) * torch.tensor([state.plan.layout.tp, 1, 1, 1, 1], device=device)

    return patch.object(step, "_count", count)


@fault(
    "each micro batch's own mean counts alike, whatever its number of tokens",
    known="transformers #34191",
    layout="shard2",
    expects=[("loss", r"")],
)
def mean_of_micro_batches() -> Any:
    plain = step.inputs_of_step

    def inputs_of_step(model: Any, batch: Sequence[MicroBatch], *rest: Any, **options: Any) -> list[passes.Inputs]:
        ranks, inputs = step.state_of(model).plan.layout.data_ranks, plain(model, batch, *rest, **options)
        for each, own in zip(batch, inputs, strict=True):
            own.task.scale = torch.tensor(1 / (each.targets * len(batch) * ranks), dtype=torch.float64)
        return inputs

    return patch.object(step, "inputs_of_step", inputs_of_step)


@fault(
    "the backward pass divides by the number of micro batches once more",
    known="divided by the model and by the trainer",
    layout="shard2",
    expects=[("gradient of output", r"0\.25 times")],
)
def micro_batches_scaled_twice() -> Any:
    plain = passes.run_stage

    def run_stage(*args: Any, **options: Any) -> Tensor:
        exact = plain(*args, **options)
        return exact.detach() * 0.75 + exact * 0.25  # the same loss, of a quarter's gradient

    return patch.object(passes, "run_stage", run_stage)


@fault(
    "the last micro batch of a step is left out",
    known="loops that end before a last, shorter micro batch",
    layout="shard2",
    expects=[("micro batches", r"3 of 4")],
)
def last_micro_batch_dropped() -> Any:
    plain = step.inputs_of_step
    return patch.object(step, "inputs_of_step", lambda *given, **options: plain(*given, **options)[:-1])


# ---- what is added up ------------------------------------------------------------------------------------------------


@fault(
    "gradients are zeroed before every micro batch: the last one alone counts",
    known="zero_grad inside the loop",
    layout="shard2",
    expects=REDUCED,
)
def only_the_last_micro_batch_counts() -> Any:
    def zero(model: Any, _: int) -> None:
        for parameter in model.parameters():
            parameter.grad = None

    return _before_each(zero)


@fault(
    "the first micro batch's gradients are never reduced under ZeRO 2",
    known="no_sync around the wrong micro batch",
    layout="shard2+zero2",
    expects=REDUCED,
)
def first_micro_batch_not_reduced() -> Any:
    def forget(model: Any, index: int) -> None:
        model.set_requires_gradient_sync(index != 0)
        for module in model.modules() if index == 1 else ():
            group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            for each in group.fsdp_params if group else ():
                each._unsharded_param.grad = each.unsharded_accumulated_grad = None

    return _before_each(forget)


@fault(
    "copies of the model do not add up their gradients",
    known="HSDP without its all-reduce",
    layout="dp2",
    expects=REDUCED,
)
def replicas_not_reduced() -> Any:
    plain = data.fully_shard
    return patch.object(
        data, "fully_shard", lambda module, *, mesh, **options: plain(module, mesh=mesh["dp_shard"], **options)
    )


@fault(
    "gradients averaged over data ranks, though the loss is divided by all tokens",
    known="FSDP's default",
    layout="shard2",
    expects=[("gradient, reduced", r"0\.5 times")],
)
def gradients_averaged() -> Any:
    def average(model: Any, _: Any) -> None:
        for parameter in model.parameters():
            parameter.grad /= step.state_of(model).plan.layout.data_ranks

    return _gradients(average)


@fault(
    "gradients reduced in bf16",
    known="reduction in the type of the computation",
    layout="shard2",
    expects=REDUCED,
)
def reduced_in_bf16() -> Any:
    plain = data.MixedPrecisionPolicy
    return patch.object(
        data, "MixedPrecisionPolicy", lambda **options: plain(**options | {"reduce_dtype": torch.bfloat16})
    )


@fault(
    "gradients stay from one step to the next",
    known="a zero_grad that misses parameters",
    layout="shard2",
    expects=[("gradients left after the step", r"")],
)
def gradients_not_zeroed() -> Any:
    return patch.object(torch.optim.Optimizer, "zero_grad", lambda *_, **__: None)


@fault(
    "squared lengths are those of rows, not of documents: attention is counted with FLOPs that it does not have",
    known="FLOPs of attention from the length of a packed row",
    layout="shard2",
    expects=[("counts of a step", r"squared")],
)
def lengths_of_rows_squared() -> Any:
    return patch.object(step, "squared_lengths", lambda batch: sum(len(each.input_ids) * 31**2 for each in batch))


# ---- the norm, and clipping by it ------------------------------------------------------------------------------------


def _norm_of(counted: Callable[[ParallelState, str], bool]) -> Any:
    """The gradient norm is made of `counted` parameters."""

    def norm(model: Any) -> Tensor:
        state = step.state_of(model)
        own = [each.double().square().sum() for name, each in local_gradients(model) if counted(state, name)]
        return torch.stack([torch.zeros((), dtype=torch.float64), *own]).sum()

    return patch.object(step, "squared_norm", norm)


@fault(
    "parameters that every tensor parallel rank holds count once per rank in the norm",
    known="NeMo RL #3788, ROCm TransformerEngine #715",
    layout="tp2",
    expects=[("gradient norm", r"")],
)
def copies_counted_in_the_norm() -> Any:
    return _norm_of(lambda *_: True)


@fault(
    "embeddings are left out of the gradient norm",
    known="a norm over some of the groups",
    layout="shard2",
    expects=[("gradient norm", r"")],
)
def parameters_left_out_of_the_norm() -> Any:
    return _norm_of(lambda state, name: state.placement.is_owner(name) and "embed" not in name)


@fault(
    "every rank clips by the norm of its own shard",
    known="fairscale #167 (review)",
    layout="shard2",
    expects=[("gradient, clipped", r"")],
)
def clipping_by_a_local_norm() -> Any:
    clip = step.clip_
    return patch.object(step, "clip_", lambda model, _, limit: clip(model, sqrt(float(squared_norm(model))), limit))


@fault(
    "gradients clipped on the first tensor parallel rank alone",
    known="a call guarded by a rank",
    layout="tp2",
    expects=[("gradient, clipped", r"tp rank 1")],
)
def clipped_on_one_tensor_rank() -> Any:
    clip = step.clip_

    def clip_(model: Any, *args: Any) -> None:
        if step.state_of(model).placement.coords.tp == 0:
            clip(model, *args)

    return patch.object(step, "clip_", clip_)


@fault(
    "gradients whose norm is below the limit are scaled up to it",
    known="a factor of limit over norm without its minimum with one",
    layout="shard2",
    expects=[("gradient, second step", r"times")],
)
def small_gradients_scaled_up() -> Any:
    def clip_(model: Any, norm: float, limit: float) -> None:
        for _, gradient in local_gradients(model):
            gradient.mul_(limit / (norm + 1e-6))

    return patch.object(step, "clip_", clip_)


@fault(
    "ranks round the gradients of a norm weight differently: the copies drift apart",
    known="bigscience Megatron-DeepSpeed #270, #271",
    layout="tp2",
    expects=[("replicas", r"norm")],
)
def copies_drift() -> Any:
    clip, steps = step.clip_, [0]

    def clip_(model: Any, *args: Any) -> None:
        clip(model, *args)
        steps[0] += 1
        for name, gradient in local_gradients(model):
            if name.endswith("norm.weight") and step.state_of(model).placement.coords.tp:
                gradient.mul_(1 + 2e-11 * (steps[0] % 2))  # Adam would not see a factor that stays

    return patch.object(step, "clip_", clip_)
