"""What the page of a run tells of its starts: true to when and where it was trained, nothing averaged over layouts."""

import html
import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fivefold.core import history
from fivefold.core.history import NAME, load
from fivefold.report.curves import draw, nice, panels
from fivefold.report.run import main
from fivefold.report.story import duration, marks, moment, spans
from tests.report.html import Reader, asks_for_nothing
from tests.report.test_run import make_run, row

DATA = {"documents": 30, "tokens": 40_000, "vocabulary": 2048, "train": {"rows": 90, "tokens": 20000, "padding": 5000}}
HEADER = [
    ["data", "30 documents in 2 files, 40,000 tokens"],
    ["", "train       90 rows of 256, 80.0% full"],
    ["", "validation  9 rows of 256, 97.6% full; 2.4% of the tokens, 1% asked"],
    ["", "source      a.txt: 10 documents, 15,000 tokens to train on, weight 1 = 75.0% of the tokens read"],
    ["", "source      b.txt: 20 documents, 5,000 tokens to train on, weight 1 = 25.0% of the tokens read"],
    ["", "note        3 pieces left out"],
]


def start(step: int, minute: int, layout: str = "shard2", **more: Any) -> dict[str, Any]:
    return {
        "event": "start", "step": step, "time": f"2020-03-04T05:{minute:02}:00+01:00", "layout": layout, "world": 2,
        "versions": {"fivefold": "0.0.7", "torch": "1.2.3"}, "machine": {"host": "here", "system": "Linux"},
        "device": "ABACUS 3000", "schedule": {"name": "cosine", "total_steps": 30}, "data": DATA,
        "header": [["run", "x"], *HEADER, ["layout", layout], ["", "not of the data"]], **more,
    }  # fmt: skip


def end(step: int, minute: int, what: str = "finished") -> dict[str, Any]:
    return {"event": "end", "step": step, "time": f"2020-03-04T05:{minute:02}:00+01:00", "what": what}


TWO_LAYOUTS = [
    start(0, 0),
    {"event": "skipped", "step": 7, "time": "2020-03-04T05:01:00+01:00", "what": "the loss was not finite"},
    end(30, 10, "stopped by SIGINT"),
    start(30, 20, "tp2", schedule={"name": "cosine", "total_steps": 60}, resumed="runs/x/checkpoints/step-000030",
          damages=["step-000040: flipped"]),
    end(60, 50),
]  # fmt: skip


def rows_of_two() -> list[dict[str, Any]]:
    """Five thousand tokens a second, then one thousand; the learning rate jumps."""
    speeds = {False: 5000.0, True: 1000.0}
    return [
        row(step, **{
            "perf/tokens_per_second": speeds[step > 30], "memory/peak_gib": 1.5 if step <= 30 else 0.5,
            "perf/elapsed_seconds": 3.6 * step, "train/learning_rate": 1e-4 if step <= 30 else 5.9e-4,
        })
        for step in range(1, 61)
    ]  # fmt: skip


def write(folder: Path, records: list[dict[str, Any]]) -> None:
    (folder / NAME).write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = make_run(tmp_path / "mine", rows_of_two(), "data.validation=1%")
    write(folder, TWO_LAYOUTS)
    return folder


def plain(path: Path) -> str:
    return html.unescape(path.read_text(encoding="utf-8"))


def test_when_with_and_where_are_those_of_the_run(run: Path) -> None:
    text = plain(main(run))
    asks_for_nothing(text)
    for said in (
        "2020-03-04 05:00:00 +0100", "40 min 00 s in 2 starts", "fivefold 0.0.7, torch 1.2.3", "ABACUS 3000", "here",
    ):  # fmt: skip
        assert said in text, said
    facts = text[: text.index("Training curves")]
    assert "transformers" not in facts.replace("fivefold", ""), "of the report's own versions none"


def test_layouts_are_not_averaged(run: Path) -> None:
    text = plain(main(run))
    first, second = spans(load(run), rows_of_two())
    assert (first.layout, first.steps, first.tokens_per_second, first.peak_gib) == ("shard2", "1–30", 5000.0, 1.5)
    assert (second.layout, second.steps, second.tokens_per_second, second.peak_gib) == ("tp2", "31–60", 1000.0, 0.5)
    assert "1,000 tokens per second" in text and "0.50 GiB on the fullest rank" in text
    assert ">5,000<" in text and "3,000 tokens per second" not in text


def test_what_happened_is_marked_on_every_curve_and_listed(run: Path) -> None:
    text = plain(main(run))
    found = marks(load(run), rows_of_two())
    assert [(mark.step, mark.kind) for mark in found] == [(7, "skipped"), (30, "layout")]
    for said in ("layout shard2 → tp2", "steps 30 → 60", "1.00e-04 → 5.90e-04", "DAMAGED step-000040: flipped",
                 "goes on from step-000030", "the loss was not finite"):  # fmt: skip
        assert said in found[-1].what or said in found[0].what
        assert said in text[text.index("Starts and events") :]
    count = len(panels(rows_of_two()))
    assert text.count('<line class="mark layout"') == text.count('<line class="mark skipped"') == count + 1
    assert "stopped by SIGINT" in text


