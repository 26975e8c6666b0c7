"""A block that Dynamo gives up is named, on the screen and to whoever calls the library. Graphs wait late, and gather
again what enters a column.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.apply import parallelize
from fivefold.parallel.graphs import runtime as compiled
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.graphs.spec import GraphPlan
from fivefold.parallel.state import state_of
from fivefold.parallel.tensor.mappings import gather
from tests import parity
from tests.parity import Case, batch_of, build, documents, gathered, gradient, gradients, hf_config, pieces, reference
from tests.pool import run_ranks
from tests.rehearsal import fake_world
from tests.tiers import put_off


def test_a_block_that_is_given_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions are allowed; a third is asked for."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward, **_: plain(forward, backend="eager", dynamic=False))
    monkeypatch.setattr(compiled, "VERSIONS", 2)
    torch._dynamo.reset()

    def forward(x: Tensor) -> Tensor:
        return x * 2

    with torch._dynamo.config.patch(recompile_limit=2):
        blocks = Compiled()
        first, second = (blocks.block(name, forward) for name in ("model.layers.0", "model.layers.1"))
        for size in (2, 3):
            first(torch.ones(size))
        assert not blocks.news()
        with pytest.warns(UserWarning, match=r"model\.layers\.1 .* uncompiled"):
            assert second(torch.ones(5)).tolist() == [2.0] * 5
        (line,) = blocks.news()
    assert "model.layers.1" in line and "train.compile: false" in line
    assert not blocks.news(), "it is said once"


@pytest.mark.full
def test_a_graph_waits_for_a_collective_where_its_result_is_read() -> None:
    """A product that does not read what is gathered stands between the collective and the wait for it."""
    torch._dynamo.reset()
    with fake_world(2, 0):
        assert dist.group.WORLD is not None
        group = dist.group.WORLD

        def forward(x_BTD: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return gather(x_BTD, group).sum(1), w @ w

        _, (code, *_) = run_and_get_code(
            Compiled().block("model.layers.0", forward), torch.ones(4, 4, 4), torch.ones(4, 4)
        )
    begin, product, end = (code.rindex(each) for each in ("all_gather_into_tensor.default(", ".mm(", "wait_tensor.def"))
    assert begin < product < end


# ---- what enters a column is gathered again --------------------------------------------------------------------------


@contextmanager
def compiled_on_cpu(*, again: bool | None = None, backend: str = "aot_eager") -> Iterator[None]:
    """Blocks are compiled for autograd, without kernels. `again`: whether they gather again; None: as the plan says."""
    torch._dynamo.reset()
    plain = torch.compile
    with ExitStack() as patches:
        patches.enter_context(patch.object(torch, "compile", lambda forward, **_: plain(forward, backend=backend)))
        patches.enter_context(patch.object(parity, "parallelize", partial(parallelize, compile_blocks=True)))
        if again is not None:
            patches.enter_context(patch.object(GraphPlan, "gathers_again", lambda *_: again))
        yield


def first_gradients(case: Case) -> tuple[float, list[Any], int]:
    """Loss and gradients of the first step, as its reference scales them, and the numbers that forward left for
    backward."""
    numbers = [0]

    def pack(saved: Tensor) -> Tensor:
        numbers[0] += saved.numel()
        return saved

    model, rows = build(case), documents(case, 0)
    batch = batch_of(rows, case.parsed, state_of(model).placement.data_rank)
    targets = sum(len(document) - 1 for row in rows for document in row)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        loss = gradients(model, batch, torch.tensor(1.0 / targets, dtype=torch.float64))
    found = pieces(model, {name: gradient(parameter) for name, parameter in model.named_parameters()})
    state = state_of(model)
    assert not state.live(Compiled).given_up
    return float(loss), found, numbers[0]


def compiled_gradients(case: Case, options: dict[str, Any]) -> tuple[float, list[Any], int]:
    with compiled_on_cpu(**options):
        return first_gradients(case)


@pytest.mark.full
@pytest.mark.parametrize("adapter", [None, put_off(Lora(rank=2))])
def test_a_graph_keeps_this_ranks_tokens_of_what_enters_a_column(adapter: Lora | None) -> None:
    """Two entries a layer, each of all tokens: half of them stay away at least. Every gradient is the same."""
    case = Case("tp2+mb8+fp64", adapter=adapter, overrides=(("num_hidden_layers", 1),))
    eager = run_ranks(2, first_gradients, case)
    kept, again = (run_ranks(2, compiled_gradients, case, {"again": each}) for each in (False, True))
    entered = 2 * sum(len(row[0]) for row in documents(case, 0)) * hf_config(case).hidden_size
    for (loss, expected, _), (_, _, most), (other, found, least) in zip(eager, kept, again, strict=True):
        assert other == pytest.approx(loss, rel=1e-13)
        assert most - least >= entered / 2
        for (name, _, a), (_, _, b) in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.full
def test_a_graph_recomputes_what_selective_recompute_does_not_keep() -> None:
    """Gradients are the same, and fewer numbers than without it stay, and more than of a layer that keeps its input."""
    kept = {}
    for recompute in ("", "+selective", "+full"):
        case = Case(f"single{recompute}+mb8+fp64", overrides=(("num_hidden_layers", 1),))
        ((loss, expected, _),) = run_ranks(1, first_gradients, case)
        ((other, found, kept[recompute]),) = run_ranks(1, compiled_gradients, case, {"backend": "aot_eager"})
        assert other == pytest.approx(loss, rel=1e-13)
        for (name, _, a), (_, _, b) in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12, err_msg=name)
    assert kept["+full"] < kept["+selective"] < kept[""]


LAYERS = ("num_hidden_layers", 2)
CASES = [
    pytest.param(
        case, backend, id=f"{case.layout}-{case.family}-{backend}", marks=() if quick else pytest.mark.campaign
    )
    for case, backend, quick in (
        (Case("tp2+mb8+fp64", tied=True, overrides=(LAYERS,)), "aot_eager_decomp_partition", True),
        (Case("pp2.tp2+mb2+fp64", overrides=(LAYERS,)), "aot_eager", False),
        (Case("tp2+mb8+full+fp64", overrides=(LAYERS,)), "aot_eager", False),
        (Case("tp2+mb8+selective+fp64", overrides=(LAYERS,)), "aot_eager", False),
        (Case("pp2.tp2+zb+mb2+fp64", overrides=(LAYERS,)), "aot_eager", False),
        (Case("tp2+nosp+mb8+fp64", overrides=(LAYERS,)), "aot_eager", False),
        (Case("shard2.tp2+mb2+fp64", "qwen3", overrides=(LAYERS,)), "aot_eager_decomp_partition", False),
        (Case("tp4+mb8+fp64", "gemma2", overrides=(LAYERS,)), "aot_eager_decomp_partition", False),
        (Case("tp2+mb8+fp64", "phi3", overrides=(LAYERS,)), "aot_eager", False),
    )
]


@pytest.mark.full
@pytest.mark.parametrize(("case", "backend"), CASES)
def test_compiled_layers_over_tp_have_the_gradients_of_the_unmodified_model(case: Case, backend: str) -> None:
    """By the partition of graphs that Inductor makes, too. Norms compute in fp32."""
    expected = reference(case)
    per_rank = run_ranks(case.parsed.world, compiled_gradients, case, {"backend": backend})
    found = gathered(
        [parts for _, parts, _ in per_rank], {name: each.shape for name, each in expected.gradients.items()}
    )
    floor = 1e-6 * expected.norms[0]
    for name, true in expected.gradients.items():
        error = np.linalg.norm(found[name] - true) / max(float(np.linalg.norm(true)), floor)
        assert error <= 1e-5, name
