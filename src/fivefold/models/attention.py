"""Attention of every model: causal, grouped-query, documents packed in a row kept apart.

`transformers` calls `attention_forward` in place of its own functions (see `register`). Without `bounds` each row is
one document. With `bounds`, the cumulative document bounds of the micro batch (`MicroBatch.bounds`), no document
sees another. A quadratic mask exists in neither case. Sliding windows (Mistral, Gemma), soft-capped scores (Gemma 2)
and attention sinks (gpt-oss) are served in both, and in generation.

Legend: B rows, T positions, H query heads, S key positions, D head size; G key/value heads (H is a multiple of G).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from fivefold.errors import UserError
from fivefold.models import kernels, surfaces
from fivefold.models.packed import packed_attention

NAME = "fivefold"
CONTEXT = "context_parallel"  # attribute of an attention module: the fold that attends in place of this file

# What some models ask of attention that is not built here; dropping any of these would train a different model.
_UNSUPPORTED = {
    "position_bias": "a position bias",
    "head_mask": "a head mask",
}


def register() -> None:
    """Offer this attention to `transformers` under `NAME`. Calling it again changes nothing."""
    surfaces.register_attention(NAME, attention_forward, no_mask)


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    bounds: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of the models, in the signature of `transformers`.

    query [B,H,T,D], key and value [B,G,S,D] -> ([B,T,H,D], None). `bounds`: int32 [n+1] on the CPU, 0 first, B*T
    last, every row start included. S > T is generation with a cache: the queries are the last T of S positions.
    A query sees itself and the `sliding_window` - 1 positions before it. `softcap`: scores become
    tanh(scores / softcap) * softcap. `s_aux` [H]: attention sinks, a logit per query head without a value.
    Raises `UserError` for dropout, masks, and forms of attention that would otherwise be dropped without a word.
    """
    _refuse(module, attention_mask, dropout, sliding_window, kwargs)
    if value.shape[-1] != query.shape[-1]:
        return _with_equal_heads(module, query, key, value, scaling, bounds, sliding_window, softcap, s_aux), None
    context = getattr(module, CONTEXT, None)
    if context is not None and context.is_on:
        rule = kernels.Rule(_scale(scaling, query), sliding_window, softcap)
        return context.attend(query, key, value, bounds, rule, s_aux), None
    (rows, _, length, _), keys = query.shape, key.shape[2]
    packed = bounds is not None and bounds.shape[0] != rows + 1
    bites = sliding_window is not None and sliding_window < keys
    if not (packed or bites or softcap is not None or s_aux is not None):
        return _plain_rows(query, key, value, scaling), None
    if keys != length and not packed:
        rule = kernels.Rule(_scale(scaling, query), sliding_window, softcap)
        return _cached_rows(query, key, value, rule, s_aux), None
    if bounds is None:
        bounds = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device="cpu")
    window = sliding_window if bites else None
    out_BTHD, _ = packed_attention(query, key, value, bounds, _scale(scaling, query), window, softcap, s_aux)
    return out_BTHD, None


def _with_equal_heads(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None,
    bounds: torch.Tensor | None, window: int | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Latent attention (DeepSeek) has heads of two sizes: the narrower are filled up with zeros, which add nothing."""
    size, given = value.shape[-1], query.shape[-1]
    query, key, value = (F.pad(each, (0, max(size, given) - each.shape[-1])) for each in (query, key, value))
    scale = float(given) ** -0.5 if scaling is None else scaling
    out_BTHD, _ = attention_forward(
        module, query, key, value, None, scale, bounds=bounds, sliding_window=window, softcap=softcap, s_aux=sinks
    )
    return out_BTHD[..., :size]


def _plain_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
    """[B,T,H,D]: each row one document, by PyTorch's own function."""
    length, keys = query.shape[2], key.shape[2]
    causal = length > 1
    cached = causal and keys != length
    out_BHTD = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_last_positions(length, keys, query.device) if cached else None,
        is_causal=causal and not cached,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out_BHTD.transpose(1, 2)


def _cached_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: kernels.Rule, sinks: torch.Tensor | None
) -> torch.Tensor:
    """[B,T,H,D]: generation under `rule`. The cache of a sliding layer may have dropped its first keys; only the
    distance from the last one counts."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
        raise UserError(
            "a sliding window, soft-capping or attention sinks with a key/value cache have no gradients",
            fix="train with use_cache=False, generate under torch.no_grad()",
        )
    out_BHTD, lse_BHT = kernels.blockwise_forward(query, key, value, rule)
    out_BTHD = out_BHTD.transpose(1, 2)
    if sinks is not None:
        kernels.join_sinks(out_BTHD, lse_BHT.transpose(1, 2), sinks.detach())
    return out_BTHD


def no_mask(
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    """The mask function of the models: never a mask, and a `UserError` where leaving it out would be wrong."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UserError(
            "the attention mask hides tokens (a padded batch), which fivefold's attention does not do",
            fix="pass rows without padding, or packed documents with their bounds",
        )
    total = int(kv_offset) + int(kv_length)
    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    if chunk is not None and kwargs.get("local_size") == chunk and total > chunk:
        raise UserError(
            f"chunked attention ({chunk} positions) over rows of {total} is not supported yet",
            fix=f"set data.seq_length to {chunk} or less",
        )
    if int(q_offset) + int(q_length) != total:
        raise UserError(
            "the key/value cache holds positions that are not written yet (a static cache)",
            fix="use a dynamic cache",
        )


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """The plain twin of `attention_forward`: every score written out under a dense mask. Same shapes."""
    rows, heads, length, _ = query.shape
    keys = key.shape[2]
    groups = heads // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    seen = _last_positions(length, keys, query.device).expand(rows, 1, length, keys)
    if sliding_window is not None:
        seen = seen & seen.new_ones(length, keys).triu(keys - length - sliding_window + 1)
    if bounds is not None:
        token = torch.arange(rows * length).view(rows, length)
        document = torch.bucketize(token, bounds.long(), right=True).to(query.device)
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])
    scores = query @ key.transpose(-1, -2) * _scale(scaling, query)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.view(-1, 1, 1).expand(rows, heads, length, 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :keys] @ value).transpose(1, 2)


def _scale(scaling: float | None, query: torch.Tensor) -> float:
    return float(query.shape[-1]) ** -0.5 if scaling is None else float(scaling)


def _last_positions(length: int, keys: int, device: torch.device) -> torch.Tensor:
    """[T, S], True where query t, which stands at position S - T + t, sees key s."""
    return torch.ones(length, keys, dtype=torch.bool, device=device).tril(keys - length)


def _refuse(
    module: nn.Module, mask: torch.Tensor | None, dropout: float, window: int | None, kwargs: Mapping[str, Any]
) -> None:
    if dropout:
        raise UserError(f"attention dropout {dropout} is not supported", fix="set model.overrides.attention_dropout: 0")
    if mask is not None:
        raise UserError("a dense attention mask was passed", fix="leave attention_mask out; documents go in bounds")
    if window is not None and window < 1:
        raise UserError(f"a sliding window of {window} positions hides every key", fix="use null for no window")
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UserError(f"{type(module).__name__} asks for attention that is not causal, which is not supported")
    for name, what in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise UserError(f"{type(module).__name__} asks for {what} ({name}), which is not supported yet")
