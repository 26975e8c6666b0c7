"""Linears in fp8 compute under every layout what they compute in one process: ranks that share a tensor agree on its
scales. One process computes what a reference does that rounds by a table (`parallel/fp8/by_hand.py`)."""

import json
from functools import lru_cache
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen2MoeConfig
from transformers.pytorch_utils import Conv1D

from fivefold import own_loop
from fivefold.core.errors import UserError
from fivefold.models.discover import facts_of
from fivefold.models.hf_internals import linear_dims
from fivefold.ops.linear import Linears
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.collectives import differing
from fivefold.parallel.dtensor import local
from fivefold.parallel.features import edits
from fivefold.parallel.fp8 import by_hand as fp8_by_hand
from fivefold.parallel.fp8.matmul import DTYPES, Float8, Fp8Weight, cast_to_fp8, casts, restored, scale_of
from fivefold.parallel.fp8.recipes import KINDS, RECIPES, Recipe
from fivefold.parallel.fp8.runtime import Delayed
from fivefold.parallel.fp8.scales import AmaxHistory, Fp8Scales
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.layout import Layout
from fivefold.parallel.linears.spec import Multiply
from fivefold.parallel.lower import lower
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step
from tests.parallel.test_context_parity import compiled, uncompiled
from tests.parity import (
    Case,
    Outcome,
    batch_of,
    build,
    documents,
    gradient_error,
    on_rank,
    outcome,
    reference_model,
)
from tests.pool import run_ranks
from tests.tiers import every, put_off

WORDS = {
    "tensorwise": "fp8",
    "mxfp8": "mxfp8",
    **{name: f"fp8_{name}" for name in ("rowwise", "rowwise_gw_hp", "delayed", "blockwise")},
}


@lru_cache
def found(layout: str, family: str, kv_heads: int) -> tuple[Outcome, list[dict[str, Any]]]:
    """What a layout computes in two steps."""
    case = Case(layout, family, kv_heads=kv_heads, packing=False)
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    shapes = {name: tuple(each.shape) for name, each in reference_model(case).named_parameters()}
    return outcome(case, per_rank, shapes), per_rank


def equals_one_process(layout: str, recipe: str, family: str = "llama", kv_heads: int = 2) -> None:
    base, _, last = layout.partition("+nosp")
    rows = (
        "mb2" if "pp" in layout else "mb4"
    )  # the same everywhere: a scale is of one micro batch, of which are several
    text = f"{base}+{rows}+fp64+{WORDS[recipe]}{_}{last}"
    one, _ = found(f"single+{rows}+fp64+{WORDS[recipe]}{'+hp1' * ('+hp1' in layout)}", family, kv_heads)
    many, per_rank = found(text, family, kv_heads)
    error, worst = gradient_error(many, one)
    assert error <= 1e-10, worst
    assert many.losses == pytest.approx(one.losses, rel=1e-10)
    assert not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])


EACH = [*product(["tp2.cp2", "tp2+full+nosp"], ["tensorwise", "rowwise", "rowwise_gw_hp"]), ("tp2.cp2", "delayed")]


@pytest.mark.full
@pytest.mark.parametrize("case", every(EACH, 3), ids="-".join)
def test_ranks_agree_on_scales(case: tuple[str, str]) -> None:
    equals_one_process(*case)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "recipe"),
    [
        ("shard2", "blockwise"),
        put_off("pp2+zb", "tensorwise"),
        put_off("dp2", "mxfp8"),
        ("shard2.pp2+zb", "delayed"),
    ],
)
def test_what_is_whole_on_a_rank_is_cast_there(layout: str, recipe: str) -> None:
    equals_one_process(layout, recipe)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "family", "recipe"),
    [
        put_off("shard2.ep2", "mixtral", "tensorwise"),
        ("tp2.ep2", "mixtral", "rowwise"),
        ("shard2.ep2+hp1", "deepseek_v3", "blockwise"),
    ],
)
def test_experts_are_cast_row_by_row(layout: str, family: str, recipe: str) -> None:
    equals_one_process(layout, recipe, family, 4)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["rowwise", put_off("delayed")])
def test_a_gate_of_shared_experts_stays_in_the_compute_dtype(recipe: str) -> None:
    """Also if a schedule that splits backward, or an adapter (zero at first), replaces its forward."""
    losses = {
        case: run_ranks(world, _loss_with_gate, f"{layout}+fp64+{WORDS[recipe]}", adapter)[0]
        for case, world, layout, adapter in (
            ("plain", 1, "single", None), ("adapter", 1, "single", Lora(rank=2)), ("zb", 2, "pp2+zb", None),
        )
    }  # fmt: skip
    assert losses["adapter"] == pytest.approx(losses["plain"], rel=1e-12)
    assert losses["zb"] == pytest.approx(losses["plain"], rel=1e-12)


