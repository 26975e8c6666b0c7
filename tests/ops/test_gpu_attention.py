"""Attention of soft-capped scores and of windows between ranks on a GPU, without one: FlexAttention against fp64, the
trial that comes before it, and who is chosen.

On a CPU its operators run uncompiled, with all scores in memory. fp32 shows the arithmetic, fp16 the rounding between
products. `tests/rehearsed/test_compiled_attention.py` compiles them for GPUs.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from transformers import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, eager_attention_forward

from fivefold.models import kernels, offdiagonal
from fivefold.models.attention import attention_forward
from fivefold.models.kernels import AttentionParams
from fivefold.models.packed import packed_attention
from fivefold.ops import gpu_attention
from fivefold.ops.blockwise_attention import blockwise_backward, blockwise_forward
from fivefold.ops.cpu import cpu_attention
from tests.plain_attention import reference_attention

# Of the largest value. fp16 rounds weights and results to 11 bits.
TOLERANCE = {torch.float32: 8e-6, torch.float16: 2e-3}
CPU = torch.device("cpu")
CAPPED, BANDED, BOTH = AttentionParams(0.4, None, 1.5), AttentionParams(0.4, 40), AttentionParams(0.4, 40, 1.5)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a hundred tokens have tiles of all kinds, and the dense gradients of a CPU may be asked for."""
    monkeypatch.setattr(gpu_attention, "TILE", 16)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(gpu_attention, "_fused", lambda function: function)


def drawn(rows: int, tokens: int, heads: int, size: int, dtype: torch.dtype) -> Tensor:
    """[N,H,L,D] in the memory order of the models."""
    return torch.randn(rows, tokens, heads, size).to(dtype).transpose(1, 2)


def inputs(
    queries: int, keys: int, *, heads: int = 4, shared: int = 2, rows: int = 1, size: int = 24, **of: Any
) -> list:
    """q, k, v and the gradient of the output."""
    torch.manual_seed(0)
    dtype = of.get("dtype", torch.float32)
    shapes = ((queries, heads), (keys, shared), (keys, shared), (queries, heads))
    return [drawn(rows, tokens, count, size, dtype) for tokens, count in shapes]


def by_blocks(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rule: AttentionParams, ahead: int | None = None) -> list:
    """Output, log-sum-exp and gradients in fp64."""
    q, k, v, grad = (each.double() for each in (q, k, v, grad))
    out, lse = blockwise_forward(q, k, v, rule, ahead=ahead)
    return [out, lse, *blockwise_backward(grad, q, k, v, out, lse, rule, ahead=ahead)]


def of_documents(tensors: list[Tensor], edges: list[int], rule: AttentionParams) -> list[Tensor]:
    """The same of a row of documents."""
    spans = [slice(*edge) for edge in pairwise(edges)]
    parts = [by_blocks(*(each[:, :, span] for each in tensors), rule) for span in spans]
    return [torch.cat(pieces, 2) for pieces in zip(*parts, strict=True)]


def flex(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, rule: AttentionParams, **options: Any) -> list[Tensor]:
    out, lse = gpu_attention.forward(q, k, v, rule, **options)
    return [out, lse, *gpu_attention.backward(grad, q, k, v, out, lse, rule, **options)]


def assert_close(ours: list[Tensor], exact: list[Tensor], tolerance: float, *, least: float = 0.0) -> None:
    """By `tolerance` of the largest value, or of `least` where that is more."""
    for mine, twin in zip(ours, exact, strict=True):
        assert (mine - twin).abs().max() <= tolerance * twin.abs().max().clamp(min=least)


