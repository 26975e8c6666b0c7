"""LoRA under every fold against `peft` on the unmodified model: two steps, in fp64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fivefold.checkpoint.export import CheckpointAdapter
from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.sources import ModelTensors
from fivefold.parallel.adapters.by_hand import in_nf4
from fivefold.parallel.adapters.peft_folder import config_of, target_names
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.apply import parallelize
from fivefold.parallel.dtensor import local
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.optimizers import Weights, build_optimizer, rule_of
from tests.parity import (
    OPTIONS,
    Case,
    Outcome,
    adapters_of,
    assert_proved,
    batch_of,
    build,
    cross_entropy,
    documents,
    gathered,
    gradient,
    hf_config,
    on_rank,
    outcome,
    pieces,
    proof,
    reference_model,
    refusal,
)
from tests.pool import run_ranks
from tests.tiers import put_off

peft = pytest.importorskip("peft")
ParamWrapper = peft.tuners.lora.layer.ParamWrapper

LORA = Lora(rank=3, alpha=7.0)


def of_peft(case: Case) -> Any:
    """The model of `peft`, with the adapters of the case."""
    lora, values = case.adapter, adapters_of(case)
    assert lora is not None
    beside = {name.replace(".lora_A.", ".") for name in values if ".lora_A." in name}
    modules = sorted(name.removesuffix(".weight") for name in beside if name.endswith(".weight"))
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.rslora, target_modules=modules,
        target_parameters=sorted(name for name in beside if not name.endswith(".weight")),
        lora_dropout=lora.dropout,
    )  # fmt: skip
    base = reference_model(case)
    for module in modules if lora.quantize == "nf4" else ():
        weight = base.get_parameter(f"{module}.weight")
        weight.data = in_nf4(weight.data).to(weight.dtype)
    model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, view, parameter in as_here(model):
            if parameter.requires_grad:
                view(parameter).copy_(values[name])
    return model.double()


Numbers = Callable[[Tensor], Tensor]


def as_here(model: Any) -> Iterator[tuple[str, Numbers, Any]]:
    """Parameters of `peft` as they are called here: (name, what shows numbers of it as they lie here, parameter). Of
    experts `peft` has A [E r, I] and B [O, r E], which are A [E, r, I] and B [E, O, r] here."""
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, ParamWrapper)}
    for name, parameter in model.named_parameters():
        owner = wrapped.get(name.rpartition(".lora_")[0])
        plain = name.removeprefix("base_model.model.").replace(".default.", ".").replace(".base_layer", "")
        if owner is None or ".lora_" not in name:
            yield plain, lambda x: x, parameter
        elif ".lora_A." in name:
            plain = plain.replace(".weight", f".{owner.parameter_name}")
            yield plain, partial(Tensor.unflatten, dim=0, sizes=(owner.num_experts, -1)), parameter
        else:
            plain = plain.replace(".weight", f".{owner.parameter_name}")
            yield plain, partial(_b_of_experts, owner.num_experts), parameter


def _b_of_experts(experts: int, values: Tensor) -> Tensor:
    return values.unflatten(1, (-1, experts)).permute(2, 0, 1)


def expected(case: Case) -> Outcome:
    """Two steps of torch's own optimizer on the adapters alone."""
    model = of_peft(case)
    with proof(case):
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        frozen = [p for p in model.parameters() if not p.requires_grad]
        weights = Weights([], [*trained.values()], frozen[:1])
        optimizers = rule_of(case.optimizer).reference(weights, case.options, OPTIONS.learning_rate)
        losses, norms, gradients = [], [], dict[str, np.ndarray]()
        for step in range(case.steps):
            model.zero_grad()
            loss = cross_entropy(model, [each for row in documents(case, step) for each in row])
            loss.backward()
            if step == 0:
                gradients = {name: view(gradient(p)).numpy().copy() for name, view, p in as_here(model)}
            norms.append(float(nn.utils.clip_grad_norm_(trained.values(), case.max_grad_norm or np.inf)))
            losses.append(loss.item())
            for optimizer in optimizers:
                optimizer.step()
    last = {name: view(p.detach()).numpy().copy() for name, view, p in as_here(model)}
    return Outcome(losses, norms, gradients, last)


