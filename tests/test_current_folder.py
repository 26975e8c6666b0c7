"""No file of the folder where a user stands is run, though it has the name of a module of Python or its packages."""

import sys
from pathlib import Path

import pytest

from tests.commands import BIN, as_process
from tests.tiers import put_off

PACKAGES = ("torch", "transformers", "tokenizers", "datasets", "numpy", "yaml", "fivefold", "sitecustomize")
TINY = [
    "model.overrides.num_hidden_layers=2", "model.overrides.hidden_size=16", "model.overrides.intermediate_size=24",
    "tokenizer.name_or_path=byte", "data.train=notes.txt", "data.seq_length=32", "train.max_steps=2",
    "train.global_batch_size=4", "train.micro_batch_size=2", "layout=shard2", "run.name=run", "sample.prompts=[a]",
]  # fmt: skip
COMMANDS = [
    ["train", *TINY], ["data", *TINY], ["doctor", "demo"], ["plan", "demo", "--cluster", "8xH100"],
    ["generate", "runs/run", "--prompt", "a", "--max-new-tokens", "2", "--layout", "tp2"],
    ["export", "runs/run", "model"], ["evaluate", "model", "--text", "notes.txt", "--layout", "tp2"],
    ["verify", *TINY, "--quick", "--layouts", "tp2"], ["report", "runs/run"],
]  # fmt: skip
AGAIN = [
    COMMANDS[0], ["train", *TINY, "layout=tp2", "train.max_steps=3"],
    ["generate", "runs/run", "--prompt", "a", "--max-new-tokens", "2"],
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("commands", [COMMANDS, put_off(AGAIN)], ids=["each", "resumed and alone"])
def test_no_verb_runs_a_file_of_the_current_folder(commands: list[list[str]], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("".join(f"{number} is a number. " for number in range(2000)), "utf-8")
    for name in (*sys.stdlib_module_names, *PACKAGES):
        (tmp_path / f"{name}.py").write_text("open('executed', 'a').write(__name__)\nraise SystemExit(77)\n", "utf-8")
    for command in commands:
        as_process([str(BIN / "fivefold"), *command], tmp_path)
        assert not (tmp_path / "executed").exists(), command


@pytest.mark.full
def test_a_folder_that_was_removed_stops_no_command(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    said = as_process(["sh", "-c", f"cd gone && rmdir ../gone && '{BIN / 'fivefold'}' --version"], tmp_path)
    assert said.startswith("fivefold ")
