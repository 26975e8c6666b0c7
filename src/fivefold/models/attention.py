"""Attention of every model: causal, grouped-query, with the documents packed in a row kept apart.

`transformers` calls `attention_forward` in place of its own functions (see `register`). Without `cu_seqlens` each row
is one document. With `cu_seqlens`, the cumulative document bounds of the micro batch (`MicroBatch.cu_seqlens`), no
document sees another. Neither case builds a quadratic mask. Sliding windows (Mistral, Gemma), chunks (Llama 4),
soft-capped scores (Gemma 2) and attention sinks (gpt-oss) are supported in both, and in generation.

Models request a mask with a function of positions, and pass the result to attention, layer by layer. Here the result is
a `Mask`, two numbers with the same meaning. Some models pass attention a window as well, which is ignored, as the eager
and the PyTorch attention of `transformers` do. A mask that a `Mask` cannot express is refused: `trace` compares it with
the function of positions (`check_mask`).

Legend: B rows, T positions, H query heads, S key positions, D head size; G key/value heads (H is a multiple of G).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fivefold.core.errors import UserError
from fivefold.models import hf_internals, kernels
from fivefold.models.kernels import AttentionParams
from fivefold.models.packed import packed_attention
from fivefold.ops.dropout import AttentionDrops

INSTEAD_OF_A_MASK = (
    "leave attention_mask out: with padding at the end of a row no token sees it, and position_ids that restart keep "
    "the documents of a row apart"
)

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # batch, head, query, key -> True if the key is seen


class MaskOpened(TypeError, AttributeError):
    """Raised when a model reads its mask, which is no tensor here."""


@dataclass(frozen=True)
class Mask:
    """A query sees itself and earlier keys of its document. `window`: it sees the last `window` positions only.
    `chunk`: it sees its own chunk only; chunks of `chunk` positions count from the start of the document. `start`: the
    position of the first key, if a cache has dropped earlier ones; else 0."""

    window: int | None = None
    chunk: int | None = None
    start: int = 0

    def sees(self, query: Tensor, key: Tensor) -> Tensor:
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        return seen if self.chunk is None else seen & (key // self.chunk == query // self.chunk)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise MaskOpened(f"its layers look into the attention mask (.{name}), which is not computed here")

    def __getitem__(self, index: Any) -> Any:
        raise MaskOpened("its layers cut the attention mask, which is not computed here")

    def _computed(self, other: Any) -> Any:
        raise MaskOpened("its layers compute with the attention mask, which is not computed here")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __or__ = __lt__ = __gt__ = _computed


def mask_asked_for(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    *,
    local_size: int | None = None,
    config: Any = None,
    **kwargs: Any,
) -> Mask:
    """The mask function of the models, in the signature of `transformers`.

    Raises `UserError` for padding, for a static cache, and for masks that let a query see later keys or that add
    functions of their own.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UserError(
            "the attention mask hides tokens (a padded batch), which fivefold's attention does not do",
            fix=INSTEAD_OF_A_MASK,
        )
    if "allow_is_bidirectional_skip" in kwargs:
        raise UserError("it asks for a bidirectional mask: tokens would see those that come later")
    if kwargs.get("use_vmap"):
        raise UserError("it adds a function of its own to the causal mask (or_mask_function, and_mask_function)")
    if int(q_offset) + int(q_length) != int(kv_offset) + int(kv_length):
        raise UserError(
            "the key/value cache holds positions that are not written yet (a static cache)",
            fix="use a dynamic cache",
        )
    if local_size is None:
        return Mask()
    if local_size != getattr(config, "attention_chunk_size", None):
        return Mask(window=local_size)
    if local_size == getattr(config, "sliding_window", None):
        raise UserError(
            f"sliding_window and attention_chunk_size are both {local_size}: which of them a mask means is not told",
            fix="give them different values in model.overrides",
        )
    return Mask(chunk=local_size, start=int(kv_offset))


class NeedsTokens(UserError):
    """A mask function that reads per-token data beyond the row that it was made for."""


