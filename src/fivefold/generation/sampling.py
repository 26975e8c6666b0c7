"""Which token comes next: the likeliest, or one drawn."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. Otherwise tokens are drawn from the `top_k` likeliest (0: all), of
    these from the smallest set of likeliest ones whose probabilities add up to `top_p` (1: all)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def choose(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """A token; drawn by inverting the cumulative distribution in fp64 with one uniform number."""
        if self.temperature == 0:
            return int(logits_V.argmax())
        scores_V = logits_V.double().cpu() / self.temperature
        if 0 < self.top_k < scores_V.numel():
            lowest = scores_V.topk(self.top_k).values[-1]
            scores_V = scores_V.masked_fill(scores_V < lowest, float("-inf"))
        chances_V = scores_V.softmax(-1)
        if self.top_p < 1:
            sorted_V, order_V = chances_V.sort(descending=True, stable=True)
            likelier_V = sorted_V.cumsum(-1) - sorted_V
            chances_V[order_V[likelier_V >= self.top_p]] = 0.0  # the likeliest has nothing before it, and stays
        cumulative_V = chances_V.cumsum(-1)
        uniform = torch.rand((), generator=generator, dtype=torch.float64) * cumulative_V[-1]
        return int(torch.searchsorted(cumulative_V, uniform, right=True).clamp(max=scores_V.numel() - 1))
