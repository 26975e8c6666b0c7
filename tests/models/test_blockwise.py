"""Blockwise attention with products of 16 bits, as on CUDA: against fp64, with the products computed here in fp32."""

import pytest
import torch
from torch import Tensor

from fivefold.models import kernels
from fivefold.models.kernels import AttentionParams
from fivefold.ops import blockwise_attention

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
