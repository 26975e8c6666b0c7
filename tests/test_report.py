"""The `Report` noun: the same rows for people and for tools."""

import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from fivefold.report.table import Report, write


@dataclass(frozen=True)
class Row:
    what: str
    state: str
    found: float


REPORT = Report(title="a title", rows=(Row("tp2", "ok", 1e-7), Row("pp2", "failed", 0.5)), ok=False, closing="and now")


def test_columns_are_the_fields_of_the_rows() -> None:
    assert REPORT.columns == ("what", "state", "found")
    assert Report[Row](title="empty", rows=(), ok=True).columns == ()


def test_json_holds_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(REPORT, json="-")
    alone = json.loads(capsys.readouterr().out)
    assert alone["ok"] is False
    assert alone["rows"][1] == {"what": "pp2", "state": "failed", "found": 0.5}
    write(REPORT, json=str(tmp_path / "report.json"))
    assert json.loads((tmp_path / "report.json").read_text()) == alone
    assert "a title" in capsys.readouterr().out


def test_the_table_shows_every_cell() -> None:
    console = Console(file=io.StringIO(), width=80)
    REPORT.show(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(word in text for word in ("a title", "what", "tp2", "failed", "0.5", "and now"))
