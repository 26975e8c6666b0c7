"""Attention as its formula has it, for comparison."""

import torch


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor | None = None,
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
    seen = (
        torch.ones(length, keys, dtype=torch.bool, device=query.device)
        .tril(keys - length)
        .expand(rows, 1, length, keys)
    )
    if sliding_window is not None:
        seen = seen & seen.new_ones(length, keys).triu(keys - length - sliding_window + 1)
    if cu_seqlens is not None:
        token = torch.arange(rows * length).view(rows, length)
        document = torch.bucketize(token, cu_seqlens.long(), right=True).to(query.device)
        seen = seen & (document[:, None, :, None] == document[:, None, None, :])
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if s_aux is not None:
        sinks = s_aux.view(-1, 1, 1).expand(rows, heads, length, 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :keys] @ value).transpose(1, 2)
