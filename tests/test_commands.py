"""What a user types in the first hour, each as a process of its own, in every run of the tests: train, go on under
another layout, verify, generate, export, plan.
"""

import argparse
import json
import shlex
from pathlib import Path

import pytest
import torch

from tests.commands import as_process

pytestmark = pytest.mark.core
RUN_FILE = """
model: {name_or_path: demo, init: random}
tokenizer: {name_or_path: "train:300"}
data: {train: notes.txt, seq_length: 61}
train: {max_steps: 3, global_batch_size: 4, micro_batch_size: 1}
optimizer: {learning_rate: 1.0e-3}
scheduler: {name: constant, warmup_steps: 0}
eval: {max_tokens: 1k}
run: {name: notes}
"""
STEPS, PROMPT = 6, "def "


def fivefold(command: str, folder: Path) -> str:
    """What a command prints; it has to end well."""
    return as_process(["fivefold", *shlex.split(command)], folder)


def losses(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that two processes of FSDP began."""
    folder = tmp_path_factory.mktemp("hour")
    text = Path(argparse.__file__).read_bytes().decode()
    (folder / "notes.txt").write_text(text[:30_000], encoding="utf-8")
    (folder / "notes.yaml").write_text(RUN_FILE, encoding="utf-8")
    fivefold("train notes.yaml layout=shard2", folder)
    return folder


def test_a_run_goes_on_under_another_layout_as_if_unbroken(folder: Path) -> None:
    assert len(losses(folder, "notes")) == 3
    fivefold(f"train notes.yaml layout=tp2 train.max_steps={STEPS}", folder)
    fivefold(f"train notes.yaml layout=single train.max_steps={STEPS} run.name=unbroken", folder)
    found = losses(folder, "notes")
    assert len(found) == STEPS and found[-1] < found[0]
    assert found == pytest.approx(losses(folder, "unbroken"), rel=2e-4)  # fp32: 5e-5 measured


def test_the_layout_is_proved(folder: Path) -> None:
    said = fivefold("verify notes.yaml --quick --layouts tp2", folder)
    assert "tp2" in said


def test_what_is_exported_writes_what_the_run_writes(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    fivefold("export runs/notes model", folder)
    said = fivefold(f"generate runs/notes --prompt {PROMPT} --max-new-tokens 9 --temperature 0", folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    rows = tokenizer(PROMPT.strip(), return_tensors="pt")
    with torch.no_grad():
        written = model.generate(**rows, max_new_tokens=9, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True) in said


def test_a_layout_is_planned(folder: Path) -> None:
    said = fivefold("plan llama-3.2-1b --cluster 8xH100 --seq-length 8k --global-batch-size 64", folder)
    assert "shard8" in said and "GiB" in said
