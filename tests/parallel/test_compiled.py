"""A block that Dynamo gives up is named, on the screen and to whoever calls the library. Graphs wait late."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fivefold.parallel import compiled
from fivefold.parallel.compiled import Compiled
from fivefold.parallel.mappings import gather
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
