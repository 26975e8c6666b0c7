"""MLPs that run piece by piece compute what they compute at once, send what is declared, and need less memory."""

import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.core.errors import UserError
from fivefold.models.config_facts import facts_of_config
from fivefold.models.discover import facts_of
from fivefold.parallel.chunks.runtime import _in_pieces
from fivefold.parallel.collectives import differing
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import layer_bytes, layer_numbers
from fivefold.parallel.step import LayerStep
from tests.parity import Case, gradient_error, on_rank, outcome, reference, reference_model
from tests.pool import run_ranks

CASES = [
    Case("tp2.cp2+mb4+fp64+full+mlp3"),  # the last piece of a layer stops before its sum
    Case("tp2.shard2+mb2+fp64+mlp2+full", "gemma2"),  # whose MLP does not end its layer
    Case("pp2.tp2+mb2+fp64+zb+mlp2+nosp"),
    Case("tp2.shard2+mb2+fp64+mlp2", "deepseek_v3", kv_heads=4),  # whose first layer alone is dense
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.layout)
def test_pieces_compute_what_the_whole_computes(case: Case) -> None:
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    shapes = {name: tuple(each.shape) for name, each in reference_model(case).named_parameters()}
    found, expected = outcome(case, per_rank, shapes), reference(case)
    error, worst = gradient_error(found, expected)
    assert error <= 1e-10, worst
    assert found.losses == pytest.approx(expected.losses, rel=1e-10)
    assert not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])


def test_a_piece_of_an_mlp_is_planned() -> None:
    """Llama 3.1 8B under tp2: of gate, up, their product and silu(gate) nothing is kept, and of what comes in only this
    rank's tokens; backward has an eighth of the four, and of the gradients of two."""
    facts = facts_of_config("llama-3.1-8b")
    whole, pieces = (lower(facts, Layout.parse(f"tp2{text}"), 0) for text in ("", "+mlp8"))
    shape, (cost,) = whole.step_shape(1, 65536, 1), facts.costs
    token = 65536 * shape.compute_bytes
    saved = [layer_bytes(plan, plan.placement.layers[0], cost, shape).kept // token for plan in (whole, pieces)]
    assert saved[0] - saved[1] == 4 * 14336 // 2 + 4096 // 2
    step = LayerStep(pieces, pieces.placement.layers[0], cost, shape)
    assert layer_numbers(step).working == (4 + 2) * 14336 / 2 / 8 + 3 * 4096


@pytest.mark.parametrize(
    ("layout", "family", "what"),
    [
        ("mlp2", "mixtral", "no dense MLP"),
        ("mlp2+fp8", "llama", "scales that span the tokens"),
        ("mlp2+fp8_rowwise", "llama", "scales that span the tokens"),
        ("mlp2+selective", "llama", "says what of an MLP is kept"),
        ("mlp2+keep1GiB", "llama", "says what of an MLP is kept"),
    ],
)
def test_what_is_not_run_in_pieces(layout: str, family: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        lower(facts_of(reference_model(Case("single", family))), Layout.parse(f"single+{layout}"), 0)


def test_full_recompute_keeps_no_input_of_an_mlp() -> None:
    """What runs a piece again holds no tensor: 2 GiB were held of a Llama 1B with rows of 32,768 tokens a rank."""
    given: list[weakref.ref[Tensor]] = []

    def block(x: Tensor) -> Tensor:
        hidden = x * 2
        given.append(weakref.ref(hidden))
        return _in_pieces(torch.relu, lambda part: part, 3, hidden)

    x = torch.randn(1, 11, 4, requires_grad=True)
    out = checkpoint(block, x, use_reentrant=False)
    assert given[0]() is None
    out.sum().backward()
    assert torch.equal(x.grad, 2.0 * (x.detach() > 0))  # type: ignore[arg-type]


def test_an_mlp_may_be_given_its_input_by_name() -> None:
    """Every piece enters it, by whatever name the layer calls it."""
    x = torch.arange(22.0).view(1, 11, 2)
    expected = torch.relu(2 * x - 9) + 1

    def mlp(hidden_states: Tensor) -> Tensor:
        return torch.relu(hidden_states - 9) + 1

    assert torch.equal(_in_pieces(mlp, lambda part: 2 * part, 3, x), expected)
    assert torch.equal(_in_pieces(mlp, lambda part: 2 * part, 3, hidden_states=x), expected)
