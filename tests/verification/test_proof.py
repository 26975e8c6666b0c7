"""What a proof looks at, and what it leaves out."""

from pathlib import Path

import pytest
import torch

from fivefold.verification.prepare import flips, left_to_chance, rounding
from fivefold.verification.rows import FACTOR
from tests.verification.faults import Model
from tests.verification.mutation import prove


def test_a_module_that_runs_twice_in_a_pass_is_left_out(tmp_path: Path) -> None:
    """Gemma 3 asks for its rotary tables once for each kind of layer, in an order that differs between processes."""
    kinds = ["sliding_attention", "full_attention"]
    outcome = prove("step", Model("gemma3", changes=(("layer_types", kinds),)), "tp2", tmp_path, steps=1)
    assert not outcome.is_killed, outcome.row
    seen = {row.where for row in outcome.found.rows if row.what == "output"}
    assert "model.rotary_emb" not in seen
    assert {"model.layers.0.self_attn.q_norm", "model.layers.1.mlp.down_proj input", "model.norm"} < seen


def test_an_update_may_be_off_by_the_rounding_of_weights() -> None:
    weight, update = torch.full((16,), 1.0), torch.full((16,), 1e-3)
    found = rounding({"weight/a": weight, "update/a": update, "weight/b": weight, "update/b": torch.zeros(16)})
    assert 5e-5 < found["update/a"] < 7e-5  # half of 1.2e-7 in 1e-3
    assert found["update/b"] < 100  # relative to a millionth of all updates, not to its own


def test_a_continuation_is_left_to_chance_from_the_first_tie_on() -> None:
    margins = torch.tensor([[9.0, 9.0, 0.09, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0, 9.0]])
    assert left_to_chance(margins, 0.01) == pytest.approx(3 / 10 / 10)
    assert left_to_chance(margins, 0.001) == 0.0


def test_an_update_may_be_a_sign_that_is_left_to_chance() -> None:
    """Of 16 gradients 4 are below their noise: these may go the other way, at every step."""
    gradient = torch.tensor([1e-6] * 4 + [1.0] * 12)
    tensors = {
        f"{kind}/{name}": torch.full((16,), size) for kind, size in (("update", 1e-3), ("last", 0.5)) for name in "ab"
    }
    tensors |= {"clipped/a": gradient, "clipped/b": gradient}
    found = flips(tensors, {"clipped/a": 1e-4, "clipped/b": 1e-9}, 5)
    assert FACTOR * found["update/a"] == pytest.approx(1.0)  # a quarter of it twice as large: half of its norm, twice
    assert FACTOR * found["last/a"] == pytest.approx(5 * 1e-3 / 0.5)
    assert found["update/b"] == found["last/b"] == 0.0