# ---- FlexAttention ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", [CAPPED, BANDED, BOTH, AttentionParams(0.4), AttentionParams(0.4, 1, 1.5)], ids=str)
def test_documents_of_any_lengths(rule: AttentionParams, dtype: torch.dtype) -> None:
    """Of 1, 2, 7 and 31 tokens in one tile, and 97 in several. Under a window of 1 queries have no gradients."""
    edges = [0, 1, 3, 10, 41, 138]
    tensors = inputs(138, 138, heads=2, shared=1, dtype=dtype)
    ours = flex(*tensors, rule, cu_seqlens=torch.tensor(edges, dtype=torch.int32))
    assert ours[0].dtype is dtype and ours[1].dtype is torch.float32
    assert_close(ours, of_documents(tensors, edges, rule), TOLERANCE[dtype], least=1.0)


@pytest.mark.parametrize(("heads", "shared"), [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("size", [16, 24, 72])
def test_heads_of_any_size_that_share_keys(heads: int, shared: int, size: int) -> None:
    tensors = inputs(67, 67, heads=heads, shared=shared, size=size)
    ours = flex(*tensors, BOTH, cu_seqlens=torch.tensor([0, 53, 67], dtype=torch.int32))
    assert_close(ours, of_documents(tensors, [0, 53, 67], BOTH), TOLERANCE[torch.float32])


def test_inputs_in_another_order_of_memory() -> None:
    """Elements of a head apart from each other, and a gradient that is one number, expanded."""
    q, k, v, grad = inputs(67, 67)
    grad = grad[..., :1].expand_as(q)
    apart = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in (q, k, v)]
    assert all(each.stride(-1) == 67 for each in apart)
    ours = flex(*apart, grad, BOTH, cu_seqlens=torch.tensor([0, 53, 67], dtype=torch.int32))
    assert_close(ours, of_documents([q, k, v, grad], [0, 53, 67], BOTH), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rule", [CAPPED, AttentionParams(0.4, 95), AttentionParams(0.4, 95, 1.5)], ids=str)
def test_keys_that_are_all_earlier(rule: AttentionParams, dtype: torch.dtype) -> None:
    """Blocks between ranks: a band of keys under a window."""
    tensors = inputs(59, 61, heads=2, shared=1, rows=2, dtype=dtype)
    assert_close(flex(*tensors, rule, offset=90), by_blocks(*tensors, rule, ahead=90), TOLERANCE[dtype])


def test_queries_that_see_nothing_give_nothing() -> None:
    """The window ends before the queries: 0, minus infinity, and no gradients; merged with others, no share."""
    tensors = inputs(33, 17)
    out, lse, *grads = flex(*tensors, AttentionParams(0.4, 30, 1.5), offset=46)
    assert lse.eq(-torch.inf).all() and not any(each.any() for each in (out, *grads))
    other, other_lse = torch.randn_like(out), torch.randn_like(lse)
    merged, merged_lse = other.clone(), other_lse.clone()
    offdiagonal.combine(merged, merged_lse, out, lse)
    assert torch.equal(merged, other) and torch.equal(merged_lse, other_lse)


@pytest.mark.parametrize("rule", [BOTH, AttentionParams(0.4, 95), CAPPED], ids=str)
def test_parts_of_the_keys_merge_to_all_of_them(rule: AttentionParams) -> None:
    """As in a ring: the second half of a row attends to itself and to the first half, then each backward has the merged
    output and log-sum-exp."""
    half, whole = 41, 82
    q, k, v, grad = inputs(whole, whole)
    exact = by_blocks(q, k, v, grad, rule)
    q2, grad2, k1, v1, k2, v2 = (
        q[:, :, half:],
        grad[:, :, half:],
        *(x[:, :, :half] for x in (k, v)),
        *(x[:, :, half:] for x in (k, v)),
    )
    out, lse = gpu_attention.forward(q2, k2, v2, rule)
    more, more_lse = gpu_attention.forward(q2, k1, v1, rule, offset=half)
    out = out.contiguous()
    offdiagonal.combine(out, lse, more, more_lse)
    own = gpu_attention.backward(grad2, q2, k2, v2, out, lse, rule)
    first = gpu_attention.backward(grad2, q2, k1, v1, out, lse, rule, offset=half)
    later = [out, lse, own[0] + first[0], *own[1:]]
    assert_close(later, [each[:, :, half:] for each in exact], TOLERANCE[torch.float32])
    alone = by_blocks(*(each[:, :, :half] for each in (q, k, v, grad)), rule)  # the first half attends to itself
    assert_close(
        [first[1] + alone[3], first[2] + alone[4]], [each[:, :, :half] for each in exact[3:]], TOLERANCE[torch.float32]
    )


def test_it_computes_what_transformers_does() -> None:
    """Gemma 2's own attention in fp64, which takes the window from its mask."""
    config = Gemma2Config(num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.0)
    module = Gemma2Attention(config, 0)
    q, k, v, grad = inputs(67, 67)
    distance = torch.arange(67)[:, None] - torch.arange(67)
    mask = torch.zeros(1, 1, 67, 67).masked_fill((distance < 0) | (distance >= 40), float("-inf"))
    exact = [each.double().requires_grad_() for each in (q, k, v)]
    twin, _ = eager_attention_forward(module, *exact, mask.double(), scaling=0.4, softcap=1.5)
    grads = torch.autograd.grad(twin, exact, grad.double().transpose(1, 2))
    out, _, *ours = flex(q, k, v, grad, BOTH)
    assert_close([out.transpose(1, 2), *ours], [twin, *grads], TOLERANCE[torch.float32])


def test_sinks_join_afterwards() -> None:
    q, k, v, grad = inputs(67, 67)
    sinks = torch.tensor([0.5, -2.0, 3.0, 8.0])
    out, lse = gpu_attention.forward(q, k, v, BOTH)
    out64, lse64, *_ = by_blocks(q, k, v, grad, BOTH)
    kernels.join_sinks(out.transpose(1, 2), lse.transpose(1, 2), sinks)
    kernels.join_sinks(out64.transpose(1, 2), lse64.transpose(1, 2), sinks.double())
    grads = gpu_attention.backward(grad, q, k, v, out, lse, BOTH)
    exact = blockwise_backward(*(each.double() for each in (grad, q, k, v)), out64, lse64, BOTH)
    assert_close([out, lse, *grads], [out64, lse64, *exact], TOLERANCE[torch.float32])


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize(("scale", "tolerance"), [(1e-3, 4e-6), (300.0, 1e-4)])
def test_the_cap_of_small_and_large_scores(scale: float, tolerance: float) -> None:
    """The cap leaves scores of 1e-3 what they are. It flattens those of 1e4, of which fp32 rounds off 1e-3, and whose
    exponentials overflow."""
    rule, tensors = AttentionParams(scale, None, 50.0), inputs(35, 35)
    assert_close(flex(*tensors, rule), by_blocks(*tensors, rule), tolerance)


def test_gradients_are_the_same_each_time() -> None:
    tensors = inputs(83, 83, heads=2, shared=1)
    first, again = flex(*tensors, BOTH), flex(*tensors, BOTH)
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_the_models_attention_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of documents under every rule at once, through the operator that models call, and its gradients."""
    monkeypatch.setattr(kernels, "_OWN", {"compiled": gpu_attention})
    monkeypatch.setattr(kernels.cpu_attention, "serves", lambda _: True)
    torch.manual_seed(0)
    rule = {"sliding_window": 20, "softcap": 0.8, "s_aux": torch.linspace(-1, 2, 4)}
    edges = torch.tensor([0, 1, 38, 45, 82, 90], dtype=torch.int32)
    q, k, v = (drawn(2, 45, heads, 24, torch.float32).requires_grad_() for heads in (4, 2, 2))
    module = type("Attention", (torch.nn.Module,), {"is_causal": True})()
    ours, _ = attention_forward(module, q, k, v, None, scaling=0.4, cu_seqlens=edges, **rule)
    exact = [each.detach().double().requires_grad_() for each in (q, k, v)]
    twin, weight = reference_attention(*exact, edges, 0.4, **rule), torch.randn_like(ours)
    grads = torch.autograd.grad((ours * weight).sum(), (q, k, v))
    grads64 = torch.autograd.grad((twin * weight.double()).sum(), exact)
    assert_close([ours, *grads], [twin, *grads64], TOLERANCE[torch.float32])


@pytest.mark.parametrize("edges", [[0, 1, 3, 10, 41, 138], [0, 138]], ids=str)
@pytest.mark.parametrize("rule", [CAPPED, BANDED, AttentionParams(0.4, 1)], ids=str)
def test_tiles_hold_what_queries_see(rule: AttentionParams, edges: list[int]) -> None:
    """A tile that is wholly visible compares no positions, so none may be called so that is not."""
    q, *_ = inputs(138, 138)
    first, last = gpu_attention._sees(q, rule, 0, torch.tensor(edges, dtype=torch.int32))
    mask, key = gpu_attention._mask(first, last, 138), torch.arange(138)
    sees = (first[:, None] <= key) & (key <= last[:, None])
    tiles = torch.nn.functional.pad(sees, (0, 6, 0, 6)).unflatten(0, (9, 16)).unflatten(2, (9, 16))
    whole = flex_attention.BlockMask.from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=16)
    assert torch.equal(whole.to_dense()[0, 0].bool(), tiles.all(3).all(1))
    assert not (tiles.any(3).any(1) & ~mask.to_dense()[0, 0].bool()).any()


def test_a_tile_that_ends_behind_the_last_key_is_not_wholly_visible() -> None:
    """Nor to queries behind all keys, which see each of them."""
    q, *_ = inputs(138, 138)
    first, last = gpu_attention._sees(q, CAPPED, 138, None)
    mask = gpu_attention._mask(first, last, 138)
    whole = flex_attention.BlockMask.from_kv_blocks(mask.full_kv_num_blocks, mask.full_kv_indices, BLOCK_SIZE=16)
    expected = torch.ones(9, 9, dtype=torch.bool)
    expected[8], expected[:, 8] = False, False
    assert torch.equal(whole.to_dense()[0, 0].bool(), expected)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_inside_an_operator(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, and below a compiled layer, where neither autograd nor `vmap` is at hand; once, whatever the documents
    and the window are. No GPU's compiler is needed."""
    compiles: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        compiles.append(graph)
        return graph

    compiled = cache(partial(torch.compile, fullgraph=True, backend=backend))
    monkeypatch.setattr(gpu_attention, "_fused", compiled)
    monkeypatch.setattr(kernels, "_OWN", {"compiled": gpu_attention})
    monkeypatch.setattr(kernels.cpu_attention, "serves", lambda _: True)
    q, k, v, grad = inputs(67, 67)

    def layer(q: Tensor, edges: Tensor, window: int | None) -> Tensor:
        return packed_attention(q, k, v, edges, 0.4, window, 1.5)[0]

    run = torch.compile(layer, backend="aot_eager") if is_compiled else layer
    for edges, rule in (([0, 67], CAPPED), ([0, 1, 31, 67], BOTH)):
        given = q.clone().requires_grad_()
        run(given, torch.tensor(edges, dtype=torch.int32), rule.window).backward(grad.transpose(1, 2))
        exact = of_documents([q, k, v, grad], edges, rule)
        assert_close([given.grad], [exact[2]], TOLERANCE[torch.float32])
        assert len(compiles) == 3  # forward, and in backward forward again with its gradient, and the shares


# ---- the trial -------------------------------------------------------------------------------------------------------


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, *, offset: int = 0, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As the kernels, by PyTorch's operators."""
    if cu_seqlens is None:
        return blockwise_forward(q, k, v, rule, ahead=offset)
    spans = [slice(*edge) for edge in cu_seqlens.unfold(0, 2, 1).tolist()]
    parts = [blockwise_forward(*(each[:, :, span] for each in (q, k, v)), rule) for span in spans]
    out, lse = (torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))
    return out, lse


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionParams, *, offset: int = 0,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    if cu_seqlens is None:
        return blockwise_backward(grad, q, k, v, out, lse, rule, ahead=offset)
    spans = [slice(*edge) for edge in cu_seqlens.unfold(0, 2, 1).tolist()]
    tensors = grad, q, k, v, out, lse
    parts = [blockwise_backward(*(each[:, :, span] for each in tensors), rule) for span in spans]
    return tuple(torch.cat(pieces, 2) for pieces in zip(*parts, strict=True))


def other_window(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, **options: Any) -> tuple[Tensor, Tensor]:
    assert rule.window
    return plain_forward(q, k, v, AttentionParams(rule.scale, rule.window - 1, rule.softcap), **options)


def no_cap(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, **options: Any) -> tuple[Tensor, Tensor]:
    return plain_forward(q, k, v, AttentionParams(rule.scale, rule.window), **options)


def one_document(q: Tensor, k: Tensor, v: Tensor, rule: AttentionParams, **options: Any) -> tuple[Tensor, Tensor]:
    return plain_forward(q, k, v, rule, offset=options.get("offset", 0))


def no_numbers(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse = plain_forward(*given, **options)
    return out * torch.nan, lse


def no_slope(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *given: Any, **options: Any
) -> Any:
    """The derivative of the cap is left out (flash-attention #1065)."""
    exact = torch.Tensor.square_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "square_", lambda tensor: exact(tensor).zero_())
        return plain_backward(grad, q, k, v, out, lse, *given, **options)


def no_first_key(*given: Any, **options: Any) -> tuple[Tensor, ...]:
    dq, dk, dv = plain_backward(*given, **options)
    dv[:, :, 0] = 0
    return dq, dk, dv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_capped", [True, False])
def test_the_trial_takes_what_is_right(is_capped: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_attention, "forward", plain_forward)
    monkeypatch.setattr(gpu_attention, "backward", plain_backward)
    assert gpu_attention.differs(CPU, dtype, 16, is_capped=is_capped) == ""


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("forward", other_window, "the output"), ("forward", no_cap, "the output"),
        ("forward", one_document, "the output"), ("forward", no_numbers, "the output is nan"),
        ("backward", no_slope, "the gradient of queries"), ("backward", no_first_key, "of values"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_the_trial_refuses_a_wrong_kernel(
    name: str, wrong: Callable[..., Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_attention, "forward", plain_forward)
    monkeypatch.setattr(gpu_attention, "backward", plain_backward)
    monkeypatch.setattr(gpu_attention, name, wrong)
    assert said in gpu_attention.differs(CPU, torch.bfloat16, 16, is_capped=True)


# ---- who is chosen ---------------------------------------------------------------------------------------------------


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A GPU, of which the trials say what is in the list, last first."""
    said: list[str] = []
    gpu_attention.lacks.cache_clear()
    monkeypatch.setattr(gpu_attention, "differs", lambda *_, **__: said.pop())
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    yield said
    gpu_attention.lacks.cache_clear()


class OnGPU:
    """What a choice asks of queries [.., D]."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, size: int = 256) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda", 0), dtype, (1, 4, 8192, size)


@pytest.mark.parametrize(
    ("rule", "farthest", "ahead", "serving"),
    [
        (AttentionParams(1.0, None, 50.0), 99, None, "flex"), (AttentionParams(1.0, None, 50.0), 99, 64, "flex"),
        (AttentionParams(1.0, 64), 99, 64, "flex"), (AttentionParams(1.0, 64), 63, 32, "flash"),
        (AttentionParams(1.0), 99, 64, "flash"), (AttentionParams(1.0), 99, None, "flex"),
    ],
)  # fmt: skip
def test_flex_serves_what_flash_has_not(
    rule: AttentionParams, farthest: int, ahead: int | None, serving: str, tried: list[str]
) -> None:
    tried.append("")
    query: Any = OnGPU()
    assert kernels.serving(query, rule, farthest, ahead) == serving
    assert kernels.serving_documents(query, rule) == ("flex" if rule.softcap else "flash")
    assert not kernels.takes_flash(OnGPU(size=100))  # type: ignore[arg-type]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Computed by the kernel for CPUs, which takes what FlexAttention takes; the names of the calls."""
    called: list[str] = []

    class Counted:
        def __getattr__(self, name: str) -> Any:
            called.append(name)
            return getattr(cpu_attention, name)

    monkeypatch.setattr(cpu_attention, "serves", lambda query: False)
    monkeypatch.setattr(gpu_attention, "serves", lambda query, rule: True)
    monkeypatch.setattr(kernels, "_OWN", {"flex": Counted()})
    return called


@pytest.mark.skipif(cpu_attention.lacks() != "", reason="no kernel for this CPU")
@pytest.mark.parametrize("ahead", [None, 52])
def test_flex_gets_the_positions_of_queries(ahead: int | None, calls: list[str]) -> None:
    """The last of the keys, as in generation, or behind all of them, as in a ring."""
    q, k, v, grad = inputs(41, 52)
    expected = by_blocks(q, k, v, grad, BOTH, ahead)
    out, lse = kernels.forward(q, k, v, BOTH, 93, ahead=ahead)
    found = [out, lse, *kernels.backward(grad, q, k, v, out, lse, BOTH, 93, ahead=ahead)]
    for mine, twin in zip(found, expected, strict=True):
        finite = twin.isfinite()  # of the window's queries some see nothing
        torch.testing.assert_close(mine.double()[finite], twin[finite], rtol=0, atol=1e-5)
    assert calls == ["forward", "backward"]


@pytest.mark.skipif(cpu_attention.lacks() != "", reason="no kernel for this CPU")
def test_documents_under_a_cap_are_one_call(calls: list[str]) -> None:
    edges = [0, 13, 14, 61]
    tensors = inputs(61, 61)
    q, k, v, grad = (each[0].transpose(0, 1) for each in tensors)
    bounds = torch.tensor(edges, dtype=torch.int32)
    out, lse = kernels.varlen_forward(q, k, v, bounds, 47, CAPPED)
    found = [out, lse.T, *kernels.varlen_backward(grad, q, k, v, out, lse, bounds, 47, CAPPED)]
    for mine, twin in zip(found, of_documents(tensors, edges, CAPPED), strict=True):
        torch.testing.assert_close(mine.double(), twin[0].transpose(0, 1), rtol=0, atol=1e-5)
    assert calls == ["forward", "backward"]


@pytest.mark.parametrize(
    ("dtype", "size", "why"),
    [
        (torch.float32, 64, "this is float32"), (torch.float64, 64, "this is float64"),
        (torch.bfloat16, 264, "these have 264"), (torch.bfloat16, 20, "these have 20"),
    ],
)  # fmt: skip
def test_blockwise_serves_the_others(dtype: torch.dtype, size: int, why: str, tried: list[str]) -> None:
    query: Any = OnGPU(dtype, size)
    assert why in gpu_attention.lacks(query.device, dtype, size, is_capped=True)
    assert kernels.serving(query, CAPPED, 99, 64) == "blockwise" and not kernels.serving_documents(query, CAPPED)


def test_blockwise_serves_where_the_trial_fails(tried: list[str]) -> None:
    """It is made once for a type and a size of heads."""
    tried.append("on this GPU the output is 3 off, where rounding is 0.02")
    query: Any = OnGPU()
    for _ in range(2):
        assert kernels.serving(query, CAPPED, 99, 64) == "blockwise" and not kernels.serving_documents(query, CAPPED)
    why = gpu_attention.lacks(query.device, query.dtype, 256, is_capped=True)
    assert why.startswith("on this GPU the output is 3 off") and not tried


def test_a_compiler_that_fails_is_a_reason(tried: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> str:
        raise RuntimeError("out of resource: shared memory\nRequired: 1")

    monkeypatch.setattr(gpu_attention, "differs", broken)
    assert gpu_attention.lacks(CPU, torch.bfloat16, 64, is_capped=True) == "out of resource: shared memory"
