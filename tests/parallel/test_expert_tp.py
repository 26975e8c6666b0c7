"""`expert_tp`: the features of every expert split over tp. Who holds what, the order of the features, what is refused.

17 to 29 features, which no degree divides. (Layouts with `expert_tp` are in the matrix, test_matrix.py.)
"""

import re
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from fivefold.core.model_limits import ModelLimits
from fivefold.models import discover
from fivefold.models.build import build_meta
from fivefold.models.experts import expert_features, expert_mlp
from fivefold.models.facts import ORDERS, Experts
from fivefold.parallel import shard_rules
from fivefold.parallel.features import limits_of
from fivefold.parallel.layout import Layout
from fivefold.parallel.legality import violations
from fivefold.parallel.shard_rules import feature_splits
from fivefold.parallel.sharding import Split
from fivefold.parallel.state import state_of
from fivefold.report.slices import slice_map
from tests.parallel.test_parity import run
from tests.parity import Case, assert_proved, build, hf_config, reference_model, refusal
from tests.pool import run_ranks
from tests.tiers import put_off

ROWS = 8
FAMILIES = ("gpt_oss", "mixtral", "qwen3_moe", "olmoe")
THREE = Case("tp3+etp+mb8+fp64", "mixtral", rows=ROWS, steps=2, kv_heads=3, overrides=(("num_attention_heads", 3),))


@pytest.mark.full
def test_three_ranks_equal_one_process() -> None:
    found, expected, per_rank = run(THREE)
    assert_proved(found, expected, per_rank)


# ---- who holds what --------------------------------------------------------------------------------------------------


def held(case: Case) -> Any:
    state = state_of(build(case))
    return state.placement.by_rank(), {name: state.placement.local_shape(name) for name in state.placement.shards}


@pytest.mark.full
def test_the_map_shows_both_cuts() -> None:
    """12 experts of 23 features over ep 2 and tp 2: six experts each, and 12 or 11 features, gate and up together."""
    ranks = run_ranks(4, held, Case("shard2.tp2.ep2+etp", "gpt_oss"))
    by_rank, prefix = ranks[0][0], "model.layers.0.mlp.experts."
    assert by_rank[f"{prefix}gate_up_proj"]["ranks"] == [
        [[[0, 6], [0, 32], [0, 24]]], [[[0, 6], [0, 32], [24, 46]]], [[[6, 12], [0, 32], [0, 24]]],
        [[[6, 12], [0, 32], [24, 46]]],
    ]  # fmt: skip
    assert [shapes[f"{prefix}down_proj"] for _, shapes in ranks] == [(6, 12, 32), (6, 11, 32)] * 2
    assert [shapes[f"{prefix}down_proj_bias"] for _, shapes in ranks] == [(6, 16)] * 4
    drawn = slice_map({f"{prefix}gate_up_proj": by_rank[f"{prefix}gate_up_proj"]})
    assert drawn is not None and [(cell.x > 0, cell.y > 0) for cell in drawn.parts[0].drawings[0].boxes] == [
        (False, False), (True, False), (False, True), (True, True),
    ]  # fmt: skip


def test_ranks_of_a_layout() -> None:
    layout = Layout.parse("dp2.shard3.cp2.tp2.ep6+etp")
    assert str(layout) == "dp2.shard3.cp2.tp2.ep6+etp" and layout.resolve(24) == layout
    assert (layout.etp, layout.expert_shards) == (2, 1)
    plain = Layout.parse("dp2.shard3.cp2.tp2.ep6")
    assert (plain.etp, plain.expert_shards) == (1, 2)
    assert Layout.parse("shard4.ep2+etp").resolve(4).etp == 1  # nothing to split over


# ---- the order of an expert's features -------------------------------------------------------------------------------


def experts_of(family: str) -> Any:
    return reference_model(Case("single", family)).model.layers[0].mlp.experts


def splits_of(name: str, module: Any, parts: int) -> dict[str, Split]:
    shapes = {leaf: tuple(parameter.shape) for leaf, parameter in module.named_parameters()}
    held = Experts(name, "", len(module.down_proj), 1, True, features=expert_features(module))
    return feature_splits(held, shapes, parts)


