"""`fivefold compare`: whole, with real runs; its turns, interruptions and failures, with a trainer that pretends."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml
from rich.console import Console

from fivefold import cli
from fivefold.comparison import RECORD, ComparisonRuns, Request, main
from fivefold.comparison.configurations import Configuration, Contest, PlannedRun, fresh, in_turns, unlike
from fivefold.comparison.logs import LoggedStep
from fivefold.comparison.measure import MeasuredRun, rows
from fivefold.comparison.report import CompareReport
from fivefold.config import RunConfig, load_config
from fivefold.core.errors import RunFailed, UserError
from fivefold.launch.events import Listener
from fivefold.launch.folder import FolderLock
from tests.commands import fivefold
from tests.report.html import asks_for_nothing
from tests.training.bodies import run_file


def configuration(name: str) -> Configuration:
    return Configuration(name, None, (), RunConfig())


def test_runs_take_turns() -> None:
    a, b = configuration("a"), configuration("b")
    runs = list(in_turns([(a, 1), (b, 1), (a, 2)], 2))
    names = ["a-on-1-repeat-1", "b-on-1-repeat-1", "a-on-2-repeat-1"]
    assert [run.name for run in runs] == names + [name.replace("t-1", "t-2") for name in names]
    assert [run.seed for run in runs] == [1234] * 3 + [1235] * 3


def test_no_two_share_a_folder() -> None:
    assert fresh("a", []) == "a"
    assert fresh("a b", ["a-b", "a b-2"]) == "a b-3"


def test_what_a_comparison_does_not_need_is_off_whatever_is_asked(tmp_path: Path) -> None:
    keys = ("log.every=5", "checkpoint.resume=never", "train.seed=7")
    run = PlannedRun(Configuration("a", None, keys, load_config(None, keys)), 1, 2)
    config = load_config(None, run.overrides(tmp_path))
    assert (config.log.every, config.checkpoint.resume, config.train.seed) == (1, "auto", 8)
    assert config.run_dir == tmp_path / "a-on-1-repeat-2"


def test_two_commands_do_not_share_a_folder(tmp_path: Path) -> None:
    request = Request(overrides=["train.max_steps=5"], out=tmp_path)
    lock = FolderLock(tmp_path)
    with pytest.raises(UserError, match="another run writes to") as refused:
        main(request, lambda report: None, quiet=True)
    assert refused.value.fix == "wait for it, end it, or name another folder: --out DIR"
    assert not (tmp_path / RECORD).exists()
    lock.release()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_long_name_is_broken_between_its_parts(width: int) -> None:
    name = "shard2.tp2+selective+fp8_rowwise, optimizer.state_dtype=8bit memory.offload_activations=true"
    runs = [MeasuredRun(each, 1, 1, "", [], []) for each in ("a", name)]
    found = CompareReport(
        title="", rows=tuple(rows(runs, [("a", 1), (name, 1)], {}, base="a")), ok=True, runs=tuple(runs)
    )
    with (console := Console(width=width)).capture() as screen:
        found.show(console)
    assert set(re.findall("[a-z0-9]+", name)) <= set(re.findall("[a-z0-9]+", screen.get()))
    assert max(map(len, screen.get().splitlines())) <= width


def test_losses_of_other_text_are_not_set_against_the_first() -> None:
    keys = {"a": "data.seq_length=64", "b": "data.seq_length=128", "c": "data.validation=0.3"}
    some = [Configuration(name, None, (), load_config(None, [key])) for name, key in keys.items()]
    assert unlike(some) == {"c": "data.validation"}


def test_a_number_of_devices_asked_twice_is_run_once() -> None:
    contest = Contest.of([Configuration("a", None, (), load_config(None))], [1, 1], 2)
    assert [run.name for run in contest.runs] == ["a-on-1-repeat-1", "a-on-1-repeat-2"]


def test_a_run_that_went_on_is_done_when_its_last_start_is_and_warms_up_again(tmp_path: Path) -> None:
    contest = Contest.of([Configuration("a", None, (), load_config(None))], [1], 1)
    (run,), comparison = contest.runs, ComparisonRuns(Request(), contest, tmp_path, [])
    (tmp_path / run.name).mkdir()
    rows = [{"step": at, "train/tokens_seen": at, "perf/tokens_per_second_per_device": 1.0} for at in range(1, 11)]
    events: list[dict[str, Any]] = [{"event": "start", "step": 0}, {"event": "end", "step": 5, "what": "failed"}]
    for more in ([], [{"event": "start", "step": 5}, {"event": "end", "step": 10, "what": "finished"}]):
        events += more
        for name, lines in (("metrics.jsonl", rows), ("history.jsonl", events)):
            (tmp_path / run.name / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        assert comparison._is_done(run) is bool(more)
    assert [each.step for each in comparison._measured(run).timed] == [3, 4, 5, 8, 9, 10]


@pytest.mark.full
def test_two_configurations_on_one_and_two_devices(tmp_path: Path) -> None:
    tree = run_file(tmp_path, data__validation="20%", eval__every=3, train__max_steps=9)
    tree["run"]["dir"] = str(tmp_path / "runs")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    command = [
        "compare", "run.yaml", "train.max_steps=5", "--vary", "optimizer.learning_rate=0.02",
        "--nproc", "2,1", "--repeats", "1", "--json", "found.json", "--html", "found.html", "--out", "out",
    ]  # fmt: skip
    screen = fivefold(command, tmp_path)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ok"], found["complete"], found["base"]) == (True, True, "run")
    assert [(row["configuration"], row["devices"]) for row in found["rows"]] == [
        ("run", 1), ("learning_rate=0.02", 1), ("run", 2), ("learning_rate=0.02", 2)
    ]  # fmt: skip
    assert [(run["repeat"], run["devices"], run["steps"], run["timed_steps"]) for run in found["runs"]] == [
        (1, devices, 5, 3) for devices in (1, 1, 2, 2)
    ]
    one, _, two, _ = (row["loss"] for row in found["rows"])
    assert one["median"] == pytest.approx(two["median"], rel=1e-5)  # the same curve on any number of devices
    assert [row["loss_difference_pct"] is None for row in found["rows"]] == [True, False, True, False]
    assert found["rows"][3]["decrease_pct"]["measured"] is None
    assert found["configurations"]["learning_rate=0.02"] == [
        "run.yaml", "train.max_steps=5", "optimizer.learning_rate=0.02"
    ]  # fmt: skip
    assert "on 2 devices" in screen
    assert max(map(len, screen.splitlines())) <= 80
    asks_for_nothing((tmp_path / "found.html").read_text())
    # Again: everything is there, and nothing is trained.
    with patch("fivefold.training.launch.run", side_effect=AssertionError):
        assert "4 done" in fivefold(command, tmp_path)


class Trainer:
    """In the place of `fivefold train`: writes what a run of four steps leaves, and fails or stops where it is told."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.raises: dict[int, BaseException] = {}  # by the number of the run, from 1

    def run(self, path: Path | None, overrides: list[str], *, nproc: int, listener: Listener) -> Path:
        config = load_config(path, overrides)
        self.ran.append(config.run.name)
        print("the screen of a run")
        if error := self.raises.pop(len(self.ran), None):
            raise error
        speed = 100 * nproc / (2 if config.precision.fp8 != "none" else 1)
        rows = [
            {"step": at, "train/loss": 5 - at, "train/tokens_seen": 10 * at, "perf/tokens_per_second_per_device": speed}
            for at in range(1, 5)
        ]
        start, end = {"event": "start", "step": 0}, {"event": "end", "step": 4, "what": "finished"}
        for name, lines in (("metrics.jsonl", rows), ("history.jsonl", [start, end])):
            (config.run_dir / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (config.run_dir / "run.yaml").write_text(config.to_yaml())
        return config.run_dir


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.chdir(tmp_path)
    trainer = Trainer()
    with patch("fivefold.training.launch.run", trainer.run):
        yield trainer


def compare(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--nproc", "1", "--steps", "4", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


FP8 = ("--vary", "precision.fp8=rowwise", "--repeats", "2")


def test_what_is_interrupted_goes_on(trainer: Trainer, capfd: pytest.CaptureFixture[str]) -> None:
    trainer.raises = {3: KeyboardInterrupt()}
    assert compare(*FP8) == 130
    screen = capfd.readouterr().out
    assert "-50.0?" in screen  # the first repeat of both
    assert "2 runs of 4 not done: the same command goes on" in screen
    assert "the screen of a run" not in screen
    assert compare(*FP8) == 0
    names = [f"{name}-on-1-repeat-{repeat}" for repeat in (1, 2) for name in ("demo", "fp8=rowwise")]
    assert trainer.ran == [*names[:3], names[2], names[3]]
    assert "-50.0" in capfd.readouterr().out
    log = Path("runs/compare-demo-fp8=rowwise") / names[0] / "logs" / "screen.log"
    assert log.read_text() == "the screen of a run\n"


def test_another_comparison_is_not_mixed_in(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(*FP8, "--out", "out") == 0
    assert compare(*FP8, "--out", "out", "optimizer.learning_rate=0.5") == 2
    assert "out holds runs of demo with optimizer.learning_rate 0.01, not 0.5" in capsys.readouterr().err
    assert compare("--vary", "precision.fp8=mxfp8", "--out", "out") == 2
    assert "out holds a comparison of demo, fp8=rowwise" in capsys.readouterr().err
    assert compare(*FP8[:2], "--out", "out", "--repeats", "3") == 0  # more of the same
    assert len(trainer.ran) == 6


def test_a_run_that_fails_is_a_row(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    trainer.raises = {2: RunFailed("the loss is not finite\nmore of it", fix="a smaller learning rate")}
    assert compare(*FP8, "--json", "found.json") == 1
    assert trainer.ran == ["demo-on-1-repeat-1", "fp8=rowwise-on-1-repeat-1", "demo-on-1-repeat-2"]
    row = json.loads(Path("found.json").read_text())["rows"][1]
    assert row["note"].startswith("failed: the loss is not finite (log: runs/compare-demo-fp8=rowwise/fp8=rowwise-on-1")
    assert "fp8=rowwise on 1 device failed: the loss" in " ".join(capsys.readouterr().out.split())
    assert compare(*FP8) == 0  # what failed is tried again


def test_what_cannot_run_on_a_number_of_devices_says_why(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--vary", "layout=tp2+fp32", "--nproc", "1,2", "--repeats", "1", "--json", "found.json") == 0
    rows = json.loads(Path("found.json").read_text())["rows"]
    assert [row["note"] for row in rows] == [
        "",
        "not run: tp 2 = 2, but 1 worker started; 2 does not divide 1, tp 1 does",
        "",
        "",
    ]
    assert trainer.ran == [f"{name}-repeat-1" for name in ("demo-on-1", "demo-on-2", "layout=tp2+fp32-on-2")]


def test_a_log_beside_a_run_and_logs_alone(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    Path("other.csv").write_text("step,tokens,loss,tps\n" + "".join(f"{at},{10 * at},2,50\n" for at in range(1, 5)))
    assert (
        compare(
            "train.seed=5", "--repeats", "2", "--against", "other.csv devices=1", "--json", "found.json", "--out", "out"
        )
        == 0
    )
    own, other = json.loads(Path("found.json").read_text())["rows"]
    assert own["loss"]["median"] == 1
    assert (other["faster_pct"]["percent"], other["loss_difference_pct"]["percent"]) == (-50, 100)
    assert "other: 4 rows of CSV" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "--against", "out/demo-on-1-repeat-1", "--against", "other.csv", "--json", "-"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["base"] == "demo-on-1-repeat-1"


def headline_of(speeds: dict[str, list[float]], losses: dict[str, list[float]]) -> str:
    """The headline of a comparison of `a` with `b`, a run for each speed."""
    runs = [
        MeasuredRun(name, 2, repeat, "", steps, steps)
        for name in speeds
        for repeat, (speed, loss) in enumerate(zip(speeds[name], losses[name], strict=True), start=1)
        for steps in [[LoggedStep(at, 100 * at, loss, None, speed, 0.1) for at in (1, 2, 3)]]
    ]
    found = tuple(rows(runs, [("a", 2), ("b", 2)], {}, base="a"))
    return CompareReport(title="", rows=found, ok=True, base="a", runs=tuple(runs)).headline


def test_a_headline_claims_what_was_measured_alone() -> None:
    alike = {"a": [2.0] * 3, "b": [2.0, 2.1, 1.9]}
    one = headline_of({"a": [100.0], "b": [163.0]}, {"a": [2.0], "b": [1.5]})
    assert one == (
        "On 2 devices, one run of each, so no difference is known: a 100 tokens/s a device at training loss 2.0000, "
        "b 163 tokens/s a device at training loss 1.5000"
    )
    none = headline_of({"a": [100.0, 101.0, 99.0], "b": [101.0, 99.0, 102.0]}, alike)
    assert none.endswith(
        "no difference in speed was measured between a and b; no difference in training loss was measured"
    )
    higher = {"a": [2.0] * 3, "b": [2.5, 2.51, 2.52]}
    faster = headline_of({"a": [100.0, 101.0, 99.0], "b": [150.0, 151.0, 149.0]}, higher)
    assert faster == "On 2 devices, b is 50.0 % faster than a; its training loss is 25.5 % higher"


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nothing.yaml"], "nothing.yaml: there is no such file"),
        (["--nproc", "1,x"], "--nproc 1,x is no list"),
        (["--nproc", "0"], "--nproc 0 is no list"),
        (["--vary", "fp8"], "--vary 'fp8' is not key=value"),
        (["--vary", "run.name='a"], "is not key=value"),
        (["--vary", "precision.fp9=x"], "precision.fp9 is not a key"),
        (["a.yaml", "b.yaml", "--vary", "a=b"], "--vary is of one run file"),
        (["--steps", "2"], "demo has 2 steps, of which the first 2 are not timed: none is left"),
        (["--vary", "layout=tp2+fp32"], "layout=tp2+fp32 cannot run with --nproc 1: tp 2 = 2"),
        (["--against", "nothing.csv"], "nothing.csv: there is no such log"),
        (["--out", "cli.txt"], "cannot write cli.txt"),
        (["--json", "a", "--html", "a"], "a is written by"),
    ],
)
def test_what_is_refused(trainer: Trainer, capsys: pytest.CaptureFixture[str], arguments: list[str], what: str) -> None:
    Path("cli.txt").write_text("a file")
    assert compare(*arguments) == 2
    assert what in capsys.readouterr().err
    assert trainer.ran == []


def test_a_world_that_is_there_is_refused(
    trainer: Trainer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables: dict[str, Any] = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert compare(*FP8) == 2
    assert "compare their folders: fivefold compare --against" in capsys.readouterr().err
