"""Blockwise attention with products of 16 bits, as on CUDA: against fp64, with the products computed here in fp32."""

import pytest
import torch
from torch import Tensor

from fivefold.models import kernels
from fivefold.models.kernels import AttentionParams
from fivefold.ops import blockwise_attention
from fivefold.ops.dropout import attention_drops, feature_hashes, kept, token_hashes

TOLERANCE = 1e-2  # of the largest value: weights and their gradients are rounded to 8 bits, and so is each result
RULES = [AttentionParams(0.3, None, 1.5), AttentionParams(0.3, 29, 1.5), AttentionParams(0.3, 29)]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, torch.dtype]]:
    """As on CUDA; the types of every product."""
    seen = []

    def bmm(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert out_dtype is torch.float32
        seen.append((left.dtype, right.dtype))
        return left.float() @ right.float()

    monkeypatch.setattr(torch, "bmm", bmm)
    monkeypatch.setattr(blockwise_attention, "_factors", lambda tensor: tensor.dtype)
    return seen


@pytest.mark.parametrize("ahead", [None, 140])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_products_of_16_bits(rule: AttentionParams, ahead: int | None, products: list, monkeypatch) -> None:
    if ahead and rule.window:
        rule = AttentionParams(rule.scale, 150, rule.softcap)  # each query sees a key
    monkeypatch.setattr(blockwise_attention, "_CPU_BLOCK", 2**13)  # several blocks
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 6, 131, 24, dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(2, 3, 131, 24, dtype=torch.bfloat16) for _ in range(2))
    exact = [each.double() for each in (q, k, v)]
    out64, lse64 = kernels.blockwise_forward(*exact, rule, ahead=ahead)
    grads64 = kernels.blockwise_backward(grad.double(), *exact, out64, lse64, rule, ahead=ahead)
    assert not products
    out, lse = kernels.blockwise_forward(q, k, v, rule, ahead=ahead)
    blocks = len(products) // 2
    assert blocks > 1 and lse.dtype is torch.float32 and out.dtype is torch.bfloat16
    grads = kernels.blockwise_backward(grad, q, k, v, out, lse, rule, ahead=ahead)
    assert products == [(torch.bfloat16, torch.bfloat16)] * 7 * blocks
    assert (lse - lse64).abs().max() < 1e-5 * lse64.abs().max()
    for ours, theirs in zip((out, *grads), (out64, *grads64), strict=True):
        assert ours.dtype is torch.bfloat16
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.abs().max()


@pytest.mark.parametrize("window", [None, 29])
def test_each_block_drops_what_the_whole_drops(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a block's first query is not the first, nor its first key."""
    monkeypatch.setattr(blockwise_attention, "_CPU_BLOCK", 2**12)
    torch.manual_seed(0)
    (rows, length, heads, shared), rule, p = (2, 131, 4, 2), AttentionParams(0.3, window, None), 0.25
    q, k, v = (
        torch.randn(rows, n, length, 8, dtype=torch.float64, requires_grad=True) for n in (heads, shared, shared)
    )
    hashes = token_hashes(1, 0, range(rows), length, torch.device("cpu"))
    numbers = torch.arange(heads, dtype=torch.int32)
    drops = attention_drops(hashes, torch.tensor(7, dtype=torch.int32), feature_hashes(1, "a", numbers), p)
    is_kept = kept(drops.queries[:, :, None, None] * drops.keys[:, None], p).permute(0, 3, 1, 2) != 0  # [B, H, T, S]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    scores = (q @ k.repeat_interleave(heads // shared, 1).mT * rule.scale).masked_fill(hidden, -torch.inf)
    expected = (scores.softmax(-1) * is_kept / (1 - p)) @ v.repeat_interleave(heads // shared, 1)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    given = [x.detach() for x in (q, k, v)]
    out, lse = kernels.blockwise_forward(*given, rule, drops=drops)
    grads = kernels.blockwise_backward(grad, *given, out, lse, rule, drops=drops)
    for found, wanted in zip((out, *grads), (expected, q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=1e-12)
