"""Parts of the user's own in a run, which the run file names."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import fivefold as ff
from fivefold.checkpoint import Checkpoint, step_folder
from fivefold.config import load_config
from fivefold.config.schema import check_code
from fivefold.core.errors import UserError
from fivefold.training import parts, standing_checks
from fivefold.training import run as run_module
from fivefold.training.checkpoints import Checkpoints
from fivefold.training.part import Environment, LiveRun, RunProgress, own_parts
from tests.tiers import put_off
from tests.training.bodies import Ran, Stopped, column, metrics, run_dir, run_file, same, state, train, train_alone

DOCS = Path(__file__).parents[2] / "docs" / "howto" / "parts.md"
READER = """
import math
import fivefold as ff

class Reader(ff.Part):
    def __init__(self):
        self.steps = []

    def before_update(self, run):
        self.norm = ff.clip_grad_norm_(run.model, math.inf)

    def after_update(self, run, result):
        self.loss = result.loss

    def after_step(self, run, row):
        self.steps.append(run.step)
        row["mine/norm"], row["mine/steps"] = self.norm, len(self.steps)
        assert row["train/loss"] == self.loss and row["step"] == run.step

    def state(self):
        return {"steps": self.steps}

    def load(self, state):
        self.steps = state["steps"]
"""
MOMENTS = """
import fivefold as ff
from contextlib import contextmanager

def note(name, value=None):
    def moment(self, run, *rest, **named):
        with open(f"{run.config.run_dir}/moments-{run.world.rank}", "a") as file:
            file.write(f"{name} {run.step}\\n")
        return value
    return moment

class Moments(ff.Part):
    build, begin, before_step, before_update = map(note, ("build", "begin", "before_step", "before_update"))
    after_update, after_step, at_save, leave = map(note, ("after_update", "after_step", "at_save", "leave"))
    at_end, why_over, saves, interrupts = map(note, ("at_end", "why_over", "saves", "interrupts"))
    lines = note("lines", [("mine", "noted")])

    @contextmanager
    def in_step(self, run):
        note("in")(self, run)
        yield
        note("out")(self, run)

    @contextmanager
    def running(self, run):
        note("running")(self, run)
        yield
        note("over")(self, run)
