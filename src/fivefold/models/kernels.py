"""Causal attention of documents, forward and backward written out, for the operator in `packed.py`.

Operators cannot call autograd, so each kernel is a pair of functions that pass on the log-sum-exp.

| kernel | where | window | soft-capping | memory |
|---|---|---|---|---|
| `compiled` | fp32 and bf16 on the CPU, documents of any lengths: `ops/cpu` | yes | yes | linear in T |
| `cpu` | any other type on the CPU, or no C compiler: the fused kernel of PyTorch | no | no | linear in L |
| `flash_*`, of documents | 16-bit types on CUDA: one variable-length flash call | yes | no | linear in T |
| `flash_*` | 16-bit types on CUDA, context parallel: queries that see all of the keys | no | no | linear in L |
| `flex` | 16-bit types on CUDA, not served by flash: `ops/gpu_attention.py`, once tried | yes | yes | linear in T |
| `blockwise_*` | everything else: scores in fp32 or fp64, some queries at a time | yes | yes | linear in L |

Probabilities are dropped by `compiled` and `blockwise_*`: the others have random numbers of their own, or none.

Attention sinks need no kernel of their own: `join_sinks` adds them to the output and log-sum-exp of any of them.

Legend: N documents of L tokens, or one row of M tokens of all documents; H query heads, G key/value heads (R = H / G
query heads share one), D head size.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from fivefold.core.errors import UserError, first_line
from fivefold.ops import gpu_attention
from fivefold.ops.blockwise_attention import AttentionParams as AttentionParams
from fivefold.ops.blockwise_attention import blockwise_backward as blockwise_backward
from fivefold.ops.blockwise_attention import blockwise_forward as blockwise_forward
from fivefold.ops.blockwise_attention import precise as precise
from fivefold.ops.cpu import cpu_attention
from fivefold.ops.dropout import AttentionDrops
from fivefold.torch_internals import (
    cpu_attention_backward,
    cpu_attention_forward,
    flash_attention_backward,
    flash_attention_forward,
    takes_flash_attention_3,
    use_flash_attention,
)

Gradients = tuple[Tensor, Tensor, Tensor]

_OWN: Mapping[str, Any] = {"compiled": cpu_attention, "flex": gpu_attention}  # of one interface
FA3_MODULE = "flash_attn_interface"  # module of the package flash_attn_3


def choose(asked: str, device: torch.device) -> str:
    """Select the kernels used from here on. On a GPU, for 16-bit types: `fa2` or `fa3`. On a CPU: `compiled`, or "" for
    PyTorch's own kernels, requested as `fa2`. `asked`: `train.attention`. Raises `UserError` if fa3 is requested and
    not available."""
    why = _no_fa3(device)
    if asked == "fa3" and why:
        raise UserError(
            f"train.attention: fa3 cannot be used: {why}",
            fix="train.attention: auto",
            more="fivefold docs explain/machine",
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
            fix="train.attention: fa2, or install it again for this torch", more="fivefold docs explain/machine",
        ) from error  # fmt: skip
    return which


def _no_fa3(device: torch.device) -> str:
    """Why FlashAttention 3 is not available; "" if it is."""
    if device.type != "cuda":
        return f"it is for GPUs, and this run is on {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it is for GPUs of compute capability 9.0"
    if not takes_flash_attention_3():
        return "this torch cannot let it serve its operators"
    return "" if find_spec(FA3_MODULE) else "the package flash_attn_3 is not installed"


def forward(
    q_NHLD: Tensor, k_NGSD: Tensor, v_NGSD: Tensor, rule: AttentionParams, farthest: int, *, ahead: int | None = None,
    drops: AttentionDrops | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [N,H,L,D] and log-sum-exp [N,H,L], by the kernel that supports the batch.

    A query sees itself and the keys before it; there are as many keys as queries. With `ahead`, all S keys are earlier
    than the queries, and the first query stands `ahead` positions after the first key. `farthest`: positions from a key
    to the last query that could see it. `drops`: of these queries and keys.
    """
    kernel = serving(q_NHLD, rule, farthest, ahead, drops)
    if kernel in _OWN:
        given: tuple[Tensor, Tensor] = _OWN[kernel].forward(
            q_NHLD, k_NGSD, v_NGSD, rule, offset=_offset(q_NHLD, k_NGSD, ahead), **_dropping(drops)
        )
        return given
    if kernel == "cpu":
        out, lse = cpu_attention_forward(q_NHLD, k_NGSD, v_NGSD, 0.0, ahead is None, scale=rule.scale)
        return out, lse
    if kernel == "flash":
        return flash_forward(q_NHLD, k_NGSD, v_NGSD, rule)
    return blockwise_forward(q_NHLD, k_NGSD, v_NGSD, rule, ahead=ahead, drops=drops)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionParams, farthest: int,
    *, ahead: int | None = None, drops: AttentionDrops | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v, by the kernel of `forward`; `grad` and `out` [N,H,L,D], `lse` [N,H,L]."""
    kernel = serving(q, rule, farthest, ahead, drops)
    if kernel in _OWN:
        grads: Gradients = _OWN[kernel].backward(
            grad, q, k, v, out, lse, rule, offset=_offset(q, k, ahead), **_dropping(drops)
        )
        return grads
    if kernel == "cpu":
        dq, dk, dv = cpu_attention_backward(grad, q, k, v, out, lse, 0.0, ahead is None, scale=rule.scale)
        return dq, dk, dv
    if kernel == "flash":
        return flash_backward(grad, q, k, v, out, lse, rule)
    return blockwise_backward(grad, q, k, v, out, lse, rule, ahead=ahead, drops=drops)


def serving(
    q_NHLD: Tensor, rule: AttentionParams, farthest: int, ahead: int | None = None, drops: AttentionDrops | None = None
) -> str:
    """The kernel of the table for a batch: see `forward`."""
    if cpu_attention.serves(q_NHLD):
        return "compiled"
    if drops is not None:
        return "blockwise"
    is_plain = rule.softcap is None and (rule.window is None or farthest < rule.window)
    if is_plain and q_NHLD.device.type == "cpu":
        return "cpu"
    if is_plain and ahead is not None and takes_flash(q_NHLD):
        return "flash"
    return "flex" if gpu_attention.serves(q_NHLD, rule) else "blockwise"


def serving_documents(query: Tensor, rule: AttentionParams, drops: AttentionDrops | None = None) -> str:
    """The kernel of the table that handles all documents of queries [.., D] in one call; "" if there is none."""
    if cpu_attention.serves(query):
        return "compiled"
    if drops is not None:
        return ""
    if rule.softcap is None:
        return "flash" if takes_flash(query) else ""
    return "flex" if gpu_attention.serves(query, rule) else ""


def takes_flash(query: Tensor) -> bool:
    """True if PyTorch has flash kernels for heads [.., D] like these."""
    is_short = query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] <= 256 and query.shape[-1] % 8 == 0
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
    """Flatten to [N*L,H,D] for the variable-length calls."""
    return tensor_NHLD.transpose(1, 2).flatten(0, 1)


def _even(rows: int, length: int, like: Tensor) -> Tensor:
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=like.device)


def varlen_forward(
    q_MHD: Tensor, k_MGD: Tensor, v_MGD: Tensor, cu_seqlens: Tensor, longest: int, rule: AttentionParams,
    drops: AttentionDrops | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [M,H,D] and log-sum-exp [H,M] of all documents. `cu_seqlens`: on the device. `drops`: of one row."""
    if (kernel := serving_documents(q_MHD, rule, drops)) in _OWN:
        q, k, v = map(_one_row, (q_MHD, k_MGD, v_MGD))
        out, lse = _OWN[kernel].forward(q, k, v, rule, cu_seqlens=cu_seqlens, **_dropping(drops))
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
    drops: AttentionDrops | None = None,
) -> Gradients:
    """Gradients of q, k, v; `grad` and `out` [M,H,D], `lse` [H,M]."""
    if (kernel := serving_documents(q, rule, drops)) in _OWN:
        grad, q, k, v, out = map(_one_row, (grad, q, k, v, out))
        dq, dk, dv = _OWN[kernel].backward(
            grad, q, k, v, out, lse.unsqueeze(0), rule, cu_seqlens=cu_seqlens, **_dropping(drops)
        )
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = flash_attention_backward(
        grad, q, k, v, out, lse, cu_seqlens, cu_seqlens, longest, longest, 0.0, rule.window is None, no_dropout, unused,
        scale=rule.scale, **_flash_window(rule),
    )  # fmt: skip
    return dq, dk, dv


