"""A block that Dynamo gives up is named, on the screen and to whoever calls the library."""

import pytest
import torch
from torch import Tensor

from fivefold.parallel import compiled
from fivefold.parallel.compiled import Compiled


def test_a_block_that_is_given_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two versions are allowed; a third is asked for."""
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda forward: plain(forward, backend="eager", dynamic=False))
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