"""


def with_parts(folder: Path, source: str, *names: str, **changes: Any) -> dict[str, Any]:
    """A run file with parts, whose file is written."""
    (folder / "mine.py").write_text(source)
    return run_file(folder, train__parts=[f"{folder / 'mine.py'}:{name}" for name in names], **changes)


def refused(folder: Path, source: str, *names: str) -> str:
    with pytest.raises(UserError) as caught:
        own_parts(load_config(None, [f"train.parts={json.dumps([f'{folder}/mine.py:{name}' for name in names])}"]))
    return str(caught.value)


@pytest.mark.parametrize(
    "layout",
    [pytest.param({"dp_shard": 2}, marks=pytest.mark.core), pytest.param({"pp": 2}, marks=pytest.mark.full)],
    ids=str,
)
def test_a_part_that_reads_changes_no_bit_and_its_state_survives_a_kill(layout: dict[str, int], tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint__every": 2, "layout__dp_shard": 1, "optimizer__max_grad_norm": 0.1}
    options |= {f"layout__{name}": size for name, size in layout.items()}
    plain = run_file(tmp_path, run__name="plain", **options)
    assert train(plain).error is None
    read = with_parts(tmp_path, READER, "Reader", run__name="read", **options)
    assert isinstance(train(read, stop_at=6).error, Stopped)
    kept = Checkpoint.described(run_dir(read) / "checkpoints" / step_folder(4)).state
    assert kept["parts"] == {"Reader": {"steps": [1, 2, 3, 4]}}
    assert train(read).error is None
    assert same(state(read, 6), state(plain, 6))
    assert column(read, "train/loss") == column(plain, "train/loss")
    assert column(read, "mine/steps") == [1, 2, 3, 4, 5, 6]
    assert column(read, "mine/norm") == pytest.approx(column(plain, "train/grad_norm"), rel=1e-6)


@pytest.mark.full
def test_the_plateau_of_the_docs_ends_a_run_also_after_a_kill(tmp_path: Path) -> None:
    source = (
        DOCS.read_text().split("```python\n")[1].partition("```")[0].replace(">= 200", ">= 3").replace("% 10", "% 1")
    )
    rising: dict[str, Any] = {"optimizer__learning_rate": 1e-30, "scheduler__warmup_steps": 0, "train__max_steps": 30}
    tree = with_parts(tmp_path, source, "Plateau", **rising, checkpoint__every=2)
    assert isinstance(train(tree, stop_at=4).error, Stopped)
    ran = train(tree)
    assert ran.error is None and "done     no progress for 3 steps" in ran.screen
    losses, since = column(tree, "train/loss"), column(tree, "mine/steps_without_progress")
    assert len(losses) < 30 and since[-3:] == [1, 2, 3] and losses[-4] == min(losses)


@pytest.mark.full
def test_the_average_of_the_docs_goes_on_under_another_layout(tmp_path: Path) -> None:
    source = DOCS.read_text().split("```python\n")[2].partition("```")[0].replace("% 10", "% 1")
    options: dict[str, Any] = {"checkpoint__every": 2, "train__max_steps": 4, "layout__dp_shard": 1}
    ema = [
        with_parts(tmp_path, source, "Ema", run__name=name, **options, layout__dp_replicate=2) for name in ("a", "b")
    ]
    assert train(ema[0]).error is None and isinstance(train(ema[1], stop_at=3).error, Stopped)
    ema[1]["layout"] = {"tp": 2}
    assert train(ema[1]).error is None
    alone, both = (torch.load(run_dir(tree) / "ema" / "step-4.pt") for tree in ema)
    weights = state(ema[0], 4)
    for name, average in alone.items():
        torch.testing.assert_close(average, both[name], rtol=1e-4, atol=1e-6)
        assert average.shape == (weight := weights[f"weight/{name}"]).shape and not torch.equal(average, weight)


@pytest.mark.full
def test_the_noise_and_the_counts_of_the_docs_are_those_of_one_process_also_after_a_kill(tmp_path: Path) -> None:
    source = "".join(block.partition("```")[0] for block in DOCS.read_text().split("```python\n")[3:5])
    options: dict[str, Any] = {"checkpoint__every": 2, "train__max_steps": 4, "optimizer__max_grad_norm": 0}
    plain = run_file(tmp_path, run__name="plain", **options)
    alone, both = (
        with_parts(tmp_path, source, "Noise", "Lengths", run__name=name, **options) for name in ("alone", "both")
    )
    assert train_alone(plain).error is None and train_alone(alone).error is None
    both["layout"] = {"dp_shard": 2}
    assert isinstance(train(both, stop_at=3).error, Stopped)
    both["layout"] = {"tp": 2}
    assert train(both).error is None
    assert column(both, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-5)
    assert column(alone, "train/loss")[1:] != pytest.approx(column(plain, "train/loss")[1:], rel=1e-4)
    counts = [json.loads((run_dir(tree) / "lengths.json").read_text()) for tree in (alone, both)]
    assert counts[0] == counts[1]
    targets = sum(int(length) * count for length, count in counts[0].items())
    assert targets == column(alone, "train/tokens_seen")[-1] - 1  # the text's last token has none


@pytest.mark.full
def test_moments_come_in_the_order_of_the_docs_on_every_rank(tmp_path: Path) -> None:
    tree = with_parts(tmp_path, MOMENTS, "Moments", train__max_steps=2, checkpoint__every=2)
    ran = train(tree)
    assert ran.error is None and "mine     noted" in ran.screen
    first, second = ((run_dir(tree) / f"moments-{rank}").read_text().splitlines() for rank in (0, 1))
    decided = ["why_over {}", "saves {}"]
    step = ["before_step {0}", "in {0}", "interrupts {0}", "before_update {0}", "out {0}", "after_update {1}"]
    step += ["after_step {1}", *(each.replace("{}", "{1}") for each in decided)]
    expected = ["build 0", "begin 0", *(each.format(0) for each in decided)]
    expected += ["running 0", *(each.format(0, 1) for each in step), "leave 1"]
    expected += [*(each.format(1, 2) for each in step), "at_save 2", "at_end 2", "over 2"]
    assert second == expected
    assert [line for line in first if line != "lines 0"] == expected and first.count("lines 0") == 1
    rows = [line.split("`")[1].partition("(")[0] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    own = {name for name in vars(ff.Part) if not name.startswith("_")} - {"name", "finish_step", "try_memory"}
    assert {*rows} == own


@pytest.mark.full
def test_what_the_first_rank_decides_holds_on_all(tmp_path: Path) -> None:
    """Ranks whose parts disagree save and end together."""
    source = """
import fivefold as ff

class Odd(ff.Part):
    def after_step(self, run, row):
        self.number = run.step - run.world.rank

    def saves(self, run):
        return run.step and self.number == 2

    def why_over(self, run):
        return f"enough at {self.number}" if run.step and self.number == 4 else ""
"""
    tree = with_parts(tmp_path, source, "Odd", eval__every=0)
    ran = train(tree)
    assert ran.error is None and "done     enough at 4" in ran.screen
    assert len(metrics(tree)) == 4
    assert {path.name for path in (run_dir(tree) / "checkpoints").glob("step-*")} == {step_folder(2), step_folder(4)}


WRONG = """
import fivefold as ff
import torch

