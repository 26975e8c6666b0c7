"""Choice of the next token: logits as `transformers` processes them, then the likeliest token or one drawn.

Legend: T tokens so far, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fivefold.models import hf_internals


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. Otherwise tokens are drawn from the `top_k` likeliest (0: all), and
    among these from the smallest set of likeliest ones whose probabilities add up to `top_p` (1: all)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The settings as options of `generate` of `transformers`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True, "temperature": float(self.temperature), "top_k": self.top_k, "top_p": float(self.top_p)
        }  # fmt: skip


class Choice:
    """Chooses the tokens that follow one text, by a request and by the model's generation config."""

    def __init__(self, model: Any, ids: Sequence[int], sampling: Sampling, *, seed: int, max_new_tokens: int) -> None:
        """`ids`: the tokens of the text. `max_new_tokens`: the most tokens to follow."""
        self._ids, self._is_drawn = list(ids), sampling.temperature > 0
        self._generator = torch.Generator().manual_seed(seed)
        self._device = torch.device("cpu") if self._is_drawn else next(model.parameters()).device
        self._process = hf_internals.logits_processors(
            model, torch.tensor([self._ids], device=self._device), max_new_tokens, sampling.options
        )

    def choose(self, logits_V: Tensor) -> int:
        """The next token; drawn by inverting the cumulative distribution in fp64 with one uniform number."""
        dtype = torch.float64 if self._is_drawn else torch.promote_types(logits_V.dtype, torch.float32)
        scores_V = logits_V.to(self._device, dtype)
        if self._process:
            scores_V = self._process(torch.tensor([self._ids], device=self._device), scores_V[None])[0]
        if not self._is_drawn:
            return int(scores_V.argmax())
        cumulative_V = scores_V.softmax(-1).cumsum(-1)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative_V[-1]
        return int(torch.searchsorted(cumulative_V, uniform, right=True).clamp(max=scores_V.numel() - 1))

    def add(self, token: int) -> None:
        """Append the next token, on which all ranks agree."""
        self._ids.append(token)
