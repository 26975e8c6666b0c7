"""Refusals of a parallelized model when its user calls it and the result would be silently wrong.

After backward the library sums gradients over tensor parallel ranks and over the two ends of a pipeline, and it divides
by the targets of all data ranks. A plain `loss.backward()` misses all three. So every output of the model has a hook
that raises when a gradient reaches it. On one process a plain backward is right and is allowed. On a pipeline rank,
which has only its own layers, a plain forward is refused too. The library's own passes run inside `Guard.library`,
where nothing is refused.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.models.hf_internals import implementations
from fivefold.parallel.fsdp.copies import before_backward
from fivefold.parallel.fsdp.runtime import put_in_order, reshard
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.parts import AssembledParameter, PartOfParameter, refused
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.state import state_of
from fivefold.torch_internals import is_in_backward


def install(model: Any) -> None:
    """Hook `model`, its base, its layers, its embedding and its head to refuse calls that are not the library's.

    Gathered parameters are dropped after a plain forward, and before the next: backward may have gathered them again,
    or ended half-way. Otherwise the forward after the next optimizer step would still use the old values.
    """
    state = state_of(model)
    guard, plan = state.guard, state.plan
    guard.implementations = implementations(model)
    base, parts = plan.anatomy.base, [plan.anatomy.embedding, *plan.anatomy.layers, plan.anatomy.head]
    pipelined, recomputes = plan.layout.pp > 1, any(map(plan.recompute.wraps, plan.placement.layers))

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if guard.is_library:
            return None
        if pipelined:
            raise refused(
                "pp: this rank has only some of the model's layers, so the model cannot be called on it",
                "ff.train_step(model, optimizer, batch), ff.evaluate(model, batches), or ff.logits(model, batch)",
            )
        keys = ("output_hidden_states", "output_attentions")
        asked = [key for key in keys if kwargs.get(key, getattr(model.config, key, False))]
        if asked and dist.get_world_size() > 1:
            raise refused(
                f"{asked[0]} over several ranks: each has other tokens, and nobody puts them together",
                f"leave {asked[0]} out, or ask for it in one process",
            )
        if plan.splits_sequence and kwargs.get("inputs_embeds") is not None:
            raise refused(
                "inputs_embeds under tp with sequence parallel: the embedding gives each rank its tokens",
                "pass input_ids, or a layout with +nosp",
            )
        if not is_in_backward():  # backward reruns a model that is checkpointed as a whole
            put_in_order(model)
            check_parameters(model)
            check_inside(model)
            state.begin_passes()  # weights may have changed since the last passes
            _begin_rows(model, args, kwargs)
        guard.is_called = True
        return None

    def before_base(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if guard.is_library:
            return None
        if not guard.is_called:
            raise refused(
                "the base of a parallelized model cannot be called by itself: its parameters come with the whole",
                "model(input_ids=...).logits; for a loss model.backward(batch), or ff.evaluate(model, batches)",
            )
        if recomputes and torch.is_grad_enabled() and kwargs.get("past_key_values") is None:
            kwargs = {**kwargs, "use_cache": False}  # a second forward would append to the cache
        return args, _with_cu_seqlens(args, kwargs)

    def before_part(part: nn.Module, args: tuple[Any, ...]) -> None:
        if not (guard.is_library or guard.is_called):
            raise refused(
                f"{type(part).__name__} cannot be called by itself: a rank has some of its tokens, or nothing of it",
                "ff.logits(model, batch), or a layout with +nosp and without pp",
            )

    def after(_: nn.Module, args: Any, output: Any) -> None:
        if guard.is_library or not torch.is_grad_enabled() or dist.get_world_size() == 1:
            return
        before_backward(output, refuse_backward)

    def drop(*_: Any) -> None:
        guard.is_called = False
        if not guard.is_library:
            reshard(model)

    for name in dict.fromkeys(("", base, *parts)):
        # Prepended: refuse before FSDP's own hooks begin a backward that would be left half done.
        model.get_submodule(name).register_forward_hook(after, prepend=True)
    for name, module in model.named_modules():
        if name:
            module.register_state_dict_pre_hook(refuse_state_dict)
    for name in parts if pipelined or plan.splits_sequence else ():
        model.get_submodule(name).register_forward_pre_hook(before_part, prepend=True)
    model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    for name in _around_layers(plan):
        model.get_submodule(name).register_forward_pre_hook(before_base, with_kwargs=True, prepend=True)
    model.register_forward_hook(drop, always_call=True)
    if plan.feature(FsdpPlan).is_used or plan.feature(FsdpPlan).stood_in_for:
        guard.parameters = _by_name(model)
    kind = PartOfParameter if plan.layout.world > plan.layout.dp_replicate else AssembledParameter
    for name, parameter in guard.parameters.items():
        if isinstance(parameter, DTensor):
            parameter.register_hook = refuse_gradient_hook  # type: ignore[method-assign]
            if name in plan.gradient_sums or (name == plan.tied and len(plan.placement.pp_ranks[name]) > 1):
                parameter.register_post_accumulate_grad_hook = refuse_accumulated_hook  # type: ignore[method-assign]
            parameter.__class__ = kind  # type: ignore[assignment]


def _begin_rows(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a plain forward in training mode drop other elements than the one before."""
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    tokens = next((value for value in given if value is not None), None)
    if model.training and tokens is not None:
        state = state_of(model)
        first = state.placement.data_rank * len(tokens)
        places = range(first, first + len(tokens))
        state.begin_rows(tokens.shape, places, kwargs.get("cu_seqlens"), ends_step=torch.is_grad_enabled())


