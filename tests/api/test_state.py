"""Saved under one layout and loaded under another; exported; evaluated; asked for text."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fivefold as ff
from tests.api import state
from tests.pool import run_ranks
from tests.tiers import put_off

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("adamw", "tp2", "shard2"),
        ("sgd", "shard2", "pp2"),
        put_off("adamw", "pp2", "tp2"),
        put_off("sgd", "tp2", "tp2"),
    ],
)
def test_saved_under_one_layout_goes_on_under_another(kind: str, before: str, after: str, tmp_path: Path) -> None:
    """Weights and optimizer state bit for bit; the next step as if nothing had been saved."""
    (saved, went_on), _ = run_ranks(2, state.save, before, kind, tmp_path / "a")
    for loaded, next_step, options in run_ranks(2, state.load, after, kind, tmp_path / "a"):
        assert all(np.array_equal(loaded[name], values) for name, values in saved.items())
        for name, values in went_on.items():
            if before == after:
                assert np.array_equal(next_step[name], values), name
            np.testing.assert_allclose(next_step[name], values, rtol=0, atol=1e-10, err_msg=name)
        assert [group["weight_decay"] for group in options] == [0.1, 0.0, 0.03]
        assert all(group["lr"] != 7.0 for group in options)
        assert [group.get("betas") for group in options] == [(0.9, 0.999) if kind == "adamw" else None] * 3


@pytest.mark.parametrize(
    ("layout", "frozen"),
    [put_off("dp2", ""), ("tp2", ""), put_off("pp2", "but the head"), ("pp2", "but the embedding")],
)
def test_whatever_an_optimizer_keeps_comes_back_as_it_was(layout: str, frozen: str, tmp_path: Path) -> None:
    """Counts stay integers, a moment in bf16 stays in bf16, and what has a shape of its own is there. Where all but the
    head, or the embedding, is frozen, one rank of the pipeline, the first or the last, has nothing to say of it."""
    assert all(run_ranks(2, state.odd_state, layout, frozen, tmp_path / "a"))


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert all(run_ranks(2, state.wrong_states, tmp_path))


@pytest.mark.parametrize(("layout", "name"), [put_off("tp2", "llama"), ("pp2", "tied"), ("shard2.ep2", "moe")])
def test_the_whole_model_is_exported_from_every_layout(layout: str, name: str, tmp_path: Path) -> None:
    expected, _ = run_ranks(2, state.exported, layout, name, tmp_path)
    found = state.weights_of(tmp_path / "pretrained", torch.float64)
    assert all(np.array_equal(found[each], values) for each, values in expected.items())
    found = state.weights_of(tmp_path / "exported", torch.float32)
    assert all(np.array_equal(found[each], values.astype(np.float32)) for each, values in expected.items())
    names = {path.name for path in (tmp_path / "pretrained").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}


@cache
def expected(name: str) -> tuple[Any, ...]:
    return state.text_of_one_process(name)


@pytest.mark.parametrize(
    ("layout", "name"), [("shard2+zero1", "llama"), put_off("tp2", "llama"), ("cp2", "llama"), ("pp2", "tied")]
)
def test_logits_evaluation_and_text_are_those_of_one_process(layout: str, name: str) -> None:
    """And stay so after a step: nothing that was gathered before it is used after it."""
    for found in run_ranks(2, state.text, layout, name):
        for mine, theirs in zip(found, expected(name), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-10)


def test_a_model_of_sixteen_bits_comes_out_in_sixteen_bits(tmp_path: Path) -> None:
    assert run_ranks(1, sixteen_bits, tmp_path)[0] == (torch.bfloat16, "bf16", torch.float32, "fp32")


def sixteen_bits(path: Path) -> tuple[Any, ...]:
    """What it comes out as, and what it computes and is kept in; and what a model in fp32 computes in."""
    model = ff.parallelize(state.build("llama").bfloat16(), ff.Layout())
    model.save_pretrained(path)
    stored = state.AutoModelForCausalLM.from_pretrained(path, dtype="auto").dtype
    own = ff.parallelize(state.build("llama").float(), ff.Layout())
    return stored, model.layout.precision, next(model.parameters()).dtype, own.layout.precision
