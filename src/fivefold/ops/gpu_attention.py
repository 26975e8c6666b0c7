"""Causal attention on a GPU by PyTorch's FlexAttention (arXiv:2412.05496), for 16-bit dtypes: the twin of
`cpu/cpu_attention.py`. Adds soft-capped scores and windows between ranks, which PyTorch's FlashAttention lacks.

A query sees an interval of keys: from the start of its document or its window, whichever is later, to itself. Both ends
are tensors, so one compiled program serves all documents, windows and offsets.

No GPU has run it here, so each GPU tries it before it serves: on a small row, forward and backward, against attention
in fp64 (`lacks`). If it fails or differs, `blockwise_attention.py` serves, and the header says why.

Legend: M tokens in documents one after the other, or N rows of L queries and S keys; H query heads, G key/value heads,
D head size; X queries and Y keys in tiles.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from fivefold.core.errors import first_line
from fivefold.ops.blockwise_attention import AttentionParams, blockwise_backward, blockwise_forward
from fivefold.torch_internals import compiled_versions, dispatched_as_outside

Gradients = tuple[Tensor, Tensor, Tensor]

NARROWEST, WIDEST = 16, 256  # features of a head
TILE = 128  # queries, and keys, of which FlexAttention takes all, some or none
_VERSIONS = 64  # for row counts and lengths of 1 and more; at torch's own limit of 8 the run would end


def serves(query: Tensor, rule: AttentionParams) -> bool:
    """True if FlexAttention computes attention of queries like these [.., D] under `rule`. The first call tries it and
    waits for the GPU; later ones do not."""
    is_capped = rule.softcap is not None
    return query.device.type == "cuda" and not lacks(query.device, query.dtype, query.shape[-1], is_capped=is_capped)


@cache
def lacks(device: torch.device, dtype: torch.dtype, size: int, *, is_capped: bool) -> str:
    """Return why FlexAttention cannot serve heads of `size` features on a GPU; "" if it can. The first call compiles it
    (seconds; Inductor keeps the result)."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"FlexAttention is for 16-bit types here, and this is {str(dtype).removeprefix('torch.')}"
    if not NARROWEST <= size <= WIDEST or size % 8:
        return f"FlexAttention is for heads of 16, 24, 32 .. {WIDEST} features here, and these have {size}"
    try:
        with torch.cuda.device(device):
            return differs(device, dtype, size, is_capped=is_capped)
    except Exception as error:  # of Inductor, Triton, ptxas or the driver: another kernel serves
        return first_line(error)


