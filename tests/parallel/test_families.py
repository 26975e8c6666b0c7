"""Every family computes what its unmodified model computes, in fp64 to 1e-10.

In every run under tensor parallelism where the core of the proofs lacks the family, and a few of them under one more
fold; in a campaign all of them, and under five kinds of layout besides.
"""

import pytest

from fivefold.parallel.layout import Layout
from tests.families import TINY
from tests.parallel.test_parity import run
from tests.parity import Case, assert_proved, gradient_error, refusal
from tests.pool import run_ranks
from tests.tiers import every, put_off
from tests.verification.core import core

pytestmark = pytest.mark.full

FAMILIES = tuple(TINY)
OTHER = ("pp2+mb2", "shard2.tp2+nosp+zero2+full+mb4", "cp2+allgather+mb4", "shard2+zero1+full+mb4", "cp2+ring+mb4")
LAYOUTS = ("shard2+zero2", "tp2+full", "tp4+nosp", "dp2.tp2+nosp", "cp2.tp2+nosp+ring")


def case_of(at: int, family: str, layout: str, steps: int) -> Case:
    """A family in its turn: tied or not; as many key/value heads as queries, or half."""
    layout += "+nosp" if family == "gpt2" and "tp" in layout and "nosp" not in layout else ""
    return Case(
        f"{layout}+fp64", family, tied=at % 2 == 0, kv_heads=4 if at % 3 == 0 else 2, steps=steps, loss_chunks=3
    )


OF_CORE = {case.model.family for case in core() if Layout.parse(case.layout).tp > 1}
OTHERWISE = ("cohere2", "gemma3", "gpt2", "gpt_neox", "nemotron")  # one for each other layout
TIERED = [
    *(
        each if family not in OF_CORE else put_off(each)
        for at, family in enumerate(FAMILIES)
        for each in [case_of(at, family, "tp2+mb8", 1)]
    ),
    *(
        pytest.param(
            case_of(at + 1, family, OTHER[at % len(OTHER)], 1),
            marks=[] if family in OTHERWISE else [pytest.mark.campaign],
        )
        for at, family in enumerate(FAMILIES)
    ),
    *(
        put_off(case_of(at + number, family, f"{layout}+mb2", 2))
        for number, layout in enumerate(LAYOUTS)
        for at, family in enumerate(FAMILIES)
        if (family, layout) != ("phi3", "tp4+nosp") or (at + number) % 3 == 0
    ),
]


@pytest.mark.parametrize(
    "case", TIERED, ids=lambda case: f"{case.family}-{case.layout}-kv{case.kv_heads}{'-tied' * case.tied}"
)
def test_layout_equals_one_process(case: Case) -> None:
    found, expected, per_rank = run(case)
    assert_proved(found, expected, per_rank)


BIASES, NO_QUERY_LATENT = ("attention_bias", True), ("q_lora_rank", None)
LATENT = [
    Case("tp2+mb4+fp64", "deepseek_v3", overrides=(BIASES,)),
    Case("tp4+mb8+fp64+nosp+full", "deepseek_v3", overrides=(BIASES, NO_QUERY_LATENT)),
    Case("cp2.tp2+mb4+fp64+ring+full", "deepseek_v3", overrides=(BIASES,)),
    Case("tp2.pp2+mb2+fp64+zb", "deepseek_v3", overrides=(NO_QUERY_LATENT,)),
]


@pytest.mark.parametrize("case", every(reversed(LATENT), 4), ids=lambda case: case.layout)
def test_latent_attention_equals_one_process(case: Case) -> None:
    found, expected, per_rank = run(case)
    assert_proved(found, expected, per_rank)


OPT = (
    ("model_type", "opt"),
    ("ffn_dim", 53),
    ("word_embed_proj_dim", 32),
    ("dropout", 0.0),
    ("activation_function", "gelu"),
)
BIOGPT = (("model_type", "biogpt"), ("hidden_dropout_prob", 0.0), ("attention_probs_dropout_prob", 0.0))


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("tp2", "none", overrides=OPT), "sequence parallel is refused: model.decoder.embed_positions of OPT"),
        (Case("tp2", "none", overrides=BIOGPT), "sequence parallel is refused: biogpt.embed_positions of BioGpt"),
        (Case("tp2", "gpt2"), "sequence parallel is refused: transformer.wpe of GPT2LMHeadModel adds"),
        (Case("tp4", "phi3"), "tp=4 is more than num_key_value_heads=2"),
    ],
    ids=lambda value: (
        "" if isinstance(value, str) else f"{value.family}-{value.layout}{dict(value.overrides).get('model_type', '')}"
    ),
)
def test_refusals(case: Case, said: str) -> None:
    for error in run_ranks(case.parsed.world, refusal, case):
        assert error.startswith("UserError") and said in error, error


ERNIE = (
    ("model_type", "ernie4_5_moe"), ("moe_num_experts", 4), ("moe_k", 2), ("moe_intermediate_size", 17),
    ("moe_num_shared_experts", 1), ("moe_layer_start_index", 1),
)  # fmt: skip
GEMMA4 = (
    ("model_type", "gemma4_text"), ("enable_moe_block", True), ("num_experts", 4), ("top_k_experts", 2),
    ("moe_intermediate_size", 17), ("hidden_size_per_layer_input", 0), ("sliding_window", 5),
    ("num_kv_shared_layers", 0), ("global_head_dim", 8),
)  # fmt: skip
ROUTED = [
    Case("shard2.ep2+mb4+fp64", "none", steps=2, overrides=ERNIE),
    Case("shard2.ep2+mb4+fp64", "none", steps=2, overrides=GEMMA4),
    Case("pp2+mb4+fp64", "deepseek_v3", steps=2, overrides=(("first_k_dense_replace", 2),)),  # a rank has no router
]


@pytest.mark.parametrize("case", ROUTED, ids=lambda case: dict(case.overrides).get("model_type", case.family))
def test_routers_that_lie_elsewhere_or_on_other_ranks(case: Case) -> None:
    """A router with a module inside (ERNIE), one beside the feed-forward (Gemma 4), none on this pipeline rank."""
    found, expected, per_rank = run(case)
    assert_proved(found, expected, per_rank)


# ---- classes that no file lists --------------------------------------------------------------------------------------

UNLISTED = (("model_type", "glm"), ("attention_bias", True))


@pytest.mark.parametrize("layout", ["tp2", put_off("shard2.tp2+nosp")])
def test_a_class_that_no_file_lists_is_tried_and_then_trusted(layout: str) -> None:
    found, expected, _ = run(Case(f"{layout}+mb4+fp64", steps=2, overrides=UNLISTED))
    assert gradient_error(found, expected)[0] <= 1e-10
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)


def test_a_partition_that_is_wrong_is_refused_with_what_differs() -> None:
    errors = run_ranks(2, wrong_refusal, Case("tp2+fp64", overrides=UNLISTED))
    assert len(set(errors)) == 1
    assert "tensor parallel of GlmForCausalLM is refused: split over 2 ranks" in errors[0]
    assert "differs by" in errors[0] and "dp_shard" in errors[0]


def wrong_refusal(case: Case) -> str:
    """The error with gradients of norms over heads and tokens left unsummed: logits and loss are right."""
    from unittest.mock import patch

    from fivefold.parallel import lower

    with patch.object(lower, "gradient_sums", lambda *args, **kwargs: {}):
        return refusal(case)