def _dropping(drops: AttentionDrops | None) -> dict[str, AttentionDrops]:
    return {} if drops is None else {"drops": drops}


def _one_row(tensor_MHD: Tensor) -> Tensor:
    """Reshape to [1,H,M,D]."""
    return tensor_MHD.transpose(0, 1).unsqueeze(0)


def _offset(q_NHLD: Tensor, k_NGSD: Tensor, ahead: int | None) -> int:
    """Positions from the first key to the first query: `ahead`, or by default the queries are the last of the keys."""
    return k_NGSD.shape[2] - q_NHLD.shape[2] if ahead is None else ahead


def _flash_window(rule: AttentionParams) -> dict[str, int]:
    """The window in the form of `torch.nn.attention.varlen`: keys before and after a query, without a causal flag."""
    return {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}


def join_sinks(out_xHD: Tensor, lse_xH: Tensor, sinks_H: Tensor) -> None:
    """Add one more logit per head to the softmax, in place: a key without a value (gpt-oss).

    The backward kernels need no change. From the new log-sum-exp they recompute weights that sum to less than 1; the
    rest is the sink's share.
    """
    joined_xH = torch.logaddexp(lse_xH, sinks_H.to(lse_xH.dtype))
    out_xHD.mul_((lse_xH - joined_xH).exp().unsqueeze(-1))
    lse_xH.copy_(joined_xH)
