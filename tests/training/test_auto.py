"""`layout: auto` through every way a run starts: workers read a plain layout, and a run keeps the one that it began
with."""

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from fivefold.config import RunConfig, load_config
from fivefold.launch.folder import began_with
from tests.commands import fivefold
from tests.pool import run_ranks

RUN = """
model: {name_or_path: demo, overrides: {hidden_size: 32, intermediate_size: 48, head_dim: 8, num_hidden_layers: 2}}
tokenizer: {name_or_path: byte}
data: {train: notes.txt, validation: 0, seq_length: 512}
train: {max_steps: 1, global_batch_size: 4, device: cpu}
precision: {compute: fp32}
eval: {every: 0}
layout: auto
run: {name: small}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("one two three\n" * 1000)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def in_a_world(rank: int, folder: Path) -> tuple[str, str]:
    """What `fivefold train` does on a rank that torchrun has started."""
    import torch.distributed as dist

    from fivefold.training.launch import run

    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    env = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    os.chdir(folder)
    with patch.dict(os.environ, env):
        path = run(Path("run.yaml"), ["train.max_steps=2", "run.name=told"])
    return str(path), str(load_config(path).layout)


@pytest.mark.full
def test_a_run_chooses_once(here: Path) -> None:
    first = fivefold(["train", "run.yaml"], here)
    assert "layout: auto: " in first and "that fit" in first and "s a step" in first
    chosen = load_config(Path("runs/small")).layout
    assert chosen.world == 2 and f"layout   {chosen}" in first
    again = fivefold(["train", "run.yaml", "train.max_steps=2"], here)
    assert f"layout: auto: {chosen}, as this run began" in again and "resume   from" in again


@pytest.mark.full
def test_ranks_that_something_else_started_get_the_choice_of_the_first(here: Path) -> None:
    assert len(set(run_ranks(2, in_a_world, 0, here))) == 1
    assert load_config(here / "runs/told").layout.world == 2


@pytest.mark.parametrize(
    ("overrides", "world", "is_kept"),
    [
        ((), 4, True), ((), 2, False), (("layout.tp=2",), 4, True), (("layout.tp=4",), 4, False),
        (("data.seq_length=256",), 4, False), (("train.global_batch_size=8",), 4, False),
        (("precision.compute=bf16",), 4, False), (("train.max_steps=9", "log.every=2"), 4, True),
        (("run.name=other",), 4, False), (("layout.dp_shard=-1",), 4, True),
    ],
)  # fmt: skip
def test_which_run_keeps_its_layout(here: Path, overrides: tuple[str, ...], world: int, is_kept: bool) -> None:
    before = load_config(Path("run.yaml"), ["layout=shard2.tp2"])
    before.run_dir.mkdir(parents=True)
    (before.run_dir / "run.yaml").write_text(before.to_yaml())
    config: RunConfig = load_config(Path("run.yaml"), overrides)
    found = began_with(config, world)
    assert found == (before.layout if is_kept else None)
