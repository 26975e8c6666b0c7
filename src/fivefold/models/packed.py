"""Causal attention over packed documents, document by document, as one operator.

`fivefold::packed_attention` is opaque to `torch.compile`: a compiled block holds one call to it, whatever the
documents are. Documents of equal length run as one batch; see `kernels.py` for what runs where.

Legend: B rows, T positions, H query heads, G key/value heads, D head size; N documents of length L in one group;
M = B * T tokens.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from fivefold.models import kernels

# Documents of one length: (row, first position) of each.
Places = list[tuple[int, int]]


@torch.library.custom_op("fivefold::packed_attention", mutates_args=())
def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B,H,T,D], key and value [B,G,T,D], bounds int32 [n+1] on the CPU -> ([B,T,H,D], log-sum-exp [B,H,T]).

    `bounds` are cumulative over the B*T tokens: 0 first, B*T last, every row start included.
    """
    groups = documents(bounds, query.shape[0], query.shape[2])
    out_BTHD, lse_BHT = _empty_outputs(query)
    if _kernel(query) == "varlen":
        q, k, v = (_tokens(tensor) for tensor in (query, key, value))
        out, lse = kernels.varlen_forward(q, k, v, bounds.to(query.device), max(groups), scale)
        out_BTHD.copy_(out.view_as(out_BTHD))
        _tokens_of_lse(lse_BHT).copy_(lse.view(query.shape[1], query.shape[0], -1))
        return out_BTHD, lse_BHT
    forward = kernels.cpu_forward if _kernel(query) == "cpu" else kernels.dense_forward
    for length, places in groups.items():
        q, k, v = (_take(tensor, places, length) for tensor in (query, key, value))
        out, lse = forward(q, k, v, scale)
        _put(out_BTHD.transpose(1, 2), places, out)
        _put(lse_BHT.unsqueeze(-1), places, lse.unsqueeze(-1))
    return out_BTHD, lse_BHT


@torch.library.custom_op("fivefold::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value from `grad` and `out` [B,T,H,D]; see `packed_attention`."""
    groups = documents(bounds, query.shape[0], query.shape[2])
    grads = _empty_grads(query, key, value)
    grad_BHTD, out_BHTD = grad.transpose(1, 2), out.transpose(1, 2)
    if _kernel(query) == "varlen":
        g, q, k, v, o = (_tokens(tensor) for tensor in (grad_BHTD, query, key, value, out_BHTD))
        stat = _tokens_of_lse(lse).flatten(1)
        pieces = kernels.varlen_backward(g, q, k, v, o, stat, bounds.to(q.device), max(groups), scale)
        for whole, piece in zip(grads, pieces, strict=True):
            whole.transpose(1, 2).copy_(piece.view_as(whole.transpose(1, 2)))
        return grads
    backward = kernels.cpu_backward if _kernel(query) == "cpu" else kernels.dense_backward
    for length, places in groups.items():
        g, q, k, v, o = (_take(tensor, places, length) for tensor in (grad_BHTD, query, key, value, out_BHTD))
        stat = _take(lse.unsqueeze(-1), places, length).squeeze(-1)
        for whole, piece in zip(grads, backward(g, q, k, v, o, stat, scale), strict=True):
            _put(whole, places, piece)
    return grads


def documents(bounds: torch.Tensor, rows: int, length: int) -> dict[int, Places]:
    """Where the documents are, grouped by their length: {length: [(row, first position), ...]}."""
    edges: list[int] = bounds.tolist()
    assert edges[0] == 0 and edges[-1] == rows * length, f"bounds {edges[0]}..{edges[-1]} for {rows} x {length} tokens"
    groups: dict[int, Places] = {}
    for start, stop in pairwise(edges):
        row, first = divmod(start, length)
        assert 0 < stop - start <= length - first, f"document {start}..{stop} crosses a row of {length} tokens"
        groups.setdefault(stop - start, []).append((row, first))
    return groups


def _kernel(query: torch.Tensor) -> str:
    """Which kernel of `kernels.py` serves these queries."""
    if query.device.type == "cpu":
        return "cpu"
    short = query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] <= 256 and query.shape[3] % 8 == 0
    return "varlen" if query.device.type == "cuda" and short else "dense"


def _tokens(tensor_BHTD: torch.Tensor) -> torch.Tensor:
    """[M,H,D]: a view where the projection that made the tensor left it in that order."""
    return tensor_BHTD.transpose(1, 2).flatten(0, 1)


def _tokens_of_lse(lse_BHT: torch.Tensor) -> torch.Tensor:
    """[H,B,T], which flattens to the [H,M] of the variable-length kernel."""
    return lse_BHT.transpose(0, 1)


def _take(tensor_BHTD: torch.Tensor, places: Places, length: int) -> torch.Tensor:
    """The documents at `places` as [N,H,L,D]: a view where they are one document, or whole rows in order."""
    if _is_whole(tensor_BHTD, places, length):
        return tensor_BHTD
    views = [tensor_BHTD[row : row + 1, :, first : first + length] for row, first in places]
    return views[0] if len(views) == 1 else torch.cat(views)


def _put(tensor_BHTD: torch.Tensor, places: Places, documents_NHLD: torch.Tensor) -> None:
    """Write the documents back to where `_take` found them."""
    length = documents_NHLD.shape[2]
    if _is_whole(tensor_BHTD, places, length):
        tensor_BHTD.copy_(documents_NHLD)
        return
    for (row, first), document in zip(places, documents_NHLD, strict=True):
        tensor_BHTD[row, :, first : first + length].copy_(document)


def _is_whole(tensor_BHTD: torch.Tensor, places: Places, length: int) -> bool:
    return length == tensor_BHTD.shape[2] and len(places) == tensor_BHTD.shape[0]


# What the operators look like from outside: shapes, types and memory order, for autograd and `torch.compile`. ---------


def _empty_outputs(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows, heads, length, size = query.shape
    precise = query.dtype if query.dtype == torch.float64 else torch.float32
    return query.new_empty(rows, length, heads, size), query.new_empty(rows, heads, length, dtype=precise)


def _empty_grads(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One gradient per [B,H,T,D] tensor, in the memory order [B,T,H,D] in which the projections want it."""
    q, k, v = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in tensors)
    return q, k, v


@packed_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, scale: float) -> Any:
    return _empty_outputs(query)


@packed_attention_backward.register_fake
def _(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
    return _empty_grads(query, key, value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, bounds, scale = inputs
    ctx.save_for_backward(*tensors, *output, bounds)
    ctx.mark_non_differentiable(output[1])
    ctx.scale = scale


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    query, key, value, out, lse, bounds = ctx.saved_tensors
    backward: Callable[..., tuple[torch.Tensor, ...]] = packed_attention_backward
    return (*backward(grad, query, key, value, out, lse, bounds, ctx.scale), None, None)


packed_attention.register_autograd(_differentiate, setup_context=_save)
