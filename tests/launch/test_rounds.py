"""One round of nodes writes to a run folder: nothing that an earlier one has begun reaches it."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.core import files
from fivefold.core.json_lines import JsonLines, read
from fivefold.launch.rounds import RoundOver, check, clear_logs, last_round, logs_of, room, take


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read(path).rows]


def test_a_later_round_takes_the_folder_and_an_earlier_one_never_again(tmp_path: Path) -> None:
    assert last_round(tmp_path) == 0 and room(tmp_path, 0) == tmp_path
    take(tmp_path, 3)
    (room(tmp_path, 3) / "half").mkdir()
    take(tmp_path, 12)
    assert last_round(tmp_path) == 12 and not room(tmp_path, 3).exists() and (room(tmp_path, 12) / "half").exists()
    check(tmp_path, 12)
    check(tmp_path, 0)
    for late in (3, 7, 12):
        with pytest.raises(RoundOver):
            take(tmp_path, late)
    with pytest.raises(RoundOver):
        check(tmp_path, 3)


def test_of_two_rounds_that_take_at_once_the_later_one_writes(tmp_path: Path) -> None:
    take(tmp_path, 1)
    rename = os.rename

    def slow(old: Path, new: Path) -> None:
        """Another round is faster, between the look and the renaming."""
        with patch.object(os, "rename", rename):
            take(tmp_path, 5)
        rename(old, new)

    with patch.object(os, "rename", slow), pytest.raises(RoundOver):
        take(tmp_path, 4)
    assert last_round(tmp_path) == 5


def test_rows_of_an_earlier_round_reach_no_file_of_a_later_one(tmp_path: Path) -> None:
    path, said = tmp_path / "metrics.jsonl", list[str]()

    def begin(number: int, last_step: int) -> JsonLines:
        take(tmp_path, number)
        return JsonLines(path, last_step=last_step, say=said.append, room=room(tmp_path, number))

    first = begin(1, 0)
    first.write({"step": 1})
    first.write({"step": 2})
    second = begin(2, 2)  # nothing is cut, and the file is another one all the same
    first.write({"step": 3})
    second.write({"step": 3})
    first.write({"step": 4})
    first.close()
    assert steps(path) == [1, 2, 3]
    again = JsonLines(path, last_step=1, say=said.append, room=room(tmp_path, 1))  # it stood still as it began
    again.write({"step": 2})
    assert steps(path) == [1, 2, 3] and said == []
    second.write({"step": 4})
    assert steps(path) == [1, 2, 3, 4]


@pytest.mark.parametrize("call", ["open", "write", "replace"])
def test_a_file_that_is_replaced_as_the_round_ends_stays(call: str, tmp_path: Path) -> None:
    """The process stands still before each call of the system with which it replaces a file."""
    take(tmp_path, 1)
    (tmp_path / "run.yaml").write_text("of round 2")
    original = getattr(os, call)

    def still(*args: Any, **options: Any) -> Any:
        with patch.object(os, call, original):
            take(tmp_path, 2)
        return original(*args, **options)

    with patch.object(os, call, still), pytest.raises(OSError):
        files.replace(tmp_path / "run.yaml", b"of round 1", room=room(tmp_path, 1))
    assert (tmp_path / "run.yaml").read_text() == "of round 2"


def test_logs_of_the_last_rounds_are_kept(tmp_path: Path) -> None:
    for number in (9, 10, 11):
        logs_of(tmp_path, number).mkdir(parents=True)
    (tmp_path / "logs" / "rank-0.log").touch()
    clear_logs(tmp_path)
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-0.log", "round-10", "round-11"]
