"""Every block of the docs is run in the way that its page says, or a line above it says why not (`tests/pages.py`).

Run files are read, commands are taken apart, scripts and commands are run. README.md, docs/howto/python.md and
docs/start/first_fine_tune.md have tests of their own.
"""

import io
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

from fivefold.cli import app
from fivefold.cli.train import split_arguments
from fivefold.config import keys, load_config
from fivefold.hardware.cluster import Cluster
from fivefold.parallel.layout import Layout
from tests.commands import as_process, fivefold
from tests.pages import DOCS, ROOT, Block, blocks
from tests.tiers import put_off

BLOCKS = [block for page in [ROOT / "README.md", *DOCS] for block in blocks(page)]
LANGUAGES = {"bash", "python", "yaml", "toml", "json", "text", ""}  # the last two: what is printed
OWN = {
    ("docs/howto/python.md", "python"): "tests/api/test_docs.py",
    ("docs/start/first_fine_tune.md", "python"): "tests/test_smollm2.py",
    ("docs/start/first_fine_tune.md", "bash"): "tests/test_smollm2.py",
}
# Pages of proofs and of runs whose like guards a merge elsewhere.
CAMPAIGN = {
    f"docs/{name}.md"
    for name in (
        "explain/context", "explain/fp8", "howto/checkpoints", "howto/distillation", "howto/python", "howto/run_file",
        "howto/verify", "start/is_it_right",
    )
}  # fmt: skip
# A line that tests/test_readme.py runs too, and that leaves nothing which a later one reads.
OF_README = {command for block in blocks(ROOT / "README.md") for command in block.commands if block.language == "bash"}
READ_ONLY = ("fivefold verify ", "fivefold plan ", "fivefold doctor ")

BY_TORCHRUN = re.compile(r"torchrun .* -m fivefold\.cli ")  # which starts a run of README.md in the tests of that
# What is added to a command to make it short; nothing else about it changes.
SHORT = {
    r"(torchrun .* -m )?fivefold(\.cli)? train ": "train.max_steps=2 train.global_batch_size=4 "
    "train.micro_batch_size=2 data.seq_length=128",
    r"fivefold train ($|run\.name=)": "data.train=notes.txt",  # the demo's text takes a while to read
    r"fivefold verify notes\.yaml ": "--quick",
    r".*fivefold generate ": "--max-new-tokens 9",
}
AXOLOTL = """
base_model: my-model
datasets: [{path: json, type: completion, field: text, data_files: [texts.jsonl]}]
sequence_len: 128
micro_batch_size: 1
num_epochs: 1
learning_rate: 2e-4
optimizer: adamw_torch
lr_scheduler: cosine
"""


def of(*languages: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages and not block.not_run]


def given(block: Block) -> Iterator[list[str]]:
    """The arguments of each `fivefold` of a block, with what its page sets for the shell in their place."""
    page = "".join(each.text for each in BLOCKS if each.page == block.page)
    names = dict(re.findall(r'^(?:export )?(\w+)="(.*)"$', page, re.MULTILINE))
    names |= dict(re.findall(r"^for (\w+) in (\S+)", page, re.MULTILINE))
    text = re.sub(r"\$(\w+)", lambda name: names[name[1]], block.text.replace("\\\n", " "))
    for command in re.findall(r"(?:^|\| |^ +|-m |/)fivefold(?:\.cli)? (.*)", text, re.MULTILINE):
        yield shlex.split(command.partition(" > ")[0], comments=True)


def test_every_block_is_of_a_kind(subtests: pytest.Subtests) -> None:
    for page in [ROOT / "README.md", *DOCS]:
        with subtests.test(msg=page.name):
            own = list(blocks(page))
            fences = re.findall(r"^ *(?:```|~~~).*$", page.read_text(encoding="utf-8"), re.MULTILINE)
            assert len(fences) == 2 * len(own)
            assert {block.language for block in own} <= LANGUAGES
            printed = [block for block in own if block.language in ("text", "")]
            assert [str(block) for block in printed if re.search(r"^(fivefold|python|torchrun) \w+ ", block.text)] == []