def check(case: Case) -> None:
    right = expected(case)
    assert case.max_grad_norm < right.norms[0]  # clipping bites
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    found = outcome(case, per_rank, {name: each.shape for name, each in right.weights.items()})
    assert_proved(found, right, per_rank)
    frozen = [name for name in right.weights if ".lora_" not in name]
    assert frozen and not any(found.gradients[name].any() for name in frozen)
    assert all(found.gradients[name].any() for name in right.weights if ".lora_" in name)


# The first two have every fold; `tp2+nosp` is in the core (test_core.py), and the others follow in a campaign.
LAYOUTS = [
    "shard2.tp2", "pp2.cp2",
    *map(put_off, ("tp2+nosp", "dp2+zero1", "single", "shard2", "tp2", "pp2", "cp2", "shard2+zero2")),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_equals_peft(layout: str) -> None:
    check(Case(f"{layout}+mb2+fp64", adapter=LORA, loss_chunks=3, max_grad_norm=0.05))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        put_off("tp2", {"adapter": replace(LORA, targets=("o_proj", "down_proj"))}),
        ("pp2", {"adapter": replace(LORA, targets=("model.layers.1.mlp.up_proj",), rslora=True)}),
        put_off("tp2.cp2", {"adapter": replace(LORA, targets=("q_proj", "v_proj"))}),
        put_off("tp4", {"kv_heads": 2}),  # ranks share key and value heads
        put_off("pp2+zb", {}),
        ("tp2+full", {"family": "qwen2"}),  # biases
        put_off("tp2", {"tied": True}),
        put_off("pp2", {"tied": True}),
        put_off("shard2", {"tied": True}),
        put_off(
            "shard2.ep2",
            {"family": "qwen3_moe", "adapter": replace(LORA, targets=("q_proj", "k_proj", "v_proj", "o_proj"))},
        ),
        ("tp2+nosp", {"family": "gpt2"}),  # [I, O]
        put_off("shard2+selective", {}),
        put_off("shard2.tp2+full", {"family": "qwen2"}),
        ("shard2+offload+offload_optimizer+offload_parameters", {}),
    ],
)
def test_lora_beside_other_parts(layout: str, more: dict[str, Any]) -> None:
    case = Case(f"{layout}+fp64" if "+mb" in layout else f"{layout}+mb2+fp64", max_grad_norm=0.02, loss_chunks=2)
    check(replace(case, **{"adapter": LORA, **more}))


# ---- experts ---------------------------------------------------------------------------------------------------------

