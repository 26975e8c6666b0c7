"""The `Report` noun: the same rows for people and for tools."""

import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from fivefold.core.errors import UserError
from fivefold.report.findings import Report, write


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


def test_files_are_written_though_nobody_reads_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit):
            write(REPORT, json=str(tmp_path / "report.json"), html=str(tmp_path / "report.html"))
    assert json.loads((tmp_path / "report.json").read_text())["ok"] is False
    assert "pp2" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("kind", ["json", "html"])
def test_a_report_is_shown_though_its_file_cannot_be_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        write(REPORT, **{"json": None, "html": None, kind: str(tmp_path / "file" / "report")})
    assert "a title" in capsys.readouterr().out


def test_the_table_shows_every_cell() -> None:
    console = Console(file=io.StringIO(), width=80)
    REPORT.show(console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert all(word in text for word in ("a title", "what", "tp2", "failed", "0.5", "and now"))
