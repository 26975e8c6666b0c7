"""Causal attention of documents, forward and backward written out, for the operator in `packed.py`.

Operators cannot call autograd, so each kernel is a pair of functions that hand over the log-sum-exp.

| kernel | where | window | soft-capping | memory |
|---|---|---|---|---|
| `compiled` | fp32 and bf16 on the CPU, of documents of any lengths: `ops/cpu_attention.c` | yes | yes | linear in T |
| `cpu` | any other type on the CPU, or no C compiler: the fused kernel of PyTorch | no | no | linear in L |
| `flash_*`, of documents | 16-bit types on CUDA: one variable-length flash call | yes | no | linear in T |
| `flash_*` | 16-bit types on CUDA, context parallel: queries that see all of the keys | no | no | linear in L |
| `blockwise_*` | everything else: scores in fp32 or fp64, some queries at a time | yes | yes | linear in L |

Attention sinks need no kernel of their own: `join_sinks` puts them into the output and log-sum-exp of any of them.

Legend: N documents of L tokens, or one row of M tokens of all documents; H query heads, G key/value heads (R = H / G
query heads share one), D head size. In a block: L queries, S keys, and X = R * L queries of the heads that share keys.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from fivefold.core.errors import UserError, first_line
from fivefold.ops import cpu_attention
from fivefold.ops.cpu_attention import AttentionParams as AttentionParams
from fivefold.torch_internals import (
    cpu_attention_backward,
    cpu_attention_forward,
    flash_attention_backward,
    flash_attention_forward,
    takes_flash_attention_3,
    use_flash_attention,
)

Gradients = tuple[Tensor, Tensor, Tensor]

# Scores of one block: on a CPU few enough to stay in its cache, elsewhere enough to fill a GPU.
_CPU_BLOCK, _GPU_BLOCK = 2**19, 2**25


FA3_MODULE = "flash_attn_interface"  # of the package flash_attn_3


def choose(asked: str, device: torch.device) -> str:
    """Which kernels serve from here on. On a GPU, for 16-bit types: `fa2` or `fa3`. On a CPU: `compiled`, or "" for
    PyTorch's own, which are asked for as `fa2`. `asked`: `train.attention`. Raises `UserError` where fa3 is asked for
    and cannot be."""
    why = _no_fa3(device)
    if asked == "fa3" and why:
        raise UserError(
            f"train.attention: fa3 cannot be used: {why}", fix="train.attention: auto", more="docs/machine.md"
        )
    if device.type != "cuda":
        cpu_attention.use(asked != "fa2")
        return "compiled" if asked != "fa2" and not cpu_attention.lacks() else ""
    which: Literal["fa2", "fa3"] = "fa2" if asked == "fa2" or why else "fa3"
    try:
        use_flash_attention(which)
    except (ImportError, RuntimeError) as error:  # a package that was built for another torch
        raise UserError(
            f"FlashAttention 3 is installed and cannot be loaded: {first_line(error)}",
            fix="train.attention: fa2, or install it again for this torch", more="docs/machine.md",
        ) from error  # fmt: skip
    return which


def _no_fa3(device: torch.device) -> str:
    """Why there is no FlashAttention 3 here; "" where there is."""
    if device.type != "cuda":
        return f"it is for GPUs, and this run is on {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it is for GPUs of compute capability 9.0"
    if not takes_flash_attention_3():
        return "this torch cannot let it serve its operators"
    return "" if find_spec(FA3_MODULE) else "the package flash_attn_3 is not installed"


def forward(
    q_NHLD: Tensor, k_NGSD: Tensor, v_NGSD: Tensor, rule: AttentionParams, farthest: int, *, ahead: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output [N,H,L,D] and log-sum-exp [N,H,L], by the kernel that serves them.

    A query sees itself and the keys before it, of as many as there are queries. With `ahead`, all S keys are earlier
    than the queries, and the first query stands `ahead` positions after the first key. `farthest`: positions from a
    key to the last query that could see it.
    """
    kernel = serving(q_NHLD, rule, farthest, ahead)
    if kernel == "compiled":
        return cpu_attention.forward(q_NHLD, k_NGSD, v_NGSD, rule, offset=_offset(q_NHLD, k_NGSD, ahead))
    if kernel == "cpu":
        out, lse = cpu_attention_forward(q_NHLD, k_NGSD, v_NGSD, 0.0, ahead is None, scale=rule.scale)
        return out, lse
    if kernel == "flash":
        return flash_forward(q_NHLD, k_NGSD, v_NGSD, rule)
    return blockwise_forward(q_NHLD, k_NGSD, v_NGSD, rule, ahead=ahead)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionParams, farthest: int,
    *, ahead: int | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v, by the kernel of `forward`; `grad` and `out` [N,H,L,D], `lse` [N,H,L]."""
    kernel = serving(q, rule, farthest, ahead)
    if kernel == "compiled":
        return cpu_attention.backward(grad, q, k, v, out, lse, rule, offset=_offset(q, k, ahead))
    if kernel == "cpu":
        dq, dk, dv = cpu_attention_backward(grad, q, k, v, out, lse, 0.0, ahead is None, scale=rule.scale)
        return dq, dk, dv
    if kernel == "flash":
        return flash_backward(grad, q, k, v, out, lse, rule)
    return blockwise_backward(grad, q, k, v, out, lse, rule, ahead=ahead)


def serving(q_NHLD: Tensor, rule: AttentionParams, farthest: int, ahead: int | None = None) -> str:
    """Which kernel of the table serves a batch: see `forward`."""
    if cpu_attention.serves(q_NHLD):
        return "compiled"
    if rule.softcap is not None or (rule.window is not None and farthest >= rule.window):
        return "blockwise"
    if q_NHLD.device.type == "cpu":
        return "cpu"
    return "flash" if ahead is not None and takes_flash(q_NHLD) else "blockwise"


def takes_documents(query: Tensor, rule: AttentionParams) -> bool:
    """Whether one call serves all documents, of whatever lengths: `varlen_forward`."""
    return cpu_attention.serves(query) or (rule.softcap is None and takes_flash(query))


def takes_flash(query: Tensor) -> bool:
    """Whether PyTorch has flash kernels for heads [., ., ., D] like these."""
    is_short = query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] <= 256 and query.shape[3] % 8 == 0
    return query.device.type == "cuda" and is_short


def flash_forward(q_NHLD: Tensor, k_NGSD: Tensor, v_NGSD: Tensor, rule: AttentionParams) -> tuple[Tensor, Tensor]:
    """As `forward` with `ahead`, for 16-bit types on CUDA."""
    (rows, _, length, _), keys = q_NHLD.shape, k_NGSD.shape[2]
    q, k, v = (_flat(tensor) for tensor in (q_NHLD, k_NGSD, v_NGSD))
    out, lse_HM, *_ = flash_attention_forward(
        q, k, v, _even(rows, length, q), _even(rows, keys, q), length, keys, 0.0, False, False, scale=rule.scale
    )
    return out.unflatten(0, (rows, length)).transpose(1, 2), lse_HM.unflatten(1, (rows, length)).transpose(0, 1)


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionParams
) -> Gradients:
    """As `backward` with `ahead`, for 16-bit types on CUDA."""
    (rows, _, length, _), keys = q.shape, k.shape[2]
    no_dropout, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    dq, dk, dv = flash_attention_backward(
        *(_flat(tensor) for tensor in (grad, q, k, v, out)), lse.transpose(0, 1).flatten(1).contiguous(),
        _even(rows, length, q), _even(rows, keys, q), length, keys, 0.0, False, no_dropout, unused, scale=rule.scale,
    )  # fmt: skip
    dq, dk, dv = (tensor.unflatten(0, (rows, -1)).transpose(1, 2) for tensor in (dq, dk, dv))
    return dq, dk, dv


def _flat(tensor_NHLD: Tensor) -> Tensor:
    """[N*L,H,D]: what the variable-length calls take."""
    return tensor_NHLD.transpose(1, 2).flatten(0, 1)


def _even(rows: int, length: int, like: Tensor) -> Tensor:
    """Cumulative bounds of `rows` times `length` tokens."""
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=like.device)


def varlen_forward(
    q_MHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, cu_seqlens: Tensor, longest: int, rule: AttentionParams
) -> tuple[Tensor, Tensor]:
    """Output [M,H,D] and log-sum-exp [H,M] of all documents at once; `cu_seqlens` on the device."""
    if q_MHD.device.type == "cpu":
        q, k, v = map(_one_row, (q_MHD, k_MGD, v_MGD))
        out, lse = cpu_attention.forward(q, k, v, rule, cu_seqlens=cu_seqlens)
        return out[0].transpose(0, 1), lse[0]
    out, lse, *_ = flash_attention_forward(
        q_MHD, k_MGD, v_MGD, cu_seqlens, cu_seqlens, longest, longest, 0.0, rule.window is None, False,
        scale=rule.scale, **_flash_window(rule),
    )  # fmt: skip
    return out, lse


def varlen_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    longest: int,
    rule: AttentionParams,
) -> Gradients:
    """Gradients of q, k, v; `grad` and `out` [M,H,D], `lse` [H,M]."""
    if q.device.type == "cpu":
        grad, q, k, v, out = map(_one_row, (grad, q, k, v, out))
        dq, dk, dv = cpu_attention.backward(grad, q, k, v, out, lse.unsqueeze(0), rule, cu_seqlens=cu_seqlens)
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = flash_attention_backward(
        grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, rule.window is None, no_dropout, unused,
        scale=rule.scale, **_flash_window(rule),
    )  # fmt: skip
    return dq, dk, dv


def _one_row(tensor_MHD: Tensor) -> Tensor:
    """As [1,H,M,D]."""
    return tensor_MHD.transpose(0, 1).unsqueeze(0)


def _offset(q_NHLD: Tensor, k_NGSD: Tensor, ahead: int | None) -> int:
    """Positions from the first key to the first query: `ahead`, or the queries are the last of the keys."""
    return k_NGSD.shape[2] - q_NHLD.shape[2] if ahead is None else ahead


def _flash_window(rule: AttentionParams) -> dict[str, int]:
    """As `torch.nn.attention.varlen` asks for it: keys before and after a query, and then no causal flag."""
    return {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}


def blockwise_forward(
    q_NHLD: Tensor, k_NGSD: Tensor, v_NGSD: Tensor, rule: AttentionParams, *, ahead: int | None = None
) -> tuple[Tensor, Tensor]:
    """As `forward`, for every rule; the L queries are the last of the S keys (S > L: generation with a cache), or
    the first of them stands `ahead` positions after the first key. Each query must see a key."""
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
) -> Gradients:
    """As `backward`, for every rule: P = exp(scores - lse) again, dscores = P * (dO V' - sum(dO * O))."""
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(tensor, dtype=precise(q.dtype)) for tensor in (k, v))
    for queries, keys, hidden in _blocks(q, k, rule.window, ahead):
        g_NGXD, q_NGXD, o_NGXD = (_by_shared(tensor[:, :, queries], k.shape[1]) for tensor in (grad, q, out))
        lse_NGX1 = _by_shared(lse[:, :, queries].unsqueeze(-1), k.shape[1])
        k_NGSD, v_NGSD = (tensor[:, :, keys].to(q_NGXD.dtype) for tensor in (k, v))
        scores_NGXS = _scores(q_NGXD, k_NGSD, rule)
        weights = (scores_NGXS - lse_NGX1).exp_()
        _hide(weights, hidden, 0.0)
        dv[:, :, keys] += _product(weights.mT, g_NGXD)
        given_NGX1 = (g_NGXD * o_NGXD.to(lse.dtype)).sum(-1, keepdim=True)
        dscores = weights.mul_(_product(g_NGXD, v_NGSD.mT).sub_(given_NGX1))
        if rule.softcap is not None:
            dscores.mul_(1 - (scores_NGXS / rule.softcap).square_())
        dscores.mul_(rule.scale)
        dq[:, :, queries] = _by_head(_product(dscores, k_NGSD), q.shape[1]).to(dq.dtype)
        dk[:, :, keys] += _product(dscores.mT, q_NGXD)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def join_sinks(out_xHD: Tensor, lse_xH: Tensor, sinks_H: Tensor) -> None:
    """Put one more logit per head into the softmax, in place: a key without a value (gpt-oss).

    The backward kernels need no change. From the new log-sum-exp they recompute weights that sum to less than 1; the
    rest is the sink's share.
    """
    joined_xH = torch.logaddexp(lse_xH, sinks_H.to(lse_xH.dtype))
    out_xHD.mul_((lse_xH - joined_xH).exp().unsqueeze(-1))
    lse_xH.copy_(joined_xH)


