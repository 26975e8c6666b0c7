"""Log-probabilities of texts after others, under any layout, as lm-eval requests them.

Legend: B texts, K tokens of the longest continuation, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.generation.decode import next_logits, padded, ready

_MOST_LOGITS = 2**28  # per batch: 1 GiB of fp32
Pair = tuple[Sequence[int], Sequence[int]]  # given tokens, scored tokens; at least one each


def log_probabilities(model: Any, pairs: Sequence[Pair], *, batch_size: int) -> list[tuple[float, bool]]:
    """Score pairs: the summed log-probability, nats, of the second text after the first, and whether each of its tokens
    is the likeliest. Every rank calls this with the same pairs, and gets the same result."""
    found: dict[int, tuple[float, bool]] = {}
    longest_first = sorted(range(len(pairs)), key=lambda at: -len(pairs[at][0]) - len(pairs[at][1]))
    with ready(model):
        for places in _batches(pairs, longest_first, batch_size, model.config.get_text_config().vocab_size):
            found |= zip(places, _scored(model, [pairs[at] for at in places]), strict=True)
    return [found[at] for at in range(len(pairs))]


def _batches(pairs: Sequence[Pair], places: Sequence[int], size: int, vocabulary: int) -> list[list[int]]:
    """Group places into batches of at most `size`, whose logits fit in memory."""
    batches: list[list[int]] = []
    for at in places:
        scored = max(len(pairs[place][1]) for place in (*(batches[-1] if batches else ()), at))
        if batches and len(batches[-1]) < size and (len(batches[-1]) + 1) * scored * vocabulary <= _MOST_LOGITS:
            batches[-1].append(at)
        else:
            batches.append([at])
    return batches


def _scored(model: Any, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
    device = next(model.parameters()).device
    ids_BT, padding = padded([[*given, *scored][:-1] for given, scored in pairs])
    keep = max(len(scored) for _, scored in pairs)
    logits: Tensor = next_logits(model, ids_BT.to(device), padding=padding, keep=keep)
    logits_BKV = logits if keep > 1 else logits[:, None]
    each = zip(logits_BKV, (scored for _, scored in pairs), strict=True)
    return [_of_one(logits_KV[-len(scored) :], scored) for logits_KV, scored in each]


def _of_one(logits_KV: Tensor, scored: Sequence[int]) -> tuple[float, bool]:
    tokens_K = torch.tensor(list(scored), device=logits_KV.device)
    chances_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32)).log_softmax(-1)
    summed = chances_KV.gather(-1, tokens_K[:, None]).double().sum()
    return float(summed), bool((logits_KV.argmax(-1) == tokens_K).all())