class Wrong(ff.Part):
    def after_step(self, run, row):
        if run.step == 2:
            {line}

    def state(self):
        return {state}
"""


@pytest.mark.parametrize(
    ("line", "state", "said"),
    [
        ("row['mine'] = self.nothing", "{}", "mine.py:8: AttributeError: 'Wrong' object has no attribute 'nothing'"),
        put_off("row['train/loss'] = 1.0", "{}", "train.parts[0]: Wrong changes train/loss of the row"),
        ("del row['train/loss']", "{}", "train.parts[0]: Wrong changes train/loss of the row"),
        put_off("row['mine'] = 'text'", "{}", "train.parts[0]: Wrong adds mine to the row, a str, which is no number"),
        ("row['mine'] = torch.ones(2)", "{}", "Wrong adds mine to the row, a Tensor, which is no number"),
        ("pass", "{'a': torch.ones(1)}", "mine.py: TypeError: Object of type Tensor is not JSON serializable"),
        put_off("raise ff.UserError('too hot')", "{}", "too hot"),
        ("raise SystemExit(0)", "{}", "mine.py:8: SystemExit: 0"),
    ],
)  # fmt: skip
@pytest.mark.full
def test_errors_name_the_part_and_keep_what_is_there(line: str, state: str, said: str, tmp_path: Path) -> None:
    source = WRONG.replace("{line}", line).replace("{state}", state)
    tree = with_parts(tmp_path, source, "Wrong", train__max_steps=2, checkpoint__every=2)
    error = train(tree).error
    assert isinstance(error, UserError) and said in error.what
    there = [row["step"] for row in metrics(tree)] if (run_dir(tree) / "metrics.jsonl").exists() else []
    assert there == ([] if "JSON" in said else [1])


@pytest.mark.full
def test_a_tensor_becomes_a_number_and_what_is_not_finite_none(tmp_path: Path) -> None:
    line = "row['mine/a'], row['mine/b'] = torch.tensor(2.5), float('nan')"
    tree = with_parts(tmp_path, WRONG.replace("{line}", line).replace("{state}", "{}"), "Wrong", train__max_steps=2)
    ran: Ran = train(tree)
    assert ran.error is None
    assert (metrics(tree)[1]["mine/a"], metrics(tree)[1]["mine/b"]) == (2.5, None)


def test_what_is_no_part_is_refused_by_its_key_or_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mine: ...\n")
    what = refused(tmp_path, "", "Mine")
    assert f"train.parts[0]: Mine of {file} makes a Mine, which is no part of a run" in what
    file.write_text("import fivefold as ff\nclass Mine(ff.Part):\n    def __init__(self, more): ...\n")
    assert "TypeError: Mine.__init__() missing 1 required positional argument" in refused(tmp_path, "", "Mine")
    file.write_text("import fivefold as ff\nclass Mine(ff.Part): ...\nclass Other(Mine): ...\n")
    assert "train.parts has two parts called Mine" in refused(tmp_path, "", "Mine", "Mine")
    assert "has no Gone" in refused(tmp_path, "", "Gone")
    names = [f"train.parts=[{file}:Mine, {file}:Other]"]
    assert [part.name for part in own_parts(load_config(None, names))] == ["Mine", "Other"]


def test_a_step_of_another_start_is_finished_by_the_part_itself(tmp_path: Path) -> None:
    """Its own `finish_step` is called, or `after_step` if that was not called."""
    file = tmp_path / "mine.py"
    mine = "import fivefold as ff\nclass Mine(ff.Part):\n    def {}: row['mine'] = run\n"
    for signature, expected in (("after_step(self, run, row)", [1]), ("finish_step(self, run, row, owes)", [1, 2])):
        file.write_text(mine.format(signature))
        part = own_parts(load_config(None, [f"train.parts=[{file}:Mine]"]))[0]
        rows: list[dict[str, Any]] = [{}, {}]
        part.finish_step(1, rows[0], owes=True)  # type: ignore[arg-type]
        part.finish_step(2, rows[1], owes=False)  # type: ignore[arg-type]
        assert [row["mine"] for row in rows if row] == expected


def test_paths_are_relative_to_the_run_file_and_the_model_folder_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine.py").write_text(READER)
    file = tmp_path / "runs" / "run.yaml"
    file.write_text("train: {parts: [mine.py:Reader]}\n")
    found = load_config(file)
    assert found.code == {"train.parts[0]": f"{tmp_path}/runs/mine.py:Reader"}
    file.write_text("train: {parts: mine.py:Reader}\n")  # one needs no list
    assert load_config(file).code == found.code
    file.write_text(f"model: {{name_or_path: {tmp_path / 'runs'}}}\ntrain: {{parts: mine.py:Reader}}\n")
    with pytest.raises(UserError, match="is in the folder of the model, and nothing there is run"):
        check_code(load_config(file))


def test_parts_of_python_are_classes_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("fivefold.training.launch.run", lambda file, keys, **_: seen.append(keys) or tmp_path)
    ff.train(None, {"train.max_steps": 3}, parts=[Mine, "x.py:Y"])
    assert seen == [["train.max_steps=3", f'train.parts=["{__file__}:Mine", "x.py:Y"]']]

    class Inner(ff.Part): ...

    for wrong in (Inner, Mine()):
        with pytest.raises(UserError, match="which is no class at the top of a file"):
            ff.train(None, parts=[wrong])  # type: ignore[list-item]


class Mine(ff.Part):
    """One that can be found."""


def test_masks_of_dropout_are_those_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = SimpleNamespace(step=0)
    monkeypatch.setattr(parts, "state_of", lambda model: SimpleNamespace(live=lambda kind: dropout))
    parts.DropoutSteps().before_step(SimpleNamespace(step=3, model=None), [])  # type: ignore[arg-type]
    assert dropout.step == 3


def test_a_held_step_gets_its_row_and_a_start_knows_whether_replicas_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, run = MagicMock(), MagicMock(step=4, total_steps=9)
    parts.RowInMemory(kept).after_step(run, {"eval/loss": 1.0})
    kept.hold.assert_called_once_with(run, {"eval/loss": 1.0}, owes=False)
    outer = SimpleNamespace(is_on=True, is_due=lambda step: step % 2 == 0, have_met=False)
    monkeypatch.setattr(parts, "state_of", lambda model: SimpleNamespace(live=lambda kind: outer))
    for run.step, expected in ((4, True), (5, False), (9, True)):
        parts.OuterUpdates().begin(run)
        assert outer.have_met == expected


def test_all_counters_come_back() -> None:
    after = RunProgress()
    after.load(RunProgress(tokens_seen=7, skipped=5, in_a_row=2).counters())
    assert (after.tokens_seen, after.skipped, after.in_a_row) == (7, 5, 2)


def test_what_is_due_every_few_steps_is_due_at_the_last_one_too() -> None:
    steps = [SimpleNamespace(step=step, total_steps=7) for step in range(1, 8)]
    due = {every: [run.step for run in steps if LiveRun.due(run, every)] for every in (3, 0)}  # type: ignore[arg-type]
    assert due == {3: [3, 6, 7], 0: []}


def test_what_is_saved_between_the_standing_checks_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    for name in ("replicas", "finite"):
        monkeypatch.setattr(standing_checks, name, lambda *_: [1])
    monkeypatch.setattr(standing_checks, "fail_on", lambda findings, **_: found.extend(findings))
    standing, run = standing_checks.StandingChecks(), MagicMock(config=load_config(None))
    standing.at_save(run)
    assert found == [1, 1]
    standing.update = MagicMock()  # its step has passed already
    standing.at_save(run)
    assert found == [1, 1]


def test_every_part_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one answers spares no other the question: they may use collectives."""
    asked: list[str] = []

    class Asked(ff.Part):
        def interrupts(self, run: ff.LiveRun) -> bool:
            asked.append("interrupts")
            return True

        def saves(self, run: ff.LiveRun) -> bool:
            asked.append("saves")
            return True

    result = MagicMock(tokens=1)
    monkeypatch.setattr(run_module, "train_step", lambda *_, **options: asked.append(options["stop"]) or result)
    checkpoints = Checkpoints(Environment(), None)
    checkpoints.manager = MagicMock(failed=None)
    run: Any = MagicMock(parts=[Asked(), Asked(), checkpoints], is_over=False)
    run.due.return_value = False
    run_module._step(run, [], 0.0, list)
    assert asked == ["interrupts", "interrupts", True, "saves", "saves"]
    checkpoints.manager.save.assert_called_once()


def test_the_order_of_the_parts() -> None:
    """Each place has its reason, in `parts_of`."""
    config = load_config(None, ["sample.every=0"])
    found = parts.parts_of(config, None, None, None, Environment())  # type: ignore[arg-type]
    assert [type(part).__name__ for part in found] == [
        "OuterUpdates", "DropoutSteps", "SlotTimes", "BlocksNotCompiled", "StepInMemory", "Evaluation", "BestSteps",
        "RowInMemory", "MetricsRows", "FiniteSteps", "StandingChecks", "Samples", "Stragglers", "Checkpoints",
        "HuggingFaceFolder",
        "Interrupts", "Trial",
    ]  # fmt: skip