def precise(dtype: torch.dtype) -> torch.dtype:
    """The type of scores and log-sum-exps for inputs of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(
    q_NHLD: Tensor, k_NGSD: Tensor, window: int | None, ahead: int | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Some queries, the keys that any of them sees, and [queries, keys] True where a query does not see a key."""
    documents, heads, length, _ = q_NHLD.shape
    total = k_NGSD.shape[2]
    width = total if window is None else min(total, max(window, 128))  # wider blocks would mostly hold hidden scores
    scores = _CPU_BLOCK if q_NHLD.device.type == "cpu" else _GPU_BLOCK
    step = max(16, min(width, scores // (documents * heads * min(total, 2 * width))))
    offset = _offset(q_NHLD, k_NGSD, ahead)
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


def _product(left: Tensor, right: Tensor) -> Tensor:
    """[N,G,.,.] in the type of scores. Beside `right` of 16 bits `left` is rounded to its type, and sums are in fp32:
    what FlashAttention does, and on an H100 ten times as fast as products of fp32."""
    if right.dtype == precise(right.dtype):
        return left @ right
    pair = left.to(right.dtype).flatten(0, 1), right.flatten(0, 1)
    found: Tensor = torch.bmm(*pair, out_dtype=torch.float32)
    return found.view(*right.shape[:2], *found.shape[1:])


def _factors(tensor: Tensor) -> torch.dtype:
    """The type of what is multiplied: 16 bits where there is a product of them with sums in fp32."""
    return tensor.dtype if tensor.device.type == "cuda" else precise(tensor.dtype)


def _by_shared(tensor_NHLx: Tensor, shared: int) -> Tensor:
    """[N,H,L,x] as [N,G,R*L,x], in the type of what is multiplied."""
    documents, _, _, size = tensor_NHLx.shape
    return tensor_NHLx.reshape(documents, shared, -1, size).to(_factors(tensor_NHLx))


def _by_head(tensor_NGXx: Tensor, heads: int) -> Tensor:
    """[N,G,R*L,x] as [N,H,L,x]."""
    documents, _, _, size = tensor_NGXx.shape
    return tensor_NGXx.view(documents, heads, -1, size)
