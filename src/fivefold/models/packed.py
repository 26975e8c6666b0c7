"""Causal attention over packed documents, document by document, as one operator.

`fivefold::packed_attention` is opaque to `torch.compile`: a compiled block contains one call to it, whatever the
documents are. Documents of similar length run as one batch, padded at their ends, where causal attention never looks;
see `kernels.py` for the choice of kernels. Windows count inside a document and have no effect on shorter ones.

Legend: B rows, T positions, H query heads, G key/value heads, D head size; N documents padded to L tokens in one group;
M = B * T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fivefold.models import kernels
from fivefold.ops.dropout import AttentionDrops


@torch.library.custom_op("fivefold::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropped_queries: Tensor | None = None,
    dropped_keys: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """query [B,H,T,D], key and value [B,G,T,D], cu_seqlens int32 [n+1] on the CPU -> ([B,T,H,D], log-sum-exp [B,T,H]).

    `cu_seqlens` are cumulative over the B*T tokens: 0 first, B*T last, every row start included. A query sees itself
    and the `window` - 1 tokens before it. `softcap`: scores become tanh(scores / softcap) * softcap. `sinks` [H]: one
    more logit per head in the softmax, without a value. `dropped_queries`, `dropped_keys`, `p`: `AttentionDrops`.
    """
    assert key.shape[2] == query.shape[2], f"{query.shape[2]} queries and {key.shape[2]} keys a row: no cache here"
    rule = kernels.AttentionParams(scale, window, softcap)
    drops = _drops(dropped_queries, dropped_keys, p)
    if kernels.serving_documents(query, rule, drops):
        out_BTHD, lse_BTH = _all_at_once(query, key, value, cu_seqlens, rule, drops)
    else:
        out_BTHD, lse_BTH = _by_groups(query, key, value, cu_seqlens, rule, drops)
    if sinks is not None:
        assert len(sinks) == query.shape[1], f"{len(sinks)} attention sinks for {query.shape[1]} query heads"
        kernels.join_sinks(out_BTHD, lse_BTH, sinks)
    return out_BTHD, lse_BTH


def _all_at_once(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, rule: kernels.AttentionParams,
    drops: AttentionDrops | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp from one call, without a copy of the output."""
    shape = query.shape[0], query.shape[2]
    if query.device.type == "cpu":  # its kernel would read and write out of bounds
        documents(cu_seqlens, *shape)
    q_MHD, k_MGD, v_MGD = (_tokens(tensor) for tensor in (query, key, value))
    edges = _on_device(cu_seqlens, query.device)
    out_MHD, lse_HM = kernels.varlen_forward(
        q_MHD, k_MGD, v_MGD, edges, longest(cu_seqlens), rule, drops and drops.as_one_row()
    )
    return out_MHD.contiguous().view(*shape, *out_MHD.shape[1:]), lse_HM.T.contiguous().view(*shape, len(lse_HM))


