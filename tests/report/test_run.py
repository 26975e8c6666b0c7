"""The page of a run: whole in itself, true to the run's folder, and calm about what is not there."""

import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import RunConfig, load_config
from fivefold.core import history
from fivefold.core.errors import UserError
from fivefold.core.text import shown
from fivefold.report.curves import POINTS, panels
from fivefold.report.figures import heat
from fivefold.report.run import main
from fivefold.report.story import Expected
from tests.report.html import asks_for_nothing
from tests.verification.test_page import HOSTILE, holds

SENT = [{"axis": "tp", "kind": "all_reduce", "count": 1234, "bytes": 3 * 2**20}]


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "train/loss": 5.0 / step, "train/grad_norm": 1.0, "train/learning_rate": 1e-3,
        "train/tokens_seen": 1000 * step, "train/skipped_steps": 0, "perf/tokens_per_second": 500.0 + step,
        "perf/step_seconds": 2.0, "perf/mfu_pct": None, "memory/peak_gib": 0.25, **more,
    }  # fmt: skip


def make_run(folder: Path, rows: list[dict[str, Any]], *overrides: str, spread: bool = True) -> Path:
    config: RunConfig = load_config(None, [f"run.dir={folder.parent}", f"run.name={folder.name}", *overrides])
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    if spread:
        about = {
            "layout": "tp2", "world": 2, "device": "cpu", "model": "LlamaForCausalLM", "parameters": 2_020_000,
            "collectives": [SENT, SENT], "holds": holds(),
        }  # fmt: skip
        (folder / "spread.json").write_text(json.dumps(about), encoding="utf-8")
    return folder


def test_the_page_says_what_the_run_was(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "mine", [row(1), row(2, **{"eval/loss": 2.75}), row(3, **{"eval/loss": 2.5})],
        "train.max_steps=40", "optimizer.learning_rate=0.0123",
    )  # fmt: skip
    (run / "samples.jsonl").write_text(json.dumps({"step": 3, "prompt": "Once", "text": HOSTILE}) + "\n{half")
    (run / "checkpoints" / "step-000002").mkdir(parents=True)
    path = main(run)
    text = path.read_text(encoding="utf-8")
    assert path == run / "report.html"
    asks_for_nothing(text)
    for said in (
        "mine: 3 of 40 steps, loss 1.6667", "LlamaForCausalLM, 2.02M parameters", "tp2, 2 ranks on cpu", "3,000 tokens",
        "2.5000 at step 3 (perplexity 12.2)", "502 tokens per second", "0.25 GiB", "step 2", "each of the 2 ranks",
        "1,234", "3 MiB", "optimizer.learning_rate", "0.0123", "&lt;script&gt;", "loss, nats per token", "tp 1",
    ):  # fmt: skip
        assert said in text, said
    assert "model FLOPs utilisation" not in text, "it was never measured"


def test_the_page_of_an_adapter_says_its_rank_and_what_is_trained(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "mine", [row(1, **{"eval/best": 2.5, "eval/best_step": 1})], "adapter.name=lora", "adapter.rank=8"
    )
    trained = "LoRA rank 8, alpha 32, on 14 linears: 32.8k of 919k parameters are trained"
    start = {"event": "start", "step": 0, "time": "2026-01-31T12:00:00+00:00", "header": [["adapter", trained]]}
    end = {"event": "end", "step": 1, "time": "2026-01-31T12:01:07+00:00", "what": "finished"}
    (run / history.NAME).write_text("".join(json.dumps(each) + "\n" for each in (start, end)))
    text = main(run).read_text(encoding="utf-8")
    assert "mine: 1 of 200 steps of LoRA, rank 8, loss 5.0000" in text
    assert f"<dt>adapter</dt><dd>{trained}</dd>" in text and "<dt>elapsed</dt><dd>1 min 07 s</dd>" in text
    assert "eval/best_step" not in text  # the best has a line, and no curve
    assert "LoRA" not in main(make_run(tmp_path / "whole", [row(1)])).read_text(encoding="utf-8").partition("<h2>")[0]


def test_no_character_of_a_run_is_a_command(tmp_path: Path) -> None:
    """Control characters are written out, as on a terminal; in what the script reads, too."""
    prompt, name = "gold \x1b[31m\r \u202edlog", "my\u202edlog"
    run = make_run(tmp_path / "mine", [row(step, **{name: 1.0}) for step in (1, 2)], f"sample.prompts=[{prompt!r}]")
    (run / "samples.jsonl").write_text(json.dumps({"step": 2, "prompt": prompt, "text": f"{prompt} and \x9b2J"}))
    text = main(run).read_text(encoding="utf-8")
    assert text == shown(text)
    assert r"gold \x1b[31m\r \u202edlog" in text and r" and \x9b2J" in text
    read = [json.loads(unescape(each)) for each in re.findall('data-panel="([^"]*)"', text)]
    assert r"my\u202edlog" in {line[2] for panel in read for line in panel["lines"]}


