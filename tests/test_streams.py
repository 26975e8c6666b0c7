"""Output that cannot be shown: training goes on, and everything else ends without noise."""

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fivefold.core.streams import is_closed_pipe, unseen_if_need_be
from fivefold.training.display import PlainDisplay
from tests.training.bodies import column, run_dir, run_file

KEYS = [sys.executable, "-m", "fivefold", "train", "--keys"]
HELP = [sys.executable, "-m", "fivefold", "train", "--help"]  # printed by Rich
ASCII = os.environ | {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


def closed_pipe() -> int:
    """A descriptor to write to that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full() -> int:
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("target", [closed_pipe, full])
def test_a_display_that_cannot_be_seen_goes_on(
    target: Callable[[], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stdout", os.fdopen(target(), "w"))
    with caplog.at_level(logging.WARNING), unseen_if_need_be():
        display = PlainDisplay(Console(file=sys.stdout, highlight=False), total_steps=3)
        for step in range(1, 4):
            display.evaluated(step, 2.0)
            print("more", flush=True)
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "standard output cannot be written"
    ]
    sys.stdout.close()  # without an error: nothing waits to be written


def test_what_can_be_seen_is(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    with unseen_if_need_be():
        print("step 1")
    assert screen.getvalue() == "step 1\n" and sys.stdout is screen


def ended(command: list[str], **streams: int) -> tuple[int, str]:
    """(exit code, what it said on standard error)."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, **streams)  # type: ignore[call-overload]
    return done.returncode, done.stderr


@pytest.mark.full
def test_a_verb_ends_quietly_when_nobody_reads_on() -> None:
    assert ended(KEYS, stdout=closed_pipe()) == (141, "")
    assert ended(HELP, stdout=closed_pipe()) == (141, "")
    assert ended(["sh", "-c", f"{' '.join(KEYS)} >&-"]) == (0, "")


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a disk that is always full")
def test_a_verb_says_that_it_cannot_write() -> None:
    code, said = ended(KEYS, stdout=full())
    assert code == 1 and said.startswith("standard output cannot be written") and len(said.splitlines()) == 1


def test_a_pipe_that_breaks_elsewhere_is_not_standard_output_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target, expected in ((os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY), False), (closed_pipe(), True)):
        with os.fdopen(target, "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert is_closed_pipe(BrokenPipeError()) is expected
            assert not is_closed_pipe(ConnectionResetError())


@pytest.mark.full
def test_another_broken_pipe_is_named(tmp_path: Path) -> None:
    """Typer turns it into a silent exit with 1."""
    script = (
        "import os; from fivefold import cli; r, w = os.pipe(); os.close(r)\n"
        "cli.VERBS.clear(); cli.app.command('breaks')(lambda: os.write(w, b'x')); cli.main(['breaks'])"
    )
    with (tmp_path / "out").open("w") as out:
        code, said = ended([sys.executable, "-c", script], stdout=out.fileno())
    assert code == 1 and said.startswith("BrokenPipeError")


@pytest.mark.full
def test_what_is_opened_does_not_become_standard_output(tmp_path: Path) -> None:
    """Without this, a closed descriptor 1 is the next file's, and what is printed goes into it."""
    script = (
        "import sys; from fivefold.core.streams import make_usable; make_usable(); f = open(sys.argv[1], 'w'); print(1)"
    )
    command = ["sh", "-c", f'"{sys.executable}" -c "{script}" {tmp_path / "weights"} >&- 2>&- <&-']
    assert subprocess.run(command, check=True).returncode == 0
    assert (tmp_path / "weights").read_text() == ""


def trained(tree: dict[str, object], script: str, **changes: str) -> None:
    """Run `script`, in which $RUN trains; the run is whole however little could be seen of it."""
    import yaml

    file = run_dir(tree).parent / f"{run_dir(tree).name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    run = f'"{sys.executable}" -m fivefold train "{file}"'
    env = os.environ | {"FIVEFOLD_CACHE": str(file.parent / "cache"), "RUN": run, **changes}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert column(tree, "step") == [1, 2, 3]
    said = done.stderr + (run_dir(tree) / "logs" / "rank-0.log").read_text()
    assert said.count("standard output cannot be written") == (" >&-" not in script)  # closed, it was never there
    assert len(done.stderr.splitlines()) <= 1


@pytest.mark.full
def test_a_run_whose_output_nobody_reads_is_finished(tmp_path: Path) -> None:
    """A sample and a name that an ASCII terminal does not have, in a pipe that closes after a line."""
    tree = run_file(tmp_path, run__name="größer", train__max_steps=3, sample__every=1, sample__prompts=["é ▁"])
    trained(
        tree,
        "set -o pipefail; eval $RUN | head -1 > /dev/null",
        **{k: ASCII[k] for k in ("LC_ALL", "PYTHONIOENCODING")},
    )


@pytest.mark.campaign
@pytest.mark.parametrize("script", ["eval $RUN > /dev/full", "eval $RUN >&-", "eval $RUN >&- 2>&- <&-"])
def test_a_run_that_cannot_be_seen_is_finished(script: str, tmp_path: Path) -> None:
    trained(run_file(tmp_path, train__max_steps=3), script)
