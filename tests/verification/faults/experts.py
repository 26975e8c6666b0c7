"""Bugs of models with experts, and of expert parallelism."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from fivefold.models import experts, hf_internals, merged
from fivefold.parallel import apply, lower, shard_rules
from fivefold.parallel.balance import runtime as balance
from fivefold.parallel.balance.runtime import AuxLossScaler, Balance, BalanceOptions, Shares
from fivefold.parallel.experts import runtime as expert
from fivefold.parallel.sharding import Split
from fivefold.parallel.state import state_of
from fivefold.parallel.tensor import runtime as tensor
from fivefold.parallel.tensor.mappings import gather, mapping
from fivefold.training import step as training
from fivefold.verification import proof
from tests.verification.faults.fault import Model, fault

MIXTRAL, DEEPSEEK = Model("mixtral"), Model("deepseek_v3")
GPT_OSS = Model("gpt_oss", changes=(("num_hidden_layers", 3),))
FULL = Model("mixtral", capacity=0.9)
OF_EXPERTS = [("output", r"mlp\.experts")]


@fault(
    "gradients of experts divided by the number of expert ranks",
    known="Megatron-LM #1398, torchtitan #2888",
    layout="shard4.ep2",
    model=MIXTRAL,
    expects=[("gradient, reduced", r"experts")],
)
def expert_gradients_divided() -> Any:
    plain = FSDPModule.set_gradient_divide_factor

    def divided(self: Any, factor: float) -> None:
        plain(self, 2 * factor if hf_internals.is_experts(self) else factor)

    return patch.object(FSDPModule, "set_gradient_divide_factor", divided)


@fault(
    "gradients of the router not summed over tp under sequence parallelism",
    known="Megatron-LM: router weights without the sequence-parallel attribute",
    layout="tp2",
    model=MIXTRAL,
    expects=[("gradient, reduced", r"mlp\.gate")],
)
def router_gradient_partial() -> Any:
    plain = lower.gradient_sums

    def sums(*args: Any, **options: Any) -> dict[str, str]:
        return {name: axis for name, axis in plain(*args, **options).items() if "gate" not in name}

    return patch.object(lower, "gradient_sums", sums)


@fault(
    "experts of a file taken in the order of their names as text: 10 before 2",
    known="the import of a model with more than ten experts",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=[("weight", r"experts")],
)
def experts_sorted_as_text() -> Any:
    plain = merged.read

    def read(pieces: Any, *rest: Any) -> Tensor:
        return plain(sorted(pieces, key=lambda each: (str(each.expert), each.part)), *rest)

    return patch.object(merged, "read", read)


@fault(
    "rows that arrive are taken as sorted by expert, though they come sender by sender",
    known="the local permutation after the all-to-all left out",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=OF_EXPERTS,
)
def arrivals_not_sorted() -> Any:
    def as_they_come(counts_nE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        return torch.arange(rows), counts_nE.sum(0)

    return patch.object(expert, "by_expert", as_they_come)


@fault(
    "results go back one row off: a token is given what belongs to its neighbour",
    known="an order inverted with another sort than it was made with",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=OF_EXPERTS,
)
def results_of_another_token() -> Any:
    plain = expert.inverse
    return patch.object(expert, "inverse", lambda order: plain(order).roll(1))


def _weights(change: Callable[[Tensor], Tensor]) -> Any:
    """The experts' results are weighted with `change(weights)`."""
    plain = expert.routed

    def routed(hidden: Tensor, index: Tensor, weights: Tensor, *rest: Any) -> Tensor:
        return plain(hidden, index, change(weights), *rest)

    return patch.object(expert, "routed", routed)


@fault(
    "the router's weights are not applied",
    known="weights applied by the caller in one version, by the experts in the next",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=OF_EXPERTS,
)
def weights_not_applied() -> Any:
    return _weights(lambda weights: weights * 0 + 1)


