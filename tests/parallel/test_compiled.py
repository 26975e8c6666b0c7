"""A block that Dynamo gives up is named, on the screen and to whoever calls the library. Graphs wait late, and gather
again what enters a column.
"""

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fivefold.models.build import build_meta
from fivefold.models.sources import ModelTensors
from fivefold.parallel import compiled
from fivefold.parallel.apply import parallelize
from fivefold.parallel.compiled import Compiled
from fivefold.parallel.mappings import gather
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.state import state_of
from fivefold.training.step import gradients
from tests.parity import Case, batch_of, documents, hf_config, pieces, reference_model
from tests.pool import run_ranks
from tests.rehearsal import fake_world


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


def outcome(case: Case, is_compiled: bool, again: bool) -> tuple[float, list[Any], int]:
    """Loss, gradients, and the numbers that forward left for backward."""
    torch._dynamo.reset()
    plain, numbers = torch.compile, [0]

    def pack(saved: Tensor) -> Tensor:
        numbers[0] += saved.numel()
        return saved

    def gathers_again(*_: Any) -> bool:
        return again

    with (
        patch.object(torch, "compile", lambda forward, **_: plain(forward, backend="aot_eager")),
        patch.object(ParallelPlan, "gathers_again", gathers_again),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved),
    ):
        source = ModelTensors(reference_model(case, torch.float32))
        model = parallelize(build_meta(hf_config(case)), case.parsed, source=source, compile_blocks=is_compiled)
        batch = batch_of(documents(case, 0), case.parsed, state_of(model).plan.data_rank)
        loss = gradients(model, batch, torch.tensor(1.0, dtype=torch.float64))
    return float(loss), pieces(model, {name: p.grad for name, p in model.named_parameters()}), numbers[0]


def test_a_graph_keeps_this_ranks_tokens_of_what_enters_a_column() -> None:
    """Two entries a layer, each of all tokens: half of them stay away at least. Every gradient is the same."""
    case = Case("tp2+mb8+fp64", overrides=(("num_hidden_layers", 1),))
    eager, kept, again = (run_ranks(2, outcome, case, *how) for how in ((False, False), (True, False), (True, True)))
    entered = 2 * sum(len(row[0]) for row in documents(case, 0)) * hf_config(case).hidden_size
    for (loss, expected, _), (_, _, most), (other, found, least) in zip(eager, kept, again, strict=True):
        assert other == pytest.approx(loss, rel=1e-13)
        assert most - least >= entered / 2
        for (name, _, a), (_, _, b) in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-11, err_msg=name)