def check_parameters(model: Any) -> None:
    """Raise `UserError` if another tensor replaces a parameter, by `functional_call` or by assignment. It would be
    ignored, because gathers and copies read the original parameter."""
    if not (held := state_of(model).guard.parameters):
        return
    found = _by_name(model)
    # `torch.utils.swap_tensors` keeps the parameter object, but gives it another's class and contents.
    if other := [
        name
        for name, parameter in held.items()
        if found.get(name) is not parameter
        or (isinstance(parameter, DTensor) and not isinstance(parameter, AssembledParameter))
    ]:
        raise refused(
            f"{other[0]} is another tensor than the one that ff.parallelize put there, and would be passed over",
            "with torch.no_grad(): parameter.copy_(values), or put it there before ff.parallelize",
        )


def check_inside(model: Any) -> None:
    """Raise `UserError` if something inside of the model would take this rank's tokens or features for all."""
    layout, guard = state_of(model).plan.layout, state_of(model).guard
    if layout.world > 1 and (found := implementations(model)) != guard.implementations:
        now, ours = next(pair for pair in zip(found, guard.implementations, strict=True) if pair[0] != pair[1])
        kind, at = ("attention", 0) if now[0] != ours[0] else ("experts", 1)
        raise refused(
            f"the model was given other {kind} ({now[at]}) after ff.parallelize, which does not know the other ranks",
            f'model.set_{"attn" if at == 0 else kind}_implementation("{ours[at]}"), or look at it in one process',
        )
    share_rows = layout.world // (layout.data_ranks * layout.pp)  # ranks: by tokens, features or both
    for at, (name, hook) in hooks_inside(model).items() if share_rows > 1 else ():
        # Those of transformers collect what passes.
        is_theirs = str(getattr(hook, "__module__", "")).startswith("transformers.")
        if not (at in guard.hooks or is_theirs or getattr(hook, "is_elementwise", False)):
            raise refused(
                f"{name} has a hook, which under {layout} would see this rank's part of the tokens or features",
                "a layout without tp and cp; where it treats each number by itself, or reads none: "
                "hook.is_elementwise = True",
            )


def hooks_inside(model: nn.Module) -> dict[int, tuple[str, Any]]:
    """The hooks of modules inside of `model` by their numbers, with the module's name."""
    kinds = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
    found = [(name, vars(module)[kind]) for name, module in model.named_modules() if name for kind in kinds]
    return {number: (name, hook) for name, hooks in found for number, hook in hooks.items()}


def _by_name(model: Any) -> dict[str, nn.Parameter]:
    return dict(nn.Module.named_parameters(model, remove_duplicate=False))


def refuse_gradient_hook(hook: Any, **_: Any) -> None:
    """Stand in for a parameter's `register_hook`: raise `UserError`, because no hook sees the whole of a gradient."""
    raise refused(
        "a hook of a parameter's gradient (register_hook) would never be called here, or see a part of it",
        "change parameter.grad after loss = model.backward(batch), before the optimizer's step",
    )


def refuse_accumulated_hook(hook: Any, **_: Any) -> None:
    """Stand in for `register_post_accumulate_grad_hook`: raise `UserError`, because the gradient is summed over ranks
    when the whole backward has run."""
    raise refused(
        "a hook behind a parameter's gradient (register_post_accumulate_grad_hook) would see a part of its sum",
        "step, or change parameter.grad, after loss = model.backward(batch); a layout without tp takes such hooks",
    )


def refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Hook of a part of the model that raises `UserError`: a state_dict of it has parts in shapes that look whole."""
    raise refused(
        f"state_dict() of a part ({type(module).__name__}) of a parallelized model is refused",
        "ff.gather(model) has whole tensors by name",
    )


def refuse_backward(_: Tensor) -> None:
    """Hook of a tensor that raises `UserError` when a gradient reaches it."""
    raise refused(
        "backward() outside of fivefold: over several ranks the gradients would be wrong, for nobody sums them",
        "loss = model.backward(batch) in place of loss.backward(), or ff.train_step(model, optimizer, batch)",
    )


def _around_layers(plan: ParallelPlan) -> list[str]:
    """The base, and modules of it around all layers, which some models call instead: `self.model.decoder(...)`."""
    base, parents = plan.anatomy.base, plan.anatomy.layers[0].split(".")[:-2]
    inside = (".".join(parents[:depth]) for depth in range(1, len(parents) + 1))
    return [base, *(name for name in inside if name.startswith(f"{base}."))]


def _with_cu_seqlens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add `cu_seqlens` to the keyword arguments of a base if `position_ids` restart. As in `transformers`, a restart
    begins a new document unless there is a mask or a cache. Example: positions 0 1 2 0 1 give [0, 3, 5]."""
    positions, others = kwargs.get("position_ids"), ("attention_mask", "past_key_values", "cu_seqlens")
    given = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))  # ids come first
    tokens = next((value for value in given if value is not None), None)
    if positions is None or positions.ndim != 2 or tokens is None or any(kwargs.get(key) is not None for key in others):
        return kwargs
    rows, length = tokens.shape[:2]
    begins = torch.ones(rows, length, dtype=torch.bool)
    begins[:, 1:] = (positions.diff(dim=1) != 1).cpu()
    if int(begins.sum()) == rows:
        return kwargs
    cu_seqlens = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([rows * length])])
    return {**kwargs, "cu_seqlens": cu_seqlens.to(torch.int32)}