@fault(
    "the router's weights are applied twice",
    known="applied before and after the experts",
    layout="tp2",
    model=MIXTRAL,
    expects=OF_EXPERTS,
)
def weights_applied_twice() -> Any:
    return _weights(torch.square)


@fault(
    "rows beyond an expert's capacity are dropped without a word",
    known="a capacity factor left on by default",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=OF_EXPERTS,
)
def rows_dropped() -> Any:
    plain = expert.routed

    def routed(hidden: Tensor, index: Tensor, weights: Tensor, number: int, *rest: Any) -> Tensor:
        order, counts = experts.sort_by_expert(index, number)
        place = torch.cat([torch.arange(count) for count in counts.tolist()])
        kept = torch.empty_like(order).scatter_(0, order, (place < 2 * index.numel() // number).long())
        return plain(hidden, index, weights * kept.view_as(index), number, *rest)

    return patch.object(expert, "routed", routed)


@fault(
    "an expert's capacity is counted by each rank on its own part of a row",
    known="a capacity per rank, which changes with the layout",
    layout="tp2.ep2",
    model=FULL,
    expects=OF_EXPERTS,
)
def capacity_per_rank() -> Any:
    plain = balance._before
    return patch.object(balance, "_before", lambda chosen, shares: plain(chosen, Shares(shares.own, (), ())))


@fault(
    "an expert's capacity is that of the padded row",
    known="a capacity from the length of a batch, padding included",
    layout="shard2.ep2",
    model=FULL,
    expects=OF_EXPERTS,
)
def capacity_of_padding() -> Any:
    plain = balance.capacity
    return patch.object(balance, "capacity", lambda *sizes: plain(*sizes[:3], torch.full_like(sizes[3], 32)))


@fault(
    "the experts are left out of the gradient norm",
    known="Megatron-LM #1085",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=[("gradient norm", "")],
)
def experts_left_out_of_the_norm() -> Any:
    def squared_norm(model: Any) -> Tensor:
        gradients = training.local_gradients(model)
        owned = [g for name, g in gradients if "experts" not in name and state_of(model).placement.is_owner(name)]
        return torch.stack([each.double().square().sum() for each in owned]).sum()

    return patch.object(training, "squared_norm", squared_norm)


@fault(
    "with replicated activations every tp rank sends all tokens to the experts",
    known="expert data parallel groups that hold the tp ranks",
    layout="tp2.ep2+nosp",
    model=MIXTRAL,
    expects=[("gradient, (raw|reduced)", r"experts")],
)
def tokens_sent_by_every_tp_rank() -> Any:
    def send_all(self: Any, module: Any, number: int, *given: Tensor) -> Tensor:
        return expert.routed(*given, number, partial(self.compute, module))

    return patch.object(expert.ExpertParallel, "_share", send_all)


@fault(
    "the experts' biases are added once per expert rank",
    known="row-parallel biases, as in torchtitan #4332, of experts",
    layout="shard2.ep2",
    model=GPT_OSS,
    expects=OF_EXPERTS,
)
def expert_biases_added_twice() -> Any:
    plain = experts._linear

    def linear(module: Any, name: str, x: Tensor, counts: Tensor, *rest: Any) -> Tensor:
        bias = getattr(module, f"{name}_bias").repeat_interleave(counts, dim=0, output_size=len(x))
        return plain(module, name, x, counts, *rest) + bias

    return patch.object(experts, "_linear", linear)


@fault(
    "gate and up are cut as one: a rank has the gates, and another what they open",
    known="a fused gate_up_proj in contiguous halves over tp",
    layout="tp2+etp",
    model=MIXTRAL,
    expects=OF_EXPERTS,
)
def gate_and_up_cut_as_one() -> Any:
    contiguous = {"gate, then up": shard_rules.ORDERS["gate beside up"]}
    return patch.object(shard_rules, "ORDERS", contiguous)


@fault(
    "the bias of an expert's result is added by every tp rank that has a part of it",
    known="row-parallel biases, as in text-generation-inference #1036, of experts",
    layout="tp2+etp",
    model=GPT_OSS,
    expects=OF_EXPERTS,
)
def down_bias_added_by_every_part() -> Any:
    plain, plain_mlp, plain_sums = shard_rules.feature_splits, expert.expert_mlp, lower.gradient_sums

    def splits(held: Any, shapes: Any, parts: int) -> dict[str, Split]:
        whole = ((0, shapes["down_proj_bias"][1]),)
        return plain(held, shapes, parts) | {"down_proj_bias": Split(1, (whole,) * parts)}

    def from_the_first(*args: Any, biased_from: int, **options: Any) -> Tensor:
        return plain_mlp(*args, **options)

    def sums(*args: Any, **options: Any) -> dict[str, str]:
        return {name: axis for name, axis in plain_sums(*args, **options).items() if "down_proj_bias" not in name}

    @contextmanager
    def all_three() -> Iterator[None]:
        with (
            patch.object(shard_rules, "feature_splits", splits),
            patch.object(expert, "expert_mlp", from_the_first),
            patch.object(lower, "gradient_sums", sums),
        ):
            yield

    return all_three()


@fault(
    "the gradient of the router's weights covers a tp rank's part of the features alone",
    known="a gather whose backward only cuts, before experts that tensor parallelism splits",
    layout="tp2+etp",
    model=MIXTRAL,
    expects=[("gradient of output", r"mlp\.gate")],
)
def weights_gradient_of_own_features() -> Any:
    plain = expert.ExpertParallel._add_up

    def add_up(self: Any, module: Any, number: int, *given: Tensor) -> Tensor:
        enter = tensor.TensorParallel.enter
        width = given[-1].shape[-1]

        def cut(grad: Tensor, group: Any) -> Tensor:
            return grad.chunk(group.size(), 1)[group.rank()]

        def of_weights(fold: Any, x: Tensor) -> Tensor:
            is_weights = x.ndim == 3 and fold.sequence_parallel and x.is_floating_point() and x.shape[-1] == width
            return mapping(gather, cut)(x, fold.group) if is_weights else enter(fold, x)

        with patch.object(tensor.TensorParallel, "enter", of_weights):
            return plain(self, module, number, *given)

    return patch.object(expert.ExpertParallel, "_add_up", add_up)


@fault(
    "the shared experts are added once per expert rank",
    known="shared experts inside the all-to-all",
    layout="shard2.ep2",
    model=DEEPSEEK,
    expects=[("output", r"layers\.1\.mlp$")],
)
def shared_experts_counted_twice() -> Any:
    plain = DeepseekV3MoE.forward

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return plain(self, hidden_states) + self.shared_experts.forward(hidden_states)  # type: ignore[no-any-return]

    return patch.object(DeepseekV3MoE, "forward", forward)


@fault(
    "the router's correction bias is not loaded: it is a buffer, and starts at zero",
    known="buffers left out of a state dict of parameters",
    layout="shard2.ep2",
    model=DEEPSEEK,
    expects=[("weight", r"e_score_correction_bias")],
)
def correction_bias_not_loaded() -> Any:
    plain = apply.fill

    def fill(model: Any, source: Any) -> None:
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        plain(model, source)
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])

    return patch.object(apply, "fill", fill)


