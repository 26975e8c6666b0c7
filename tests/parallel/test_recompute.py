"""What a layout recomputes changes nothing that it computes, bit for bit; the collectives that run are those declared;
and a budget is spent as an exhaustive search would."""

from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.ops import keep
from fivefold.parallel.collectives import differing
from fivefold.parallel.layout import Layout
from fivefold.parallel.recompute.policy import MODES, Choice, Mode, fit_recompute_budget
from fivefold.torch_internals import Dispatch
from tests.parity import Case, Outcome, on_rank, outcome, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off


@lru_cache
def found(layout: str, family: str) -> tuple[Outcome, list[dict[str, Any]]]:
    """What a layout computes in two steps."""
    case = Case(layout, family)
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    shapes = {name: tuple(each.shape) for name, each in reference_model(case).named_parameters()}
    return outcome(case, per_rank, shapes), per_rank


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "family", "recompute"),
    [
        put_off("single", "gemma2", "selective"),
        put_off("tp2+fp32", "qwen2", "selective"),
        ("tp2+fp32", "qwen2", "keep0.001GiB"),
        put_off("cp2+ring+mb2", "llama", "selective"),
        ("pp2+zb+fp64+fp8_rowwise", "llama", "selective"),
        ("tp2.ep2+nosp", "mixtral", "selective"),
        put_off("cp2+ulysses+mb2", "qwen3", "selective"),
        put_off("cp4+2x2", "llama", "selective"),
        put_off("cp2+allgather", "llama", "selective"),
        put_off("tp2+fp64+fp8_rowwise", "llama", "selective"),
        put_off("shard2.ep2", "deepseek_v3", "selective"),
        put_off("tp2.ep2", "gpt_oss", "selective"),
        put_off("tp2+etp", "qwen3_moe", "selective"),
        put_off("tp2", "olmo2", "selective"),
    ],
)
def test_recompute_changes_no_bit(layout: str, family: str, recompute: str) -> None:
    plain, _ = found(layout, family)
    again, per_rank = found(f"{layout}+{recompute}", family)
    assert again.losses == plain.losses and again.norms == plain.norms
    for name, gradient in plain.gradients.items():
        assert np.array_equal(again.gradients[name], gradient), name
    assert not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])


# ---- what is kept ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """An MLP; its last linear is computed again, if the second forward comes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.up.forward = keep.save_outputs(self.up.forward)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def counted(run: Any) -> dict[str, int]:
    """Calls of each operator."""
    seen: dict[str, int] = {}

    def note(operator: Any, args: Any, kwargs: Any) -> Any:
        name = operator.overloadpacket.__name__
        seen[name] = seen.get(name, 0) + 1
        return operator(*args, **kwargs)

    with Dispatch(note):
        run()
    return seen


def test_products_are_kept_and_the_rest_runs_again() -> None:
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    out: list[Tensor] = []
    again = counted(lambda: out.append(checkpoint(block, x, use_reentrant=False, context_fn=keep.contexts)))
    assert again["addmm"] == 2 and again["silu"] == 1
    backward = counted(lambda: out[0].sum().backward())  # type: ignore[no-untyped-call]
    assert "addmm" not in backward and backward["silu"] == 1


def test_a_kept_tensor_that_is_changed_in_place_is_refused() -> None:
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    kept: list[Tensor] = []
    block.up.register_forward_hook(lambda _, args, out: kept.append(out))
    out = checkpoint(block, x, use_reentrant=False, context_fn=keep.contexts)
    with torch.no_grad():
        kept[0].zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        out.sum().backward()


def test_a_second_backward_of_what_is_kept_is_refused() -> None:
    block, x = Block(), torch.randn(3, 4, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False, context_fn=keep.contexts)
    out.sum().backward(retain_graph=True)
    with pytest.raises(UserError, match="a second backward of one forward"):
        out.sum().backward()


def test_hooks_around_a_block_get_what_it_keeps() -> None:
    block, x, seen = Block(), torch.randn(3, 4, requires_grad=True), list[torch.Size]()

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        out = checkpoint(block, x, use_reentrant=False, context_fn=keep.contexts)
    assert (3, 8) in seen
    out.sum().backward()
    (block(x).sum() * 2).backward()
    again, plain = x.grad, torch.autograd.grad(block(x).sum(), x)[0]
    assert again is not None and torch.allclose(again, 3 * plain)


def test_what_is_kept_in_what_is_kept_is_one_value() -> None:
    first, second = keep.contexts()
    with first:
        assert keep.kept(lambda: keep.kept(lambda: 2) + 1) == 3
        assert keep.product_with_inputs(lambda: (keep.kept(lambda: 5), keep.kept(lambda: 6))) == (5, 6)
    with second:
        assert keep.kept(lambda: None) == 3 and keep.product_with_inputs(lambda: ((), ())) == (5, 6)


def test_a_product_that_is_handed_on_takes_no_memory_and_one_within_what_runs_again_is_none() -> None:
    a, b, (first, second) = torch.randn(3, 4), torch.randn(4, 5), keep.contexts()
    handed, again = keep.save_reduced_only(torch.mm), keep.save_outputs(keep.save_nothing(torch.mm))
    with first:
        assert torch.equal(handed(a, b), again(a, b))
    with second:
        out = handed(a, b)
        assert (out.shape, out.stride()) == ((3, 5), (0, 0))
        assert torch.equal(again(2 * a, b), 2 * a @ b)  # of what it is given now


# ---- a budget --------------------------------------------------------------------------------------------------------


def _layers(*unlike: tuple[int, int]) -> dict[str, dict[Mode, Choice]]:
    """Of `(what all of it takes, how dear it is)`, in MiB."""
    return {
        f"layers.{at}": {
            "none": Choice(size * 2**20, 0.0), "selective": Choice(size * 2**19, work), "full": Choice(2**20, 5 * work),
        }
        for at, (size, work) in enumerate(unlike)
    }  # fmt: skip


@pytest.mark.parametrize("mib", [8, 30, 50, 61, 90, 100, 128, 200])
def test_a_budget_is_spent_as_well_as_it_can_be(mib: int) -> None:
    """Layers alike: no other choice that holds repeats less work."""
    layers, budget = _layers(*[(20, 2)] * 6), mib * 2**20
    mode = f"{mib / 1024 + 0.0005:.3f}GiB"
    recompute = fit_recompute_budget(mode, layers)
    work = sum(layers[name][of].again for name, of in recompute.by_layer.items())
    assert (
        recompute.kept == sum(layers[name][of].kept for name, of in recompute.by_layer.items()) <= budget + GIB // 900
    )
    least = min(
        sum(layers[name][of].again for name, of in zip(layers, modes, strict=True))
        for modes in product(MODES, repeat=6)
        if sum(layers[name][of].kept for name, of in zip(layers, modes, strict=True)) <= float(mode[:-3]) * GIB
    )
    assert work <= least * 1.25


def test_a_budget_says_what_it_was_spent_for_and_what_is_the_least() -> None:
    layers = _layers(*[(20, 2)] * 6)
    assert str(fit_recompute_budget("0.1GiB", layers)) == "4 layers none, 2 selective: 0.09766 of 0.1 GiB"
    assert fit_recompute_budget("0.1GiB", layers).of("layers.0.mlp.up_proj") == "selective"
    with pytest.raises(UserError, match=r"still keep 0\.006 GiB"):
        fit_recompute_budget("0.005GiB", layers)
    assert str(Layout(recompute="12.5 GiB")) == "single+keep12.5GiB"
    with pytest.raises(UserError, match="recompute 'much' is not known"):
        Layout(recompute="much")
