"""The seam of every matmul: what each role multiplies, what waits, and where a recipe comes in."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fivefold.models.hf_internals import is_plain_linear, linear_dims
from fivefold.ops.linear import PLAIN, Dense, Linears, Role, WeightGradStore


class Scaled(nn.Linear):
    """A derived class that does more than its parent."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 3.0)


class Picks(nn.Linear):
    """A derived class that is no linear: Llama 4's router is one of these."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return tuple(super().forward(x).topk(1))


def made(kind: type[nn.Module]) -> Any:
    """A linear of 4 inputs and 6 outputs, with a bias."""
    torch.manual_seed(0)
    linear: Any = (Conv1D(6, 4) if kind is Conv1D else kind(4, 6)).double()
    nn.init.normal_(linear.bias)
    return linear


def placed(linear: Any, role: Role, linears: Linears, **options: Any) -> Any:
    linears.place(
        linear, role, is_transposed=linear_dims(linear) == (1, 0), is_plain=is_plain_linear(linear), **options
    )
    return linear


def gradients(linear: Any, x: Tensor, store: WeightGradStore | None = None) -> list[Tensor]:
    """Output, and the gradients of the input, the weight and the bias, after what was put off has been computed."""
    given = x.clone().requires_grad_()
    if store is None:
        out = linear(given)
        out.square().sum().backward()
    else:
        with store.collecting("slot"):
            out = linear(given)
            out.square().sum().backward()
        assert store.queue is None and linear.weight.grad is None
        assert store.compute("slot") == 1
    return [out.detach(), given.grad, linear.weight.grad, linear.bias.grad]  # type: ignore[list-item]


# ---- what is a linear ------------------------------------------------------------------------------------------------


def test_a_derived_class_is_a_linear_if_it_maps_features() -> None:
    assert linear_dims(made(nn.Linear)) == linear_dims(made(Scaled)) == (0, 1)
    assert linear_dims(made(Conv1D)) == (1, 0)
    assert linear_dims(made(Picks)) is None and linear_dims(nn.LayerNorm(4)) is None
    assert [is_plain_linear(made(kind)) for kind in (nn.Linear, Conv1D, Scaled)] == [True, True, False]


def test_asking_what_a_class_is_leaves_the_module_alone() -> None:
    module = made(Scaled)
    module.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    weight = module.weight
    assert linear_dims(module) == (0, 1) and module.weight is weight and not weight.is_meta


# ---- weight gradients later ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
@pytest.mark.parametrize("role", ["column", "row", "dense"])
def test_what_is_put_off_is_the_weight_gradient_and_nothing_else(kind: type[nn.Module], role: Role) -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    store = WeightGradStore()
    expected = gradients(made(kind), x)
    found = gradients(placed(made(kind), role, Linears(store)), x, store)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, expected, strict=True))


def test_without_a_slot_nothing_is_put_off() -> None:
    """Evaluation, and any pass outside of a schedule."""
    x = torch.randn(3, 4, dtype=torch.float64)
    found = gradients(placed(made(nn.Linear), "dense", Linears(WeightGradStore())), x)
    assert torch.equal(found[2], gradients(made(nn.Linear), x)[2])


def test_frozen_weights_and_passes_without_gradients_put_nothing_off() -> None:
    store = WeightGradStore()
    linear = placed(made(nn.Linear), "dense", Linears(store))
    with store.collecting("slot"), torch.no_grad():
        linear(torch.ones(1, 4, dtype=torch.float64))
    linear.weight.requires_grad_(False)
    with store.collecting("slot"):
        linear(torch.ones(1, 4, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert store.compute("slot") == 0


def test_a_compiled_block_puts_off_what_an_eager_one_does() -> None:
    """AOTAutograd makes the backward of what lies between the linears."""
    torch._dynamo.reset()
    x, store = torch.randn(3, 4, dtype=torch.float64), WeightGradStore()
    expected = gradients(made(nn.Linear), x.sin())
    linear = placed(made(nn.Linear), "dense", Linears(store))
    block = torch.compile(lambda x: linear(x.sin()), backend="aot_eager")
    with store.collecting("slot"):
        block(x.clone().requires_grad_()).square().sum().backward()
    assert linear.weight.grad is None
    store.compute("slot")
    assert torch.allclose(linear.weight.grad, expected[2], rtol=1e-12)


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # a kernel, a loop
def test_experts_put_off_the_gradients_of_all_experts(is_transposed: bool, dtype: torch.dtype) -> None:
    counts, store = torch.tensor([3, 0, 5]), WeightGradStore()
    weights = [torch.randn(3, 8, 16, dtype=dtype).requires_grad_() for _ in range(1)]
    weights.append(weights[0].detach().clone().requires_grad_())
    x = torch.randn(8, 8 if is_transposed else 16, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    PLAIN.grouped(inputs[0], weights[0], counts, is_transposed=is_transposed).square().sum().backward()
    with store.collecting("slot"):
        out = Linears(store).grouped(inputs[1], weights[1], counts, is_transposed=is_transposed)
        out.square().sum().backward()
    assert weights[1].grad is None and store.compute("slot") == 1
    for one, other in (inputs, weights):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad, other.grad, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-5)


# ---- what a role asks ------------------------------------------------------------------------------------------------


def test_where_nothing_is_asked_a_linear_is_left_as_it_is() -> None:
    roles: tuple[Role, ...] = ("column", "dense", "router", "head")
    assert all("forward" not in vars(placed(made(nn.Linear), role, PLAIN)) for role in roles)
    store = Linears(WeightGradStore())
    assert all("forward" not in vars(placed(made(nn.Linear), role, store)) for role in ("router", "head"))
    assert "forward" not in vars(placed(made(Scaled), "dense", store)), "its own forward would be lost"


@pytest.mark.parametrize("kind", [nn.Linear, Conv1D, Scaled])
def test_the_bias_of_a_row_is_added_once_to_the_sum(kind: type[nn.Module]) -> None:
    """As by two ranks that hold the same: twice the product, once the bias."""
    x = torch.randn(3, 4, dtype=torch.float64)
    product = made(kind)(x) - made(kind).bias
    row = placed(made(kind), "row", PLAIN, reduce=lambda partial: partial * 2)
    assert torch.allclose(row(x), product * 2 + row.bias, rtol=1e-12)
    assert row.bias is not None


class Rounded(Dense):
    """A recipe as an fp8 one will be: what is multiplied is rounded first."""

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().output(x.round(), weight)

    def weight_grad(self, grad: Tensor, x: Tensor) -> Tensor:
        return super().weight_grad(grad, x.round())


@pytest.mark.parametrize("later", [False, True])
def test_a_recipe_replaces_the_products_of_its_roles(later: bool) -> None:
    """With weight gradients that wait, and at once; the bias stays as it is."""
    x = torch.randn(3, 4, dtype=torch.float64) * 5
    store = WeightGradStore() if later else None
    linears = Linears(store, products={"column": lambda _, is_transposed: Rounded(is_transposed)})
    expected = gradients(made(nn.Linear), x.round())
    found = gradients(placed(made(nn.Linear), "column", linears), x, store)
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(found, expected, strict=True))
    assert "forward" not in vars(placed(made(nn.Linear), "head", linears))