def forward(
    q_NHLD: Tensor,
    k_NGSD: Tensor,
    v_NGSD: Tensor,
    rule: AttentionParams,
    *,
    offset: int = 0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [N,H,L,D] and log-sum-exp [N,H,L] in fp32. `offset`: positions from the first key to the first query. A
    query that sees no key gives 0 and -inf.

    With `cu_seqlens` (int32 [documents + 1], on the GPU) the tensors have one row of documents between these bounds.
    """
    with torch.no_grad(), dispatched_as_outside():
        sees = _sees(q_NHLD, rule, offset, cu_seqlens)
        return _fused(_attend)(q_NHLD, k_NGSD, v_NGSD, *sees, rule.scale, rule.softcap)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rule: AttentionParams,
    *,
    offset: int = 0,
    cu_seqlens: Tensor | None = None,
) -> Gradients:
    """Gradients of q, k, v; `grad` and `out` [N,H,L,D], `lse` [N,H,L], of these keys alone or merged with others; the
    rest as in `forward`.

    FlexAttention differentiates its own output and log-sum-exp, so both are computed again. A merged output is their
    function: see `_shares`.
    """
    sees = _sees(q, rule, offset, cu_seqlens)
    with torch.enable_grad(), dispatched_as_outside():
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        results = _fused(_attend)(*inputs, *sees, rule.scale, rule.softcap)
        with torch.no_grad():
            shares = _fused(_shares)(grad, out, lse, *results)
        dq, dk, dv = torch.autograd.grad(results, inputs, shares)
    return dq, dk, dv


@cache
def _fused(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Compile a function: FlexAttention is fused only inside one."""
    compiled_versions(at_least=_VERSIONS)
    return torch.compile(function, fullgraph=True)


def _sees(q_NHLD: Tensor, rule: AttentionParams, offset: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The first and the last key that each query sees, int32 [L]. A query whose last is before its first sees none."""
    last_L = torch.arange(offset, offset + q_NHLD.shape[2], dtype=torch.int32, device=q_NHLD.device)
    first_L = torch.zeros_like(last_L)
    if cu_seqlens is not None:
        assert len(q_NHLD) == 1, "documents lie in one row"
        first_L = cu_seqlens[torch.searchsorted(cu_seqlens, last_L, right=True) - 1]
    if rule.window is not None:
        first_L = torch.maximum(first_L, last_L - (rule.window - 1))
    return first_L, last_L


# ---- compiled --------------------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, first_L: Tensor, last_L: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output [N,H,L,D] and log-sum-exp [N,H,L]."""
    out, aux = flex_attention(
        q,
        k,
        v,
        _cap(softcap),
        _mask(first_L, last_L, k.shape[2]),
        scale,
        enable_gqa=True,
        kernel_options={"BACKEND": "TRITON"},  # the same kernel for any number of queries
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None
    return out, aux.lse


def _shares(grad: Tensor, out: Tensor, lse: Tensor, own_out: Tensor, own_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `own_out` and `own_lse`, of which `out` and `lse` are the merge with other keys.

    With s = exp(own_lse - lse), out is s own_out + ...: d own_out = s grad, and d own_lse = s grad (own_out - out).
    """
    share_NHL = torch.where(own_lse == -torch.inf, 0.0, (own_lse - lse).exp())
    of_lse = share_NHL * (grad.float() * (own_out.float() - out.float())).sum(-1)
    return (grad * share_NHL.unsqueeze(-1)).to(own_out.dtype), of_lse


def _cap(softcap: float | None) -> Callable[..., Tensor] | None:
    """The score function, for `scale` times the product of a query and a key; None leaves it."""
    if softcap is None:
        return None

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _mask(first_L: Tensor, last_L: Tensor, keys: int) -> BlockMask:
    """The keys that queries see, tile by tile: partly visible ones compare positions. (`create_block_mask` would look
    at every query and key.)"""

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (first_L[query] <= key) & (key <= last_L[query])

    queries = len(first_L)
    at_X = torch.arange(0, queries, TILE, device=first_L.device)  # both ends grow with the query
    to_X = (at_X + (TILE - 1)).clamp(max=queries - 1)
    at_Y = torch.arange(0, keys, TILE, device=first_L.device)
    to_Y = at_Y + (TILE - 1)
    some_XY = (first_L[at_X][:, None] <= to_Y) & (at_Y <= last_L[to_X][:, None])
    all_XY = (first_L[to_X][:, None] <= at_Y) & (to_Y <= last_L[at_X][:, None]) & (to_Y < keys)
    all_XY &= (at_X + TILE <= queries)[:, None]
    return BlockMask.from_kv_blocks(
        *_ordered(some_XY & ~all_XY), *_ordered(all_XY), TILE, sees, seq_lengths=(queries, keys)
    )


def _ordered(tiles_XY: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [1,1,X] and indices [1,1,X,Y] of the tiles of keys that are set, those first."""
    counts_X = tiles_XY.sum(-1, dtype=torch.int32)
    index_XY = tiles_XY.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts_X[None, None], index_XY[None, None]


# ---- trial on the GPU ------------------------------------------------------------------------------------------------


def differs(device: torch.device, dtype: torch.dtype, size: int, *, is_capped: bool) -> str:
    """Describe the first result of a small row that is further from fp64 than `dtype` rounds; "" if none is.

    Tests two documents of a row, then two rows with only earlier keys, under a window. The tiles are of all kinds:
    fully, partly and not visible.
    """
    rule = AttentionParams(size**-0.5, 330, 1.5 if is_capped else None)
    generator = torch.Generator("cpu").manual_seed(0)

    def drawn(rows: int, heads: int, tokens: int) -> Tensor:
        shape = rows, tokens, heads, size
        return torch.randn(shape, generator=generator, device="cpu").to(device, dtype).transpose(1, 2)

    row = [drawn(1, heads, 640) for heads in (4, 2, 2, 4)]
    ours = _both(*row, rule=rule, cu_seqlens=torch.tensor([0, 500, 640], dtype=torch.int32, device=device))
    parts = [[tensor[:, :, tokens] for tensor in row] for tokens in (slice(500), slice(500, 640))]
    exact = [torch.cat(pieces, 2) for pieces in zip(*(_exactly(*part, rule=rule) for part in parts), strict=True)]
    earlier = [drawn(2, heads, tokens) for heads, tokens in ((4, 300), (2, 340), (2, 340), (4, 300))]
    ours += _both(*earlier, rule=rule, offset=340)
    exact += _exactly(*earlier, rule=rule, ahead=340)
    names = ("the output", "the log-sum-exp", "the gradient of queries", "of keys", "of values")
    for name, mine, twin in zip(2 * names, ours, exact, strict=True):
        apart, allowed = (mine - twin).abs().max(), 2 * torch.finfo(dtype).eps * twin.abs().max()
        if not apart <= allowed:
            return f"on this GPU {name} is {float(apart):.2g} off, where rounding is {float(allowed):.2g}"
    return ""


def _both(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, rule: AttentionParams, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp, and the gradients of q, k and v."""
    out, lse = forward(q, k, v, rule, **options)
    return [out, lse, *backward(grad, q, k, v, out, lse, rule, **options)]


def _exactly(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, *, rule: AttentionParams, ahead: int | None = None
) -> list[Tensor]:
    """Like `_both`, in fp64."""
    q, k, v, grad = (tensor.double() for tensor in (q, k, v, grad))
    out, lse = blockwise_forward(q, k, v, rule, ahead=ahead)
    return [out, lse, *blockwise_backward(grad, q, k, v, out, lse, rule, ahead=ahead)]
