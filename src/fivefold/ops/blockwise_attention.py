"""Causal attention in PyTorch's operators, a block of queries at a time: for every device, dtype and rule.

Its memory is linear in the row, but every block of scores is written and read. The other kernels are tested against it
in fp64.

Legend: N documents of L tokens; H query heads, G key/value heads (R = H / G query heads share one), D head size. In a
block: L queries, S keys, and X = R * L queries of the heads that share keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.ops.dropout import AttentionDrops, kept, scaled

# Scores per block: few enough to stay in a CPU's cache, or enough to fill a GPU.
_CPU_BLOCK, _GPU_BLOCK = 2**19, 2**25


@dataclass(frozen=True)
class AttentionParams:
    """Score function: q k' * `scale`, then tanh(scores / `softcap`) * `softcap`, over the last `window` keys."""

    scale: float
    window: int | None = None
    softcap: float | None = None


def blockwise_forward(
    q_NHLD: Tensor, k_NGSD: Tensor, v_NGSD: Tensor, rule: AttentionParams, *, ahead: int | None = None,
    drops: AttentionDrops | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [N,H,L,D] and log-sum-exp [N,H,L]. The L queries are the last of the S keys (S > L: generation with a
    cache), unless `ahead` gives the first query's position after the first key. Each query must see a key. `drops`: of
    these queries [N,L] and keys [N,S,H]; the log-sum-exp is that without them."""
    heads, shared = q_NHLD.shape[1], k_NGSD.shape[1]
    out_NHLD, lse_NHL = torch.empty_like(q_NHLD), q_NHLD.new_empty(q_NHLD.shape[:3], dtype=precise(q_NHLD.dtype))
    for queries, keys, hidden in _blocks(q_NHLD, k_NGSD, rule.window, ahead):
        q_NGXD = _by_shared(q_NHLD[:, :, queries], shared)
        keys_NGSD, values_NGSD = (tensor[:, :, keys].to(q_NGXD.dtype) for tensor in (k_NGSD, v_NGSD))
        scores_NGXS = _scores(q_NGXD, keys_NGSD, rule)
        _hide(scores_NGXS, hidden, float("-inf"))
        largest = scores_NGXS.amax(-1, keepdim=True)
        weights = scores_NGXS.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        _drop(weights, drops, queries, keys)
        out_NHLD[:, :, queries] = _by_head(_product(weights, values_NGSD).div_(total), heads).to(out_NHLD.dtype)
        lse_NHL[:, :, queries] = _by_head(largest + total.log(), heads).squeeze(-1)
    return out_NHLD, lse_NHL


def blockwise_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: AttentionParams,
    *,
    ahead: int | None = None,
    drops: AttentionDrops | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; `grad` and `out` [N,H,L,D], `lse` [N,H,L]. Recomputes P = exp(scores - lse);
    dscores = P * (dO V' - sum(dO * O))."""
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(tensor, dtype=precise(q.dtype)) for tensor in (k, v))
    for queries, keys, hidden in _blocks(q, k, rule.window, ahead):
        g_NGXD, q_NGXD, o_NGXD = (_by_shared(tensor[:, :, queries], k.shape[1]) for tensor in (grad, q, out))
        lse_NGX1 = _by_shared(lse[:, :, queries].unsqueeze(-1), k.shape[1])
        k_NGSD, v_NGSD = (tensor[:, :, keys].to(q_NGXD.dtype) for tensor in (k, v))
        scores_NGXS = _scores(q_NGXD, k_NGSD, rule)
        weights = (scores_NGXS - lse_NGX1).exp_()
        _hide(weights, hidden, 0.0)
        dweights = _drop(_product(g_NGXD, v_NGSD.mT), drops, queries, keys)
        given_NGX1 = (g_NGXD * o_NGXD.to(lse.dtype)).sum(-1, keepdim=True)
        dscores = dweights.sub_(given_NGX1).mul_(weights)
        dv[:, :, keys] += _product(_drop(weights, drops, queries, keys).mT, g_NGXD)
        if rule.softcap is not None:
            dscores.mul_(1 - (scores_NGXS / rule.softcap).square_())
        dscores.mul_(rule.scale)
        dq[:, :, queries] = _by_head(_product(dscores, k_NGSD), q.shape[1]).to(dq.dtype)
        dk[:, :, keys] += _product(dscores.mT, q_NGXD)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def precise(dtype: torch.dtype) -> torch.dtype:
    """Dtype of scores and log-sum-exps for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(
    q_NHLD: Tensor, k_NGSD: Tensor, window: int | None, ahead: int | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield some queries, the keys that any of them sees, and a mask [queries, keys], True for hidden keys."""
    documents, heads, length, _ = q_NHLD.shape
    total = k_NGSD.shape[2]
    width = total if window is None else min(total, max(window, 128))  # wider blocks would mostly hold hidden scores
    scores = _CPU_BLOCK if q_NHLD.device.type == "cpu" else _GPU_BLOCK
    step = max(16, min(width, scores // (documents * heads * min(total, 2 * width))))
    offset = total - length if ahead is None else ahead  # from the first key to the first query
    for start in range(0, length, step):
        stop = min(start + step, length)
        first, last = offset + start, offset + stop  # the positions of these queries among the keys
        earliest, end = 0 if window is None else max(0, first - window + 1), min(last, total)
        query, key = (torch.arange(*edges, device=q_NHLD.device) for edges in ((first, last), (earliest, end)))
        distance = key - query[:, None]
        hidden = distance > 0 if window is None else (distance > 0) | (distance <= -window)
        yield slice(start, stop), slice(earliest, end), hidden


def _scores(q_NGXD: Tensor, k_NGSD: Tensor, rule: AttentionParams) -> Tensor:
    scores = _product(q_NGXD, k_NGSD.mT).mul_(rule.scale)
    return scores if rule.softcap is None else scores.div_(rule.softcap).tanh_().mul_(rule.softcap)


def _hide(tensor_NGXS: Tensor, hidden_LS: Tensor, value: float) -> None:
    """Fill in place where a query does not see a key, for each of the heads in X."""
    documents, shared, _, keys = tensor_NGXS.shape
    tensor_NGXS.view(documents, shared, -1, len(hidden_LS), keys).masked_fill_(hidden_LS, value)


def _drop(weights_NGXS: Tensor, drops: AttentionDrops | None, queries: slice, keys: slice) -> Tensor:
    """Drop weights of some queries and keys in place."""
    if drops is not None:
        documents, _, _, size = weights_NGXS.shape
        q_NL, k_NSH = drops.queries[:, queries], drops.keys[:, keys]
        mask_NHLS = kept(q_NL[:, None, :, None] * k_NSH.permute(0, 2, 1).unsqueeze(2).contiguous(), drops.p)
        weights_NHLS = weights_NGXS.view(documents, k_NSH.shape[2], -1, size)
        weights_NHLS.copy_(scaled(mask_NHLS, weights_NHLS, drops.p))
    return weights_NGXS


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [N,G,.,.] into the dtype of scores. For a 16-bit `right`, `left` is rounded to its dtype and sums are in
    fp32, as in FlashAttention: on an H100 ten times as fast as fp32 products."""
    if right.dtype == precise(right.dtype):
        return left @ right
    pair = left.to(right.dtype).flatten(0, 1), right.flatten(0, 1)
    found: Tensor = torch.bmm(*pair, out_dtype=torch.float32)
    return found.view(*right.shape[:2], *found.shape[1:])


def _factors(tensor: Tensor) -> torch.dtype:
    """Dtype of matmul operands: 16 bits if 16-bit matmuls can sum in fp32 (CUDA)."""
    return tensor.dtype if tensor.device.type == "cuda" else precise(tensor.dtype)


def _by_shared(tensor_NHLx: Tensor, shared: int) -> Tensor:
    """[N,H,L,x] as [N,G,R*L,x], in the dtype of matmul operands."""
    documents, _, _, size = tensor_NHLx.shape
    return tensor_NHLx.reshape(documents, shared, -1, size).to(_factors(tensor_NHLx))


def _by_head(tensor_NGXx: Tensor, heads: int) -> Tensor:
    """[N,G,R*L,x] as [N,H,L,x]."""
    documents, _, _, size = tensor_NGXx.shape
    return tensor_NGXx.view(documents, heads, -1, size)