def _by_groups(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, rule: kernels.AttentionParams,
    drops: AttentionDrops | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and log-sum-exp with documents of similar length as one batch."""
    out_BTHD, lse_BTH = _empty_outputs(query)
    q_MHD, k_MGD, v_MGD = (_tokens(tensor) for tensor in (query, key, value))
    for group in groups(cu_seqlens, query.shape[0], query.shape[2], query.device):
        q, k, v = (group.take(tensor).transpose(1, 2) for tensor in (q_MHD, k_MGD, v_MGD))
        out_NHLD, lse_NHL = kernels.forward(q, k, v, rule, group.longest - 1, drops=group.drops(drops))
        group.put(out_BTHD.flatten(0, 1), out_NHLD.transpose(1, 2))
        group.put(lse_BTH.flatten(0, 1), lse_NHL.transpose(1, 2))
    return out_BTHD, lse_BTH


@torch.library.custom_op("fivefold::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    dropped_queries: Tensor | None = None,
    dropped_keys: Tensor | None = None,
    p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from `grad` and `out` [B,T,H,D]; see `packed_attention`. Sinks are in `lse`."""
    rule, drops = kernels.AttentionParams(scale, window, softcap), _drops(dropped_queries, dropped_keys, p)
    q_MHD, k_MGD, v_MGD = (_tokens(tensor) for tensor in (query, key, value))
    grad_MHD, out_MHD, lse_MH = grad.flatten(0, 1), out.flatten(0, 1), lse.flatten(0, 1)
    if kernels.serving_documents(query, rule, drops):
        edges, lse_HM = _on_device(cu_seqlens, query.device), lse_MH.T.contiguous()
        found = kernels.varlen_backward(
            grad_MHD, q_MHD, k_MGD, v_MGD, out_MHD, lse_HM, edges, longest(cu_seqlens), rule,
            drops and drops.as_one_row(),
        )  # fmt: skip
        shape = query.shape[0], query.shape[2]
        dq, dk, dv = (piece.contiguous().view(*shape, *piece.shape[1:]).transpose(1, 2) for piece in found)
        return dq, dk, dv
    grads = _empty_grads(query, key, value)
    wholes = [_tokens(tensor) for tensor in grads]
    for group in groups(cu_seqlens, query.shape[0], query.shape[2], query.device):
        g = group.take(grad_MHD, zero_padding=True).transpose(1, 2)
        q, k, v, o, stat = (group.take(tensor).transpose(1, 2) for tensor in (q_MHD, k_MGD, v_MGD, out_MHD, lse_MH))
        pieces = kernels.backward(g, q, k, v, o, stat, rule, group.longest - 1, drops=group.drops(drops))
        for whole, piece in zip(wholes, pieces, strict=True):
            group.put(whole, piece.transpose(1, 2))
    return grads


def _drops(queries: Tensor | None, keys: Tensor | None, p: float) -> AttentionDrops | None:
    return None if queries is None or keys is None else AttentionDrops(queries, keys, p)


@dataclass(frozen=True, eq=False)
class Group:
    """Documents that run as one batch [N, L]. `index` int64 [N, L] is the token at each place; past a document's end it
    repeats the last one. `real` int64 are the flat places that hold a token, None if all do. `longest`: tokens of the
    longest document, without padding."""

    index: Tensor
    real: Tensor | None
    longest: int

    def take(self, tokens_Mx: Tensor, *, zero_padding: bool = False) -> Tensor:
        """Gather [M, ...] -> [N, L, ...]. Padding is a copy of some token, or zeros."""
        taken = tokens_Mx.index_select(0, self.index.flatten())
        if zero_padding and self.real is not None:
            padding = torch.ones(len(taken), dtype=torch.bool, device=taken.device).index_fill_(0, self.real, False)
            taken[padding] = 0
        return taken.view(*self.index.shape, *tokens_Mx.shape[1:])

    def drops(self, drops: AttentionDrops | None) -> AttentionDrops | None:
        """Gather drops of the tokens [B, T, ...] -> [N, L, ...]."""
        if drops is None:
            return None
        queries, keys = (self.take(x.flatten(0, 1)) for x in (drops.queries, drops.keys))
        return AttentionDrops(queries, keys, drops.p)

    def put(self, tokens_Mx: Tensor, documents_NLx: Tensor) -> None:
        """Write [N, L, ...] back to the places that `take` read; padding is dropped."""
        index, taken = self.index.flatten(), documents_NLx.flatten(0, 1)
        if self.real is not None:
            index, taken = index[self.real], taken.index_select(0, self.real)
        tokens_Mx.index_copy_(0, index, taken)


def groups(cu_seqlens: Tensor, rows: int, length: int, device: torch.device) -> list[Group]:
    """The documents between `cu_seqlens`, grouped by similar length, each padded to `padded_length`."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for start, stop in documents(cu_seqlens, rows, length):
        size = length if stop - start == length else padded_length(stop - start)
        by_length.setdefault(size, []).append((start, stop))
    return [_group(places, size, device) for size, places in by_length.items()]


def documents(cu_seqlens: Tensor, rows: int, length: int) -> list[tuple[int, int]]:
    """The first token of each document and the one after its last. Other bounds are a bug: asserted."""
    edges: list[int] = cu_seqlens.tolist()
    assert edges[0] == 0 and edges[-1] == rows * length, f"bounds {edges[0]}..{edges[-1]} for {rows} x {length} tokens"
    found = list(pairwise(edges))
    for start, stop in found:
        assert 0 < stop - start <= length - start % length, f"document {start}..{stop} crosses a row of {length} tokens"
    return found


def padded_length(length: int) -> int:
    """Round up to a multiple of 32, or of an eighth of an octave. Few shapes make large batches, and the CPU library
    compiles few kernels, one per shape (with unrounded lengths they took 900 MB)."""
    step = max(32, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


def longest(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max())


def _group(places: list[tuple[int, int]], size: int, device: torch.device) -> Group:
    edges = torch.tensor(places)
    index = edges[:, :1] + torch.arange(size)
    is_real = index < edges[:, 1:]
    real = None if bool(is_real.all()) else _on_device(is_real.flatten().nonzero().squeeze(1), device)
    index = torch.minimum(index, edges[:, 1:] - 1)
    return Group(_on_device(index, device), real, max(stop - start for start, stop in places))


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device`. The host does not wait for earlier kernels: CUDA takes the data from pageable
    memory before the call returns."""
    return tensor.to(device, non_blocking=True)


def _tokens(tensor_BHTD: Tensor) -> Tensor:
    """Flatten to [M,H,D]: a view if the projection that produced the tensor left it in that order."""
    return tensor_BHTD.transpose(1, 2).flatten(0, 1)


# Shapes, types and memory order of the operators, for autograd and `torch.compile`. ----------------------------------


def _empty_outputs(query: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, length, size = query.shape
    lse_BTH = query.new_empty(rows, length, heads, dtype=kernels.precise(query.dtype))
    return query.new_empty(rows, length, heads, size), lse_BTH


def _empty_grads(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One gradient per [B,H,T,D] tensor, in the memory order [B,T,H,D] in which the projections want it."""
    q, k, v = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in tensors)
    return q, k, v


@packed_attention.register_fake
def _(query: Tensor, *rest: Any) -> Any:
    return _empty_outputs(query)


@packed_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    return _empty_grads(query, key, value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens, scale, window, softcap, sinks, dropped_queries, dropped_keys, p = inputs
    ctx.rule, ctx.p = (scale, window, softcap), p
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, sinks, dropped_queries, dropped_keys)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, cu_seqlens, sinks, *dropped = ctx.saved_tensors
    backward: Callable[..., tuple[Tensor, ...]] = packed_attention_backward
    dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
    grads = backward(grad, query, key, value, out, lse, cu_seqlens, *ctx.rule, *dropped, ctx.p)
    return (*grads, None, None, None, None, dsinks, None, None, None)


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient of the sinks, [H]: as for any score, weight * (dO V' - sum(dO * O)), without V, over all queries."""
    weight_BTH = (sinks.to(lse.dtype) - lse).exp()
    return -(weight_BTH * (grad.to(lse.dtype) * out).sum(-1)).sum((0, 1)).to(sinks.dtype)


packed_attention.register_autograd(_differentiate, setup_context=_save)
