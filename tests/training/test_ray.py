"""Runs inside Ray Train: what Ray is told, and that a run goes on after Ray has started its workers again."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
import yaml

from fivefold.checkpoint import step_folder, steps
from fivefold.training.ray import FOLDER, _Reports, train_loop
from tests.pool import run_ranks
from tests.training.bodies import column, run_dir, run_file


class Checkpoint:
    """As much of Ray's as is called."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def from_directory(cls, path: str) -> "Checkpoint":
        return cls(path)

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        (Path(self.path) / ".metadata.json").write_text(json.dumps(metadata))


Report = tuple[dict[str, float], dict[str, Any] | None]  # metrics, metadata of the checkpoint


@contextmanager
def stand_in(rank: int, fails: bool = False) -> Iterator[list[Report]]:
    """Inside, `ray.train` writes down what it is told on this rank; it meets nobody."""
    told: list[Report] = []

    def report(metrics: dict[str, float], checkpoint: Checkpoint | None = None) -> None:
        if fails:
            raise ValueError("no room")
        assert all(type(value) in (int, float) for value in metrics.values())
        there = Path(checkpoint.path, ".metadata.json").read_text() if checkpoint else "null"
        told.append((metrics, json.loads(there)))

    package, module = ModuleType("ray"), ModuleType("ray.train")
    module.Checkpoint, module.report = Checkpoint, report  # type: ignore[attr-defined]
    module.get_context = lambda: SimpleNamespace(get_world_rank=lambda: rank)  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {"ray": package, "ray.train": module}):
        yield told


def test_a_checkpoint_is_reported_with_the_row_of_its_step() -> None:
    for rank in (0, 1):
        with stand_in(rank) as told, _Reports() as reports:
            for step in range(1, 5):
                reports.step({"step": step, "train/loss": 9.0 - step, "perf/mfu": None})
            reports.evaluation({"step": 4, "eval/loss": 2.5})
            reports.checkpoint(Path("runs/a/checkpoints/step-000003"))  # written in the background
            reports.checkpoint(Path("runs/a/checkpoints/step-000002"))
        folder = str(Path("runs/a/checkpoints").absolute())
        assert [row for row, _ in told] == [{"step": 4, "eval/loss": 2.5}, {"step": 3, "train/loss": 6.0}, {"step": 2}]
        assert [there for _, there in told] == (
            [None, {FOLDER: f"{folder}/step-000003", "step": 3}, {FOLDER: f"{folder}/step-000002", "step": 2}]
            if rank == 0
            else [None] * 3
        )


def test_what_ray_refuses_is_raised_at_the_end() -> None:
    with stand_in(0, fails=True), pytest.raises(ValueError, match="no room"), _Reports() as reports:
        reports.evaluation({"step": 4, "eval/loss": 2.5})
    with stand_in(0, fails=True), pytest.raises(KeyError), _Reports() as reports:
        reports.evaluation({"step": 4, "eval/loss": 2.5})
        raise KeyError("what ended the run")


def on_worker(folder: Path, overrides: list[str]) -> list[Report]:
    """Train on this rank as on a worker that Ray has started, which has joined its group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 1}
    env = {name: str(value) for name, value in here.items()} | {"MASTER_ADDR": "127.0.0.1"}
    with patch.dict(os.environ, env | {"FIVEFOLD_CACHE": str(folder / "cache")}), stand_in(rank) as told:
        train_loop({"path": str(folder / "run.yaml"), "overrides": overrides})
    return told


@pytest.mark.full
def test_every_worker_reports_as_often_and_the_run_goes_on(tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__max_steps=3, eval__every=2, checkpoint__every=2)
    tree["data"]["validation"] = tree["data"]["train"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    first, second = run_ranks(2, on_worker, tmp_path, [])
    rows = {step: loss for step, loss in zip(column(tree, "step"), column(tree, "train/loss"), strict=True)}
    assert len(first) == len(second) == 4 and not any(there for _, there in second)
    assert [row["step"] for row, there in first if not there] == [2, 3]  # evaluations
    saved = [(row, there) for row, there in first if there]
    assert [(row["step"], row["train/loss"]) for row, _ in saved] == [(step, rows[step]) for step in (2, 3)]
    assert [there[FOLDER] for _, there in saved] == [
        str(run_dir(tree) / "checkpoints" / f"step-00000{step}") for step in (2, 3)
    ]
    again, _ = run_ranks(2, on_worker, tmp_path, ["train.max_steps=4"])
    assert [row["step"] for row, _ in again] == [4, 4]  # from step 3: an evaluation and a checkpoint
    assert steps(run_dir(tree) / "checkpoints") == [2, 3, 4]


@pytest.mark.campaign
@pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install 'fivefold[ray]'")
def test_a_node_that_is_lost_ends_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script of `fivefold launch` on a real Ray of two nodes, of which one is killed and another one comes."""
    from ray.cluster_utils import Cluster

    from fivefold.jobs.launch import JobRequest, written

    monkeypatch.chdir(tmp_path)
    for name, value in (PATIENT | {"FIVEFOLD_CACHE": str(tmp_path / "cache")}).items():
        monkeypatch.setenv(name, value)
    tree = run_file(tmp_path, train__max_steps=STEPS, train__device="cpu", checkpoint__every=10)
    Path("run.yaml").write_text(yaml.safe_dump(tree))
    _, script, _ = written(JobRequest(run=Path("run.yaml"), to="ray", nodes=2, devices=1))
    Path("job.py").write_text(script)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        lost = cluster.add_node(num_cpus=1)
        driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER], env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        checkpoints = run_dir(tree) / "checkpoints"
        wait_for(lambda: driver.poll() is not None or len(steps(checkpoints)) > 1)
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        said, _ = driver.communicate(timeout=PATIENCE)
    finally:
        cluster.shutdown()
    assert driver.returncode == 0, said
    starts = [json.loads(line) for line in (run_dir(tree) / "history.jsonl").read_text().splitlines()]
    resumed = [start["step"] for start in starts if start["event"] == "start"]
    assert len(resumed) == 2 and 0 == resumed[0] < resumed[1] < STEPS, said
    assert column(tree, "step") == [*range(1, STEPS + 1)]
    last = str(checkpoints / step_folder(STEPS))
    (row,) = [line for line in said.splitlines() if line.startswith(last)]  # Ray may have the last word
    assert f"'step': {STEPS}" in row


STEPS = 300
# As `ray job submit --working-dir .`, which needs Ray's dashboard.
DRIVER = "import ray, runpy; ray.init(runtime_env={'working_dir': '.'}); runpy.run_path('job.py')"
PATIENCE = 600  # seconds: Ray starts a dozen processes, and gives up on a busy machine otherwise
PATIENT = {
    "RAY_worker_register_timeout_seconds": str(PATIENCE),
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(PATIENCE),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",  # seconds between reports
}


def wait_for(is_there: Callable[[], bool]) -> None:
    """Wait until something holds."""
    ends = time.monotonic() + PATIENCE
    while not is_there() and time.monotonic() < ends:
        time.sleep(0.05)
    assert is_there()