def check_mask(mask: Mask, function: MaskFunction) -> None:
    """Raise `UserError` unless `function` agrees with `mask` at the edges of windows and chunks. `NeedsTokens`: it can
    only be called in a row of `shown_in(mask)` tokens."""
    position = _edges(mask)
    query, key, zero = position[:, None], position[None, :], torch.zeros(1, 1, dtype=torch.long)
    try:
        seen = function(zero, zero, query, key).expand(len(position), len(position))
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise NeedsTokens("its attention mask depends on more than the positions of tokens") from error
    if bool((seen & (key > query)).any()):
        raise UserError("its attention mask lets tokens see those that come later")
    if not torch.equal(seen, mask.sees(query, key)):
        raise UserError("its attention mask is neither causal, nor a sliding window, nor of chunks")


def shown_in(mask: Mask) -> int:
    """The length of a row that contains every position that `check_mask` looks at."""
    return int(_edges(mask).max()) + 1


def _edges(mask: Mask) -> Tensor:
    size = mask.window or mask.chunk or 5
    places = {max(0, turn * size + step) for turn in range(4) for step in range(-2, 3)}
    return torch.tensor(sorted(places | {0, 1, 2, 3, 7, 29, 61}))


def in_chunks(cu_seqlens: Tensor, chunk: int) -> Tensor:
    """Bounds of documents and of their chunks of `chunk` tokens; each chunk attends as a document would."""
    lengths = cu_seqlens.diff()
    parts = (lengths + chunk - 1) // chunk
    number = torch.arange(int(parts.sum())) - (parts.cumsum(0) - parts).repeat_interleave(parts)
    starts = cu_seqlens[:-1].repeat_interleave(parts) + number * chunk
    return torch.cat([starts, cu_seqlens[-1:]]).to(cu_seqlens.dtype)


# ---- attention -------------------------------------------------------------------------------------------------------


NAME = "fivefold"
CONTEXT = "context_parallel"  # attribute of an attention module: context parallelism that attends in place of this file
DROPS = "attention_drops"  # attribute of an attention module: what it drops with a probability
KEEPS = "keeps_attention"  # attribute of an attention module: wraps the attention here, to save its result

# Keywords that do not change the result of attention: positions are in the queries and keys already, and
# `generate` passes its tokenizer on.
_HARMLESS = (
    "position_ids", "cache_position", "use_cache", "return_dict", "output_attentions", "output_hidden_states",
    "output_router_logits", "logits_to_keep", "num_items_in_batch", "tokenizer",
)  # fmt: skip
_SERVED = ("is_causal", "cu_seqlens", "sliding_window", "softcap", "s_aux")