EXPERTS = replace(LORA, targets=("q_proj", "o_proj"), target_parameters=("gate_up_proj", "down_proj"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "more"),
    [
        put_off("single", {}),
        put_off("shard2", {"family": "qwen3_moe"}),
        put_off("shard2.ep2", {}),
        put_off("tp2.ep2", {}),
        put_off("tp2+etp", {}),
        ("tp2+etp+nosp", {"family": "gpt_oss"}),  # [E, I, O], with biases, gate beside up
        put_off("shard2.tp2.ep2+etp", {}),
        put_off("pp2", {"family": "olmoe"}),
        ("shard2.pp2.ep2+zb", {}),
        put_off("cp2.ep2", {"adapter": replace(EXPERTS, targets=(), target_parameters=("down_proj",), rslora=True)}),
        put_off("shard2.ep2+selective", {}),
        put_off(
            "shard2.tp2.ep2+etp+full", {"adapter": replace(EXPERTS, targets=(), target_parameters=("gate_up_proj",))}
        ),
        put_off("shard2+offload+offload_optimizer+offload_parameters", {}),
    ],
)
def test_lora_beside_experts_equals_peft(layout: str, more: dict[str, Any]) -> None:
    case = Case(f"{layout}+mb2+fp64", "mixtral", adapter=EXPERTS, max_grad_norm=0.02, loss_chunks=2)
    check(replace(case, **more))


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (
            Case("shard2+mb2", "mixtral", adapter=replace(EXPERTS, quantize="nf4", targets=())),
            "nf4 beside experts (model.layers.0.mlp.experts.gate_up_proj) is not built",
        ),
        (Case("shard2+mb2+fp8", "mixtral", adapter=EXPERTS), "beside experts, is not built"),
        (
            Case("tp2+mb2+etp+selective", "mixtral", adapter=EXPERTS),
            "keeps nothing that the gradient of an adapter needs",
        ),
        (
            Case("single+mb2", "mixtral", adapter=replace(EXPERTS, target_parameters=("gate_proj",))),
            "no matrix of experts of MixtralForCausalLM is called gate_proj\nname some of down_proj, gate_up_proj",
        ),
    ],
)
def test_what_is_not_built_beside_experts(case: Case, said: str) -> None:
    assert all(said in each for each in run_ranks(case.parsed.world, refusal, case))


@pytest.mark.full
def test_bytes_beside_experts_are_those_of_the_plan() -> None:
    """Frozen experts have no gradients and no optimizer state, and rest in the compute type."""
    case = Case("shard2.tp2.ep2+etp+mb1", "mixtral", adapter=EXPERTS)
    for planned, found, experts in run_ranks(4, _planned_and_found, case):
        assert planned == found
        assert experts == {"gate_up_proj": (torch.bfloat16, False), "lora_A.gate_up_proj": (torch.float32, True)}


def _planned_and_found(case: Case) -> Any:
    model = build(case)
    optimizer = build_optimizer(model, case.options)
    batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    training_step.train_step(model, optimizer, batch, learning_rate=1e-3, max_grad_norm=1.0)
    shape = training_step.step_shape(model, *batch[0].input_ids.shape, len(batch), case.loss_chunks, batch=batch)
    planned = step_bytes(state_of(model).plan, shape)
    trained = [p for p in model.parameters() if p.requires_grad]
    moments = [local(each) for p in trained for name, each in optimizer.state[p].items() if name != "step"]
    sizes = [sum(local(each).nbytes for each in some) for some in (model.parameters(), trained, moments)]
    held = dict(model.get_submodule("model.layers.0.mlp.experts").named_parameters())
    kinds = {name: (held[name].dtype, held[name].requires_grad) for name in ("gate_up_proj", "lora_A.gate_up_proj")}
    return [planned.parameters, planned.gradients, planned.optimizer], sizes, kinds


@pytest.mark.full
def test_an_expert_that_no_token_reaches_keeps_its_adapter() -> None:
    """A rank has a gradient of zeros for it, and its moments and weights stay."""
    case = Case("shard2.ep2+mb1+fp64", "mixtral", adapter=EXPERTS, overrides=(("num_local_experts", 97),))
    check(replace(case, max_grad_norm=0.02, loss_chunks=2))


@pytest.mark.full
def test_selective_recompute_of_a_row_is_refused() -> None:
    said = run_ranks(2, refusal, Case("tp2+selective+mb2+fp64", adapter=LORA))
    assert all("keeps nothing that the gradient of an adapter needs" in each for each in said)