def _loss_with_gate(layout: str, adapter: Lora | None) -> float:
    """Loss of two equal micro batches, in the first step."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 61}
    of_experts = {"num_experts": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}
    config = Qwen2MoeConfig(**sizes, **of_experts, **heads, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config).double()
    for name, parameter in model.named_parameters():
        if name.endswith("shared_expert_gate.weight"):
            nn.init.normal_(parameter)
    ids = torch.randint(0, 61, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    return float(own_loop.gradients(own_loop.parallelize(model, layout, adapter=adapter), [batch, batch]))


# ---- delayed scaling -------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_history_scales_by_the_largest_value_of_its_steps() -> None:
    """Of 3 steps, of all ranks and micro batches. A step that was skipped leaves nothing behind."""
    for seen in run_ranks(2, _noted):
        assert seen["first"] == [True, False, False, False, False]
        assert seen["largest"] == [[5, 5], [5, 5], [5, 5], [2, 2], [2, 2]]
        assert seen["nothing"] == 1  # what was all zeros is not scaled
        assert seen["skipped"] == [2, 2]


def _noted() -> dict[str, Any]:
    history = AmaxHistory(["q", "k"], 3, torch.device("cpu"))
    assert history.largest(0, "input") is None and history.state() == {}

    def largest() -> list[float]:
        return [float(each) for row in (0, 1) if (each := history.largest(row, "input")) is not None]

    first, seen, own = [], [], 0.5 if dist.get_rank() == 0 else 1.0
    for value in (5.0, 1.0, 2.0, 0.5, 0.25):
        with history.recording():
            history.note([0, 1], "input", torch.tensor(value * own))
            history.note([0, 1], "input", torch.tensor(value * own / 2))  # another micro batch
            history.note([1], "gradient", torch.tensor(7.0))
        first.append(history.is_first)
        history.note([0, 1], "input", torch.tensor(100.0))  # an evaluation
        history.end_step()
        seen.append(largest())
    with history.recording():
        history.note([0, 1], "input", torch.tensor(9.0))
    nothing = history.largest(0, "gradient")
    assert nothing is not None
    return {"first": first, "largest": seen, "nothing": float(nothing), "skipped": largest()}


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen_and_forgotten(odd: float) -> None:
    """A cast would make the largest number of it, and the step would pass; in the history it would spoil sixteen."""
    history = AmaxHistory(["a"], 16, torch.device("cpu"))
    history.load({"a": [[3.0, 3.0, 3.0]]})
    linear = Delayed(RECIPES["delayed"], {}, False, history, (0,))
    x, weight = torch.tensor([[1.0, 2.0, odd]]), _gathered(torch.ones(1, 3))
    with patch.object(dist, "all_reduce"), history.recording():
        (out,), _ = linear.outputs(x, [weight])
    assert out.isnan().all()
    history.end_step()
    (out,), _ = linear.outputs(torch.tensor([[1.0, 2.0, -3.0]]), [weight])
    assert abs(out.item()) < 0.2  # of 1 + 2 - 3, in three bits each


@pytest.mark.full
def test_a_step_that_is_skipped_leaves_the_history() -> None:
    assert run_ranks(1, _skipped) == [(1, True)]


def _skipped() -> tuple[int, bool]:
    """The steps of the history, and whether a step whose loss is no number left it as it was."""
    case = Case("single+mb4+fp8_delayed", packing=False)
    model = build(case)
    optimizer, amax = build_optimizer(model, case.options), state_of(model).live(Fp8Scales).history

    def skipped(step: int) -> bool:
        batch = batch_of(documents(case, step), case.parsed, 0)
        return train_step(model, optimizer, batch, learning_rate=1e-3, max_grad_norm=1.0).skipped

    assert not skipped(0)
    before = amax.history.clone()
    with torch.no_grad():
        local(model.model.norm.weight).fill_(torch.nan)  # the layers before it have numbers
    assert skipped(1) and bool(amax._now.any())
    return len(before), torch.equal(amax.history, before)


def test_a_history_goes_on_from_a_checkpoint_by_the_names_of_linears() -> None:
    one, other = AmaxHistory(["a", "b"], 2, torch.device("cpu")), AmaxHistory(["b", "a"], 2, torch.device("cpu"))
    state = {"a": [[1.0, 2.0, 3.0]], "b": [[4.0, 5.0, 6.0]]}
    one.load(state)
    other.load(json.loads(json.dumps(one.state())))
    assert one.state() == other.state() == state
    assert [other.largest(0, operand) for operand in KINDS] == [4, 5, 6]
    more = AmaxHistory(["a", "b", "c"], 2, torch.device("cpu"))
    more.load(state)  # one layer more multiplies in fp8
    assert more.largest(0, "input") is None
    one.load({})  # a checkpoint of a run in bf16
    assert one.largest(0, "input") is None and one.state() == {}


# ---- one process and the reference -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_the_reference(recipe: str, dtype: torch.dtype) -> None:
    """Output and both gradients, of both kinds of linear; sizes that no block divides."""
    torch.manual_seed(0)
    for linear in (nn.Linear(150, 70), Conv1D(70, 150)):
        linear.to(dtype)
        x = (torch.randn(2, 67, 150) * torch.randn(2, 67, 1).exp()).to(dtype)
        expected = _gradients(linear, x, lambda x, w=linear: fp8_by_hand._forward(w, RECIPES[recipe], None, x))
        ours = Linears(products={"dense": lambda _, is_transposed: Float8(RECIPES[recipe], {}, is_transposed)})
        ours.place(linear, "dense", is_transposed=linear_dims(linear) == (1, 0), is_plain=True)
        if RECIPES[recipe].casts_once:
            linear.weight = nn.Parameter(_gathered(linear.weight))
        for one, other in zip(_gradients(linear, x, linear), expected, strict=True):
            assert torch.allclose(
                one, other, rtol=0, atol=(1e-12 if dtype == torch.float64 else 1e-4) * float(other.abs().max())
            )


@pytest.mark.full
def test_a_compiled_layer_is_one_graph() -> None:
    """Weights that are gathered in fp8 are tensors of a class of their own: no graph breaks at one, nor is it taken for
    another's."""
    case = Case("single+mb8+fp64+fp8", overrides=(("num_hidden_layers", 1),))
    ((loss, found, breaks),), ((other, plain),) = run_ranks(1, compiled, case), run_ranks(1, uncompiled, case)
    assert not breaks and loss == pytest.approx(other, rel=1e-12)
    for (name, _, a), (_, _, b) in zip(found, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("has_gradient", [True, False])
def test_two_that_share_their_input_are_one_graph(has_gradient: bool) -> None:
    """With a gradient and without (an evaluation), as what they compute one by one."""
    torch._dynamo.reset()
    gate, up, x = nn.Linear(32, 16), nn.Linear(32, 16), torch.randn(4, 32)
    expected = [fp8_by_hand._forward(each, RECIPES["rowwise"], None, x) for each in (gate, up)]
    ours = Linears(products={"column": lambda _, is_transposed: Float8(RECIPES["rowwise"], {}, is_transposed)})
    ours.place_together([gate, up], "column", is_transposed=False)
    block = torch.compile(lambda x: (gate(x), up(x)), backend="eager", fullgraph=True)
    with torch.set_grad_enabled(has_gradient):
        assert all(torch.allclose(*both, atol=1e-5) for both in zip(block(x), expected, strict=True))


def _gathered(weight: Tensor) -> Fp8Weight:
    """As FSDP gathers it."""
    cast = RECIPES["tensorwise"].output[1]
    scale = scale_of(weight.detach().abs().amax().reshape(1, 1), cast, weight)
    return Fp8Weight(cast_to_fp8(weight.detach(), cast, scale), scale, weight.dtype)


def _gradients(linear: nn.Module, x: Tensor, forward: Any) -> list[Tensor]:
    given = x.clone().requires_grad_()
    linear.zero_grad()
    out = forward(given)
    out.square().sum().backward()
    return [out.detach(), given.grad, linear.weight.grad.clone()]  # type: ignore[list-item,union-attr,operator]


@pytest.mark.parametrize("form", DTYPES)
def test_fp64_is_rounded_once(form: Any) -> None:
    """By way of fp32 a number just beside the middle of two would become the even one."""
    table = fp8_by_hand.numbers(form)
    middle = (table[1:] + table[:-1]) / 2
    x = torch.cat([middle, middle * (1 + 1e-12), middle * (1 - 1e-12), table])[None] / table[-1]
    cast = next(c for c in (RECIPES["tensorwise"].input_grad[0], RECIPES["tensorwise"].output[0]) if c.form == form)
    [(values, scale)], _ = casts("output", Recipe((cast, cast), (cast, cast), None), {}, [x], [])
    assert torch.equal(restored(values, scale, scale.dtype), fp8_by_hand.cast(x, cast))


@pytest.mark.parametrize("size", [1.0, 1e-12])  # gradients are small
def test_a_rounding_leaves_what_three_bits_leave(size: float) -> None:
    x = size * torch.randn(64, 64)
    [(values, scale)], _ = casts("output", RECIPES["rowwise"], {}, [x], [])
    assert values.dtype == torch.float8_e4m3fn
    error = (restored(values, scale, scale.dtype) - x).abs() / x.abs().clamp(min=1e-2 * size)
    assert 2**-6 < float(error.max()) <= 2**-4


def test_head_routers_and_latent_projections_stay_in_the_compute_dtype() -> None:
    facts = facts_of(reference_model(Case("single", "deepseek_v3", kv_heads=4)))
    plan = lower(facts, Layout.parse("tp2+fp8"), 0)
    cast = {each.path.rpartition(".")[2] for each in edits(plan) if "fp8" in each.by}
    assert cast == {"q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    layers = {each.name.split(".")[2] for each in plan.feature(Fp8Plan).linears}
    assert layers == {"0", "1", "2"} and not lower(facts, Layout.parse("tp2"), 0).feature(Fp8Plan).linears


def test_adapters_stay_in_the_compute_dtype() -> None:
    """Beside linears that do not. Where gradients are put off, adapters have forwards of fivefold's too."""
    facts = adapted(facts_of(reference_model(Case("single"))), Lora(rank=3))
    plan = lower(facts, Layout.parse("pp2+zb+fp8"), 0)
    placed = {each.path for each in edits(plan) if isinstance(each, Multiply)}
    inside = {path for path in placed if path.endswith((".lora_A", ".lora_B"))}
    assert inside and not any(map(plan.feature(Fp8Plan).covers, inside))
    assert placed - inside and all(map(plan.feature(Fp8Plan).covers, placed - inside))


def test_layers_at_the_ends_stay_in_the_compute_dtype() -> None:
    """Of three layers the middle one is left, with its linears and its experts."""
    facts = facts_of(reference_model(Case("single", "deepseek_v3", kv_heads=4)))
    plan = lower(facts, Layout.parse("single+fp8+hp1").resolve(1), 0)
    assert {
        each.name.split(".")[2] for each in (*plan.feature(Fp8Plan).linears, *plan.feature(Fp8Plan).expert_modules)
    } == {"1"}
    assert "without fp8" in _refused("tp2+hp1", "llama", 2)
    of_no_model = next(Layout.parse("tp2+hp1").violations())
    assert of_no_model.what == "fp8_high_layers 1 without fp8"
    assert "fp8_high_layers 2 at each end leaves none of" in _refused("tp2+fp8+hp2", "llama", 2)


# ---- what is refused -------------------------------------------------------------------------------------------------


def _refused(layout: str, family: str, kv_heads: int) -> str:
    facts = facts_of(reference_model(Case("single", family, kv_heads=kv_heads)))
    with pytest.raises(UserError) as refused:
        lower(facts, Layout.parse(layout), 0)
    return refused.value.what


def test_no_rank_has_a_part_of_a_gradient_or_of_a_block() -> None:
    assert "share model.layers.0.self_attn.k_proj.weight" in _refused("tp4+fp8", "llama", 2)
    assert "blocks of 32 features" in _refused("tp2+mxfp8", "llama", 2)
    assert "experts" in _refused("tp2+fp8+etp", "mixtral", 4)


def test_sizes_that_no_kernel_takes_are_named() -> None:
    facts = facts_of(reference_model(Case("single", "llama", kv_heads=2)))
    plan = lower(facts, Layout.parse("tp2+fp8_rowwise"), 0)
    wide = [each for each in plan.feature(Fp8Plan).linears if each.inputs % 16 or each.outputs % 16]
    assert len(plan.feature(Fp8Plan).unaligned(64)) == len(wide)
    assert plan.feature(Fp8Plan).unaligned(72)[-1] == "the gradients of weights, of 72 tokens"
    assert not lower(facts, Layout.parse("tp2"), 0).feature(Fp8Plan).unaligned(72)


def test_rows_are_padded_to_whole_blocks() -> None:
    assert Layout.parse("cp2+mxfp8").padded(100) == 128
    assert Layout.parse("tp2+mxfp8").padded(130) == 192  # 32 tokens are a multiple of tp
    assert Layout.parse("cp2+fp8").padded(100) == 100
    assert Layout.parse("shard2+fp8_blockwise").padded(100) == 256
