"""How long a run is and how long it warms up: said in steps, tokens or epochs, settled once the data is known."""

from math import ceil
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.checkpoint import agreement, check_agreement
from fivefold.config import RunConfig, load_config
from fivefold.core.errors import UserError
from fivefold.data import prepare
from fivefold.training import schedule
from fivefold.training.schedule import learning_rate
from tests.data.helpers import config_for, prepare_texts, write_jsonl
from tests.pages import ROOT, blocks
from tests.training.bodies import column, run_dir, run_file, state, train


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("asked", "total", "expected"),
    [
        ("auto", 20, 1), ("auto", 1, 1), ("auto", 200, 10), ("auto", 1990, 100), ("auto", 10**6, 100),
        ("5%", 10**6, 50_000), (0.1, 30, 3), (0, 30, 0), (7, 3, 7), ("0%", 30, 0),
    ],
)  # fmt: skip
def test_the_warm_up_follows_the_run_unless_it_is_a_number(asked: Any, total: int, expected: int) -> None:
    settled = schedule.settled(config(scheduler={"warmup_steps": asked}), total, before=None)
    assert settled.scheduler.warmup_steps == expected and isinstance(settled.scheduler.warmup_steps, int)
    assert schedule.settled(settled, 10 * total, before=None) == settled


@pytest.mark.parametrize("asked", ["auto", "5%"])
def test_a_warm_up_that_is_left_open_is_that_of_the_checkpoint(asked: str) -> None:
    """Whatever it was: it may have been a number then."""
    open_ = config(scheduler={"warmup_steps": asked})
    for before in (0, 7, 500):
        assert schedule.settled(open_, 200, before=before).scheduler.warmup_steps == before


def test_the_run_file_of_the_readme_reaches_its_learning_rate(tmp_path: Path) -> None:
    (run_file,) = (each for each in blocks(ROOT / "README.md") if each.language == "yaml")
    (tmp_path / "notes.yaml").write_text(run_file.text)
    read = load_config(tmp_path / "notes.yaml")
    total, peak = read.train.max_steps, read.optimizer.learning_rate
    assert total
    warmup = schedule.settled(read, total, before=None).scheduler.warmup_steps
    assert isinstance(warmup, int)
    shape = {"name": read.scheduler.name, "peak": peak, "total_steps": total, "min_lr_ratio": 0.1}
    assert max(learning_rate(step, warmup_steps=warmup, **shape) for step in range(total)) == peak


def test_a_warm_up_that_is_longer_than_the_run_is_said_with_the_rate_it_reaches() -> None:
    long = config(scheduler={"warmup_steps": 100}, optimizer={"learning_rate": 1e-3})
    said = schedule.warning(long, 20)
    assert said and "warmup_steps 100 is longer than the run of 20 steps" in said and "reaches 0.0002" in said
    assert schedule.warning(long, 100) is None


@pytest.mark.parametrize("epochs", [1, 3, 0.5, 2.5, 0.1])
def test_epochs_are_as_many_passes_over_the_rows(tmp_path: Path, epochs: float) -> None:
    data = prepare_texts(tmp_path, ["x" * 40] * 50, packing=False)
    asked = config(train={"max_epochs": epochs, "global_batch_size": 4})
    steps = schedule.total_steps(asked, data)
    assert steps == {1: 13, 3: 38, 0.5: 7, 2.5: 32, 0.1: 2}[epochs]
    order = data.train._order
    seen = [order[place] for place in range(4 * steps)]
    assert all(seen.count(row) >= int(epochs) for row in range(50))
    assert schedule.total_steps(config(train={"max_steps": 7}), data) == 7
    for tokens, expected in ((41 * 8, 2), (41 * 8 + 1, 3), (1, 1)):
        assert schedule.total_steps(config(train={"max_tokens": tokens, "global_batch_size": 4}), data) == expected


def test_an_epoch_has_the_share_of_a_source_that_its_weight_says(tmp_path: Path) -> None:
    sources = [
        {"path": str(write_jsonl(tmp_path / f"{weight}.jsonl", [f"{weight} {n}" for n in range(30)])), "weight": weight}
        for weight in (1.0, 0.5)
    ]
    data = prepare(config_for(sources, packing=False), cache=tmp_path / "cache")
    asked = config(train={"max_epochs": 2, "global_batch_size": 4})
    assert schedule.total_steps(asked, data) == 23  # 2 x (30 + 15) rows


def test_a_tenth_is_a_tenth(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, ["x" * 40] * 100, packing=False)
    assert schedule.total_steps(config(train={"max_epochs": 0.1, "global_batch_size": 10}), data) == 1


