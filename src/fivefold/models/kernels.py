"""Causal attention of documents, forward and backward written out, for the operator in `packed.py`.

Operators cannot call autograd, so each kernel is a pair of functions that hand over the log-sum-exp.

| kernel | where | memory |
|---|---|---|
| `cpu_*` | any type on the CPU: the fused kernel of PyTorch | linear in L |
| `varlen_*` | 16-bit types on CUDA: one call of the variable-length flash kernel for all documents | linear in T |
| `dense_*` | anything else (fp32 and fp64 proofs on CUDA): every score written out, by document | quadratic in L |

Legend: N documents of L tokens, or one row of M tokens of all documents; H query heads, G key/value heads (R = H / G
query heads share one), D head size.
"""

import torch

aten = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def cpu_forward(
    q_NHLD: torch.Tensor, k_NGLD: torch.Tensor, v_NGLD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [N,H,L,D] and log-sum-exp [N,H,L]."""
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_NHLD, k_NGLD, v_NGLD, 0.0, True, scale=scale)
    return out, lse


def cpu_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> Gradients:
    """Gradients of q, k, v; `grad` and `out` [N,H,L,D], `lse` [N,H,L]."""
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, True, scale=scale
    )
    return dq, dk, dv


def varlen_forward(
    q_MHD: torch.Tensor, k_MGD: torch.Tensor, v_MGD: torch.Tensor, bounds: torch.Tensor, longest: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [M,H,D] and log-sum-exp [H,M] of all documents at once; `bounds` on the device."""
    out, lse, *_ = aten._flash_attention_forward(
        q_MHD, k_MGD, v_MGD, bounds, bounds, longest, longest, 0.0, True, False, scale=scale
    )
    return out, lse


def varlen_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float,
) -> Gradients:
    """Gradients of q, k, v; `grad` and `out` [M,H,D], `lse` [H,M]."""
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, device=q.device)
    dq, dk, dv = aten._flash_attention_backward(
        grad, q, k, v, out, lse, bounds, bounds, longest, longest, 0.0, True, no_dropout, unused, scale=scale
    )
    return dq, dk, dv


def dense_forward(
    q_NHLD: torch.Tensor, k_NGLD: torch.Tensor, v_NGLD: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cpu_forward`, by the definition."""
    scores_NGRLL = _scores(q_NHLD, k_NGLD, scale)
    lse_NGRL = scores_NGRLL.logsumexp(-1)
    out = (scores_NGRLL - lse_NGRL.unsqueeze(-1)).exp() @ v_NGLD.unsqueeze(2)
    return out.flatten(1, 2), lse_NGRL.flatten(1, 2)


def dense_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> Gradients:
    """As `cpu_backward`, by the definition: dS = P * (dO V' - sum(dO * O))."""
    shared = k.shape[1]
    grad_NGRLD, q_NGRLD, lse_NGRL = (_by_shared(tensor, shared) for tensor in (grad, q, lse))
    weights = (_scores(q, k, scale) - lse_NGRL.unsqueeze(-1)).exp()
    inner = _by_shared((grad * out).sum(-1, keepdim=True), shared)
    dscores = weights * (grad_NGRLD @ v.unsqueeze(2).mT - inner) * scale
    dq = (dscores @ k.unsqueeze(2)).flatten(1, 2)
    return dq, (dscores.mT @ q_NGRLD).sum(2), (weights.mT @ grad_NGRLD).sum(2)


def _by_shared(tensor_NHx: torch.Tensor, shared: int) -> torch.Tensor:
    """[N,H,...] as [N,G,R,...]."""
    return tensor_NHx.reshape(tensor_NHx.shape[0], shared, -1, *tensor_NHx.shape[2:])


def _scores(q_NHLD: torch.Tensor, k_NGLD: torch.Tensor, scale: float) -> torch.Tensor:
    """[N,G,R,L,L], minus infinity above the diagonal."""
    scores: torch.Tensor = _by_shared(q_NHLD, k_NGLD.shape[1]) @ k_NGLD.unsqueeze(2).mT * scale
    length = scores.shape[-1]
    future = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, float("-inf"))