def test_steps_done_again_are_told_from_those_that_are_left(tmp_path: Path) -> None:
    write(tmp_path, [
        start(0, 0), {"event": "skipped", "step": 18, "what": "a"},
        {"event": "died", "step": 20, "time": "2020-03-04T05:09:00+01:00", "what": "rank 1 was killed"},
        start(10, 12, resumed="step-000010"), {"event": "skipped", "step": 12, "what": "b"},
    ])  # fmt: skip
    past = load(tmp_path)
    first, second = spans(past, [row(step) for step in range(1, 26)])
    assert (first.steps, first.took, first.ended) == ("1–10", "9 min 00 s", "a worker died")
    assert (second.steps, second.took) == ("11–25", "") and "not recorded" in second.ended
    said = {mark.what for mark in marks(past, [])}
    assert "a (this step was done again since)" in said and "b" in said
    assert any("whose steps after 10 are done again" in each for each in said)


def test_the_data_is_told(run: Path) -> None:
    text = plain(main(run))
    data = text[text.index("<h2>Data</h2>") : text.index("<h2>Parameter sharding</h2>")]
    for said in (
        "30 documents in 2 files, 40,000 tokens", "90 rows of 256, 80.0% full", "2.4% of the tokens, 1% asked",
        "3.00 epochs", "3 pieces left out", "a.txt: 10 documents", "b.txt: 20 documents", "2,048",
    ):  # fmt: skip
        assert said in data, said
    assert "not of the data" not in data


def test_a_run_of_an_earlier_version_claims_nothing(tmp_path: Path) -> None:
    text = plain(main(make_run(tmp_path / "run", [row(1), row(2)])))
    asks_for_nothing(text)
    facts = text[: text.index("Training curves")]
    assert facts.count("not recorded") == 2 and "torch" not in facts
    assert "Starts and events" not in text


def test_samples_keep_their_lines_and_command_nothing(run: Path) -> None:
    sample = {"step": 3, "prompt": "def f(", "text": "def f(a):\n    return <b>\u2028\x1b[2J\u202e"}
    (run / "samples.jsonl").write_text(json.dumps(sample, ensure_ascii=False) + "\nnot JSON\n", encoding="utf-8")
    raw = main(run).read_text(encoding="utf-8")
    (text,) = re.findall(r"<pre><span class=\"prompt\">(.*?)</pre>", raw, re.DOTALL)
    assert text == "def f(</span>a):\n    return &lt;b&gt;\\u2028\\x1b[2J\\u202e"
    assert re.search(r"pre \{ white-space: pre-wrap", raw)
    assert "samples.jsonl:2 is not a row of JSON" in raw


def test_damage_is_named_and_the_page_is_there(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "train/lo\n{"step": 62}\n')
    with (run / NAME).open("a") as file:
        file.write("[]\n")
    text = plain(main(run))
    assert "metrics.jsonl:61 is not a row of JSON" in text and "history.jsonl:6 is not a row" in text
    assert "62 of 200 steps" in text


def test_the_script_has_the_numbers_of_every_axis(run: Path) -> None:
    tags = Reader(main(run).read_text(encoding="utf-8")).tags
    (shared,) = [json.loads(str(each["data-curves"])) for _, each in tags if "data-curves" in each]
    assert list(shared["xs"]) == ["steps", "tokens", "hours"] and shared["marks"] == [7, 30]
    assert shared["xs"]["steps"][0] == list(range(1, 61))
    assert shared["xs"]["tokens"][0][-1] == 60_000 and shared["xs"]["hours"][0][-1] == pytest.approx(0.06)
    drawn = [json.loads(str(each["data-panel"])) for _, each in tags if "data-panel" in each]
    for panel in drawn:
        for grid, values, _ in panel["lines"]:
            assert len(values) == len(shared["xs"]["steps"][grid])
    assert drawn[0]["loss"] and drawn[0]["lines"][0][1][:2] == [5, 2.5]
    without = draw(panels([row(1), row(2)]), [], averaged=False)
    assert list(json.loads(without.data)["xs"]) == ["steps", "tokens"]  # nobody noted the time


@pytest.mark.parametrize("low, high", [(0, 1), (6.28, 7.64), (-3, 4e9), (1e-9, 2e-9), (5, 5), (0, 0)])
def test_ticks_are_few_and_round(low: float, high: float) -> None:
    ticks = nice(low, high, 5)
    assert 1 <= len(ticks) <= 6 and all(low - 1e-6 <= tick <= high + 1e-6 for tick in ticks)


def test_words_for_times() -> None:
    assert [duration(each) for each in (None, 7, 65, 3700)] == ["", "7 s", "1 min 05 s", "1 h 01 min"]
    assert moment("2026-01-31T12:34:56+01:00") == "2026-01-31 12:34:56 +0100"
    assert moment("nonsense") == moment("") == ""


def test_the_history_is_written_and_read(tmp_path: Path) -> None:
    said: list[str] = []
    with closing(history.Log(tmp_path, said.append)) as log:
        log.write("start", 0, layout="tp2", **history.surroundings())
        log.write("end", 5, what="finished")
    (found,) = load(tmp_path).starts
    assert (found.step, found.last, found.how) == (0, 5, "finished") and found.seconds is not None
    assert {"fivefold", "torch", "transformers", "Python"} <= found.about["versions"].keys()
    assert history.changes(found.about, {**found.about, "layout": "pp2"}) == ["layout tp2 → pp2"]
    assert said == []
