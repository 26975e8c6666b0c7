"""Causal attention on a GPU by the Triton kernels of `gpu_attention_kernels.py`, for 16-bit dtypes: the twin of
`cpu_attention.py`. Adds soft-capped scores and windows between ranks, which PyTorch's FlashAttention lacks.

No GPU has run them here, so each GPU tries them before they serve: on a small row, forward and backward, against
attention in fp64 (`lacks`). If they fail or differ, `blockwise_attention.py` serves, and the header says why.

Legend: M tokens in documents one after the other, or N rows of L queries and S keys; H query heads, G key/value heads,
D head size.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import first_line
from fivefold.ops.blockwise_attention import blockwise_backward, blockwise_forward
from fivefold.ops.cpu_attention import AttentionParams

Gradients = tuple[Tensor, Tensor, Tensor]

WIDEST = 256  # features of a head
_NO_WINDOW = 2**30  # more than any row has; with a position added it is still an int32
_LARGE = 227 * 2**10  # bytes of shared memory that a block may ask for, from Hopper on

# (queries and keys of a tile, warps, stages) by head size: large tiles that hardly spill inside the loops. Hopper
# multiplies 64 rows in 4 warps; other GPUs may have 99 KiB of shared memory. `tests/rehearsed` compiles them.
LARGE_TILES = {
    "forward": {64: (128, 64, 8, 3), 128: (128, 64, 8, 2), 256: (128, 64, 8, 2)},
    "backward_of_queries": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (128, 32, 8, 2)},
    "backward_of_keys": {64: (64, 128, 8, 2), 128: (64, 128, 8, 2), 256: (32, 128, 8, 2)},
    "backward_of_values": {64: (64, 128, 8, 2), 128: (64, 128, 8, 2), 256: (64, 128, 8, 2)},
}
TILES = {
    "forward": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 16, 4, 2)},
    "backward_of_queries": {64: (128, 64, 8, 2), 128: (128, 32, 8, 2), 256: (64, 16, 4, 2)},
    "backward_of_keys": {64: (32, 128, 8, 2), 128: (32, 128, 8, 2), 256: (16, 64, 4, 2)},
    "backward_of_values": {64: (64, 128, 8, 2), 128: (64, 128, 8, 2), 256: (32, 64, 4, 2)},
}


def serves(query: Tensor, rule: AttentionParams) -> bool:
    """True if the kernels compute attention of queries like these [.., D] under `rule`. The first call tries them and
    waits for the GPU; later ones do not."""
    is_capped = rule.softcap is not None
    return query.device.type == "cuda" and not lacks(query.device, query.dtype, query.shape[-1], is_capped=is_capped)


@cache
def lacks(device: torch.device, dtype: torch.dtype, size: int, *, is_capped: bool) -> str:
    """Return why the kernels cannot serve heads of `size` features on a GPU; "" if they can. The first call compiles
    them (seconds; Triton keeps the result)."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"Triton kernels are for 16-bit types, and this is {str(dtype).removeprefix('torch.')}"
    if size > WIDEST or size % 8:
        return f"Triton kernels are for heads of 8, 16, 24 .. {WIDEST} features, and these have {size}"
    if find_spec("triton") is None:
        return "triton is not installed"
    try:
        with torch.cuda.device(device):
            return differs(device, dtype, size, is_capped=is_capped)
    except Exception as error:  # of Triton's compiler, ptxas or the driver: another kernel serves
        return first_line(error)


