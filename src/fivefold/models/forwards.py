"""A model's own forward at run time: its inputs, its refusals, and its head alone.

- Layers that do not know `cu_seqlens` still pass it on to their attention.
- A model that counts its tokens from the padding token (RoBERTa: padding + 1, + 2, and so on) gets such positions.
  Every other model gets 0, 1, 2 from a document's start.
- A model refuses a row in which a document would be affected by its neighbours.

`trace` finds out which models these are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast

from fivefold.core.errors import UserError
from fivefold.models.anatomy import Anatomy

# ---- the head alone --------------------------------------------------------------------------------------------------


@contextmanager
def head_only(model: nn.Module, anatomy: Anatomy) -> Iterator[Callable[[Tensor], Tensor]]:
    """The model's own forward from hidden states to logits: its base is a pass-through inside the block."""
    base = model.get_submodule(anatomy.base)
    setattr(model, anatomy.base, _PassThrough())
    try:
        yield lambda hidden: type(model).forward(model, inputs_embeds=hidden, use_cache=False).logits
    finally:
        setattr(model, anatomy.base, base)


class _PassThrough(nn.Module):
    def __getattr__(self, name: str) -> Any:
        """Pass through for parts of a base as well, which some models call (`self.model.decoder(...)`)."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=inputs_embeds)


@contextmanager
def base_gives(base: nn.Module, hidden: Tensor) -> Iterator[list[dict[str, Any]]]:
    """Make `base` return `hidden` for any input; the yielded list collects the keyword arguments of each call."""
    given, own = list[dict[str, Any]](), vars(base).get("forward")

    def forward(*_: Any, **kwargs: Any) -> BaseModelOutputWithPast:
        given.append(kwargs)
        return _Output(last_hidden_state=hidden)

    base.forward = forward
    try:
        yield given
    finally:
        del base.forward
        if own is not None:
            base.forward = own


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    def __getattr__(self, name: str) -> None:
        """None for every other output of a base (router logits, cross attentions)."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None


# ---- bounds of documents ---------------------------------------------------------------------------------------------


def hand_on_cu_seqlens(model: nn.Module, forgetful: Sequence[tuple[str, str]]) -> None:
    """Pass the bounds of documents to attention in layers that drop unknown keywords."""
    by_layer: dict[str, list[Any]] = {}
    for layer, name in forgetful:
        by_layer.setdefault(layer, []).append(model.get_submodule(name))
    for layer, modules in by_layer.items():
        block = model.get_submodule(layer)
        block.forward = partial(_with_cu_seqlens, block.forward, list(dict.fromkeys(modules)))


def _with_cu_seqlens(
    plain: Any, modules: Sequence[Any], *args: Any, cu_seqlens: Tensor | None = None, **kwargs: Any
) -> Any:
    """Run a block's forward with the bounds passed to its attention modules."""
    attends = [module.forward for module in modules]
    for module, attend in zip(modules, attends, strict=True):
        module.forward = partial(attend, cu_seqlens=cu_seqlens)
    try:
        return plain(*args, **kwargs)
    finally:
        for module, attend in zip(modules, attends, strict=True):
            module.forward = attend


# ---- positions behind padding ----------------------------------------------------------------------------------------


def behind_padding(ids_BT: Tensor, positions_BT: Tensor, padding: int) -> Tensor:
    """The positions [B, T] that such a model counts for tokens at `positions_BT` of their documents.

    Tokens count from padding + 1. A padding token has position `padding` and is not counted. Example: padding 1 and the
    tokens 7, 1, 8 of one document give 2, 1, 3. All cached tokens of a document count, as in `transformers`.
    """
    is_token = ids_BT != padding
    place = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    counted, start = is_token.cumsum(1), place - positions_BT
    before = (counted - is_token.long()).gather(1, start.clamp(min=0))
    return (counted - before - start.clamp(max=0)) * is_token + padding


def count_behind_padding(base: nn.Module, padding: int) -> None:
    """Give the base of such a model the positions that it would count for each document alone."""
    base.register_forward_pre_hook(partial(_place, padding), with_kwargs=True, prepend=True)  # while rows are whole


