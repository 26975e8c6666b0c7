"""The keys that a query sees, as numbers instead of a matrix.

Models of `transformers` request a mask with a function of positions, and pass the result to attention, layer by layer.
Here the result is a `Mask`, two numbers with the same meaning. Some models pass attention a window as well. The eager
and the PyTorch attention of `transformers` follow the mask and ignore that window; so does the attention here.

A mask that a `Mask` cannot express is refused: `trace` compares it with the function of positions (`check`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError

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
        """A bool tensor over positions that broadcast."""
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


def asked_for(
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


def check(mask: Mask, function: MaskFunction) -> None:
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
    """The length of a row that contains every position that `check` looks at."""
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