@pytest.mark.parametrize("family", [*FAMILIES, "no gate"])
def test_parts_of_an_expert_add_up_to_it(family: str) -> None:
    """As slices of the module's own parameters, three parts of uneven size."""
    module = experts_of("mixtral" if family == "no gate" else family)
    if family == "no gate":
        module.has_gate, module.up_proj = False, nn.Parameter(module.gate_up_proj[:, :29].detach())
        del module.gate_up_proj
    splits = splits_of("experts", module, 3)
    plain = {name: parameter.detach() for name, parameter in module.named_parameters()}
    assert splits.keys() == plain.keys()
    counts = torch.tensor([2, 0, 5] + [1] * (len(module.down_proj) - 3))
    x = torch.randn(int(counts.sum()), 32, dtype=torch.float64)
    expected, total = expert_mlp(module, x, counts), 0
    for part in range(3):
        for name, values in plain.items():
            blocks = splits[name].blocks[part]
            own = torch.cat([values.narrow(splits[name].dim, a, b - a) for a, b in blocks], splits[name].dim)
            setattr(module, name, nn.Parameter(own))
        bias = splits["down_proj_bias"].blocks[part][0][0] if "down_proj_bias" in splits else 0
        total = total + expert_mlp(module, x, counts, biased_from=bias)
    assert (total - expected).norm() <= 1e-12 * expected.norm()


def softmaxed(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return gate.softmax(-1) * up


def sized(gate_up: Tensor) -> Tensor:
    return gate_up[..., :29].sigmoid() * gate_up[..., 29:]


def limits(model: Any) -> ModelLimits:
    return limits_of(discover._found(model))


def test_what_cannot_be_split_is_refused_with_its_reason() -> None:
    """By the facts of the model: 29 features are too few for 31 ranks, and each reason is said of its module."""
    case = Case("single", "mixtral")
    model = build_meta(hf_config(case))
    (found,) = violations(Layout(tp=31, expert_tp=True), replace(limits(model), query=31, kv=31, attended=None))
    assert "29 features, and they cannot be split over 31" in found.what and found.fix == "use tp 29 or less"
    for gate, reason in ((softmaxed, "not known in which order its activation reads"), (sized, "cannot be tried")):
        for layer in model.model.layers:
            layer.mlp.experts._apply_gate = gate
        assert re.search(
            f"features of model.layers.0.* cannot be split: .*{reason}", limits(model).refusals["expert_tp"]
        )
    model = build_meta(hf_config(case))
    model.model.layers[0].mlp.experts.register_parameter("scale", nn.Parameter(torch.ones(12, 1, device="meta")))
    assert "scale acts on what all features of an expert have made" in limits(model).refusals["expert_tp"]


# ---- classes that no test holds against the model: tried first ------------------------------------------------------

UNLISTED = Case(  # two layers without experts, then one with shared experts beside the others
    "tp2+mb8+fp64", "none", rows=ROWS, steps=2,
    overrides=(("model_type", "glm4_moe"), ("n_routed_experts", 12), ("num_experts_per_tok", 2), ("pad_token_id", 3),
               ("first_k_dense_replace", 2), ("moe_intermediate_size", 17), ("n_group", 1), ("topk_group", 1)),
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off(UNLISTED.layout), "tp2+etp+mb4+fp64+full"])
def test_experts_of_a_class_without_a_family(layout: str) -> None:
    found, expected, per_rank = run(UNLISTED.with_layout(layout))
    assert_proved(found, expected, per_rank)


def with_wrong_order(case: Case) -> str:
    """The refusal, where gate and up are taken to lie side by side."""
    wrong = {"gate, then up": ORDERS["gate beside up"]}
    with patch.object(shard_rules, "ORDERS", wrong):
        return refusal(case)


@pytest.mark.full
def test_features_that_were_split_wrongly_are_found_when_tried() -> None:
    for error in run_ranks(2, with_wrong_order, UNLISTED.with_layout("tp2+etp+mb8+fp64")):
        assert "Glm4MoeForCausalLM is refused: split over 2 ranks it does not compute what it does whole" in error