@pytest.mark.full
def test_new_adapters_are_as_peft_draws_them_and_change_nothing() -> None:
    """A is uniform within 1 / sqrt(inputs), the same for every layout; B is zero."""
    case = Case("single+mb2+fp64", adapter=LORA)
    plain_loss = run_ranks(1, on_rank, replace(case, adapter=None, steps=1))[0]["losses"]
    one, other = run_ranks(1, new_on_rank, case), run_ranks(2, new_on_rank, case.with_layout("tp2+mb2+fp64"))
    shapes = {name: values.shape for name, values in one[0][1].items()}
    a = one[0][1]["model.layers.0.mlp.down_proj.lora_A.weight"]
    assert a.shape == (3, 53) and 0.9 / np.sqrt(53) < np.abs(a).max() <= 1 / np.sqrt(53)
    assert not one[0][1]["model.layers.0.mlp.down_proj.lora_B.weight"].any()
    whole = gathered([each[2] for each in other], shapes)
    assert all(np.array_equal(whole[name], values) for name, values in one[0][1].items())
    assert one[0][0] == pytest.approx(plain_loss[0], rel=1e-12)


def new_on_rank(case: Case) -> Any:
    """The loss of the first batch with new adapters, and these, whole (of one rank) and in pieces."""
    source = ModelTensors(reference_model(case, torch.float32))
    model = parallelize(build_meta(hf_config(case)), case.parsed, source=source, adapter=case.adapter, seed=5)
    own = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    with proof(case):
        loss = training_step.mean_loss(model, batch)
    return loss, {name: local(p).detach().numpy() for name, p in own.items()}, pieces(model, own)


@pytest.mark.full
@pytest.mark.parametrize("targets", [put_off(("auto",)), ("model.layers.1.mlp.up_proj",)])
def test_muon_trains_adapters_alike_under_a_pipeline(targets: tuple[str, ...]) -> None:
    """All of an adapter is matrices, so AdamW beside it has nothing; of the second, a stage trains nothing."""
    case = Case("single+mb2+fp64", adapter=replace(LORA, targets=targets), optimizer="muon")
    one, two = run_ranks(1, on_rank, case), run_ranks(2, on_rank, case.with_layout("pp2+mb2+fp64"))
    np.testing.assert_allclose(two[0]["losses"], one[0]["losses"], rtol=1e-10)
    assert one[0]["losses"][1] != one[0]["losses"][0]
    for found in two:
        own = {name: (region, values) for name, region, values in one[0]["weights"]}
        assert all(np.abs(values - own[name][1]).max() < 1e-10 for name, _, values in found["weights"])


# ---- a base in four bits ---------------------------------------------------------------------------------------------

WIDE = (("hidden_size", 128), ("head_dim", 32), ("intermediate_size", 256))
NF4 = Lora(rank=3, alpha=7.0, quantize="nf4")


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [
        "pp2+zb+v2", "shard2.tp2", "shard2+selective",
        *map(put_off, ("single", "shard2", "tp2", "tp2+nosp", "pp2", "pp2.cp2", "dp2+zero1", "shard2+zero2")),
        *map(put_off, ("cp2", "tp2+full", "shard2+full")),
    ],
)  # fmt: skip
def test_qlora_equals_peft_beside_what_four_bits_leave(layout: str) -> None:
    more = (("num_hidden_layers", 4),) if "v2" in layout else ()
    check(Case(f"{layout}+mb2+fp64", adapter=NF4, loss_chunks=3, max_grad_norm=0.05, overrides=(*WIDE, *more)))