def _place(padding: int, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    ids, given = kwargs.get("input_ids", args[0] if args else None), kwargs.get("position_ids")
    if ids is None or (given is None and kwargs.get("past_key_values") is not None):
        return args, kwargs  # the model counts by itself
    given = torch.arange(ids.shape[1], device=ids.device) if given is None else given
    cu_seqlens, cached = kwargs.get("cu_seqlens"), kwargs.get("past_key_values") is not None
    longest = int(given.max()) + 1 if cached else ids.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    _check_length(base, padding, longest)
    return args, kwargs | {"position_ids": behind_padding(ids, given.expand(ids.shape), padding)}


def _check_length(base: Any, padding: int, longest: int) -> None:
    """Raise `UserError` for a document longer than the positions after the padding token."""
    places = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if places is not None and longest > places - padding - 1:
        raise UserError(
            f"{type(base).__name__} counts positions from behind its padding token: its {places} leave "
            f"{places - padding - 1} for a document, and one has {longest} tokens",
            fix=f"keep rows and texts to {places - padding - 1} tokens or less",
        )


# ---- lengths that a model does not support ---------------------------------------------------------------------------


def has_rope_limits(config: PreTrainedConfig) -> bool:
    """True if the rotary tables depend on the length."""
    return any(_rope_limits(config))


def check_lengths(hf_config: PreTrainedConfig, longest: int) -> None:
    """Raise `UserError` if documents of several lengths, up to `longest` tokens, cannot share a micro batch.

    `dynamic` and `longrope` take one table of frequencies for a whole micro batch, by its longest document. Above a
    limit the rotation of a document would depend on its neighbours, and so on the layout.
    """
    for kind, limit, instead in _rope_limits(hf_config):
        if longest > limit:
            raise UserError(
                f"rope type {kind} takes other frequencies for all documents of a micro batch when one of them is "
                f"longer than {limit} tokens: with up to {longest} tokens they would change each other",
                fix=f"keep rows and texts to {limit} tokens or less, or {instead} in model.overrides.rope_parameters",
            )


def check_slices(hf_config: PreTrainedConfig, position_ids: Tensor) -> None:
    """Raise `UserError` if a part of these tokens would be rotated by another table than the whole row. `transformers`
    chooses the rotary table by the largest position in its input."""
    for kind, limit, instead in _rope_limits(hf_config):
        if int(position_ids.max()) >= limit:
            raise UserError(
                f"rope type {kind} takes other frequencies for documents longer than {limit} tokens, which a rank "
                "with a part of the tokens cannot tell",
                fix=f"use documents of {limit} tokens or less, layout.cp: 1, or {instead} in "
                "model.overrides.rope_parameters",
            )


def _rope_limits(config: PreTrainedConfig) -> Iterator[tuple[str, int, str]]:
    """(rope type, the length up to which its table is constant, what fixes the table) per rope with a limit."""
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]:
        if parameters.get("rope_type") == "dynamic":
            yield "dynamic", config.max_position_embeddings, "a rope_type whose table is fixed (yarn, linear)"
        if parameters.get("rope_type") == "longrope" and parameters["short_factor"] != parameters["long_factor"]:
            yield "longrope", parameters["original_max_position_embeddings"], "equal short_factor and long_factor"


def check_documents(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A pre-hook of the base of a model with `has_rope_limits`. Documents of equal length are rotated as if alone,
    whatever the length; for several lengths, see `check_lengths`."""
    cu_seqlens = kwargs.get("cu_seqlens")
    if cu_seqlens is not None and len(set(cu_seqlens.diff().tolist())) > 1:
        check_lengths(base.config, int(cu_seqlens.diff().max()))


def check_rows(name: str, most: int, parts: int, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A pre-hook of the base of a model in which module `name` counts the tokens of a row for itself (Llama 4).

    The count is wrong for a document that begins inside a row, and on a rank with one of `parts` parts of the row. Up
    to `most` tokens it has no effect. Raises `UserError` for longer rows of either kind.
    """
    given = kwargs.get("input_ids", args[0] if args else None)
    length = parts * given.shape[1] if isinstance(given, Tensor) else 0
    if kwargs.get("cu_seqlens") is not None and isinstance(given, Tensor):  # a cache: the length of all its tokens
        length = max(length, int(kwargs["cu_seqlens"][-1]) // len(given))
    if length > most and (kwargs.get("cu_seqlens") is not None or parts > 1):
        raise UserError(
            f"{name} of {type(base).__name__} counts the tokens of a row, whatever documents are in it: in rows of "
            f"more than {most} tokens documents would change each other",
            fix=f"keep rows and texts to {most} tokens or less, or one document to a row, with layout.cp: 1",
        )