def test_only_what_was_set_is_listed_as_changed(tmp_path: Path) -> None:
    text = main(make_run(tmp_path / "run", [row(1)], "train.seed=99")).read_text(encoding="utf-8")
    changed = text[text.index("Non-default settings") : text.index("The whole run file, resolved")]
    assert "train.seed" in changed
    assert "optimizer.eps" not in changed


def test_ranks_that_send_otherwise_stand_apart(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [row(1)])
    about = json.loads((run / "spread.json").read_text())
    other = [{**SENT[0], "count": 77}]
    about |= {"world": 4, "collectives": [SENT, SENT, other, []]}
    (run / "spread.json").write_text(json.dumps(about))
    text = main(run).read_text(encoding="utf-8")
    assert "ranks 0,1" in text
    assert "rank 2" in text and ">77<" in text


@pytest.mark.parametrize(
    "rows",
    [
        [row(1, **{"train/loss": None, "train/grad_norm": None})],
        [row(step, **{"memory/peak_gib": None}) for step in range(1, 5)],
        [row(1, **{"moe/aux_loss": 0.01})],
    ],
    ids=["no-number", "no-memory", "more-metrics"],
)
def test_little_is_enough(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    text = main(make_run(tmp_path / "run", rows, spread=False), tmp_path / "elsewhere" / "page.html").read_text()
    asks_for_nothing(text)
    assert "Parameter sharding" not in text
    assert ("moe/aux_loss" in text) == ("moe/aux_loss" in rows[0])


def test_a_long_run_is_a_small_page(tmp_path: Path) -> None:
    rows = [row(step, **{"train/loss": math.sin(step)}) for step in range(1, 30_001)]
    assert main(make_run(tmp_path / "run", rows)).stat().st_size < 150_000
    (loss,) = (curves["train/loss"] for curves in panels(rows).values() if "train/loss" in curves)
    assert len(loss) == POINTS
    assert loss[0][:2] == (pytest.approx(38), pytest.approx(sum(math.sin(step) for step in range(1, 76)) / 75))


def test_a_run_without_metrics_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no metrics yet"):
        main(make_run(tmp_path / "run", []))
    with pytest.raises(UserError, match="not a run"):
        main(tmp_path)


def test_the_load_of_experts_is_drawn_over_the_last_part_of_a_run(tmp_path: Path) -> None:
    early, late = [[90, 1, 1], [1, 1, 90]], [[10, 20, 30], [0, 50, 10]]
    rows = [row(step, **{"moe/load": late if step > 18 else early, "moe/load_max": 2.5}) for step in range(1, 21)]
    text = main(make_run(tmp_path / "run", rows)).read_text(encoding="utf-8")
    asks_for_nothing(text)
    assert "steps 19 to 20: the busiest expert has 2.50 times the mean of its layer; 1 of 6 experts without" in text
    for said in ("layer 0, expert 0: 0.50 of the mean, 20 rows", "layer 1, expert 1: 2.50 of the mean, 100 rows"):
        assert said in text
    found = heat(rows)
    assert found is not None
    boxes = [(box.fill, round(box.opacity, 3)) for box in found.boxes]
    grounds = [at for at, (fill, _) in enumerate(boxes) if fill == "band"]
    cells = [boxes[first + 1 : end] for first, end in zip(grounds, [*grounds[1:], None], strict=True)]
    assert cells[0] == [("series-0", 0.5), ("series-1", 0.0), ("series-1", 0.292)]
    assert cells[1][0] == ("series-0", 1.0) and cells[1][2] == ("series-0", 0.5)
    assert "moe/load_max" in panels(rows)
    assert not any("moe/load" in curves for curves in panels(rows).values())
    assert heat([row(1)]) is None


def slot(rank: int, stage: int, kind: str, micro_batch: int, start: float, end: float) -> dict[str, Any]:
    return {"rank": rank, "stage": stage, "kind": kind, "micro_batch": micro_batch, "start": start, "end": end}


def test_a_pipeline_is_drawn_as_it_ran_and_as_it_was_meant(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [row(1)])
    slots = [
        slot(0, 0, "F", 0, 10, 11),
        {**slot(1, 1, "F", 0, 11, 12), "waited": 0.75},
        slot(1, 1, "B", 0, 12, 14),
        slot(0, 0, "B", 0, 14, 16),
    ]
    timeline = {"ranks": 2, "bubble": 0.5, "span": 6.0, "slots": slots}
    about = json.loads((run / "spread.json").read_text())
    about["timeline"] = {"step": 7, "measured": timeline, "simulated": timeline, "ideal_bubble": 0.25}
    (run / "spread.json").write_text(json.dumps(about))
    text = main(run).read_text(encoding="utf-8")
    asks_for_nothing(text)
    assert "measured at step 7" in text and "bubble 50.0 % of the time; 25.0 % by the closed form" in text
    assert "rank 1, stage 1, micro batch 0: backward, 2 s from 2<" in text
    assert "rank 1, stage 1, micro batch 0: forward, 1 s from 1, after waiting 0.75<" in text
    assert text[text.index("Pipeline schedule") :].count("<rect") == 8


def test_a_path_that_is_no_run_is_answered_with_the_runs_that_are_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "notes", [row(1)])
    (tmp_path / "notes.yaml").write_text("run: {name: notes}\n")
    (tmp_path / "other.yaml").write_text("run: {name: other}\n")
    (tmp_path / "empty").mkdir()
    said = {}
    for name in (
        "runs/none",
        "runs",
        "empty",
        "notes.yaml",
        "other.yaml",
        "runs/notes/run.yaml",
        "runs/notes/metrics.jsonl",
    ):
        with pytest.raises(UserError) as caught:
            main(Path(name))
        said[name] = str(caught.value)
        assert "a run folder is what fivefold train writes" in said[name]
        assert "demo" not in said[name] and ".yaml/run.yaml" not in said[name] and "write one" not in said[name]
    assert "there is no such folder\nruns in runs: notes" in said["runs/none"]
    assert "runs in runs: notes" in said["empty"] and "runs in runs: notes" in said["other.yaml"]
    assert "it holds no run.yaml\nruns in runs: notes" in said["runs"]
    assert "is a file, not a run folder\nits run: fivefold report runs/notes" in said["notes.yaml"]
    assert "its run: fivefold report runs/notes" in said["runs/notes/run.yaml"]


