"""`train` from the run file to the last line on the screen, on two ranks unless said."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from fivefold.checkpoint import shard, steps
from fivefold.config import RunConfig
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.run_folder import METRICS, RUN_FILES
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.data.prepare import prepare
from fivefold.report.run import main as report
from fivefold.training.checkpoints import CheckpointManager
from fivefold.training.schedule import learning_rate
from tests.checkpoint.folders import hf_folder
from tests.data.helpers import random_texts, segments, write_jsonl
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import (
    SEQ,
    Ran,
    column,
    metrics,
    on_rank,
    run_dir,
    run_file,
    same,
    state,
    train,
    write_corpus,
)

pytestmark = pytest.mark.full

KEYS = {
    "step", "train/loss", "train/grad_norm", "train/learning_rate", "train/tokens_seen", "perf/tokens_per_second",
    "perf/tokens_per_second_per_device", "perf/tflops_per_device", "perf/mfu_pct", "perf/step_seconds",
    "perf/data_wait_pct", "memory/peak_gib",
}  # fmt: skip


def prepared(tree: dict[str, Any]) -> Any:
    """The data of a run that has been trained: found in its cache."""
    return prepare(RunConfig.model_validate(tree), cache=Path(tree["run"]["dir"]) / "cache")


def tokens_of(tree: dict[str, Any], step: int) -> int:
    """Real input tokens of the global batch of a step."""
    (rows,) = prepared(tree).train.batch(
        step, global_batch_size=8, data_rank=0, data_ranks=1, micro_batch_size=8, row_multiple=2
    )
    return int(rows.tokens)


def files_of(run: Path) -> list[str]:
    """Every file of a run folder, by its path in it."""
    return [file.relative_to(run).as_posix() for file in run.rglob("*") if file.is_file()]


def is_described(name: str) -> bool:
    """True if `RUN_FILES` has the file, or a folder with it (but a checkpoint, whose files it has one by one)."""
    for each in RUN_FILES:
        pattern = re.sub("N+|R+", r"\\d+", re.escape(each).replace("NAME", ".+"))
        inside = ".+" if each.endswith("/") and not each.endswith("step-NNNNNN/") else ""
        if re.fullmatch(pattern + inside, name):
            return True
    return False


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    """bf16, as by default; the text is split, so that it has a validation loss."""
    write_corpus(tmp_path / "more.txt", 3001, seed=8)
    tree = run_file(
        tmp_path, data__validation=[str(tmp_path / "more.txt")], precision__compute="bf16", train__max_steps=12,
        eval__every=5, eval__max_tokens=500, sample__prompts=["der "], sample__every=12,
        log__to=["jsonl", "tensorboard"],
    )  # fmt: skip
    ran = train(tree)
    assert ran.error is None
    rows = metrics(tree)
    assert column(tree, "step") == list(range(1, 13))
    assert all(set(row) >= KEYS for row in rows)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.5  # it learns
    assert [row["step"] for row in rows if "eval/loss" in row] == [5, 10, 12]
    assert rows[-1]["eval/loss"] == pytest.approx(rows[-1]["train/loss"], rel=0.1)
    seen = [sum(tokens_of(tree, step) for step in range(done)) for done in range(1, 13)]
    assert column(tree, "train/tokens_seen") == seen
    assert seen[-1] < 12 * 8 * SEQ  # rows are not full: padding is not counted
    options = {"name": "cosine", "peak": 1e-2, "warmup_steps": 2, "total_steps": 12, "min_lr_ratio": 0.1}
    assert column(tree, "train/learning_rate") == [learning_rate(step, **options) for step in range(12)]
    for row in rows:
        assert row["perf/mfu_pct"] is None  # no peak is known for a CPU
        assert row["perf/tokens_per_second"] == pytest.approx(2 * row["perf/tokens_per_second_per_device"])
        assert row["perf/tflops_per_device"] > 0 and row["memory/peak_gib"] > 0
        assert 0 <= row["perf/data_wait_pct"] <= 100
    (sample,) = [json.loads(line) for line in (run_dir(tree) / "samples.jsonl").read_text().splitlines()]
    assert sample["step"] == 12 and sample["prompt"] == "der " and sample["text"]
    assert RunConfig.model_validate(tree).to_yaml() == (run_dir(tree) / "run.yaml").read_text()
    assert list((run_dir(tree) / "tensorboard").glob("events.out.tfevents.*"))
    assert {name for row in rows for name in row} <= METRICS.keys()
    assert [name for name in files_of(run_dir(tree)) if not is_described(name)] == []
    for said in ("LlamaForCausalLM", "shard2", "step 1/12", "validation loss", "sample @12", "fivefold generate"):
        assert said in ran.screen
    page = report(run_dir(tree)).read_text()
    for said in ("12 steps", "shard2", "dp_shard 1", "reduce_scatter", "perplexity", "each of the 2 ranks"):
        assert said in page


def test_tensorboard_holds_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tree = run_file(tmp_path, train__max_steps=3, log__to=["tensorboard"])
    train(tree)
    events = EventAccumulator(str(run_dir(tree) / "tensorboard")).Reload()
    for name in ("train/loss", "train/tokens_seen"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx(column(tree, name))
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3]


def test_nothing_is_written_for_tensorboard_unless_asked(tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=1)
    train(tree)
    assert sorted(path.name for path in run_dir(tree).iterdir()) == [
        ".lock",
        "checkpoints",
        "history.jsonl",
        "logs",
        "metrics.jsonl",
        "run.yaml",
        "spread.json",
    ]


@pytest.mark.parametrize("compute", ["bf16"])
def test_repeated_runs_are_bitwise_equal(tmp_path: Path, compute: str) -> None:
    first, again = (run_file(tmp_path, run__name=name, precision__compute=compute) for name in ("first", "again"))
    train(first), train(again)
    for name in ("train/loss", "train/grad_norm"):
        assert column(first, name) == column(again, name)
    assert same(state(first, 6), state(again, 6))


@pytest.mark.parametrize("layout", [{"tp": 2}, put_off({"dp_replicate": 2})])
def test_the_loss_does_not_depend_on_the_layout(tmp_path: Path, layout: dict[str, int]) -> None:
    write_corpus(tmp_path / "more.txt", 1501, seed=8)  # 25 rows: no layout deals them evenly
    plain, other = (
        run_file(tmp_path, run__name=name, data__validation=str(tmp_path / "more.txt"), eval__every=3)
        for name in ("plain", "other")
    )
    other["layout"] = layout
    train(plain, world=1), train(other)
    assert column(other, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=1e-4)
    assert column(other, "train/loss")[0] == pytest.approx(column(plain, "train/loss")[0], rel=1e-6)
    assert column(other, "train/tokens_seen") == column(plain, "train/tokens_seen")
    for found, expected in zip(column(other, "eval/loss"), column(plain, "eval/loss"), strict=True):
        assert found == (expected if expected is None else pytest.approx(expected, rel=1e-4))
    assert None not in (column(plain, "eval/loss")[2], column(plain, "eval/loss")[5])


def test_recompute_changes_nothing(tmp_path: Path) -> None:
    plain, full = run_file(tmp_path, run__name="plain"), run_file(tmp_path, run__name="full", memory__recompute="full")
    train(plain), train(full)
    assert column(plain, "train/loss") == column(full, "train/loss")
    assert same(state(plain, 6), state(full, 6))


# ---- how long, how often ---------------------------------------------------------------------------------------------


def test_no_validation(tmp_path: Path) -> None:
    tree = run_file(tmp_path, eval__every=2, train__max_steps=2)
    assert train(tree).error is None
    assert not any("eval/loss" in row for row in metrics(tree))


def test_never_means_never(tmp_path: Path) -> None:
    """`every: 0`: no evaluation and no sample, at the end neither; the last checkpoint is always written."""
    tree = run_file(
        tmp_path, data__validation="30%", eval__every=0, sample__every=0, sample__prompts=["der"], train__max_steps=2
    )
    write_corpus(tmp_path / "corpus.txt", 40_001)  # more than one block, so that some of them are held out
    assert train(tree).error is None
    assert prepared(tree).validation is not None
    assert not any("eval/loss" in row for row in metrics(tree))
    assert not (run_dir(tree) / "samples.jsonl").exists()
    assert state(tree, 2)


def test_fewer_rows_than_a_batch(tmp_path: Path) -> None:
    """Rows come again within one batch; each rank still has all of its micro batches."""
    tree = run_file(tmp_path, train__max_steps=3)
    write_corpus(tmp_path / "corpus.txt", 150)
    assert train(tree).error is None
    assert len(prepared(tree).train) < 8
    assert column(tree, "train/tokens_seen") == [sum(tokens_of(tree, s) for s in range(n)) for n in (1, 2, 3)]


@pytest.mark.parametrize("max_tokens", [put_off(1), 900, put_off(1500)])
def test_max_tokens(tmp_path: Path, max_tokens: int) -> None:
    """As many steps as reach it at the mean fill of the rows, and no more."""
    tree = run_file(tmp_path, train__max_steps=None, train__max_tokens=max_tokens)
    assert train(tree).error is None
    per_step = 8 * prepared(tree).train.counts.tokens / len(prepared(tree).train)
    steps = column(tree, "step")[-1]
    assert per_step * (steps - 1) < max_tokens <= per_step * steps
    options = {"name": "cosine", "peak": 1e-2, "warmup_steps": 2, "total_steps": steps, "min_lr_ratio": 0.1}
    assert column(tree, "train/learning_rate")[-1] == learning_rate(steps - 1, **options)


def test_rows_of_metrics_every_few_steps(tmp_path: Path) -> None:
    tree = run_file(tmp_path, log__every=4)
    train(tree)
    assert column(tree, "step") == [4, 6]


# ---- the weights a run starts from -----------------------------------------------------------------------------------


def loss_of_transformers(model: Any, batches: list[MicroBatch]) -> float:
    """The mean over targets, every document its own sequence."""
    total, targets = 0.0, 0
    for tokens, labels, _ in (segment for batch in batches for segment in segments(batch)):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0]
        total += float(F.cross_entropy(logits, torch.tensor(labels), reduction="sum"))
        targets += sum(label != IGNORE for label in labels)
    return total / targets


@pytest.mark.parametrize("layout", [put_off({}), {"tp": 2}])
def test_pretrained_weights_have_the_losses_of_transformers(tmp_path: Path, layout: dict[str, int]) -> None:
    """Of the first batch and, with a rate of zero, of the first rows held out: short documents, several in a row."""
    folder = hf_folder(Case("single", overrides=(("vocab_size", 263), ("pad_token_id", None))), tmp_path / "model")
    texts = write_jsonl(tmp_path / "texts.jsonl", random_texts(5, longest=40))
    tree = run_file(
        tmp_path, model__name_or_path=str(folder), model__init="pretrained", tokenizer__name_or_path="auto",
        train__max_steps=1, data__validation=str(texts), eval__max_tokens=500, optimizer__learning_rate=0.0,
    )  # fmt: skip
    tree["layout"] = layout
    assert train(tree).error is None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    one_rank = {"data_rank": 0, "data_ranks": 1, "row_multiple": 2}
    first = prepared(tree).train.batch(0, global_batch_size=8, micro_batch_size=8, **one_rank)
    assert column(tree, "train/loss")[0] == pytest.approx(loss_of_transformers(model, first), rel=1e-6)
    held_out = list(prepared(tree).validation.sequential(micro_batch_size=1, max_tokens=500, **one_rank))
    assert 500 <= sum(batch.tokens for batch in held_out) < 500 + SEQ
    assert column(tree, "eval/loss")[0] == pytest.approx(loss_of_transformers(model, held_out), rel=1e-6)


def refusal(tree: dict[str, Any]) -> UserError:
    error = train(tree).error
    assert type(error) is UserError
    return error


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    folder = hf_folder(Case("single"), tmp_path / "model")  # 101 tokens, and a tokenizer of 257
    tree = run_file(tmp_path, model__name_or_path=str(folder), model__init="pretrained")
    error = refusal(tree)
    assert "the tokenizer has 257 tokens, the model's vocabulary 101" in error.what
    tree["model"] = {"name_or_path": str(folder), "init": "random", "overrides": {"vocab_size": 211}}
    assert "211" in refusal(tree).what


def test_rows_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    error = refusal(run_file(tmp_path, data__seq_length=65))
    assert error.what.startswith("data.seq_length 65") and "64" in error.fix


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    error = refusal(run_file(tmp_path, train__global_batch_size=6))
    assert "global_batch_size 6" in error.what and "4 or 8" in error.fix


# ---- steps that are not finite ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "what"), [("nan_loss", "loss"), ("inf_gradient", "gradient")])
def test_a_step_that_is_not_finite_is_skipped_counted_and_said(tmp_path: Path, fault: str, what: str) -> None:
    """On one rank alone; two in a row, then one more later, which is not three in a row."""
    tree = run_file(tmp_path, checkpoint__every=1, train__max_steps=6)
    ran = train(tree, **{fault: (2, 3, 5)})
    assert ran.error is None
    assert column(tree, "train/skipped_steps") == [0, 1, 2, 2, 3, 3]
    bad = "train/loss" if what == "loss" else "train/grad_norm"
    assert [value is None for value in column(tree, bad)] == [False, True, True, False, True, False]
    assert re.findall(r"note: (.*)", ran.screen) == [
        f"step {step}: the {what} is not finite; the update was skipped" for step in (2, 3, 5)
    ]
    assert "3 steps skipped" in ran.screen
    states = {step: state(tree, step) for step in range(1, 7)}
    for step in range(2, 7):  # weights and moments are as they were, to the last bit
        assert same(states[step - 1], states[step]) is (step in (2, 3, 5))


@pytest.mark.parametrize("layout", [{"tp": 2}])
def test_three_in_a_row_stop_the_run(tmp_path: Path, layout: dict[str, int]) -> None:
    tree = run_file(tmp_path, train__max_steps=9)
    tree["layout"] = layout
    error = train(tree, inf_gradient=(2, 3, 4, 5)).error
    assert type(error) is RunFailed and error.exit_code == 1
    assert "3 steps in a row" in error.what and "step 4" in error.what and "optimizer.learning_rate" in error.fix
    assert column(tree, "step") == [1, 2, 3, 4]  # the last one too
    assert column(tree, "train/skipped_steps") == [0, 1, 2, 3]


def ended_before_the_save(tree: dict[str, Any]) -> list[str]:
    """Events of the history at the moment when a run that has failed begins to wait for its last save."""
    seen: list[str] = []
    close = CheckpointManager.close

    def closing(manager: CheckpointManager) -> None:
        seen.extend(json.loads(line)["event"] for line in (run_dir(tree) / "history.jsonl").read_text().splitlines())
        close(manager)

    with patch.object(CheckpointManager, "close", closing):
        on_rank(tree, stop_at=2)
    return seen


@pytest.mark.full
def test_the_history_has_an_error_before_a_save_is_waited_for(tmp_path: Path) -> None:
    """A rank that waits for others may be ended there."""
    tree = run_file(tmp_path)
    assert run_ranks(1, partial(ended_before_the_save, tree)) == [["start", "end"]]
    assert (run_dir(tree) / "history.jsonl").read_text().count('"end"') == 1


def test_a_validation_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    tree = run_file(tmp_path, data__validation=str(tmp_path / "corpus.txt"), train__max_steps=1)
    tree["optimizer"]["learning_rate"] = 1e11
    assert train(tree, world=1).error is None
    assert column(tree, "eval/loss") == [None]


# ---- a full disk -----------------------------------------------------------------------------------------------------


def train_on_full_disk(tree: dict[str, Any], failing: set[int]) -> Ran:
    """Saves of these steps fail on the last rank."""
    plain = shard.write

    def write(path: Path, *rest: Any) -> Any:
        step = int(path.parent.name.rpartition("-")[2])
        if step in failing and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(28, "No space left on device")
        return plain(path, *rest)

    with patch.object(shard, "write", write):
        return on_rank(tree)


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path: Path, background: bool) -> None:
    tree = run_file(tmp_path, checkpoint__every=2, checkpoint__async=background)
    ran = run_ranks(2, train_on_full_disk, tree, {4})[0]
    assert ran.error is None and steps(run_dir(tree) / "checkpoints") == [2, 6]
    assert re.search(
        r"note: step [56]: .*step-000004 could not be written.*No space left.*; training goes on", ran.screen
    )
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_stops_the_run_when_asked_to(tmp_path: Path) -> None:
    tree = run_file(tmp_path, checkpoint__every=2, checkpoint__on_failure="stop", train__max_steps=12)
    results = run_ranks(2, train_on_full_disk, tree, {4})
    assert {type(ran.error) for ran in results} == {RunFailed} and "step-000004" in results[0].error.what
    last = column(tree, "step")[-1]
    saved = steps(run_dir(tree) / "checkpoints")  # one more where the failure was noticed as a save was due
    assert 5 <= last <= 8 and 4 not in saved and saved[0] == 2 and saved[-1] == last  # saved before it stopped
    assert "training stops" in results[0].screen


def test_a_last_save_that_fails_fails_the_run(tmp_path: Path) -> None:
    tree = run_file(tmp_path, checkpoint__every=2)
    results = run_ranks(2, train_on_full_disk, tree, {6})
    assert {type(ran.error) for ran in results} == {RunFailed}
    assert steps(run_dir(tree) / "checkpoints") == [2, 4]
