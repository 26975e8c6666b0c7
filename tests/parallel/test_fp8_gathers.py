"""Weights that FSDP gathers in fp8: what a rank is given is the whole weight, cast by the scale of the whole weight as
it is now, in the type of compute."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fivefold as ff
from fivefold.parallel.dtensor import local
from fivefold.parallel.fp8.matmul import Fp8Weight, cast_to_fp8, restored, scale_of
from fivefold.parallel.fp8.recipes import RECIPES
from fivefold.parallel.fp8.scales import AmaxHistory
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training.step import accumulate
from tests.parity import Case, batch_of, build, documents, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off

CAST = RECIPES["tensorwise"].output[1]
FACTORS = (1.0, 1.7, 0.3)  # of each step, what the weights are multiplied by before it


def _seen(layout: str) -> list[dict[str, tuple[Tensor, Tensor, Tensor]]]:
    """Of each step by weight: the codes and the scale that a linear was given, and the whole weight in bf16."""
    case = Case(layout, packing=False)
    model = build(case)
    plan, found = state_of(model).plan, []
    linears = {name: model.get_submodule(name.rpartition(".")[0]) for name in plan.feature(Fp8Plan).gathers}
    for step, factor in enumerate(FACTORS):
        seen: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        with torch.no_grad():
            for linear in linears.values():
                local(linear.weight).mul_(factor)
            whole = {name: linear.weight.full_tensor().bfloat16() for name, linear in linears.items()}

        def look(module: Any, name: str) -> None:
            assert isinstance(module.weight, Fp8Weight)
            seen[name] = (module.weight.codes.view(torch.uint8).clone(), module.weight.scale.clone(), whole[name])  # noqa: B023

        hooks = [
            linear.register_forward_pre_hook(lambda module, _, name=name: look(module, name))
            for name, linear in linears.items()
        ]
        accumulate(model, batch_of(documents(case, step), case.parsed, plan.placement.data_rank))
        for hook in hooks:
            hook.remove()
        model.zero_grad()
        found.append(seen)
    return found


@pytest.mark.full
@pytest.mark.parametrize("words", [put_off("fp8"), "fp8_delayed"])
def test_codes_and_scale_are_those_of_the_whole_weight_in_each_step(words: str) -> None:
    """In bf16, the type that is cast: the scale of a value that was rounded is another one. With a history the scale is
    of the largest value in the steps before."""
    for found in run_ranks(2, _seen, f"shard2+mb4+{words}"):
        assert len(found[0]) == 21
        for step, seen in enumerate(found):
            for name, (codes, scale, whole) in seen.items():
                steps = found[:step] if step and words == "fp8_delayed" else found[step : step + 1]
                largest = torch.stack([each[name][2].abs().amax() for each in steps]).amax()
                assert torch.equal(scale.flatten(), scale_of(largest, CAST, largest).flatten()), (name, step)
                assert torch.equal(codes, cast_to_fp8(whole, CAST, scale).view(torch.uint8)), (name, step)


def _after_an_update(layout: str) -> list[tuple[Tensor, Tensor]]:
    """Scales of a weight in calls without gradient, each after another change of all weights; and those that follow
    from its values there."""
    model = ff.parallelize(reference_model(Case("single"), torch.bfloat16), layout)
    name = state_of(model).plan.feature(Fp8Plan).gathers[0]
    linear, seen, found = model.get_submodule(name.rpartition(".")[0]), list[Tensor](), []
    linear.register_forward_pre_hook(lambda module, _: seen.append(module.weight.scale.clone()))
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    calls = (
        lambda: model(input_ids=ids), lambda: ff.evaluate(model, [batch]), lambda: ff.logits(model, batch),
        lambda: model(input_ids=ids),
    )  # fmt: skip
    for call in calls:
        with torch.no_grad():
            for each in model.parameters():
                local(each).mul_(3.0)
            largest = local(linear.weight).bfloat16().abs().amax()
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            call()
        found.append((seen[-1].flatten(), scale_of(largest, CAST, largest).flatten()))
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("single+fp8"), "shard2+fp8", put_off("shard2+fp8_delayed")])
def test_any_call_after_an_update_casts_by_the_scales_of_now(layout: str) -> None:
    """One of a user's own too, which is the first."""
    for found in run_ranks(Layout.parse(layout).world, _after_an_update, layout):
        assert all(torch.equal(scale, expected) for scale, expected in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_no_product_in_fp8_sees_what_a_weight_stands_for(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(3)).to(dtype)
    scale = scale_of(weight.abs().amax().reshape(1, 1), CAST, weight)
    gathered = Fp8Weight(cast_to_fp8(weight, CAST, scale), scale, dtype)
    plain = gathered.restored()
    assert plain.dtype == dtype and torch.allclose(plain, weight, rtol=0.07, atol=1e-3)
    assert torch.equal(plain, restored(gathered.codes, scale, dtype))
    x = torch.ones(2, 7, dtype=dtype)
    assert torch.equal(x @ gathered.t(), x @ plain.t()) and torch.equal(gathered + 1, plain + 1)


@pytest.mark.parametrize("odd", [float("inf"), float("nan")])
def test_the_largest_weights_of_a_step_are_noted_and_no_number_is_seen(odd: float) -> None:
    history = AmaxHistory(["a", "b"], 16, torch.device("cpu"))
    with patch.object(dist, "all_reduce"):
        with history.recording():
            assert history.of_weights(torch.tensor([3.0, 4.0], dtype=torch.float64)) is None
            history.of_weights(torch.tensor([2.0, 5.0], dtype=torch.float64))  # another pass of the step
        history.of_weights(torch.tensor([9.0, 9.0], dtype=torch.float64))  # of an evaluation
        history.end_step()
        with history.recording():
            found = history.of_weights(torch.tensor([1.0, odd], dtype=torch.float64))
    assert found is not None and found[0] == 3 and found[1].isnan()  # a cast would make the largest number of it
    assert [history.state()[name] for name in "ab"] == [[[0, 3.0, 0]], [[0, 5.0, 0]]]
