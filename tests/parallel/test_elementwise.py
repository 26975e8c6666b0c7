"""Operators by what their results depend on: an example for each name in the lists, and for each kind of other ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fivefold.parallel.parts import keeps_places, mixes_nothing
from fivefold.torch_internals import Dispatch

aten = torch.ops.aten
A, B = torch.rand(4, 4), torch.rand(4, 4)
MASK, AT, MANY = A > 0.5, torch.tensor([0, 1]), [A.clone(), B.clone()]


def operators(call: Callable[[], Any]) -> list[Any]:
    seen = []

    def run(operator: Any, args: Any, kwargs: Any) -> Any:
        seen.append(operator)
        return operator(*args, **kwargs)

    with Dispatch(run):
        call()
    return seen


# By tag, or by that of the operator that is not in place, or that takes tensors one by one.
POINTWISE = (
    lambda: A + B, lambda: A.lerp(B, 0.5), lambda: A.addcmul(A, B), lambda: A == B, lambda: A.clamp(0, 1),
    lambda: torch.max(A, B), lambda: A.clone().abs_(), lambda: A.clone().eq_(B),
    lambda: torch._foreach_sqrt(MANY), lambda: torch._foreach_maximum(MANY, 0.0),
    lambda: torch._foreach_add_(MANY, 1.0), lambda: torch._foreach_lerp_(MANY, MANY, 0.5),
    lambda: torch._foreach_addcdiv_(MANY, MANY, MANY), lambda: torch._foreach_copy_(MANY, MANY),
    lambda: torch._foreach_zero_(MANY),
)  # fmt: skip
BY_NAME = (
    lambda: aten.copy(A, B), lambda: A.clone().copy_(B), lambda: A.double(), lambda: torch.where(MASK, A, B),
    lambda: A.masked_fill(MASK, 0.0), lambda: 1 - A, lambda: A.clone().fill_(1.0), lambda: A.clone().zero_(),
    lambda: torch.scalar_tensor(1.0), lambda: torch.ones_like(A), lambda: torch.zeros_like(A),
    lambda: torch.full_like(A, 1.0), lambda: torch.empty_like(A), lambda: A.new_full((4,), 1.0),
    lambda: A.detach(), lambda: aten.alias(A), lambda: A.view(16),
    lambda: aten._reshape_alias(A, [16], [1]),
    lambda: A.unsqueeze(0), lambda: A[None].squeeze(0), lambda: A[None].expand(2, 4, 4), lambda: aten.lift_fresh(A),
)  # fmt: skip
TURNED = (lambda: A.t(), lambda: A.transpose(0, 1), lambda: A.permute(1, 0))
OPTIMIZERS = (aten._fused_sgd_, aten._fused_adam_, aten._fused_adamw_, aten._fused_adagrad_)
PICKS = (
    lambda: A[AT], lambda: A.index_select(0, AT), lambda: aten.index_put_(A.clone(), [AT], B[0]),
    lambda: A.clone().index_copy_(0, AT, torch.rand(2, 4)), lambda: A.index_fill(0, AT, 0.0),
    lambda: A.gather(0, AT[None]), lambda: A.take(AT), lambda: A.masked_select(MASK), lambda: A.nonzero(),
    lambda: torch.cat(MANY), lambda: torch.stack(MANY),
    lambda: torch.rand_like(A), lambda: A.clone().normal_(), lambda: A.bernoulli(), lambda: A.clone().uniform_(),
)  # fmt: skip
MIXING = (
    lambda: A.sum(), lambda: A.mean(0), lambda: A.norm(), lambda: A.max(), lambda: A.amin(1), lambda: MASK.all(),
    lambda: A.argmax(), lambda: A.sort(), lambda: A.cumsum(0), lambda: A.softmax(0), lambda: A @ B, lambda: A.roll(1),
    lambda: torch.fft.fft(A), lambda: torch.equal(A, B), lambda: A.tril(), lambda: A.clone().index_add_(0, AT, B[:2]),
    lambda: torch._foreach_norm(MANY), lambda: torch._foreach_max(MANY),
    lambda: A.clone().scatter_add_(0, AT[None], B),
)  # fmt: skip


@pytest.mark.parametrize("call", POINTWISE + BY_NAME)
def test_what_keeps_every_number_at_its_place_may_be_computed_on_a_part(call: Any) -> None:
    seen = operators(call)
    assert seen and all(map(keeps_places, seen)) and all(map(mixes_nothing, seen)), seen


@pytest.mark.parametrize("call", TURNED)
def test_a_transpose_has_other_numbers_at_its_places(call: Any) -> None:
    assert not any(map(keeps_places, operators(call)))


def test_a_part_of_a_name_says_nothing() -> None:
    assert all(keeps_places(packet.default) for packet in OPTIMIZERS)
    assert not any(mixes_nothing(packet.default) for packet in (aten._fused_dropout, aten.fill_diagonal_))


@pytest.mark.parametrize("call", PICKS)
def test_picks_and_random_numbers_mix_nothing_but_are_others_of_a_part(call: Any) -> None:
    seen = [each for each in operators(call) if not each.is_view]
    assert all(map(mixes_nothing, seen)) and not all(map(keeps_places, seen)), seen


@pytest.mark.parametrize("call", MIXING)
def test_what_depends_on_several_numbers_of_a_tensor_is_told_from_both(call: Any) -> None:
    last = operators(call)[-1]
    assert not mixes_nothing(last) and not keeps_places(last), last
