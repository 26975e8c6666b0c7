"""Experts at their worst: all tokens to the same ones, and experts without a token; what is saved of them; and the
function that computes them. (Layouts with experts are in the matrix, test_matrix.py.)
"""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.core.errors import UserError
from fivefold.models.experts import EAGER, RowKernels, expert_mlp, routed, sort_by_expert
from fivefold.ops.linear import PLAIN
from fivefold.parallel.experts.runtime import by_expert
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training.step import mean_loss
from tests.parity import (
    Case,
    assert_proved,
    batch_of,
    build,
    documents,
    on_rank,
    outcome,
    pieces,
    reference_model,
    refusal,
)
from tests.pool import run_ranks

ROWS = 8
FAMILIES = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")

# ---- routers at their worst ------------------------------------------------------------------------------------------


def lopsided(case: Case, dtype: torch.dtype = torch.float64) -> Any:
    """Every token goes to experts 10 and 11, so that whole ranks are left without: mixtral, whose last experts' router
    rows are the only ones that agree with a large part that all hidden states share."""
    model = reference_model(case, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("post_attention_layernorm.weight"):
                parameter[0] = 40.0
            if name.endswith("o_proj.weight"):
                parameter[0] = 0.0
            if name.endswith("embed_tokens.weight"):
                parameter[:, 0] = 3.0
            if name.endswith("gate.weight"):
                parameter[:10, 0], parameter[10:, 0] = -1.0, 1.0
            if name.endswith("down_proj"):
                parameter[:, 0] = 0.0  # nothing changes the shared part on the way
    return model.to(dtype)


def on_rank_lopsided(case: Case) -> dict[str, Any]:
    with patch("tests.parity.reference_model", lopsided):
        return on_rank(case)


@pytest.mark.full
def test_ranks_without_a_token_and_ranks_with_all() -> None:
    from tests.parity import reference

    case = Case("shard4.ep4+mb2+fp64", "mixtral", rows=ROWS, steps=2)
    with patch("tests.parity.reference_model", lopsided):
        expected = reference(case)
    used = expected.gradients["model.layers.1.mlp.experts.down_proj"]
    assert np.abs(used).sum((1, 2)).nonzero()[0].tolist() == [10, 11]
    per_rank = run_ranks(4, on_rank_lopsided, case)
    assert_proved(outcome(case, per_rank, {n: g.shape for n, g in expected.gradients.items()}), expected, per_rank)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def saved(case: Case, folder: str) -> None:
    from pathlib import Path

    from fivefold.checkpoint import Metadata, save
    from fivefold.training.optimizers import build_optimizer

    model = build(case)
    save(model, build_optimizer(model, case.options), Path(folder, "step-000001"), Metadata(step=1, state={}))


def loaded(case: Case, folder: str) -> Any:
    from pathlib import Path

    from fivefold.checkpoint import Checkpoint, restore
    from fivefold.training.optimizers import build_optimizer

    with patch("tests.parity.reference_model", lambda case, dtype: lopsided_zero(case)):
        model = build(case)
    restore(model, build_optimizer(model, case.options), Checkpoint.open(Path(folder) / "step-000001"))
    buffers = {name: model.get_buffer(name).numpy().copy() for name in state_of(model).placement.buffers}
    return pieces(model, dict(model.named_parameters())), buffers


def lopsided_zero(case: Case) -> Any:
    """Another model, so that what is loaded shows."""
    model = reference_model(case, torch.float32)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "correction" in n)):
            tensor.fill_(9.0)
    return model


@pytest.mark.full
def test_a_checkpoint_of_one_ep_degree_loads_under_another_bit_for_bit(tmp_path: Any) -> None:
    first = Case("shard4.ep4+fp32", "deepseek_v3")
    run_ranks(4, saved, first, str(tmp_path))
    expected = reference_model(first, torch.float32)
    tensors = dict(expected.named_parameters())
    for text in ("shard2.ep2+fp32", "dp2+fp32"):
        for parts, buffers in run_ranks(2, loaded, Case(text, "deepseek_v3"), str(tmp_path)):
            for name, region, values in parts:
                place = tuple(slice(*edges) for edges in region)
                assert np.array_equal(tensors[name][place].detach().double().numpy(), values), name
            assert len(buffers) == 2
            for name, values in buffers.items():
                assert values.any() and np.array_equal(values, expected.get_buffer(name).numpy())


# ---- the experts function --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_experts_are_those_of_transformers(family: str, dtype: torch.dtype) -> None:
    """Forward and every gradient, against the module's own loop; with sizes that the kernel takes in bf16."""
    sizes = (("hidden_size", 32), ("intermediate_size", 48), ("moe_intermediate_size", 48))
    model = reference_model(Case("single", family, overrides=sizes), dtype)
    module = model.model.layers[2].mlp.experts
    torch.manual_seed(1)
    x = torch.randn(37, 32, dtype=dtype)
    index = torch.stack([torch.randperm(11)[:3] for _ in range(37)])
    weights = torch.rand(37, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    results = []
    for ours in (False, True):
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        module.zero_grad()
        if ours:
            out = routed(leaves[0], index, leaves[1], len(module.down_proj), lambda r, c: expert_mlp(module, r, c))
        else:
            out = module(leaves[0], index, leaves[1])
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves), *(p.grad.clone() for p in module.parameters())])
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    for theirs, own in zip(*results, strict=True):
        assert (own - theirs).norm() <= tolerance * theirs.norm()


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    weight, counts = torch.randn(3, 4, 5, requires_grad=True), torch.zeros(3, dtype=torch.int64)
    PLAIN.grouped(torch.zeros(0, 4), weight, counts, is_transposed=True).sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_rows_are_sorted_by_number_and_not_as_text() -> None:
    order, counts = sort_by_expert(torch.tensor([[10, 2], [1, 11], [2, 10]]), 12)
    assert order.tolist() == [2, 1, 4, 0, 5, 3]
    assert counts.tolist() == [0, 1, 2, 0, 0, 0, 0, 0, 0, 0, 2, 1]


