"""Bugs of the update: what decays, what is updated, by which rule, and what is computed with afterwards."""

from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from fivefold.config import OptimizerSection
from fivefold.parallel.dtensor import local
from fivefold.parallel.matrices.runtime import FullMatrices
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import adamw, muon
from tests.verification.faults.fault import Model, fault

ANY_UPDATE = [("update", r"")]


def _adamw(change: Callable[[nn.Module, OptimizerSection], torch.optim.Optimizer]) -> Any:
    """The optimizer is what `change(model, options)` gives."""
    return patch.object(adamw.RULE, "build", lambda model, options, but=(): change(model, options))


def _after_step(change: Callable[[torch.optim.Optimizer], None]) -> Any:
    """`change(optimizer)` happens after every update."""
    plain = torch.optim.AdamW.step

    def step(self: Any, *args: Any) -> Any:
        result = plain(self, *args)
        with torch.no_grad():
            change(self)
        return result

    step.hooked = True  # type: ignore[attr-defined]
    return patch.object(torch.optim.AdamW, "step", step)


def _parameters(of: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in of.param_groups for parameter in group["params"])


# ---- what is updated -------------------------------------------------------------------------------------------------


@fault(
    "norms and biases decay",
    known="verl #5070, Fast-LLM #542",
    layout="shard2",
    expects=[("update", r"norm|bias")],
)
def norms_decay() -> Any:
    plain = torch.optim.AdamW

    def build(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        return plain(
            model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay, betas=options.betas,
            eps=options.eps, fused=True,
        )  # fmt: skip

    return _adamw(build)


@fault(
    "nothing decays: parameters seen as flat shards have one dimension, as biases have",
    known="open_clip #358",
    layout="shard2",
    expects=[("update", r"embed_tokens")],  # the first of the matrices
)
def nothing_decays() -> Any:
    return _adamw_with_groups(lambda group: group | {"weight_decay": 0.0})


def _adamw_with_groups(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    plain = torch.optim.AdamW
    return patch.object(
        adamw.torch.optim, "AdamW", lambda groups, **options: plain([change(each) for each in groups], **options)
    )


@fault(
    "a projection is not among the optimizer's parameters",
    known="parameters listed before the model was complete",
    layout="shard2",
    expects=[("update", r"layers\.1\.mlp\.down_proj\.weight")],
)
def parameter_missing_from_the_optimizer() -> Any:
    plain = adamw.RULE.build
    return _adamw(lambda model, options: plain(model, options, but=["model.layers.1.mlp.down_proj.weight"]))


@fault(
    "a norm weight is not among the optimizer's parameters",
    known="parameters listed before the model was complete",
    layout="tp2",
    expects=[("update", r"model\.norm\.weight")],
)
def norm_missing_from_the_optimizer() -> Any:
    plain = adamw.RULE.build
    return _adamw(lambda model, options: plain(model, options, but=["model.norm.weight"]))


@fault(
    "the update happens on the first tensor parallel rank alone",
    known="a call guarded by a rank",
    layout="tp2",
    expects=[("update", r"tp rank 1")],
)
def updated_on_one_tensor_rank() -> Any:
    plain = adamw.RULE.build

    def build(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        made = plain(model, options)
        if state_of(model).placement.coords.tp:
            step = made.step

            def only_seen(*_: Any) -> None:
                """The hooks of a step run; the weights stay."""
                before = [local(each).clone() for each in _parameters(made)]
                step()
                for each, kept in zip(_parameters(made), before, strict=True):
                    local(each).detach().copy_(kept)

            made.step = only_seen  # type: ignore[method-assign,assignment]
        return made

    return _adamw(build)


# ---- by which rule ---------------------------------------------------------------------------------------------------


@fault(
    "the update is applied twice",
    known="a step in the trainer and one in a callback",
    layout="shard2",
    expects=ANY_UPDATE,
)
def updated_twice() -> Any:
    plain = torch.optim.AdamW.step

    def step(self: Any, *args: Any) -> Any:
        plain(self, *args)
        return plain(self, *args)

    step.hooked = True  # type: ignore[attr-defined]
    return patch.object(torch.optim.AdamW, "step", step)


@fault(
    "the second moment decays by torch's default, whatever the run file says",
    known="an option that is read and not passed on",
    layout="shard2",
    expects=[("second moment", r"")],
)
def another_beta2() -> Any:
    plain = torch.optim.AdamW

    def build(groups: Any, *, betas: tuple[float, float], **options: Any) -> torch.optim.AdamW:
        return plain(groups, betas=(betas[0], 0.999), **options)

    return patch.object(adamw.torch.optim, "AdamW", build)


@fault(
    "weight decay goes through the moments: Adam where AdamW was asked for",
    known="L2 in place of decoupled decay, arXiv:1711.05101",
    layout="shard2",
    expects=ANY_UPDATE,
)
def decay_through_the_moments() -> Any:
    return patch.object(adamw.torch.optim, "AdamW", torch.optim.Adam)


@fault(
    "the learning rate of a step is set after its update, which still has the one before",
    known="scheduler and optimizer in the wrong order",
    layout="shard2",
    expects=[("update", r" times the reference's")],
)
def rate_set_after_the_update() -> Any:
    plain = torch.optim.AdamW.step

    def step(self: Any, *args: Any) -> Any:
        rate = self.param_groups[0]["lr"]
        for group in self.param_groups:
            group["lr"] = self.__dict__.get("rate_before", self.defaults["lr"])
        result = plain(self, *args)
        for group in self.param_groups:
            group["lr"] = self.rate_before = rate
        return result

    step.hooked = True  # type: ignore[attr-defined]
    return patch.object(torch.optim.AdamW, "step", step)


@fault(
    "the learning rate of a step is set in the first group alone: norms and biases keep that of the run file",
    known="a schedule of param_groups[0]",
    layout="shard2",
    expects=[("update", r"norm|bias")],
)
def rate_of_the_first_group() -> Any:
    plain = adamw.RULE.build

    def build(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        def forget(of: torch.optim.Optimizer, *_: Any) -> None:
            for group in of.param_groups[1:]:
                group["lr"] = options.learning_rate

        made = plain(model, options)
        made.register_step_pre_hook(forget)
        return made

    return _adamw(build)


@fault(
    "Muon's weights decay by the decay alone, not by rate times decay",
    known="decay taken for what the rate has been multiplied into",
    layout="shard2",
    model=Model(optimizer="muon"),
    expects=[("update", r"_proj\.weight")],
)
def muon_decays_without_the_rate() -> Any:
    plain = muon.RULE.build

    def build(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        def divided(of: torch.optim.Optimizer, *_: Any) -> None:
            own = of.param_groups[0]
            own["weight_decay"] = options.weight_decay / own["lr"]

        made = plain(model, options)
        made.register_step_pre_hook(divided)
        return made

    return patch.object(muon.RULE, "build", build)


@fault(
    "the step count stays at 1: every step is corrected like the first",
    known="a count that is made again every step",
    layout="shard2",
    expects=[("losses of .* steps", r"step 3"), ("weight, last step", r"")],
)
def steps_not_counted() -> Any:
    def first(of: torch.optim.Optimizer) -> None:
        for state in of.state.values():
            cast(Tensor, state["step"]).zero_()

    return _after_step(first)


@fault(
    "master weights are kept in bf16",
    known="Model-Optimizer #2483",
    layout="shard2",
    expects=ANY_UPDATE,
)
def master_weights_rounded() -> Any:
    def rounded(of: torch.optim.Optimizer) -> None:
        for each in _parameters(of):
            local(each).copy_(local(each).bfloat16())

    return _after_step(rounded)


@fault(
    "moments are kept in bf16",
    known="state in the type of the weights",
    layout="shard2",
    expects=[("first moment", r"")],
)
def moments_rounded() -> Any:
    def rounded(of: torch.optim.Optimizer) -> None:
        for state in of.state.values():
            for kind in ("exp_avg", "exp_avg_sq"):
                local(state[kind]).copy_(local(state[kind]).bfloat16())

    return _after_step(rounded)


@fault(
    "Muon orthogonalises each rank's shard in place of the matrix",
    known="DeepSpeed #8437",
    layout="shard2",
    model=Model(optimizer="muon"),
    expects=[("update", r"_proj\.weight")],
)
def shards_orthogonalised() -> Any:
    def own(self: Any, part: Callable[[str], Tensor], work: Callable[[Tensor], Tensor]) -> Iterator[Any]:
        for name in [name for each in self._rounds for name in each.names]:
            yield name, work(part(name))

    return patch.object(FullMatrices, "map", own)


@fault(
    "Muon scales an update by the sides of a rank's shard in place of the matrix's",
    known="the scale of arXiv:2502.16982 under sharding",
    layout="shard2",
    model=Model(optimizer="muon"),
    expects=[("update", r"(gate|up)_proj\.weight")],  # the only ones whose longer side is cut
)
def update_scaled_by_the_shard() -> Any:
    plain = muon.Muon.__init__

    def init(self: Any, model: nn.Module, *args: Any, **options: Any) -> None:
        plain(self, model, *args, **options)
        self._shapes = {name: local(parameter).shape for name, parameter in self._matrices.items()}

    return patch.object(muon.Muon, "__init__", init)


# ---- what is computed with afterwards --------------------------------------------------------------------------------


@fault(
    "what is gathered was copied before the update: every later step computes with the first weights",
    known="a compute copy that is not made again",
    layout="shard2",
    expects=[("losses of .* steps", r"step 2"), ("control.*", r"does not compute with it")],
)
def gathered_weights_stay() -> Any:
    copies: dict[int, list[Tensor]] = {}
    plain = _fsdp_collectives._get_param_all_gather_inputs

    def inputs(parameters: Any) -> Any:
        gathered = zip(parameters, plain(parameters), strict=True)
        return [copies.setdefault(id(one), [tensor.clone() for tensor in tensors]) for one, tensors in gathered]

    return patch.object(_fsdp_collectives, "_get_param_all_gather_inputs", inputs)


@fault(
    "copies of the model are updated apart: each rank adds noise of its own",
    known="random numbers with a seed per rank, in what has to be the same everywhere",
    layout="dp2",
    expects=[("replicas", r"")],
)
def replicas_drift() -> Any:
    def drift(of: torch.optim.Optimizer) -> None:
        for each in _parameters(of):
            values = local(each)
            values.mul_(1 + 1e-14 * torch.distributed.get_rank())

    return _after_step(drift)