@fault(
    "the step leaves the router's correction bias where it was",
    known="a bias that is moved in the trainer's loop, and not in the step that another loop calls",
    layout="shard2.ep2",
    model=DEEPSEEK,
    expects=[("update", r"e_score_correction_bias")],
)
def correction_bias_not_moved() -> Any:
    return patch.object(Balance, "move_biases", lambda *_: None)


@fault(
    "the router's correction bias moves by the load of a rank's own tokens",
    known="a load that is not summed over data ranks",
    layout="shard2.ep2",
    model=DEEPSEEK,
    expects=[("load of experts", r"mlp\.gate")],
)
def correction_bias_moved_by_own_load() -> Any:
    plain = Balance.end_step

    def end_step(self: Balance) -> Any:
        with patch.object(balance.dist, "all_reduce", lambda *_, **__: None):
            return plain(self)

    return patch.object(Balance, "end_step", end_step)


@fault(
    "padding is counted among the tokens of experts, and moves the router's correction bias",
    known="a load from the length of a batch, padding included",
    layout="shard2.ep2",
    model=DEEPSEEK,
    # The loss that balances experts has the same counts; its gradient is compared before the loads, which a step sums.
    expects=[("gradient of output", r"mlp\.gate")],
)
def padding_counted_as_load() -> Any:
    plain = Balance._real

    def real(self: Balance, logits: Tensor) -> tuple[Tensor, Tensor]:
        real_BT, tokens_B = plain(self, logits)
        return torch.ones_like(real_BT), tokens_B

    return patch.object(Balance, "_real", real)