def register() -> None:
    """Offer this attention to `transformers` under `NAME`. Calling it again changes nothing."""
    hf_internals.register_attention(NAME, attention_forward, mask_asked_for)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seqlens: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of the models, in the signature of `transformers`.

    query [B,H,T,D], key and value [B,G,S,D] -> ([B,T,H,D], None). `cu_seqlens`: int32 [n+1] on the CPU, 0 first, B*T
    last, every row start included. S > T is generation with a cache: the queries are the last T of S positions, and
    `cu_seqlens` bounds the B*S keys. A query sees the last document of its row, and padding may precede that.
    `attention_mask`: the result of `mask_asked_for`, which decides; without one, a query sees itself and the
    `sliding_window` - 1 positions before it. `softcap`: scores become tanh(scores / softcap) * softcap. `s_aux` [H]:
    attention sinks, a logit per query head without a value.
    `dropout`: probability with which a weight is dropped, by the `DROPS` of the module.
    Raises `UserError` for tensors as masks, and any option that would otherwise be dropped silently.
    """
    check_call(module, attention_mask, kwargs)
    drops = _drops(module, dropout)
    mask = attention_mask if isinstance(attention_mask, Mask) else Mask(sliding_window)
    if mask.window is not None and mask.window < 1:
        raise UserError(f"a sliding window of {mask.window} positions hides every key", fix="use null for no window")
    if _is_padded_cache(query, key, cu_seqlens) and (query.shape[2] > 1 or mask.chunk or softcap or s_aux is not None):
        options = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        return _row_by_row(module, query, key, value, cu_seqlens, mask, **options), None
    if mask.chunk is not None:
        key, value, cu_seqlens = _own_chunks(module, query, key, value, cu_seqlens, mask)
    size, given = value.shape[-1], query.shape[-1]
    rule = AttentionParams(float(given) ** -0.5 if scaling is None else float(scaling), mask.window, softcap)
    if size == given:
        return _attend(module, query, key, value, cu_seqlens, rule, s_aux, drops), None
    # Latent attention (DeepSeek) has heads of two sizes: the narrower are padded with zeros, which add nothing.
    query, key, value = (F.pad(heads, (0, max(size, given) - heads.shape[-1])) for heads in (query, key, value))
    return _attend(module, query, key, value, cu_seqlens, rule, s_aux, drops)[..., :size], None


def _drops(module: nn.Module, p: float) -> AttentionDrops | None:
    """The weights that a module drops with probability `p`. Raises `UserError` for a model that is not parallelized."""
    if not p:
        return None
    drops = getattr(module, DROPS, None)
    if drops is None:
        raise UserError(
            f"{type(module).__name__} drops {p:g} of its attention outside of a parallelized model",
            fix="ff.parallelize(model, layout), or model.eval()",
        )
    found: AttentionDrops | None = drops(p)
    return found


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, rule: AttentionParams,
    sinks: Tensor | None, drops: AttentionDrops | None,
) -> Tensor:  # fmt: skip
    """Attend with heads of one size: [B,T,H,D]."""
    context = getattr(module, CONTEXT, None)
    if context is not None and context.is_on:
        attended: Tensor = context.attend(query, key, value, cu_seqlens, rule, sinks, drops)
        return attended
    wrapped = getattr(module, KEEPS, lambda forward: forward)
    attended = wrapped(_attend_here)(query, key, value, cu_seqlens, rule, sinks, drops)
    return attended


def _attend_here(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, rule: AttentionParams, sinks: Tensor | None,
    drops: AttentionDrops | None = None,
) -> Tensor:  # fmt: skip
    """Attend to rows that are whole on this rank: [B,T,H,D]."""
    (rows, _, length, _), keys = query.shape, key.shape[2]
    packed = cu_seqlens is not None and cu_seqlens.shape[0] != rows + 1
    window = rule.window if rule.window is not None and rule.window < keys else None
    is_plain = not (packed or window or rule.softcap or sinks is not None or drops is not None)
    if is_plain and (keys != length or kernels.serving_documents(query, rule) != "compiled"):
        return _plain_rows(query, key, value, rule.scale)
    if _is_padded_cache(query, key, cu_seqlens):
        return _last_tokens(query, key, value, cu_seqlens, rule.scale, window)
    if drops is not None and keys != length:
        raise UserError("attention drops nothing with a key/value cache", fix="model.eval() before generation")
    if keys != length and not packed:
        return _cached_rows(query, key, value, rule, sinks)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device="cpu")
    out_BTHD: Tensor
    dropping = () if drops is None else (drops.queries, drops.keys, drops.p)
    out_BTHD, _ = packed_attention(query, key, value, cu_seqlens, rule.scale, window, rule.softcap, sinks, *dropping)
    return out_BTHD


@torch.compiler.disable  # type: ignore[untyped-decorator]  # how many chunks there are depends on the documents
def _own_chunks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None,
    mask: Mask,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The keys and values that the queries may see, and bounds that make each chunk a document of its own."""
    assert mask.chunk is not None
    (rows, _, length, _), keys = query.shape, key.shape[2]
    if keys == length:
        context = getattr(module, CONTEXT, None)
        whole = length * context.size if context is not None and context.is_on else length
        if cu_seqlens is None:
            cu_seqlens = torch.arange(0, (rows + 1) * whole, whole, dtype=torch.int32, device="cpu")
        return key, value, in_chunks(cu_seqlens, mask.chunk)
    last = mask.start + keys - 1
    if (last - length + 1) // mask.chunk != last // mask.chunk:
        raise UserError(
            f"{length} tokens over the end of a chunk of {mask.chunk} cannot join a key/value cache at once",
            fix="give the whole prompt at once, then one token at a time",
        )
    seen = min(keys, last % mask.chunk + 1)
    return key[:, :, keys - seen :], value[:, :, keys - seen :], cu_seqlens