def test_every_run_file_is_read(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for block in of("yaml"):
        with subtests.test(msg=str(block)):
            (tmp_path / "run.yaml").write_text(block.text, encoding="utf-8")
            assert load_config(tmp_path / "run.yaml")


def test_every_other_file_is_read(tmp_path: Path) -> None:
    assert all(isinstance(json.loads(line), dict) for block in of("json") for line in block.text.splitlines())
    for block in of("toml"):
        (tmp_path / "mine.toml").write_text(block.text, encoding="utf-8")
        assert Cluster.parse(str(tmp_path / "mine.toml")).world > 1


def test_every_command_has_its_options_and_its_keys(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not run among them."""
    monkeypatch.chdir(tmp_path)
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    commands = [(block, words) for block in BLOCKS if block.language == "bash" for words in given(block)]
    assert len(commands) > 70
    for block, words in commands:
        with subtests.test(msg=f"{block}: {' '.join(words)}"):
            context = verbs[words[0]].make_context(words[0], words[1:])
            arguments = context.params.get("arguments") or []
            keys = [word for word in arguments if "=" in word]
            layouts = context.params.get("layouts") or ""
            assert [Layout.parse(text) for text in layouts.split(",") if text] or not layouts
            for more in [[], *(shlex.split(each) for each in context.params.get("vary") or ())]:
                assert load_config(None, [*keys, *more])
            if words[0] in ("train", "verify", "data"):
                split_arguments(arguments)


COMING_FROM = ROOT / "docs" / "start" / "coming_from.md"
# Placeholders of its texts -> numbers.
PLACEHOLDERS = {r"\bvN\b": "v2", r"\b(tp|cp|pp|ep|shard)N\b": r"\g<1>2", r"^([\d]+x\d+)$": r"cp8+\1"}


def test_words_for_people_who_come_from_another_trainer_are_ours(subtests: pytest.Subtests) -> None:
    """In the last column of each table keys are keys, values are values, and texts of layouts are read."""
    names, read = {key.name for key in keys()}, 0
    sections = {name.partition(".")[0] for name in names}
    for row in re.findall(r"^\| .*\| (.*) \|$", COMING_FROM.read_text(encoding="utf-8"), re.MULTILINE):
        for text in re.findall(r"`([^`]+)`", row):
            with subtests.test(msg=text):
                key, colon, value = text.partition(": ")
                if key.partition(".")[0] in sections and colon:
                    is_placeholder = "FILES" in value or "..." in value
                    assert key in names if is_placeholder else load_config(None, [f"{key}={value}"])
                    read += 1
                elif re.fullmatch(r"[a-z]+\.[a-z_]+", text) and text.partition(".")[0] in sections:
                    assert text in names or any(name.startswith(f"{text}.") for name in names)
                    read += 1
                elif re.match(r"(tp|cp|pp|ep|shard|dp)[\dN-]|\dx\d", text):
                    for pattern, degree in PLACEHOLDERS.items():
                        text = re.sub(pattern, degree, text)
                    assert Layout.parse(text)
                    read += 1
    assert read > 40


def test_features_beside_other_trainers_are_shown_by_what_there_is(subtests: pytest.Subtests) -> None:
    """Each of the 46 has a command whose options there are, or keys with values that are read, or is not built."""
    page = (ROOT / "docs" / "start" / "features.md").read_text(encoding="utf-8")
    header, _, *rows = [line.strip("| ").split(" | ") for line in page[page.index("| feature |") :].splitlines()]
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert len(rows) == 46
    for feature, here, *cells in rows:
        with subtests.test(msg=feature):
            peers = [cell.removesuffix(" |") for cell in cells[:5]]
            assert len(header) - 2 >= len(cells) >= 5 and set(peers) <= {"yes", "partly", "–"}
            assert "partly" not in peers or len(cells) == 6, "what is there of it?"
            if here == "not built":
                continue
            (shown,) = re.findall(r"^`([^`]+)`$", here)
            if shown.startswith("fivefold "):
                _, verb, *rest = shlex.split(shown)
                known = {option for parameter in verbs[verb].params for option in parameter.opts}
                assert {word for word in rest if word.startswith("--")} <= known
            else:
                key, _, value = shown.partition(": ")
                assert load_config(None, [f"{key}={value}"])


def test_every_script_is_there_and_takes_its_options(subtests: pytest.Subtests) -> None:
    found = [
        (block, *script)
        for block in BLOCKS
        for script in re.findall(r"(?:python -m |python |\d )(benchmarks[/.]\w+)(?:\.py)?(.*)", block.text)
    ]
    assert len(found) > 15
    for block, script, options in found:
        with subtests.test(msg=f"{block}: {script}"):
            text = (ROOT / f"{script.replace('.', '/')}.py").read_text(encoding="utf-8")
            assert [name for name in re.findall(r"--[a-z-]+", options.partition(" #")[0]) if name not in text] == []


# ---- run -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of someone who has followed the README: its run and its text, and what other pages speak of."""
    folder = tmp_path_factory.mktemp("reader")
    text = Path(shutil.__file__).read_text(encoding="utf-8")[:40_000]
    for name in ("notes.txt", "other.txt"):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": each}) + "\n" for each in text.split("\n\n")), encoding="utf-8"
    )
    (folder / "axolotl.yml").write_text(AXOLOTL, encoding="utf-8")
    (folder / "examples").symlink_to(ROOT / "examples")
    notes, *others = (block for block in BLOCKS if block.file == "notes.yaml")
    assert all(other.text == notes.text for other in others)
    notes.write(folder)
    fivefold(shlex.split(shortened("fivefold train notes.yaml"))[1:], folder)
    fivefold(["export", "runs/notes", "my-model"], folder)
    for name in ("a", "b"):
        shutil.copytree(folder / "runs" / "notes", folder / "runs" / name)
    return folder


def shortened(command: str) -> str:
    return " ".join([command, *(more for begin, more in SHORT.items() if re.match(begin, command + " "))])


EACH_BY_ITSELF = "import runpy, sys; [runpy.run_path(each, run_name='__main__') for each in sys.argv[1:]]"


def run_python(found: list[Block], folder: Path) -> None:
    """One script after the other in one process, which imports torch once."""
    for number, block in enumerate(found):
        (folder / f"block_{number}.py").write_text(block.text, encoding="utf-8")
    as_process([sys.executable, "-c", EACH_BY_ITSELF, *(f"block_{number}.py" for number in range(len(found)))], folder)


def run(block: Block, folder: Path) -> None:
    """One command after the other, those that are no `fivefold` as processes. What stands in `<<` is written first."""
    commands = block.commands
    if "<<" in block.text:
        commands = [command for command in commands if command.startswith("fivefold ")]
        script = re.sub(r"^fivefold .*$", "", block.text, flags=re.MULTILINE)
        as_process(["bash", "-e", "-c", script], folder)
    for command in commands:
        if command in OF_README and command.startswith(READ_ONLY):
            continue
        line, _, out = BY_TORCHRUN.sub("fivefold ", shortened(command)).partition(" > ")
        before, _, line = line.rpartition(" | ")
        words = shlex.split(line)
        given = as_process(["bash", "-c", before], folder) if before else ""
        with patch.object(sys, "stdin", io.StringIO(given)):
            said = fivefold(words[1:], folder) if words[0] == "fivefold" else as_process(words, folder)
        assert said
        if out:
            (folder / out).write_text(said, encoding="utf-8")


RUN = [block for block in of("bash", "python") if (block.page, block.language) not in OWN and "docs/" in block.page]


@pytest.mark.full
@pytest.mark.parametrize(
    "page", [put_off(page) if page in CAMPAIGN else page for page in dict.fromkeys(block.page for block in RUN)]
)
def test_every_block_of_a_page_runs(page: str, reader: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    shutil.copytree(reader, folder, symlinks=True)
    for block in BLOCKS:
        if block.page == page and block.file and not block.not_run:
            block.write(folder)
    for language, found in groupby((block for block in RUN if block.page == page), lambda block: block.language):
        if language == "python":
            run_python([*found], folder)
        else:
            for block in found:
                run(block, folder)


def test_every_page_with_a_test_of_its_own_is_there() -> None:
    assert OWN.keys() <= {(block.page, block.language) for block in BLOCKS}
    assert all((ROOT / test).is_file() for test in OWN.values())