def forward(
    q_NHLD: Tensor, k_NGSD: Tensor, v_NGSD: Tensor, rule: AttentionParams, *, offset: int = 0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [N,H,L,D] and log-sum-exp [N,H,L] in fp32. `offset`: positions from the first key to the first query. A
    query that sees no key gives 0 and -inf.

    With `cu_seqlens` (int32 [documents + 1], on the GPU) the tensors have one row of documents between these bounds.
    """
    rows, heads, length, size = q_NHLD.shape
    q, k, v = map(_side_by_side, (q_NHLD, k_NGSD, v_NGSD))
    out_NHLD = q.new_empty(rows, length, heads, size).transpose(1, 2)
    lse_NHL = _number_each(q)
    launch = _Launch(q, k, rule, offset, cu_seqlens)
    launch("forward", q, k, v, out_NHLD, lse_NHL)
    return out_NHLD, lse_NHL


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionParams, *, offset: int = 0,
    cu_seqlens: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Gradients of q, k, v; `grad` and `out` [N,H,L,D], `lse` [N,H,L], of these keys alone or merged with others; the
    rest as in `forward`."""
    grad, q, k, v, out = map(_side_by_side, (grad, q, k, v, out))
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    given_NHL = _number_each(q)
    launch = _Launch(q, k, rule, offset, cu_seqlens)
    launch("backward_of_queries", grad, q, k, v, out, lse, given_NHL, dq)
    launch("backward_of_keys", grad, q, k, v, lse, given_NHL, dk)
    launch("backward_of_values", grad, q, k, lse, dv)
    return dq, dk, dv


def _number_each(q_NHLD: Tensor) -> Tensor:
    """Allocate one number per query [N,H,L], heads contiguous. In the other order strides would be lengths, and Triton
    compiles another program for multiples of 16."""
    rows, heads, length, _ = q_NHLD.shape
    return q_NHLD.new_empty(rows, length, heads, dtype=torch.float32).transpose(1, 2)


def _side_by_side(tensor: Tensor) -> Tensor:
    """Make the elements of a head contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Launch:
    """Arguments that all kernels of a call share."""

    def __init__(
        self, q_NHLD: Tensor, k_NGSD: Tensor, rule: AttentionParams, offset: int, cu_seqlens: Tensor | None
    ) -> None:
        (self.rows, self.heads, self.queries, self.size), (self.shared, self.keys) = q_NHLD.shape, k_NGSD.shape[1:3]
        assert self.heads % self.shared == 0, f"{self.heads} query heads do not share {self.shared} key/value heads"
        assert cu_seqlens is None or self.rows == 1, "documents lie in one row"
        documents = 0 if cu_seqlens is None else len(cu_seqlens) - 1
        self.bounds, self.device = cu_seqlens, q_NHLD.device
        self.numbers = (
            self.heads // self.shared, self.queries, self.keys, documents, max(documents - 1, 0).bit_length(), offset,
            _NO_WINDOW if rule.window is None else min(rule.window, _NO_WINDOW), rule.scale, rule.softcap,
        )  # fmt: skip

    def __call__(self, name: str, *tensors: Tensor) -> None:
        """Launch a kernel over the queries of all heads, or over the keys of all shared heads."""
        queries, keys, warps, stages = tiles(name, self.size, self.device)
        of_queries = name in ("forward", "backward_of_queries")
        count, tile, heads = (self.queries, queries, self.heads) if of_queries else (self.keys, keys, self.shared)
        module, language = import_module("fivefold.ops.gpu_attention_kernels"), import_module("triton.language")
        strides = [(*tensor.stride()[:2], language.constexpr(tensor.stride(2))) for tensor in tensors]
        with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
            getattr(module, name)[(-(-count // tile), self.rows * heads)](
                *tensors, self.bounds, *strides, heads, *self.numbers, D=self.size, E=_width(self.size), X=queries,
                Y=keys, num_warps=warps, num_stages=stages,
            )  # fmt: skip


def tiles(kernel: str, size: int, device: torch.device) -> tuple[int, int, int, int]:
    """(queries, keys, warps, stages) of a kernel for heads of `size` features."""
    is_large = device.type == "cuda" and _shared_memory(device) >= _LARGE
    return (LARGE_TILES if is_large else TILES)[kernel][max(64, _width(size))]


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block of a GPU may ask for."""
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _width(size: int) -> int:
    """Pad a head of `size` features to a power of two, at least 16."""
    return int(max(16, 1 << (size - 1).bit_length()))


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