def _plain_rows(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor | None = None) -> Tensor:
    """Attend with each row as one document, by PyTorch's own function: [B,T,H,D]. Query t is at position S - T + t.
    `seen`: the keys that are seen, instead of those before the query."""
    length, keys = query.shape[2], key.shape[2]
    if seen is None and 1 < length != keys:
        seen = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
    out_BHTD = F.scaled_dot_product_attention(
        query, key, value, seen, is_causal=1 < length == keys, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out_BHTD.transpose(1, 2)


def _is_padded_cache(query: Tensor, key: Tensor, cu_seqlens: Tensor | None) -> bool:
    """True if the rows of a cache begin with padding."""
    return cu_seqlens is not None and query.shape[2] != key.shape[2] and cu_seqlens.shape[0] != query.shape[0] + 1


def _first_keys(cu_seqlens: Tensor | None, rows: int, keys: int) -> list[int]:
    assert cu_seqlens is not None
    ends = torch.arange(1, rows + 1) * keys
    found: list[int] = (cu_seqlens[torch.searchsorted(cu_seqlens.long(), ends) - 1] - ends + keys).tolist()
    return found


def _row_by_row(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, mask: Mask, **options: Any
) -> Tensor:
    """Generate row by row, each with its own keys, as if it were alone: [B,T,H,D]."""
    if mask.start:
        raise UserError("a cache that drops its first keys cannot hold padded rows", fix="use a dynamic cache")
    firsts, rows = _first_keys(cu_seqlens, len(query), key.shape[2]), range(len(query))
    return torch.cat(
        [
            attention_forward(
                module, query[row : row + 1], key[row : row + 1, :, first:], value[row : row + 1, :, first:], mask,
                **options,
            )[0]
            for row, first in zip(rows, firsts, strict=True)
        ]
    )  # fmt: skip


def _last_tokens(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor | None, scale: float, window: int | None
) -> Tensor:
    """Attend with the last token of each row, by PyTorch's own function, hiding padding in front: [B,1,H,D]."""
    rows, keys = len(query), key.shape[2]
    first_B = torch.tensor(_first_keys(cu_seqlens, rows, keys), device=query.device)
    if window is not None:
        first_B = first_B.clamp(min=keys - window)
    seen_BS = torch.arange(keys, device=query.device) >= first_B[:, None]
    return _plain_rows(query, key, value, scale, seen_BS[:, None, None])


def _cached_rows(query: Tensor, key: Tensor, value: Tensor, rule: AttentionParams, sinks: Tensor | None) -> Tensor:
    """Generate under `rule`: [B,T,H,D]. The cache of a sliding layer may have dropped its first keys; only the distance
    from the last one counts."""
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


def check_call(module: nn.Module, mask: object, kwargs: Mapping[str, Any]) -> None:
    """Raise `UserError` for masks that a model computed, and keywords that attention does not know: dropping one of
    these would train a different model."""
    name = type(module).__name__
    if mask is not None and not isinstance(mask, Mask):
        raise UserError(
            f"{name} is given a dense attention mask, which would be dropped",
            fix=INSTEAD_OF_A_MASK,
        )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise UserError(f"{name} asks for attention that is not causal, which is not supported")
    for keyword, value in kwargs.items():
        if keyword not in (*_HARMLESS, *_SERVED) and value is not None and value is not False:
            raise UserError(f"{name} passes its attention {keyword}, which is not supported yet")
