"""The models' attention against its plain twin: values, gradients, packing, generation, and what is refused."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from fivefold.core.errors import UserError
from fivefold.models import kernels, packed
from fivefold.models.attention import attention_forward
from fivefold.models.build import build_meta
from fivefold.ops import blockwise_attention
from tests.plain_attention import reference_attention

# Rows x positions, and the bounds of the documents in them: prime lengths, documents of 1 token, a padding tail.
PACKINGS = {
    "one document a row": (2, 13, [0, 13, 26]),
    "prime lengths": (1, 31, [0, 7, 18, 31]),
    "one-token documents": (2, 5, [0, 1, 2, 5, 6, 7, 8, 9, 10]),
    "equal lengths across rows": (3, 12, [0, 4, 8, 12, 17, 24, 28, 32, 36]),
    "padding tail": (2, 16, [0, 11, 16, 21, 24, 32]),
}
HEADS = [(4, 4), (6, 2), (5, 1)]
RULES = [
    {"sliding_window": 3},
    {"softcap": 1.5},
    {"s_aux": torch.tensor([0.5, -2.0, 3.0, 0.0, 8.0, -0.3])},
    {"sliding_window": 4, "softcap": 0.8, "s_aux": torch.linspace(-3, 3, 6)},
]
PRECISIONS = [torch.float64, torch.float32, torch.bfloat16]


class Attention(nn.Module):
    is_causal = True


def inputs(rows, length, heads, kv_heads, *, keys=None, dtype=torch.float64, requires_grad=True):
    torch.manual_seed(0)
    keys = keys or length
    shapes = [(rows, length, heads, 8), (rows, keys, kv_heads, 8), (rows, keys, kv_heads, 8)]
    tensors = [torch.randn(shape, dtype=torch.float64).to(dtype).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_(requires_grad) for tensor in tensors]


def forward(query, key, value, cu_seqlens=None, scaling=None, **kwargs):
    return attention_forward(Attention(), query, key, value, None, scaling=scaling, cu_seqlens=cu_seqlens, **kwargs)[0]


def assert_close(ours, exact):
    """Within a few roundings of the type, relative to the largest value: inputs, scores, weights, output, gradient."""
    assert (ours.double() - exact).abs().max() <= 4 * torch.finfo(ours.dtype).eps * exact.abs().max()


def check_against_twin(tensors, cu_seqlens, **rule):
    """Output and gradients equal the twin's, the sinks' among them."""
    leaves = [leaf for leaf in (*tensors, rule.get("s_aux")) if leaf is not None and leaf.requires_grad]
    ours, twin = forward(*tensors, cu_seqlens, 0.7, **rule), reference_attention(*tensors, cu_seqlens, 0.7, **rule)
    assert (ours - twin).abs().max() <= 1e-12
    weight = torch.randn_like(ours)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), leaves),
        torch.autograd.grad((twin * weight).sum(), leaves),
        strict=True,
    ):
        assert (mine - theirs).abs().max() <= 1e-12


def test_packed_values_and_gradients_match_the_twin(subtests, monkeypatch):
    for (heads, kv_heads), packing, kernel in product(HEADS, PACKINGS, ["cpu", "blockwise"]):
        with subtests.test(heads=heads, kv_heads=kv_heads, packing=packing, kernel=kernel):
            monkeypatch.setattr(kernels, "serving", lambda *_, kernel=kernel: kernel)
            rows, length, edges = PACKINGS[packing]
            check_against_twin(inputs(rows, length, heads, kv_heads), torch.tensor(edges, dtype=torch.int32))


def test_every_rule_and_its_gradients_match_the_twin(subtests, monkeypatch):
    """Windows shorter and longer than the documents, also within one group; scores that soft-capping bends."""
    monkeypatch.setattr(blockwise_attention, "_CPU_BLOCK", 1)  # 16 queries at a time
    sinks = torch.tensor([0.5, -2.0, 3.0, 0.0, 8.0, -0.3], dtype=torch.float64, requires_grad=True)
    packings = {"several blocks": (2, 67, [0, 53, 67, 134]), **PACKINGS}
    for packing, window, softcap, s_aux in product(packings, [None, 1, 5, 12, 100], [None, 1.5], [None, sinks]):
        with subtests.test(packing=packing, window=window, softcap=softcap, sinks=s_aux is not None):
            rows, length, edges = packings[packing]
            tensors, cu_seqlens = inputs(rows, length, 6, 2), torch.tensor(edges, dtype=torch.int32)
            check_against_twin(tensors, cu_seqlens, sliding_window=window, softcap=softcap, s_aux=s_aux)


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operator gave."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.parametrize(
    "rule", [kernels.AttentionParams(0.3, window=256), kernels.AttentionParams(0.3, softcap=1.5)], ids=str
)
def test_no_quadratic_memory(rule):
    """A row of 8,192 tokens has 134 million scores in two heads; a block of them has half a million."""
    q, k, v = (torch.randn(1, heads, 8192, 8) for heads in (2, 1, 1))
    with Largest() as largest:
        out, lse = kernels.blockwise_forward(q, k, v, rule)
        kernels.blockwise_backward(out, q, k, v, out, lse, rule)
    assert largest.elements <= blockwise_attention._CPU_BLOCK


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rows_without_bounds_are_one_document_each(rule):
    check_against_twin(inputs(2, 13, 6, 2), None, **rule)


def test_every_precision(subtests):
    for dtype, rule in product(PRECISIONS, [{}, *RULES]):
        with subtests.test(dtype=dtype, rule=rule):
            tensors = inputs(2, 16, 6, 2, dtype=dtype)
            cu_seqlens = torch.tensor(PACKINGS["padding tail"][2], dtype=torch.int32)
            ours = forward(*tensors, cu_seqlens, **rule)
            exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
            twin = reference_attention(*exact, cu_seqlens, **rule)
            assert ours.dtype == dtype
            assert_close(ours, twin)
            for mine, theirs in zip(
                torch.autograd.grad(ours.sum(), tensors), torch.autograd.grad(twin.sum(), exact), strict=True
            ):
                assert_close(mine, theirs)


def test_generation_with_a_cache_sees_the_last_positions(subtests):
    for (length, keys), rule in product([(1, 9), (3, 9), (9, 9), (1, 1)], [{}, *RULES]):
        with subtests.test(length=length, keys=keys, rule=rule):
            tensors = inputs(2, length, 6, 2, keys=keys, requires_grad=False)
            assert (forward(*tensors, **rule) - reference_attention(*tensors, **rule)).abs().max() <= 1e-12


def test_cached_steps_equal_the_whole_row(subtests):
    for rule, dropped in product([{}, *RULES], [False, True]):
        with subtests.test(rule=rule, dropped=dropped):
            query, key, value = inputs(1, 11, 6, 2, requires_grad=False)
            kept = rule["sliding_window"] - 1 if dropped and "sliding_window" in rule else 11
            steps = [
                forward(query[:, :, a:b], key[:, :, max(0, a - kept) : b], value[:, :, max(0, a - kept) : b], **rule)
                for a, b in ((0, 5), (5, 9), (9, 10), (10, 11))
            ]
            assert (torch.cat(steps, 1) - forward(query, key, value, **rule)).abs().max() <= 1e-12


def test_gradients_through_a_cache_under_a_rule_are_refused():
    with pytest.raises(UserError, match="no gradients"):
        forward(*inputs(1, 3, 6, 2, keys=9), sliding_window=4)


def test_nothing_leaks_between_documents():
    cu_seqlens = torch.tensor([0, 5, 11, 16], dtype=torch.int32)
    query, key, value = inputs(1, 16, 6, 2, requires_grad=False)
    before = forward(query, key, value, cu_seqlens)
    for tensor in (query, key, value):
        tensor[:, :, 2] += 1.0
    after = forward(query, key, value, cu_seqlens)
    assert torch.equal(before[:, 5:], after[:, 5:]) and torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:5], after[:, 2:5])


def test_the_variable_length_kernel_takes_our_arguments():
    """Without a GPU: what the CUDA kernels promise on the meta device has the shapes that `packed.py` counts on."""
    shapes = [(26, 6, 8), (26, 2, 8), (26, 2, 8)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    cu_seqlens = torch.empty(5, dtype=torch.int32, device="meta")
    for rule in (kernels.AttentionParams(0.3), kernels.AttentionParams(0.3, window=4)):
        out, lse = kernels.varlen_forward(q, k, v, cu_seqlens, 8, rule)
        assert out.shape == q.shape and lse.shape == (6, 26)
        grads = kernels.varlen_backward(out, q, k, v, out, lse, cu_seqlens, 8, rule)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_packed_documents_on_a_gpu(subtests):
    for (heads, kv_heads), dtype, rule in product([(6, 6), (6, 2), (6, 1)], PRECISIONS, [{}, *RULES]):
        with subtests.test(heads=heads, kv_heads=kv_heads, dtype=dtype, rule=rule):
            cu_seqlens = torch.tensor(PACKINGS["padding tail"][2], dtype=torch.int32)
            rule = {name: value.cuda() if name == "s_aux" else value for name, value in rule.items()}
            tensors = [t.detach().cuda().requires_grad_() for t in inputs(2, 16, heads, kv_heads, dtype=dtype)]
            exact = [t.detach().double().requires_grad_() for t in tensors]
            ours, twin = forward(*tensors, cu_seqlens, **rule), reference_attention(*exact, cu_seqlens, **rule)
            assert_close(ours, twin)
            for mine, theirs in zip(
                torch.autograd.grad(ours.sum(), tensors), torch.autograd.grad(twin.sum(), exact), strict=True
            ):
                assert_close(mine, theirs)


def test_the_operator_keeps_the_rules_of_custom_operators():
    cu_seqlens = torch.tensor([0, 7, 13, 18, 26], dtype=torch.int32)
    for rule in ((), (4, None, None), (None, 1.5, None), (4, 1.5, torch.randn(6, requires_grad=True))):
        torch.library.opcheck(packed.packed_attention, (*inputs(2, 13, 6, 2), cu_seqlens, 0.3, *rule))


@pytest.mark.parametrize(
    ("rule", "longest", "kernel"),
    [
        (kernels.AttentionParams(0.3), 9, "cpu"),
        (kernels.AttentionParams(0.3, window=8), 9, "blockwise"),
        (kernels.AttentionParams(0.3, window=9), 9, "cpu"),
        (kernels.AttentionParams(0.3, window=9, softcap=50.0), 9, "blockwise"),
    ],
    ids=str,
)
def test_the_fused_kernel_serves_what_it_can(rule, longest, kernel):
    """In fp64; of fp32 and bf16: tests/ops/test_cpu_attention.py."""
    assert kernels.serving(torch.empty(1, 6, 9, 8, dtype=torch.float64), rule, longest - 1) == kernel


def test_bounds_that_are_no_documents_are_a_bug(subtests):
    bounds = [[0, 13], [0, 5, 26], [1, 13, 26], [0, 13, 27], [0, 20, 13, 26]]
    for edges, dtype in product(bounds, PRECISIONS):
        with subtests.test(edges=edges, dtype=dtype):
            tensors = inputs(2, 13, 4, 4, dtype=dtype)
            with pytest.raises(AssertionError):
                packed.packed_attention(*tensors, torch.tensor(edges, dtype=torch.int32), 1.0)


def test_what_is_not_supported_is_refused_not_dropped(subtests):
    cases = [
        ({"dropout": 0.1}, "outside of a parallelized model"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "dense"),
        ({"sliding_window": 0}, "hides every key"),
        ({"position_bias": torch.ones(4)}, "position_bias"),
        ({"block_indices": torch.ones(1, 5)}, "Attention passes its attention block_indices"),
        ({"attend_to_sinks": 3}, "attend_to_sinks"),
        ({"is_sparse": True}, "is_sparse"),
        ({"is_causal": False}, "not causal"),
    ]
    for kwargs, word in cases:
        with subtests.test(msg=str(kwargs)):
            query, key, value = inputs(1, 5, 4, 4)
            with pytest.raises(UserError, match=word):
                attention_forward(Attention(), query, key, value, **{"attention_mask": None, **kwargs})


@pytest.mark.parametrize("width", [5, 11])
def test_values_of_another_width_than_the_keys(width):
    """The scale is that of the queries as they are given, not of what they are filled up to."""
    query, key, value = inputs(2, 7, 4, 2)
    value = torch.randn(2, 2, 7, width, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 3, 7, 9, 14], dtype=torch.int32)
    ours, twin = forward(query, key, value, cu_seqlens), reference_attention(query, key, value, cu_seqlens)
    assert (ours - twin).abs().max() <= 1e-12


def test_a_window_as_long_as_the_row_changes_nothing():
    tensors = inputs(1, 5, 4, 4)
    assert torch.equal(forward(*tensors, sliding_window=5), forward(*tensors))


def test_keywords_without_a_meaning_here_are_let_through():
    query, key, value = inputs(1, 5, 4, 4)
    harmless = {"position_ids": torch.arange(5)[None], "output_attentions": True, "block_indices": None}
    assert attention_forward(Attention(), query, key, value, None, **harmless)[0].isfinite().all()


def test_a_compiled_block_is_one_graph_whatever_the_documents():
    """`aot_eager` traces forward and backward with no graph break; `cu_seqlens` of other lengths do not break it."""
    torch._dynamo.reset()
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = build_meta(config).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    block = model.model.layers[0]
    hidden = torch.randn(2, 12, 32)
    position = torch.rand(2, 12, 8)
    embeddings = (position.cos(), position.sin())

    def run(layer, cu_seqlens):
        leaf = hidden.clone().requires_grad_()
        out = layer(leaf, position_embeddings=embeddings, cu_seqlens=cu_seqlens)
        return out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]

    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for edges in ([0, 5, 12, 24], [0, 12, 15, 18, 24], [0, 12, 24]):
        cu_seqlens = torch.tensor(edges, dtype=torch.int32)
        for mine, theirs in zip(run(compiled, cu_seqlens), run(block, cu_seqlens), strict=True):
            assert (mine - theirs).abs().max() <= 1e-5


# ---- which kernels on a GPU ------------------------------------------------------------------------------------------

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("asked", "capability", "installed", "which"),
    [
        ("auto", (9, 0), True, "fa3"), ("auto", (9, 0), False, "fa2"), ("auto", (10, 0), True, "fa2"),
        ("auto", (8, 0), True, "fa2"), ("fa2", (9, 0), True, "fa2"), ("fa3", (9, 0), True, "fa3"),
    ],
)  # fmt: skip
def test_flash_attention_3_is_taken_where_it_is(
    asked: str, capability: tuple[int, int], installed: bool, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(kernels, "takes_flash_attention_3", lambda: True)
    monkeypatch.setattr(kernels, "use_flash_attention", used.append)
    assert kernels.choose(asked, CUDA) == which and used == [which]


@pytest.mark.parametrize(
    ("device", "capability", "said"),
    [("cpu", (9, 0), "this run is on cpu"), ("cuda", (8, 0), "compute capability 9.0"), ("cuda", (9, 0), "installed")],
)
def test_flash_attention_3_is_refused_where_it_is_not(
    device: str, capability: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with pytest.raises(UserError, match=said):
        kernels.choose("fa3", torch.device(device))


def test_a_package_for_another_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(which: str) -> None:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(kernels, "use_flash_attention", broken)
    with pytest.raises(UserError, match="cannot be loaded: undefined symbol"):
        kernels.choose("auto", CUDA)