def test_one_of_the_three_is_set(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {max_epochs: 3}\n")
    loaded = load_config(tmp_path / "run.yaml").train
    assert (loaded.max_steps, loaded.max_tokens, loaded.max_epochs) == (None, None, 3)
    loaded = load_config(tmp_path / "run.yaml", ["train.max_steps=5"]).train
    assert (loaded.max_steps, loaded.max_epochs) == (5, None)
    loaded = load_config(tmp_path / "run.yaml", ["train.max_epochs=1.5"]).train
    assert (loaded.max_steps, loaded.max_epochs) == (None, 1.5)
    with pytest.raises(UserError, match="max_tokens and max_epochs are both set; keep one"):
        load_config(tmp_path / "run.yaml", ["train.max_tokens=5", "train.max_epochs=1"])
    for wrong in ("0", "-1", "true", "many", ".nan", ".inf"):
        with pytest.raises(UserError, match=r"train\.max_epochs"):
            load_config(tmp_path / "run.yaml", [f"train.max_epochs={wrong}"])


def test_what_is_said_of_the_epochs(tmp_path: Path) -> None:
    data = prepare_texts(tmp_path, ["x" * 40] * 50, packing=False)
    asked = config(train={"global_batch_size": 4})
    assert schedule.epochs_text(asked, data, 25) == "2 epochs: 25 steps over 50 rows"
    assert schedule.epochs_text(asked, data, 3) == "0.24 epochs: 3 steps over 50 rows"
    assert schedule.epochs_text(asked, data, 10**6) == "80,000 epochs: 1,000,000 steps over 50 rows"


def test_a_warm_up_left_open_agrees_with_what_a_checkpoint_has() -> None:
    saved = agreement(config(scheduler={"warmup_steps": 100}), "f")
    for open_ in ("auto", "5%"):
        check_agreement(saved, agreement(config(scheduler={"warmup_steps": open_}), "f"))
    with pytest.raises(UserError, match=r"scheduler.warmup_steps is 5, but the checkpoint was trained with 100"):
        check_agreement(saved, agreement(config(scheduler={"warmup_steps": 5}), "f"))


@pytest.mark.full
def test_a_run_that_is_made_longer_keeps_its_warm_up(tmp_path: Path) -> None:
    """A finished run of 21 steps, whose 5% are 2, goes on to 41, whose 5% would be 3, then to 1.3 epochs."""
    tree = run_file(tmp_path, train__max_steps=21, train__global_batch_size=2, train__check_every=0)
    del tree["scheduler"]
    ran = train(tree, world=1)
    assert ran.error is None and "warm-up 2 steps, then cosine" in ran.screen
    assert "epochs: 21 steps over" in ran.screen.split("step 1/21")[0]  # at the start
    assert "epochs: 21 steps over" in ran.screen.split("step 21/21")[1]  # and at the end
    assert max(column(tree, "train/learning_rate")) == 1e-2
    own = yaml.safe_load((run_dir(tree) / "run.yaml").read_text())
    assert own["scheduler"]["warmup_steps"] == 2
    tree["train"]["max_steps"] = 41
    assert train(tree, world=1).error is None
    rates = column(tree, "train/learning_rate")
    assert rates[:2] == [5e-3, 1e-2] and rates[21] < 1e-2 and len(rates) == 41
    own = yaml.safe_load((run_dir(tree) / "run.yaml").read_text())
    assert own["scheduler"]["warmup_steps"] == 2
    del tree["train"]["max_steps"]
    tree["train"]["max_epochs"] = 1.3
    ran = train(tree, world=1)
    assert ran.error is None and "warm-up 2 steps" in ran.screen
    rows = int(ran.screen.split(" epochs: ")[1].split()[3])
    assert len(column(tree, "train/loss")) == ceil(1.3 * rows / 2) > 41


@pytest.mark.full
def test_a_warm_up_too_long_is_said_on_the_screen(tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=1, scheduler__warmup_steps=50)
    ran = train(tree, world=1)
    assert ran.error is None and "WARNING  scheduler.warmup_steps 50 is longer than the run of 1 step" in ran.screen


@pytest.mark.full
def test_the_last_step_of_a_run_trains(tmp_path: Path) -> None:
    """Down to a lowest rate of 0: what `transformers` gives, and no step without an update."""
    scheduler = {"name": "linear", "warmup_steps": 0, "min_lr_ratio": 0.0}
    tree = run_file(tmp_path, train__max_steps=3, checkpoint__every=1, optimizer__learning_rate=3e-3)
    tree["scheduler"] = scheduler
    assert train(tree, world=1).error is None
    assert column(tree, "train/learning_rate") == pytest.approx([0.003, 0.002, 0.001])
    before, after = state(tree, 2), state(tree, 3)
    weights = [name for name in after if name.startswith("weight")]
    assert weights and all(not before[name].equal(after[name]) for name in weights)


def test_the_tokens_of_a_run_are_about_those_it_reads(tmp_path: Path) -> None:
    data, rows = prepare_texts(tmp_path, ["a" * length for length in range(1, 90)]), 8
    one = {"data_rank": 0, "data_ranks": 1, "micro_batch_size": 2, "row_multiple": 1}
    read = sum(batch.tokens for step in range(5) for batch in data.train.batch(step, global_batch_size=rows, **one))
    planned = schedule.total_tokens(config(train={"global_batch_size": rows, "micro_batch_size": 2}), data, 5)
    assert planned == pytest.approx(read, rel=0.05)
