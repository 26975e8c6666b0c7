"""Shares and independence of what `ops/dropout.py` drops, in standard deviations of independent draws."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from fivefold.ops.dropout import (
    CallsServed,
    Drop,
    attention_drops,
    feature_hashes,
    kept,
    key_of,
    of_site,
    token_hashes,
    uniform,
)

ROWS, LENGTH, FEATURES, P = 8, 256, 384, 0.1
CPU = torch.device("cpu")


def mask(*, site: str = "layers.0/module0", step: int = 0, seed: int = 1, first_row: int = 0) -> Tensor:
    """1 where an element is dropped, fp64 [B, T, D], less its mean."""
    tokens = of_site(token_hashes(seed, step, range(first_row, first_row + ROWS), LENGTH, CPU), key(seed, site))
    hashes = feature_hashes(seed, site, torch.arange(FEATURES, dtype=torch.int32))
    return 1 - P + kept(tokens.unsqueeze(-1) * hashes, P).double()


def key(seed: int, site: str) -> Tensor:
    return torch.tensor(key_of(seed, site), dtype=torch.int32)


def z(products: Tensor) -> float:
    """The mean of products of independent draws, in standard deviations."""
    return float(products.mean().abs() * products.numel() ** 0.5 / (P * (1 - P)))


@pytest.mark.parametrize("p", [0.0, 0.05, 0.1, 0.5, 0.9])
def test_the_share_of_dropped_elements(p: float) -> None:
    tokens = of_site(token_hashes(3, 7, range(ROWS), LENGTH, CPU), key(3, "a"))
    out = Drop.apply(
        torch.ones(ROWS, LENGTH, FEATURES), tokens, feature_hashes(3, "a", torch.arange(FEATURES, dtype=torch.int32)), p
    )
    spread = (p * (1 - p) / out.numel()) ** 0.5
    assert abs(float((out == 0).double().mean()) - p) <= 4 * spread
    assert out.max() == pytest.approx(1 / (1 - p))


@pytest.mark.parametrize(
    "other", [{"site": "layers.1/module0"}, {"site": "layers.0/module1"}, {"step": 1}, {"seed": 2}, {"first_row": ROWS}]
)
def test_sites_layers_steps_and_rows_are_independent(other: dict[str, int]) -> None:
    assert z(mask() * mask(**other)) <= 4


def test_features_and_tokens_are_independent() -> None:
    """The correlations of all pairs of features, and of tokens, spread as those of independent draws do."""
    found = mask().view(-1, FEATURES) / (P * (1 - P)) ** 0.5
    for draws in (found, found[:FEATURES].T):
        pairs = draws.T @ draws / len(draws) ** 0.5
        pairs.fill_diagonal_(0)
        assert float(pairs.square().mean() ** 0.5) == pytest.approx(1, abs=0.02)
        assert float(pairs.abs().max()) <= 7


def test_four_corners_of_a_rectangle_are_independent() -> None:
    """A product of two hashes has such a relation: a b and c d determine a d for known b, c."""
    found, generator = mask().view(-1, FEATURES), torch.Generator().manual_seed(0)
    i, k = torch.randint(0, len(found) // 2, (2, 10**6), generator=generator)
    j, m = torch.randint(0, FEATURES // 2, (2, 10**6), generator=generator)
    i, j = i + len(found) // 2, j + FEATURES // 2
    corners = found[i, j] * found[i, m] * found[k, j] * found[k, m]
    assert float(corners.mean().abs() * corners.numel() ** 0.5 / (P * (1 - P)) ** 2) <= 4


def test_heads_and_keys_of_attention_are_independent() -> None:
    heads = feature_hashes(1, "attention", torch.arange(4, dtype=torch.int32))
    drops = attention_drops(token_hashes(1, 0, range(2), LENGTH, CPU), key(1, "attention"), heads, P)
    found = 1 - P + kept(drops.queries[:, :, None, None] * drops.keys[:, None], P).double()  # [B, T, S, H]
    assert abs(float(found.mean())) <= 4 * (P * (1 - P) / found.numel()) ** 0.5
    assert z(found[..., 0] * found[..., 1]) <= 4
    assert z(found[:, :, 1:] * found[:, :, :-1]) <= 4
    assert z(found[:, 1:] * found[:, :-1]) <= 4
    assert z(found[0] * found[1]) <= 4


def test_noise_is_uniform_and_independent() -> None:
    tokens = of_site(token_hashes(1, 0, range(ROWS), LENGTH, CPU), key(1, "a")).flatten()
    bits = tokens.unsqueeze(-1) * feature_hashes(1, "a", torch.arange(FEATURES, dtype=torch.int32))
    found = uniform(bits, -1.0, 1.0, torch.float64)
    assert found.abs().max() <= 1 and uniform(bits, 2.0, 3.0, torch.float32).min() >= 2
    assert abs(float(found.mean())) <= 4 * (3 * found.numel()) ** -0.5
    shares = torch.histc(found, 16) / found.numel()
    assert float((shares - 1 / 16).abs().max()) <= 4 * (1 / 16 * 15 / 16 / found.numel()) ** 0.5
    for draws in (found * 3**0.5, found[:FEATURES].T * 3**0.5):
        pairs = (draws.T @ draws / len(draws) ** 0.5).fill_diagonal_(0)
        assert float(pairs.square().mean() ** 0.5) == pytest.approx(1, abs=0.02)
        assert float(pairs.abs().max()) <= 7


def test_backward_drops_what_forward_drops() -> None:
    x = torch.randn(ROWS, LENGTH, 7, dtype=torch.float64, requires_grad=True)
    tokens = of_site(token_hashes(1, 0, range(ROWS), LENGTH, CPU), key(1, "a"))
    out = Drop.apply(x, tokens, feature_hashes(1, "a", torch.arange(7, dtype=torch.int32)), P)
    out.sum().backward()
    assert torch.equal(x.grad * x.detach(), out.detach())


def drops_and_fills(x: Tensor) -> Tensor:
    return nn.functional.dropout(x, p=1.0) + torch.empty_like(x).uniform_(-1.0, 1.0)


def test_calls_are_served_in_a_context_on_one_thread() -> None:
    """Whoever makes them, also in a compiled function, which stays whole; no other thread, and nothing afterwards."""
    x, plain = torch.ones(3), (nn.functional.dropout, Tensor.uniform_)

    def served(x: Tensor) -> Tensor:
        with CallsServed(lambda x, p, **_: 2 * x, lambda x, low, high: x.uniform_(high, high).add_(high)):
            return drops_and_fills(x)

    assert served(x).tolist() == [4.0] * 3
    assert torch.compile(served, backend="eager", fullgraph=True)(x).tolist() == [4.0] * 3
    with CallsServed(lambda x, *_, **__: 5 * x, lambda x, *_: x.fill_(1.0)), ThreadPoolExecutor(1) as others:
        assert nn.Dropout(0.5)(x).tolist() == [5.0] * 3
        assert (nn.functional.dropout, Tensor.uniform_) == plain
        assert others.submit(drops_and_fills, x).result().abs().max() <= 1.0
    assert drops_and_fills(x).abs().max() <= 1.0
