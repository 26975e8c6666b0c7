"""An adapter in a loop of one's own equals that of `peft`, and its folders are those of `peft`."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fivefold as ff
from tests.api import adapters
from tests.api.loop import assert_equal
from tests.pool import run_ranks
from tests.tiers import put_off

pytest.importorskip("peft")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "other"), [put_off("shard2", "pp2"), put_off("tp2", "shard2"), ("pp2", "cp2"), ("cp2", "tp2")]
)
def test_own_loop_with_an_adapter_equals_peft(layout: str, other: str, tmp_path: Path) -> None:
    """From a folder of `peft`: losses, norms and the adapter after three steps; saved, loaded under another layout; and
    exported, it gives `peft` the same logits."""
    model = adapters.of_peft()
    model.save_pretrained(tmp_path / "start")
    wanted = adapters.reference(model)
    for found, trained in run_ranks(2, adapters.train_on_rank, layout, tmp_path / "start", tmp_path):
        assert_equal(found, wanted)
        assert trained == sum(values.size for values in wanted.weights.values())
    for loaded in run_ranks(2, adapters.load_on_rank, other, tmp_path / "checkpoint"):
        for name, values in wanted.weights.items():
            np.testing.assert_allclose(loaded[name], values, rtol=0, atol=1e-10)
    ids = torch.arange(3, 20)[None]
    for folder in ("exported", "pretrained"):
        given = adapters.of_peft(tmp_path / folder)
        with torch.no_grad():
            torch.testing.assert_close(given(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "wrong", [{"rank": 0}, {"rank": 2.5}, {"alpha": -1}, {"alpha": float("nan")}, {"targets": ()}, {"quantize": "int8"}]
)
def test_values_that_no_adapter_has_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ff.UserError, match=next(iter(wrong))):
        ff.Lora(**wrong)  # type: ignore[arg-type]


def test_one_target_is_a_text() -> None:
    assert ff.Lora(targets="q_proj").targets == ("q_proj",)  # type: ignore[arg-type]
