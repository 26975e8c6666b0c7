"""Runs that train on pairs of answers: what they compare with, what they write, and that they go on as they were."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.config import RunConfig, check_supported
from fivefold.core.errors import UserError
from fivefold.training.objectives import METRICS, RATED_METRICS
from tests.tiers import put_off
from tests.training import bodies
from tests.training.bodies import Stopped, column, run_dir, run_file, same, state, train, train_alone

WORDS = ["eins", "zwei", "drei", "vier", "acht"]


def tree_of(folder: Path, objective: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    records = []
    for _ in range(43):
        said = rng.choice(WORDS, int(rng.integers(1, 4))).tolist()
        records.append({"prompt": " ".join(said) + ":", "chosen": " ja", "rejected": " nein" * int(rng.integers(1, 3))})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    tree = run_file(folder, data__train=str(folder / "pairs.jsonl"), **changes)
    return tree | {"objective": objective or {"name": "dpo", "beta": 0.5}}


@pytest.mark.full
def test_a_run_prefers_what_was_chosen_and_says_so(tmp_path: Path) -> None:
    tree = tree_of(
        tmp_path, train__max_steps=8, data__validation=0.2, eval__every=4, eval__metric="eval/rewards/margins",
        checkpoint__keep_best=1,
    )  # fmt: skip
    ran = train_alone(tree)
    assert ran.error is None and "compared" in ran.screen and "with the first weights" in ran.screen
    assert "computed now" in ran.screen
    losses, accuracies = column(tree, "train/loss"), column(tree, "rewards/accuracies")
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6) and losses[-1] < 0.3  # its own reference, at first
    assert column(tree, "rewards/margins")[0] == pytest.approx(0, abs=1e-5) and accuracies[-1] == 1
    rows = bodies.metrics(tree)
    assert all(set(METRICS) <= set(row) for row in rows)
    evaluated = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert len(evaluated) == 2 and evaluated[1] < evaluated[0] < math.log(2)
    margins = [row["eval/rewards/margins"] for row in rows if "eval/loss" in row]
    assert 0 < margins[0] < margins[1] and rows[-1]["eval/best"] == margins[1] and rows[-1]["eval/best_step"] == 8
    assert f"step 8: eval/rewards/margins {margins[1]:.4f}" in ran.screen
    assert {f"eval/{name}" for name in METRICS} <= set(rows[-1])


@pytest.mark.full
def test_a_preference_drops_nothing(tmp_path: Path) -> None:
    """Neither features nor attention: it compares two passes of the model."""
    found = []
    for name, p in (("without", 0.0), ("with", 0.4)):
        tree = tree_of(tmp_path, run__name=name, train__max_steps=3)
        tree["model"]["overrides"], tree["adapter"] = {"attention_dropout": p}, {"name": "lora", "dropout": p}
        assert train(tree, 1).error is None
        found.append(column(tree, "train/loss"))
    assert found[0] == found[1] and len({*found[0]}) == 3


@pytest.mark.full
def test_four_bits_are_compared_with_four_bits(tmp_path: Path) -> None:
    """And not with the numbers of the same model in full, which are in the cache."""
    for quantize in ("none", "nf4"):
        tree = tree_of(tmp_path, run__name=quantize, train__max_steps=1)
        tree["model"]["overrides"] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
        ran = train_alone(tree | {"adapter": {"name": "lora", "quantize": quantize}})
        assert ran.error is None and "computed now" in ran.screen
        assert column(tree, "train/loss")[0] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.full
def test_resumed_is_bitwise_the_run_left_alone_and_computes_no_reference(tmp_path: Path) -> None:
    options: dict[str, Any] = {"train__max_steps": 5, "checkpoint__every": 2}
    alone, stopped = (tree_of(tmp_path, run__name=name, **options) for name in ("alone", "stopped"))
    assert train_alone(alone).error is None
    ran = train_alone(stopped, stop_at=4)
    assert isinstance(ran.error, Stopped) and "from the cache" in ran.screen
    ran = train_alone(stopped)
    assert ran.error is None and "from the cache" in ran.screen and "step 2 of 5" in ran.screen
    for name in ("train/loss", "train/grad_norm", *METRICS):
        assert column(stopped, name) == column(alone, name), name
    assert same(state(stopped, 5), state(alone, 5))


@pytest.mark.full
def test_what_is_damaged_in_the_cache_is_computed_again(tmp_path: Path) -> None:
    first, again = (tree_of(tmp_path, run__name=name, train__max_steps=2) for name in ("first", "again"))
    assert train_alone(first).error is None
    (file,) = (tmp_path / "cache" / "reference").glob("*/*.npy")
    file.write_bytes(file.read_bytes()[:-8] + b"\x01" * 8)
    ran = train_alone(again)
    assert ran.error is None and "computed now" in ran.screen
    assert column(again, "train/loss") == column(first, "train/loss")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "world"),
    [
        ({"pp": 2}, 2),
        put_off({"dp_shard": 2, "tp": 2}, 4),
        put_off({"tp": 2}, 2),
        put_off({"cp": 2}, 2),
        put_off({}, 1),
    ],
)
def test_a_run_under_another_layout_follows(tmp_path: Path, layout: dict[str, int], world: int) -> None:
    """Its reference too: computed by that layout."""
    options: dict[str, Any] = {"train__max_steps": 3}
    alone, other = tree_of(tmp_path, run__name="alone", **options), tree_of(tmp_path, run__name="other", **options)
    assert train_alone(alone).error is None
    shutil.rmtree(tmp_path / "cache" / "reference")
    ran = train({**other, "layout": layout}, world)
    assert ran.error is None and "computed now" in ran.screen
    for name in ("train/loss", "train/grad_norm", *METRICS):
        assert column(other, name) == pytest.approx(column(alone, name), rel=1e-3, abs=2e-4), name


@pytest.mark.full
def test_another_model_as_the_reference(tmp_path: Path) -> None:
    """Its log-probabilities are compared with, and the run starts from its own weights all the same."""
    base = tree_of(tmp_path, run__name="base", train__max_steps=1, checkpoint__export_hf=True, train__seed=11)
    assert train_alone(base).error is None
    folder = str(run_dir(base) / "hf")
    plain, other = (
        tree_of(tmp_path, {"name": "dpo", **which}, run__name=name, train__max_steps=2)
        for name, which in (("plain", {}), ("other", {"reference": folder}))
    )
    assert train_alone(plain).error is None and train_alone(other).error is None
    assert column(other, "logps/chosen")[0] == column(plain, "logps/chosen")[0]
    assert abs(column(other, "rewards/margins")[0]) > 1e-3 > abs(column(plain, "rewards/margins")[0])


@pytest.mark.full
def test_a_cache_that_cannot_be_written_is_told_before_the_reference_is_computed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "reference").write_text("in its way")
    ran = train(tree_of(tmp_path), 1)
    assert isinstance(ran.error, UserError) and "cannot write to the cache folder" in ran.error.what
    assert "computing log-probabilities" not in ran.screen
    (tmp_path / "cache" / "reference").unlink()
    ran = train(tree_of(tmp_path), 1)
    assert ran.error is None and "computing log-probabilities" in ran.screen


@pytest.mark.full
def test_what_log_probabilities_follow_from_is_in_their_key(tmp_path: Path) -> None:
    """Not the adapter, which changes nothing at first; but what its base rests in."""
    wide = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}
    lora = {"name": "lora", "rank": 2}
    for number, (change, is_new) in enumerate([
        ({}, True), ({"adapter": lora}, False), ({"adapter": {**lora, "quantize": "nf4"}}, True),
        ({"adapter": {**lora, "quantize": "nf4", "targets": ["q_proj"]}}, True),
        ({"precision": {"compute": "bf16"}}, True), ({"model": {"init": "random"}, "train": {"seed": 8}}, True),
        ({"data": {}}, True),
    ]):  # fmt: skip
        tree = tree_of(tmp_path, run__name=f"run{number}", train__max_steps=1, optimizer__learning_rate=0.0)
        tree["model"]["overrides"] = wide
        if "data" in change:  # as many pairs, of other words
            text = (tmp_path / "pairs.jsonl").read_text()
            (tmp_path / "pairs.jsonl").write_text(text.replace("ja", "so"))
        for section, values in change.items():
            tree[section] = {**tree.get(section, {}), **values}
        ran = train(tree, 1)
        assert ran.error is None and ("computed now" in ran.screen) == is_new, (change, ran.screen)
        assert column(tree, "train/loss")[0] == pytest.approx(math.log(2), rel=1e-5), change


@pytest.mark.full
def test_held_out_pairs_have_their_own_reference(tmp_path: Path) -> None:
    """A model that has not changed is its own reference."""
    tree = tree_of(tmp_path, train__max_steps=1, data__validation=0.3, eval__every=1, optimizer__learning_rate=0.0)
    assert train_alone(tree).error is None
    (found,) = [row for row in bodies.metrics(tree) if "eval/loss" in row]
    assert found["eval/loss"] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_without_a_reference_none_is_computed(tmp_path: Path, name: str) -> None:
    tree = tree_of(tmp_path, {"name": name}, train__max_steps=3)
    ran = train_alone(tree)
    assert ran.error is None and "compared" not in ran.screen and not (tmp_path / "cache" / "reference").exists()
    assert column(tree, "train/loss")[-1] < column(tree, "train/loss")[0]


@pytest.mark.full
def test_rated_answers(tmp_path: Path) -> None:
    """A run of them, and the same under another layout."""
    objective = {"name": "kto", "beta": 0.5}
    one, other = (tree_of(tmp_path, objective, run__name=name, train__max_steps=5) for name in ("one", "other"))
    ran = train_alone(one)
    assert ran.error is None and "rated answers" in ran.screen and "with the first weights" in ran.screen
    losses = column(one, "train/loss")
    assert losses[0] == pytest.approx(0.5, rel=1e-6) and losses[-1] < 0.4  # its own reference, at first
    assert set(RATED_METRICS) <= set(bodies.metrics(one)[-1])
    assert train({**other, "layout": {"tp": 2}}).error is None
    for name in ("train/loss", "train/grad_norm", *RATED_METRICS):
        assert column(other, name) == pytest.approx(column(one, name), rel=1e-3, abs=2e-4), name


def test_a_capacity_is_refused(tmp_path: Path) -> None:
    config = RunConfig.model_validate(tree_of(tmp_path, balance__capacity_factor=1.0))
    with pytest.raises(UserError, match="the reference drops no tokens"):
        check_supported(config)


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"name": "kto", "reference": "none"}, "kto compares with one"),
        ({"name": "dpo", "reference": "none"}, "dpo compares with one"),
        ({"name": "orpo", "reference": "base"}, "orpo does not use"),
        ({"name": "dpo", "beta": 0}, "greater than 0"),
    ],
)
def test_what_does_not_fit_together_is_refused(tmp_path: Path, section: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RunConfig.model_validate(tree_of(tmp_path, section))


@pytest.mark.full
def test_the_objective_of_a_run_may_not_change(tmp_path: Path) -> None:
    tree = tree_of(tmp_path, train__max_steps=2)
    assert train_alone(tree).error is None
    ran = train_alone({**tree, "objective": {"name": "dpo", "beta": 0.4}, "train": {**tree["train"], "max_steps": 3}})
    assert isinstance(ran.error, UserError) and "objective.beta" in ran.error.what