@pytest.mark.full
def test_a_rank_has_its_rows_in_four_bits() -> None:
    for found in run_ranks(2, _bytes_at_rest, Case("shard2+mb2", adapter=NF4, overrides=WIDE)):
        assert found == {"in nf4": 3 * (4 * 128 * 128 - 2 * 64 * 128 + 3 * 128 * 256) * 9 // 16 // 2}


def _bytes_at_rest(case: Case) -> dict[str, int]:
    model = build(case)
    placement, found = state_of(model).placement, 0
    for name, parameter in model.named_parameters():
        if placement.facts.parameters[name].packing:
            assert parameter.dtype == torch.uint8 and not parameter.requires_grad
            assert local(parameter).nbytes == placement.held_bytes(name, placement.rests_in(name, 4))
            found += local(parameter).nbytes
    return {"in nf4": found}


@pytest.mark.full
@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("single+mb2", adapter=NF4), "rows have 32 numbers, which are no blocks of 64"),
        (Case("single+mb2", "gpt2", adapter=NF4), "stored the other way round"),
        (
            Case("tp4+mb2", adapter=NF4, kv_heads=4, overrides=WIDE),
            "has blocks of 64 in a row of 128, and tp 4 cuts one",
        ),
        (
            Case("shard2+mb2+offload_parameters", adapter=NF4, overrides=WIDE),
            "offload_parameters with adapter.quantize",
        ),
        (Case("shard2+mb2+fp8", adapter=NF4, overrides=WIDE), "fp8 with adapter.quantize: nf4 is not built"),
    ],
)
def test_what_cannot_rest_in_four_bits(case: Case, said: str) -> None:
    assert all(said in each for each in run_ranks(case.parsed.world, refusal, case))


# ---- merged ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case("single", "gpt2", adapter=LORA),  # [I, O], one of them square
        Case("single", adapter=replace(LORA, rslora=True, targets=("o_proj", "up_proj"))),
        Case("single", adapter=replace(NF4, targets=("o_proj", "up_proj")), overrides=WIDE),  # the others are whole
    ],
    ids=lambda case: f"{case.family}-{case.adapter.quantize}",
)
def test_merged_weights_are_those_of_peft(case: Case, tmp_path: Path) -> None:
    source = reference_model(case, torch.float32)
    source.save_pretrained(tmp_path)
    adapters = ModelTensors(nn.Module())
    adapters._tensors = adapters_of(case)
    adapters.shapes = {name: tuple(values.shape) for name, values in adapters._tensors.items()}
    given = {"model": {"name_or_path": str(tmp_path)}, "adapter": {"name": "lora"}}
    checkpoint: Any = SimpleNamespace(model_folder=tmp_path, path=tmp_path, agreement={}, source=lambda: adapters)
    found, _ = CheckpointAdapter(checkpoint, RunConfig.model_validate(given), case.adapter).merged(
        lambda _, values: values, None
    )
    right, changed = dict(of_peft(case).merge_and_unload().named_parameters()), 0
    assert set(found.ordered) == set(right)
    for name, parameter in source.named_parameters():
        values = found.whole(name)
        torch.testing.assert_close(values.double(), right[name], rtol=1e-5, atol=1e-6, msg=name)
        changed += not torch.equal(values, parameter)
    assert changed == len(adapters._tensors) // 2


@pytest.mark.parametrize("rslora", [False, True])
def test_the_config_of_an_adapter_says_its_scale_and_its_linears(rslora: bool) -> None:
    lora = replace(LORA, rslora=rslora)
    linears = ["a.q_proj", "b.q_proj", "b.o_proj"]
    for targets, names in ((["b.q_proj"], ["b.q_proj"]), (["a.q_proj", "b.q_proj"], ["q_proj"])):
        found = config_of(lora, target_names(targets, linears), [], base="base", is_transposed=False)
        config = peft.LoraConfig(**found)
        assert (config.r, config.lora_alpha, config.use_rslora) == (lora.rank, lora.alpha, rslora)
        assert found["target_modules"] == names


def test_one_name_of_a_setting_is_that_name() -> None:
    lora = Lora(targets="q_proj", target_parameters="down_proj")  # type: ignore[arg-type]
    assert (lora.targets, lora.target_parameters) == (("q_proj",), ("down_proj",))


@pytest.mark.parametrize(
    ("field", "value"),
    [("rank", True), ("rslora", "no"), ("rslora", 0), ("target_parameters", (1,)), ("target_parameters", ("",))],
)
def test_a_setting_of_another_type_is_refused(field: str, value: Any) -> None:
    """`rslora="no"` would be true, and scale the adapter by another factor."""
    with pytest.raises(UserError, match=f"an adapter with {field}="):
        Lora(**{field: value})