@fault(
    "what a layer computes again in backward is counted as load again",
    known="a counter in a forward that recompute runs twice",
    layout="pp2+full",
    model=DEEPSEEK,
    expects=[("load of experts", r"mlp\.gate: 2 times")],
)
def load_counted_again_in_backward() -> Any:
    plain = Balance.begin_micro_batch

    def begin(self: Balance, tokens_B: Tensor | None, *, again: bool = False) -> None:
        plain(self, tokens_B)

    return patch.object(Balance, "begin_micro_batch", begin)


def _gradient_of_losses_times(factor: int) -> Any:
    """What routers add to the gradient is `factor` times what it should be."""
    plain = AuxLossScaler.backward
    return patch.object(
        AuxLossScaler, "backward", staticmethod(lambda ctx, *grads: (grads[0], factor * plain(ctx, *grads)[1]))
    )


@fault(
    "the losses that balance experts add no gradient",
    known="a loss that is logged and never enters backward; Megatron-LM: the aux loss lost by recompute",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=[("gradient of output", r"mlp\.gate")],
)
def losses_of_routers_without_gradient() -> Any:
    return _gradient_of_losses_times(0)


@fault(
    "the loss for uneven load takes a rank's own part of a row for the row",
    known="Megatron-LM: aux loss per rank under context parallelism, which changes with the layout",
    layout="cp2.ep2",
    model=MIXTRAL,
    expects=[("gradient of output", r"mlp\.gate")],
)
def load_of_a_part_of_a_row() -> Any:
    return patch.object(Balance, "_row_groups", ())


@fault(
    "the losses that balance experts are divided by the rows of a rank",
    known="an aux loss averaged over the ranks that should have been summed",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=[("gradient of output", r"mlp\.gate")],
)
def losses_of_routers_by_rows_of_a_rank() -> Any:
    plain = Balance.begin_step
    return patch.object(Balance, "begin_step", lambda self, rows: plain(self, rows // 2))


@fault(
    "the losses that balance experts enter once per context rank",
    known="Megatron-LM: aux loss scaled by the tensor and context parallel size",
    layout="cp2.ep2",
    model=MIXTRAL,
    expects=[("gradient of output", r"mlp\.gate")],
)
def losses_of_routers_per_context_rank() -> Any:
    return _gradient_of_losses_times(2)


@fault(
    "the loss for large router logits is left out",
    known="a coefficient that is read and not passed on",
    layout="tp2",
    model=MIXTRAL,
    expects=[("gradient of output", r"mlp\.gate")],
)
def z_loss_left_out() -> Any:
    plain = balance.configure

    def configure(model: Any, watched: Balance, options: BalanceOptions, buffers: Any) -> None:
        plain(model, watched, replace(options, z=0.0), buffers)

    return patch.object(proof, "configure", configure)


@fault(
    "the losses that balance experts are reported for a rank's rows alone",
    known="a metric that is not reduced",
    layout="shard2.ep2",
    model=MIXTRAL,
    expects=[("losses of routers", r"")],
)
def losses_of_routers_not_summed() -> Any:
    plain = Balance.end_step

    def end_step(self: Balance) -> Any:
        found = plain(self)
        return replace(found, load=found.load / 2)

    return patch.object(Balance, "end_step", end_step)
