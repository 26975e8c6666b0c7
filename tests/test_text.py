"""Text from elsewhere on a terminal: no character of it is a command, on any of the ways there."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fivefold.cli import main
from fivefold.core.errors import UserError
from fivefold.core.files import put
from fivefold.core.text import any_layer, listed, shortened, shown
from fivefold.generation.run import to_screen
from fivefold.report.findings import Report
from fivefold.training.display import open_display
from fivefold.training.launch import preparing
from fivefold.verification.report import report_of
from fivefold.verification.results import ComparisonRow, LayoutResult

COMMANDS = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x00\x08\x7f\u202e\u2066\u2028"
HOSTILE = f"a [red]b[/red] [/] {COMMANDS} c"
ALLOWED = "\n\t"


class Terminal(io.StringIO):
    """A terminal, as rich and Python see one."""

    def isatty(self) -> bool:
        return True


def is_safe(text: str, *, of_rich: bool = False) -> bool:
    """Whether no control character of `HOSTILE` came through; rich's own colours are SGR codes, which end in m."""
    if of_rich:
        import re

        text = re.sub(r"\x1b\[[\d;]*m|\x1b\[\?25[lh]|\x1b\[\d*[AGKJ]|\r(?=\x1b|\n|$)", "", text)
    return not set(text) & (set(COMMANDS) - set("]0;owned[2J31m"))


def test_every_control_character_is_written_out() -> None:
    assert shown("\x1b[31m\u202e\x9b\r\n\tä文") == "\\x1b[31m\\u202e\\x9b\\r\n\tä文"
    every = "".join(map(chr, range(0x3000)))
    assert not [each for each in shown(every) if not each.isprintable() and each not in ALLOWED and each < "\xa0"]
    plain = "".join(chr(code) for code in range(0x20, 0x7F)) + "äöü文字 😀\n\t"
    assert shown(plain) == plain


def test_generated_text_is_safe_on_a_terminal_and_exact_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    to_screen(HOSTILE)
    monkeypatch.setattr(sys, "stdout", pipe)
    to_screen(HOSTILE)
    assert is_safe(terminal.getvalue()) and "[red]b[/red]" in terminal.getvalue()
    assert pipe.getvalue() == HOSTILE


@pytest.mark.parametrize("live", [True, False])
def test_the_display_of_a_run_is_safe(live: bool) -> None:
    file = Terminal() if live else io.StringIO()
    console = Console(file=file, force_terminal=live, width=100, highlight=False)
    with open_display(total_steps=3, console=console) as display:
        display.header([("run", HOSTILE)])
        display.sampled(1, HOSTILE, HOSTILE)
        display.note(HOSTILE)
        display.closing([("done", HOSTILE)])
    assert is_safe(file.getvalue(), of_rich=live)
    assert file.getvalue().count("[red]b[/red]") >= 4


def test_tables_are_safe() -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Line:
        what: str

    console = Console(file=Terminal(), force_terminal=True, width=200)
    Report(title=HOSTILE, rows=(Line(HOSTILE),), ok=True, closing=HOSTILE).show(console)
    found = [
        LayoutResult(HOSTILE, [ComparisonRow("x", 1.0, 0.0, False, HOSTILE)]),
        LayoutResult("tp2", refused=HOSTILE),
    ]
    report_of(found, "subject", {}).show(console)
    assert is_safe(console.file.getvalue(), of_rich=True)  # type: ignore[attr-defined]
    assert console.file.getvalue().count("[red]b[/red]") >= 5  # type: ignore[attr-defined]


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_said_while_data_is_prepared_is_safe(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    with preparing(console) as progress:
        progress(HOSTILE, 1, 2)
    assert is_safe(console.file.getvalue(), of_rich=terminal)  # type: ignore[attr-defined]


def failing(error: Exception) -> Any:
    def verb(*_: Any, **__: Any) -> None:
        raise error

    return verb


@pytest.mark.parametrize("error", [UserError(HOSTILE, fix=HOSTILE, more=HOSTILE), ValueError(HOSTILE)])
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_errors_are_safe(
    error: Exception, debug: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fivefold.cli.app", failing(error))
    with pytest.raises(SystemExit):
        main(["train", *debug])
    said = capsys.readouterr().err
    assert is_safe(said) and "[red]b[/red]" in said


def test_hostile_arguments_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["report", COMMANDS], ["train", f"a.{COMMANDS}=1"], [COMMANDS], ["train", f"--{COMMANDS}"]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and is_safe(capsys.readouterr().err), arguments


def test_a_read_only_place_is_no_bug(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import errno
    import os

    for code in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.ENOTDIR):
        monkeypatch.setattr("fivefold.cli.app", failing(OSError(code, os.strerror(code), "/ro/x")))
        with pytest.raises(SystemExit) as ended:
            main(["train"])
        said = capsys.readouterr().err
        assert ended.value.code == 2 and "cannot write /ro/x" in said and "bug" not in said


@pytest.mark.parametrize("error", [MemoryError(), ImportError("libtorch.so: failed to map segment from shared object")])
def test_too_little_memory_is_no_bug(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fivefold.cli.app", failing(error))
    with pytest.raises(SystemExit) as ended:
        main(["plan"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "memory" in said and "ulimit -v" in said and "bug" not in said


LOST = (
    "reduce_scatter [30848] of group default_pg: rank 1 has left",
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242",
    "NCCL error: remote process exited or there was a network error",
)


@pytest.mark.parametrize("words", LOST)
def test_another_rank_that_ended_is_no_bug(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fivefold.cli.app", failing(RuntimeError(words)))
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    said = capsys.readouterr().err
    assert ended.value.code == 1 and "another rank has ended" in said and words in said and "bug" not in said


def test_pages_and_exports_that_cannot_be_written_are_the_users(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write") as caught:
        put(tmp_path / "file" / "page.html", b"<html>", instead="name another file: --out FILE")
    assert caught.value.exit_code == 2 and "--out FILE" in str(caught.value.fix)


def test_what_is_long_is_cut_and_says_so() -> None:
    assert [listed(names, 2) for names in ([], ["a"], "ab", "abcd")] == ["", "a", "a, b", "a, b and 2 more"]
    assert [shortened("x" * size, 5) for size in (5, 6)] == ["xxxxx", "xx..."]
    assert [any_layer(each) for each in ("layers.12.mlp", "h.3", "norm1.weight")] == [
        "layers.*.mlp",
        "h.*",
        "norm1.weight",
    ]
