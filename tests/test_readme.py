"""Every command of the README is run, in its order, in an empty folder: one of each kind as a process, as a user has
it, the others in this one (`tests/commands.py`)."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import fivefold

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent

# Commands that this test does not run, each with its reason.
NOT_RUN = {
    "git clone ADDRESS fivefold && cd fivefold": "there is one already",
    "make train": "sets up an environment; its lines are compared with the README's below",
    "make test": "would run this test again",
    "python3 -m venv .venv": "compared with the Makefile below",
    ".venv/bin/python -m pip install -c constraints.txt -e '.[dev]'": "compared with the Makefile below",
    "srun --nodes 2 --ntasks-per-node 8 fivefold train notes.yaml": "needs Slurm; its variables have tests in launch/",
}

# The first of each kind; a command that is no `fivefold` is always a process.
PROCESSES = {
    ".venv/bin/fivefold train",
    "fivefold train notes.yaml",
    "fivefold verify notes.yaml --quick --layouts shard2.tp2 --html verify.html",
    'fivefold generate runs/notes --prompt "The " --max-new-tokens 20',
    "fivefold export runs/notes notes-model",
}

# What is added to a command to make it short; nothing else about it changes.
SHORT = {
    r"\S*fivefold train": "train.max_steps=2 eval.max_tokens=2k train.global_batch_size=4 train.micro_batch_size=2 "
    "sample.prompts=[import]",
    r".*fivefold(\.cli)? train notes\.yaml.*": "train.max_steps=2",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line.strip()]
MAKES_NOTES = next(command for command in COMMANDS if "notes.txt" in command)


def shortened(command: str) -> str:
    added = next((extra for pattern, extra in SHORT.items() if re.fullmatch(pattern, command)), "")
    return f"{command.replace('.venv/bin/', '')} {added}".strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the files that the README shows or speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    run(shlex.split(MAKES_NOTES), folder)
    assert (folder / "notes.txt").stat().st_size > 60_000
    for text in blocks("yaml"):
        name = re.match(r"# (\S+\.yaml)\n", text)
        assert name, "a yaml block starts with its file's name in a comment"
        (folder / name[1]).write_text(text, encoding="utf-8")
    return folder


def run(command: list[str], folder: Path) -> str:
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


RUN = [each for each in dict.fromkeys(COMMANDS) if each not in NOT_RUN]  # one that is there twice is run once


@pytest.mark.parametrize("command", RUN)
def test_every_command_runs(command: str, folder: Path) -> None:
    words = shlex.split(shortened(command))
    if words[0] == "fivefold" and command not in PROCESSES:
        assert fivefold(words[1:], folder)
    else:
        assert run(words, folder)


@pytest.mark.parametrize("block", blocks("python"))
def test_every_python_block_runs(block: str, folder: Path) -> None:
    (folder / "block.py").write_text(block, encoding="utf-8")
    assert run([sys.executable, "block.py"], folder)


def test_the_text_of_the_run_file_is_made_before_it_is_needed() -> None:
    assert COMMANDS.index(MAKES_NOTES) < min(i for i, command in enumerate(COMMANDS) if "notes.yaml" in command)


def test_what_is_not_run_is_in_the_readme() -> None:
    assert {*NOT_RUN, *PROCESSES} <= set(COMMANDS)


def test_make_runs_the_plain_lines_of_the_readme() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "train", "PYTHON=python3"], cwd=ROOT, capture_output=True, text=True
    )
    made = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any("python3 -m venv .venv" in line for line in made)
    for line in COMMANDS[COMMANDS.index("python3 -m venv .venv") + 1 :][:2]:
        assert line in made, done.stdout


def test_make_says_so_when_python_is_too_old(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(["make", "train", "PYTHON="], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "fivefold needs Python 3.11 or newer" in done.stderr


def test_the_error_that_the_readme_shows_is_the_one_that_appears(folder: Path) -> None:
    shown = next(iter(blocks("text")))
    text = (folder / "notes.yaml").read_text(encoding="utf-8").replace("learning_rate", "learning_rte")
    (folder / "typo").mkdir()
    (folder / "typo" / "notes.yaml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [str(BIN / "fivefold"), "train", "notes.yaml"], cwd=folder / "typo", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, shown)
