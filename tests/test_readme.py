"""Every block of the README is run in the way that its text says, commands in their order and in an empty folder: one
of each kind as a process, as a user has it, the others in this one (`tests/commands.py`)."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.commands import BIN, as_process, fivefold, python
from tests.pages import DOCS, ROOT, Block, blocks

BLOCKS = list(blocks(ROOT / "README.md"))

# Lines of a block that is run otherwise: `test_make_runs_the_plain_lines_of_the_readme` holds them to the Makefile.
BY_MAKE = ["python3 -m venv .venv", ".venv/bin/python -m pip install -c constraints.txt -e '.[dev]'"]

# The first; other verbs are processes in `tests/test_commands.py`. A command that is no `fivefold` always is one.
PROCESSES = {".venv/bin/fivefold train"}

# What is added to a command to make it short; nothing else about it changes.
SHORT = {
    r"(\S*|.*-m )fivefold(\.cli)? train.*": "train.max_steps=2 eval.max_tokens=2k train.global_batch_size=4 "
    "train.micro_batch_size=2 sample.prompts=[import]",
}
SHORT_IN_PYTHON = {
    '"train.max_steps": 5': '"train.max_steps": 2, "train.global_batch_size": 4, "train.micro_batch_size": 2, '
    '"eval.max_tokens": "2k"',
}


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and not block.not_run]


COMMANDS = [command for block in of("bash") for command in block.commands]
MAKES_NOTES = next(command for command in COMMANDS if "notes.txt" in command)


def shortened(command: str) -> str:
    added = next((extra for pattern, extra in SHORT.items() if re.fullmatch(pattern, command)), "")
    return f"{command.replace('.venv/bin/', '')} {added}".strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty folder with the files that the README shows or speaks of."""
    folder = tmp_path_factory.mktemp("readme")
    as_process(shlex.split(MAKES_NOTES), folder)
    assert (folder / "notes.txt").stat().st_size > 60_000
    for block in [*of("yaml"), *of("python")]:
        if block.file:
            block.write(folder)
    return folder


RUN = [each for each in dict.fromkeys(COMMANDS) if each not in BY_MAKE]  # one that is there twice is run once


@pytest.mark.full
@pytest.mark.parametrize("command", RUN)
def test_every_command_runs(command: str, folder: Path) -> None:
    words = shlex.split(shortened(command))
    if words[0] == "fivefold" and command not in PROCESSES:
        assert fivefold(words[1:], folder)
    else:
        assert as_process(words, folder)


@pytest.mark.full
@pytest.mark.parametrize("block", [block for block in of("python") if not block.file], ids=str)
def test_every_python_block_runs(block: Block, folder: Path) -> None:
    text = block.text
    for line, shorter in SHORT_IN_PYTHON.items():
        text = text.replace(line, shorter)
    assert python(text, folder)


def test_a_block_with_a_name_is_run_by_a_command() -> None:
    named = [block.file for block in BLOCKS if block.file]
    assert named and all(any(name in command for command in COMMANDS) for name in named)
    assert all(block.file for block in of("yaml"))


def test_the_text_of_the_run_file_is_made_before_it_is_needed() -> None:
    assert COMMANDS.index(MAKES_NOTES) < min(i for i, command in enumerate(COMMANDS) if "notes.yaml" in command)


def test_what_this_file_names_is_in_the_readme() -> None:
    assert {*BY_MAKE, *PROCESSES} <= set(COMMANDS)
    assert all(any(line in block.text for block in of("python")) for line in SHORT_IN_PYTHON)


def test_no_sentence_is_cut_from_the_block_that_it_announces() -> None:
    """A line that ends in a colon has a block, a table or a list behind it."""
    for page in [ROOT / "README.md", *DOCS]:
        text = re.sub(r"^```.*?^```$", "```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        cut = re.findall(r"^.*:\n\n(?!```|<!--|\||[-*] |\d+\. |!\[|> |    ).*$", text, re.MULTILINE)
        assert cut == [], page.name


@pytest.mark.full
def test_make_runs_the_plain_lines_of_the_readme() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "train", "PYTHON=python3", "PIP_FLAGS="],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    made = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert any(BY_MAKE[0] in line for line in made)
    for line in COMMANDS[COMMANDS.index(BY_MAKE[1]) :][:2]:
        assert line in made, done.stdout


@pytest.mark.full
def test_make_says_so_when_python_is_too_old(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(["make", "train", "PYTHON="], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "fivefold needs Python 3.11 or newer" in done.stderr


@pytest.mark.full
def test_the_error_that_the_readme_shows_is_the_one_that_appears(folder: Path) -> None:
    shown = next(iter(of("text"))).text
    text = (folder / "notes.yaml").read_text(encoding="utf-8").replace("learning_rate", "learning_rte")
    (folder / "typo").mkdir()
    (folder / "typo" / "notes.yaml").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [str(BIN / "fivefold"), "train", "notes.yaml"], cwd=folder / "typo", capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, shown)