@pytest.mark.parametrize("damaged", ["{half", "[]", "null", "\0", '{"event": null, "step": null}'])
def test_a_damaged_spread_is_named_and_the_rest_is_shown(damaged: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "mine", [row(1), row(2)], "train.max_steps=2")
    (run / "spread.json").write_text(damaged)
    text = main(run).read_text(encoding="utf-8")
    assert "spread.json is not an object of JSON" in text and "mine: 2 steps" in text


def started(run: Path) -> Path:
    """With the record of one start."""
    about = {"event": "start", "step": 0, "time": "2020-03-04T05:06:07+00:00", "device": "a CPU, 2 cores", "world": 2}
    (run / "history.jsonl").write_text(json.dumps(about) + "\n")
    return run


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": {"vocabulary": "x"}},
        {"data": {"answers_alone": 3}},
        {"header": 3},
        {"machine": {"host": 5}},
        {"damages": 5},
    ],
)
def test_a_history_that_says_nonsense_is_left_out(wrong: dict[str, Any], tmp_path: Path) -> None:
    run = started(make_run(tmp_path / "mine", [row(1), row(2)], "train.max_steps=2"))
    first = json.loads((run / "history.jsonl").read_text())
    (run / "history.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in (first, first | wrong)))
    text = main(run).read_text(encoding="utf-8")
    assert "history.jsonl says what no start says" in text and "mine: 2 steps" in text


def test_planned_stands_beside_measured(tmp_path: Path) -> None:
    run, told = started(make_run(tmp_path / "mine", [row(1), row(2)])), list[str]()

    def expect(config: RunConfig, layout: str, device: str, about: Any) -> Expected:
        assert (config.run.name, layout, device, about["device"]) == ("mine", "tp2", "cpu", "a CPU, 2 cores")
        return Expected(step_seconds=1.6, peak_gib=0.2, cluster="1x2xcpu", likely_seconds=(1.2, 2.1))

    text = main(run, expect=expect, tell=told.append).read_text(encoding="utf-8")
    assert told == [
        "tp2 on 1x2xcpu",
        "  step time: planned 1.6 s (80 %: 1.2 to 2.1), measured 2 (1.25 x)",
        "  peak memory: planned 0.2 GiB, measured 0.25 (1.25 x)",
    ]  # fmt: skip
    assert all(said in text for said in ("Planned and measured", "tp2 on 1x2xcpu", ">1.6<", ">1.25 x<"))
    assert "Planned and measured" not in main(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("error", [UserError("the planner does not know X"), ValueError("of the planner")])
def test_a_planner_that_fails_costs_no_page(error: Exception, tmp_path: Path) -> None:
    def expect(*_: Any) -> Expected:
        raise error

    run, told = started(make_run(tmp_path / "mine", [row(1)])), list[str]()
    text = main(run, expect=expect, tell=told.append).read_text(encoding="utf-8")
    assert told[0].startswith("tp2 was not planned: ") and str(error) in told[0] and str(error) in text


def test_a_run_that_measured_no_memory_is_compared_in_time(tmp_path: Path) -> None:
    told = list[str]()
    run = started(make_run(tmp_path / "mine", [row(1, **{"memory/peak_gib": None})]))
    main(run, expect=lambda *_: Expected(2.0, 1.0, "1x2xcpu"), tell=told.append)
    assert [line.split(":")[0] for line in told] == ["tp2 on 1x2xcpu", "  step time"]
