"""Lines that a run writes about itself: any text, damage that is named, writes that fail and come late, never lost."""

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.core import files, json_lines
from fivefold.core.json_lines import JsonLines, read

ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\n\ud800"


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Call it with True: from now on the disk is full, after half of what is written."""
    plain, state = os.write, {"full": False}

    def write(descriptor: int, content: Any) -> int:
        if not state["full"]:
            return plain(descriptor, content)
        if len(content) > 1:
            return plain(descriptor, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "write", write)
    return lambda now: state.update(full=now)


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read(path).rows]


def test_a_line_ends_at_a_line_feed_and_nowhere_else(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "samples.jsonl"
    first = JsonLines(path, last_step=0, say=said.append)
    for step in (1, 2, 3):
        first.write({"step": step, "text": ODD})
    first.close()
    again = JsonLines(path, last_step=2, say=said.append)
    again.close()
    assert steps_of(path) == [1, 2]
    assert read(path).rows[0]["text"] == ODD
    assert said == [] and again.last["step"] == 2


def test_damaged_lines_are_set_aside_by_name_and_the_rest_is_kept(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = b'{"step": 2, "train/lo', b"\xff\xfe", b"[1]", b'{"no": 1}', b"[" * 100_000
    path.write_bytes(b'{"step": 1}\n' + b"\n".join(bad) + b'\n{"step": 3}\n{"step": 4, "t')
    sink = JsonLines(path, last_step=3, say=said.append)
    sink.write({"step": 4})
    sink.close()
    assert steps_of(path) == [1, 3, 4] and not read(path).damaged
    (what,) = said
    assert f"{path}:2 is not a row" in what and "5 more" in what and "metrics.jsonl.damaged" in what
    aside = path.with_name("metrics.jsonl.damaged")
    assert aside.read_bytes().count(b"\n") == 6
    path.write_bytes(path.read_bytes() + b'{"step": 5, "t')
    JsonLines(path, last_step=4, say=said.append).close()
    assert aside.read_bytes().count(b"\n") == 7 and steps_of(path) == [1, 3, 4]


def test_no_row_holds_what_json_does_not_have(tmp_path: Path, said: list[str]) -> None:
    sink = JsonLines(tmp_path / "metrics.jsonl", last_step=0, say=said.append)
    with pytest.raises(ValueError, match="JSON compliant"):
        sink.write({"step": 1, "train/loss": float("nan")})
    sink.write({"step": 2})
    assert steps_of(tmp_path / "metrics.jsonl") == [2]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        read(tmp_path / "pipe")


def test_a_row_that_only_lacks_its_line_feed_is_whole(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')
    JsonLines(path, last_step=9, say=said.append).write({"step": 3})
    assert steps_of(path) == [1, 2, 3] and said == []


def test_rows_are_left_out_of_metrics_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "t": "\u2028"}\n{"step": 2, "t\n{"step": 3}\n', encoding="utf-8"
    )
    with pytest.warns(UserWarning, match=r"metrics.jsonl:2 is not a row"):
        rows = ff.Run(str(tmp_path)).metrics
    assert [row["step"] for row in rows] == [1, 3]


def test_a_full_disk_loses_no_row_and_leaves_no_half_line(
    tmp_path: Path, said: list[str], full: Callable[[bool], None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLines(path, last_step=0, say=said.append)
    sink.write({"step": 1})
    full(True)
    for step in (2, 3, 4):
        sink.write({"step": step})
        assert steps_of(path) == [1] and not read(path).damaged
    assert sink.failed == 3 and len(said) == 1 and "No space left" in said[0]
    full(False)
    sink.write({"step": 5})
    assert steps_of(path) == [1, 2, 3, 4, 5]
    assert len(said) == 2 and "3 rows came late" in said[1]
    full(True)
    sink.write({"step": 6})
    sink.close()
    assert "the last 1 row could not be written" in said[-1]


def test_a_full_disk_at_a_resume_cuts_nothing_away(
    tmp_path: Path, said: list[str], full: Callable[[bool], None]
) -> None:
    path = tmp_path / "metrics.jsonl"
    before = "".join(f'{{"step": {step}}}\n' for step in range(1, 6))
    path.write_text(before)
    full(True)
    sink = JsonLines(path, last_step=3, say=said.append)
    sink.write({"step": 4, "again": 1})
    assert path.read_text() == before and "No space left" in said[0]
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]
    full(False)
    sink.write({"step": 5, "again": 1})
    assert steps_of(path) == [1, 2, 3, 4, 5] and [row.get("again") for row in read(path).rows[3:]] == [1, 1]


@pytest.mark.full
def test_killed_while_it_is_cut_back_all_rows_or_the_kept_ones_are_there(tmp_path: Path) -> None:
    """At every system call of the cut: 252 of 5,000 rows were left where the file was written in place. A line that is
    cut short is in the file, or set aside."""
    path, at, seen = tmp_path / "metrics.jsonl", 0, set()
    aside = path.with_name("metrics.jsonl.damaged")
    rows = [f'{{"step": {step}}}\n' for step in range(1, 5001)]
    while True:
        aside.unlink(missing_ok=True)
        path.write_text("".join(rows) + '{"torn')
        if _ends_before_its_end(path, at):
            seen.add(len(steps_of(path)))
            assert b"torn" in path.read_bytes() or b"torn" in aside.read_bytes()
            at += 1
        else:
            break
    assert at >= 4 and seen == {5000, 4000} and steps_of(path) == list(range(1, 4001))


def _ends_before_its_end(path: Path, at: int) -> bool:
    """Cut the file back in a child that kills itself before the `at`-th call that changes something."""
    child = os.fork()
    if child:
        return bool(os.waitpid(child, 0)[1])
    left = [at]

    class Dying:
        def __getattr__(self, name: str) -> Any:
            if name in ("open", "write", "fsync", "replace"):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return getattr(os, name)

    files.os = json_lines.os = Dying()  # type: ignore[attr-defined,assignment]
    JsonLines(path, last_step=4000, say=print)
    os._exit(0)


def test_a_file_that_is_removed_comes_back_with_all_its_rows(tmp_path: Path, said: list[str]) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonLines(path, last_step=0, say=said.append)
    sink.write({"step": 1})
    shutil.rmtree(path.parent)
    sink.write({"step": 2})
    assert steps_of(path) == [1, 2]
    assert said == [f"{path} was removed while the run writes to it; it is there again, with all its rows"]
    path.unlink()
    path.write_text(json.dumps({"step": 77}) + "\n")
    sink.write({"step": 3})
    assert steps_of(path) == [77, 3] and "another file is there" in said[-1]


def test_what_is_no_file_ends_nothing(tmp_path: Path, said: list[str]) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    sink = JsonLines(tmp_path / "metrics.jsonl", last_step=0, say=said.append)
    sink.write({"step": 1})
    assert any("cannot be written: Is a directory" in each for each in said)


@pytest.mark.parametrize("value", ['"0.5"', "[1]", "{}", "1" + "0" * 400])
def test_a_metric_that_is_no_number_makes_its_row_damaged(tmp_path: Path, value: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1, "train/loss": 0.5, "perf/mfu_pct": null}}\n{{"step": 2, "train/loss": {value}}}\n')
    lines = read(file)
    assert [row["step"] for row in lines.rows] == [1] and lines.damaged[0].number == 2
