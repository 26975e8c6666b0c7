"""The history of a run: each start with its layout, machine and data, and what happened on the way."""

import json
from pathlib import Path

import pytest

from fivefold.config import RunConfig
from fivefold.core.history import History, RunEvent, Start, load
from fivefold.report.run import main as report
from fivefold.training import header
from fivefold.training.launch import _tell_restart
from tests.training.bodies import column, run_dir, run_file, train

SCHEDULE = {"name": "cosine", "peak": 1e-3, "warmup_steps": 2, "total_steps": 10, "min_lr_ratio": 0.1}


@pytest.mark.full
def test_a_run_of_two_layouts_tells_both(tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=3)
    assert train(tree, nan_loss=[2]).error is None
    tree = run_file(tmp_path, train__max_steps=6, layout__tp=2)
    ran = train(tree)
    assert ran.error is None
    assert "changed  layout shard2" in ran.screen and "→ tp2" in ran.screen and "steps 3 → 6" in ran.screen
    assert "the learning rate of step 4 is" in ran.screen
    past = load(run_dir(tree))
    assert [(start.step, start.last, start.how) for start in past.starts] == [(0, 3, "finished"), (3, 6, "finished")]
    assert [(event.step, event.kind) for event in past.events] == [(2, "skipped")]
    assert past.starts[0].about["data"]["train"]["rows"] > 0
    assert past.starts[1].about["resumed"].endswith("step-000003")
    elapsed = column(tree, "perf/elapsed_seconds")
    assert elapsed == sorted(elapsed) and elapsed[3] > elapsed[2] > 0
    page = report(run_dir(tree)).read_text(encoding="utf-8")
    assert "Starts and events" in page and "1–3" in page and "4–6" in page
    assert train(tree).error is None and len(load(run_dir(tree)).starts) == 2  # it was finished: no start


def test_a_run_that_went_back_twice_is_told_without_what_was_done_again() -> None:
    first, again, last = (Start(step, "", {}) for step in (0, 10, 5))
    assert list(History((first, again, last)).spans()) == [(first, 0, 5), (last, 5, None)]


def test_a_start_that_was_cut_off_before_its_first_step_has_no_steps() -> None:
    first, idle, last = (Start(step, "", {}) for step in (0, 10, 10))
    assert list(History((first, idle, last)).spans()) == [(first, 0, 10), (last, 10, None)]


def test_an_event_is_left_where_no_later_start_did_its_step_again() -> None:
    past = History([Start(step, "", {}) for step in (0, 20, 5)])
    assert [past.is_left(RunEvent(step, "skipped", "", 0)) for step in (4, 5, 6)] == [True, True, False]
    assert past.is_left(RunEvent(6, "skipped", "", 2))


def test_what_happens_belongs_to_the_start_before_it(tmp_path: Path) -> None:
    kinds = [("start", 0), ("skipped", 2), ("end", 3), ("died", 3), ("start", 3), ("skipped", 4), ("died", 5)]
    rows = [json.dumps({"event": kind, "step": step, "time": "2020-03-04", "what": "finished"}) for kind, step in kinds]
    (tmp_path / "history.jsonl").write_text("\n".join(rows))
    past = load(tmp_path)
    assert [(event.step, event.number) for event in past.events] == [(2, 0), (3, 0), (4, 1), (5, 1)]
    assert [(start.last, start.how) for start in past.starts] == [(3, "finished"), (5, "a worker died")]


def test_a_worker_that_died_is_kept_by_the_launcher(tmp_path: Path) -> None:
    config = RunConfig.model_validate({"run": {"dir": str(tmp_path), "name": "x"}})
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").write_text('{"step": 7, "train/loss": 1.0}\n')
    _tell_restart(config, "rank 1 was killed by SIGKILL")
    (event,) = load(config.run_dir).events
    assert (event.step, event.kind, event.what) == (7, "died", "rank 1 was killed by SIGKILL")


def test_a_jump_of_the_learning_rate_is_said_and_nothing_else() -> None:
    from fivefold.core.history import Start

    def said(**now: object) -> list[tuple[str, str]]:
        before = History([Start(5, "", {"layout": "tp2", "schedule": SCHEDULE})])
        return header.changed(before, {"layout": "tp2", "schedule": {**SCHEDULE, **now}}, step=5)

    assert said() == []
    ((label, text),) = said(total_steps=100)
    assert label == "changed" and "steps 10 → 100; the learning rate of step 6 is 9.9" in text
    assert header.changed(History(), {}, step=5) == []
    assert header.changed(History([Start(5, "", {})]), {"schedule": SCHEDULE}, step=5) == []  # an earlier version's
