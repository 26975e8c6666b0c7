"""`pp_split: auto` on models of experts: the slowest stage against the fastest that any cut has, by hand-made costs."""

from typing import Any

import pytest
from transformers import DeepseekV3Config, Qwen3MoeConfig

from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of_deep
from fivefold.parallel.layout import Layout
from fivefold.parallel.placement import stage_plan
from tests.tiers import put_off

QWEN3_30B_A3B = Qwen3MoeConfig(
    hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
    num_key_value_heads=4, head_dim=128, vocab_size=151936, num_experts=128, num_experts_per_tok=8,
    tie_word_embeddings=False,
)  # fmt: skip
DEEPSEEK_V3 = DeepseekV3Config()  # the defaults are the model's

# Weights that a token is multiplied with, of each layer and of the head.
QWEN_LAYER = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048 + 2048 * 128 + 8 * 3 * 2048 * 768
QWEN = [QWEN_LAYER] * 48, 2048 * 151936
LATENT = 7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
DEEPSEEK_LAYER = LATENT + 7168 * 256 + (8 + 1) * 3 * 7168 * 2048
DEEPSEEK = [LATENT + 3 * 7168 * 18432] * 3 + [DEEPSEEK_LAYER] * 58, 7168 * 129280


def fastest(costs: list[int], head: int, stages: int) -> int:
    """The least that the slowest stage of any cut takes, by bisection."""

    def fits(most: int) -> bool:
        used, sums = 1, 0
        for cost in reversed(costs):  # the head's stage first
            start = head if used == 1 else 0
            if max(start, sums) + cost > most:
                used, sums = used + 1, cost
            else:
                sums = max(start, sums) + cost
        return used <= stages

    low, high = max(*costs, head + costs[-1]), sum(costs) + head
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


@pytest.mark.parametrize(
    ("config", "costs", "pp"),
    [
        (QWEN3_30B_A3B, QWEN, 4),
        (QWEN3_30B_A3B, QWEN, 8),
        put_off(DEEPSEEK_V3, DEEPSEEK, 8),  # as long as all others
        (DEEPSEEK_V3, DEEPSEEK, 16),
    ],
    ids=["qwen3-30b-a3b pp4", "qwen3-30b-a3b pp8", "deepseek-v3 pp8", "deepseek-v3 pp16"],
)
def test_the_slowest_stage_of_a_model_of_experts_is_near_the_best(
    config: Any, costs: tuple[list[int], int], pp: int
) -> None:
    """With all experts counted it was 1.25 to 1.64 times as slow."""
    splits = stage_plan(facts_of_deep(build_meta(config)), Layout(pp=pp)).splits
    layers, head = costs
    slowest = max(sum(layers[a:b]) + head * (b == len(layers)) for a, b in splits)
    assert slowest <= 1.02 * fastest(layers, head, pp)