# ---- what is refused -------------------------------------------------------------------------------------------------


ONE_EXPERT = (("num_local_experts", 1), ("num_experts_per_tok", 1))


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("shard2.ep2", "llama"), "LlamaForCausalLM has no experts"),
        (Case("tp2+etp", "llama"), "LlamaForCausalLM has no experts to split over tp"),
        (Case("shard2.ep2", "mixtral", overrides=ONE_EXPERT), "ep 2 is more than the 1"),
    ],
)
def test_refusals(case: Case, said: str) -> None:
    for error in run_ranks(2, refusal, case):
        assert error.startswith("UserError") and said in error, error


def weighted_in() -> list[torch.dtype]:
    """Types of the floating point tensors that experts are given in bf16, behind FSDP's own hook."""
    model, seen = build(Case("shard2.ep2+mb2", "mixtral", rows=ROWS)), list[torch.dtype]()
    state = state_of(model)
    experts = model.get_submodule(state.plan.experts[0].name)
    experts.register_forward_pre_hook(lambda _, args: seen.extend(x.dtype for x in args if x.is_floating_point()))
    batch = batch_of(documents(Case("single", rows=ROWS), 0), Layout.parse("shard2.ep2+mb2"), state.placement.data_rank)
    mean_loss(model, batch[:1])
    return seen


@pytest.mark.full
def test_the_weights_of_picks_stay_in_the_routers_type() -> None:
    """FSDP casts what enters a layer to bf16. What enters its experts is the router's, which computes in fp32."""
    for seen in run_ranks(2, weighted_in):
        assert seen == [torch.bfloat16, torch.float32]


def test_ep_must_divide_the_ranks_that_it_is_taken_from() -> None:
    with pytest.raises(UserError, match="ep 4 does not divide dp_shard 3 x cp 1 x tp 2 = 6") as raised:
        Layout.parse("shard3.tp2.ep4").resolve(6)
    assert raised.value.fix == "try ep 1, 2, 3, 6"
    with pytest.raises(UserError, match="ep 3 does not divide dp_shard 4"):
        Layout.parse("shard-1.ep3").resolve(4)
    assert Layout.parse("dp2.shard3.tp2.ep6").resolve(12).ep == 6
    said = r"ep 6 does not divide dp_shard 3 x cp 1 = 3, the ranks that experts are dealt to with expert_tp"
    with pytest.raises(UserError, match=said) as raised:
        Layout.parse("dp2.shard3.tp2.ep6+etp").resolve(12)
    assert raised.value.fix == "try ep 1, 3"


# ---- what rows cost on their way -------------------------------------------------------------------------------------

TOKENS, PICKS, SIZE, EXPERTS = 6, 3, 8, 5


def inputs(weights: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Hidden states in bf16, picks, and their weights."""
    torch.manual_seed(0)
    index = torch.stack([torch.randperm(EXPERTS)[:PICKS] for _ in range(TOKENS)])
    hidden = torch.randn(TOKENS, SIZE, dtype=torch.bfloat16, requires_grad=True)
    return hidden, index, torch.rand(TOKENS, PICKS, dtype=weights, requires_grad=True)


def doubled(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    return rows * 2


def test_the_host_reads_no_number_of_the_device() -> None:
    """Fake tensors have no numbers: whatever asks for one fails."""
    with FakeTensorMode():
        hidden, index, weights = inputs()
        routed(hidden, index, weights, EXPERTS, doubled).sum().backward()
        order, counts = by_expert(torch.ones(2, 3, dtype=torch.int64), 7)
    assert hidden.grad is not None and weights.grad is not None
    assert (order.shape, counts.shape) == ((7,), (3,))


class Made(TorchDispatchMode):
    """`precise`: numbers of the largest tensor in fp32 that an operator gives. `copies`: gathers of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.precise, self.copies = 0, 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.precise = max(self.precise, out.numel() * (out.dtype == torch.float32))
            self.copies += out.shape == (TOKENS * PICKS, SIZE) and operator is torch.ops.aten.index.Tensor
        return out


def test_rows_are_gathered_once_and_weighted_without_a_product_in_fp32() -> None:
    hidden, index, weights = inputs()
    with Made() as forward:
        out = routed(hidden, index, weights, EXPERTS, doubled)
    with Made() as backward:
        out.sum().backward()
    assert (forward.copies, backward.copies) == (1, 1)
    assert forward.precise == backward.precise == TOKENS * SIZE


def test_compiled_sums_of_rows_are_the_same() -> None:
    """And every gradient, in fp64 to the last rounding."""
    kernels = RowKernels().built(lambda name, function: torch.compile(function, backend="aot_eager"))
    results = []
    for each in (EAGER, kernels):
        hidden, index, weights = inputs(torch.float64)
        hidden = hidden.detach().double().requires_grad_()
        out = routed(hidden, index, weights, EXPERTS, doubled, each)
        out.square().sum().backward()
        results.append((out, hidden.grad, weights.grad))
    expected = 2 * hidden * weights.sum(1, keepdim=True)
    assert torch.allclose(results[0][0], expected, rtol=1e-14)
    for plain, compiled in zip(*results, strict=True):
        assert torch.allclose(plain, compiled, rtol=1e-14)
