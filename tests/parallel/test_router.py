"""Under 16-bit compute routers compute in fp32, bit for bit what their 16-bit weights and inputs say."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fivefold.parallel.experts.runtime import ExpertParallel, _arguments
from fivefold.parallel.state import state_of
from tests.parity import Case, batch_of, build, documents, gradients
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full


def routed(case: Case) -> list[dict[str, Any]]:
    """Of every router of this rank, in a pass over its first batch: types, and how far its logits are from fp32."""
    model = build(case)
    found: list[dict[str, Any]] = []

    @torch.no_grad()
    def after(router: Any, args: Any, out: Any) -> None:
        weight = next(each for each in router.parameters() if each.ndim == 2)  # HunYuan's is of a linear inside
        bias = getattr(router, "bias", None)
        logits = (out if isinstance(out, torch.Tensor) else out[0]).detach()
        x = args[0].reshape(-1, args[0].shape[-1])
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        short = F.linear(x, weight, bias)
        found.append({
            "held": str(weight.dtype), "given": str(x.dtype), "logits": str(logits.dtype),
            "off": float((logits - wide).abs().max()), "rounding": float((short - wide).abs().max()),
        })  # fmt: skip

    def before(_: Any, args: Any) -> None:
        found[-1] |= {"weights": str(_arguments(args, {})[2].dtype)}

    experts = state_of(model).live(ExpertParallel).modules
    for each in experts:
        model.get_submodule(each.router).register_forward_hook(after)
        model.get_submodule(each.name).register_forward_pre_hook(before)
    batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    gradients(model, batch, torch.tensor(0.01, dtype=torch.float64))
    for each in experts:
        for name, parameter in model.get_submodule(each.router).named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
    return found


HUNYUAN = (("model_type", "hunyuan_v1_moe"), ("num_experts", 11), ("num_local_experts", 11), ("moe_topk", 3))


@pytest.mark.parametrize(
    ("case", "passes"),
    [
        (Case("shard2.ep2+mb4", "qwen3_moe"), 2),
        (Case("tp2.ep2+mb8+full", "mixtral"), 6),
        put_off(Case("shard2+mb4+zero1", "gpt_oss"), 3),
        put_off(Case("shard2.ep2+mb4", "none", overrides=HUNYUAN), 3),
    ],
    ids=lambda each: f"{each.family}-{each.layout}" if isinstance(each, Case) else "",
)
def test_a_router_computes_in_fp32_from_weights_of_16_bits(case: Case, passes: int) -> None:
    for found in run_ranks(2, routed, case):
        assert len(found) == passes
        for each in found:
            assert (each["held"], each["given"]) == ("torch.bfloat16", "torch.bfloat16")
            assert (each["logits"], each["weights"]) == ("torch.float32", "torch.float32")
            assert each["off"] == 0.0 < each["rounding"]


def replaced(case: Case) -> list[bool]:
    model = build(case)
    modules = state_of(model).live(ExpertParallel).modules
    return ["forward" in vars(model.get_submodule(each.router)) for each in modules]


def test_in_fp32_and_fp64_a_router_is_left_alone() -> None:
    for precision, is_replaced in (("fp32", False), ("fp64", False), ("bf16", True)):
        text = "single" if precision == "bf16" else f"single+{precision}"
        assert run_ranks(1, replaced, Case(text, "mixtral")) == [[is_replaced] * 3]
