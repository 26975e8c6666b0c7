"""Positions of models that count their tokens from behind the padding token (RoBERTa): padding + 1, + 2, and so on.

fivefold counts 0, 1, 2 from a document's start, and that is what it hands to models. One that makes other positions of
its tokens when it is given none is given those here. A `trace` says which models these are.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.errors import UserError


def behind_padding(ids_BT: Tensor, positions_BT: Tensor, padding: int) -> Tensor:
    """The positions [B, T] that such a model counts for tokens at `positions_BT` of their documents.

    Tokens count from padding + 1. A padding token has position `padding` and is not counted. Example: padding 1 and the
    tokens 7, 1, 8 of one document give 2, 1, 3. Tokens of a document that lie in a cache all count, as in
    `transformers`.
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
        return args, kwargs  # it counts by itself
    given = torch.arange(ids.shape[1], device=ids.device) if given is None else given
    cu_seqlens, cached = kwargs.get("cu_seqlens"), kwargs.get("past_key_values") is not None
    longest = int(given.max()) + 1 if cached else ids.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    _check_length(base, padding, longest)
    return args, kwargs | {"position_ids": behind_padding(ids, given.expand(ids.shape), padding)}


def _check_length(base: Any, padding: int, longest: int) -> None:
    """Raise `UserError` for a document that is longer than the places behind the padding token."""
    places = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if places is not None and longest > places - padding - 1:
        raise UserError(
            f"{type(base).__name__} counts positions from behind its padding token: its {places} leave "
            f"{places - padding - 1} for a document, and one has {longest} tokens",
            fix=f"train on rows (data.seq_length) and generate texts of {places - padding - 1} tokens or less",
        )
