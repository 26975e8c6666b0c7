"""The batch script on a real Slurm of two nodes: trained, preempted, requeued, stopped when time is over, an array.

`tests/jobs/slurm.py` starts it, and says where it cannot.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.checkpoint import steps
from fivefold.jobs.launch import JobRequest, written
from tests.jobs.slurm import NODES, Cluster, cluster, missing
from tests.launch.test_restart import _last
from tests.training.bodies import column, run_dir, run_file, same, state

pytestmark = [pytest.mark.campaign, pytest.mark.skipif(bool(missing()), reason=missing())]

STEPS = 120


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm")) as here:
        yield here


def runs_of(slurm: Cluster, name: str, **changes: Any) -> tuple[dict[str, Any], Path]:
    """The tree of a run file, and the file."""
    tree = run_file(slurm.folder, train__max_steps=STEPS, train__compile=False, train__device="cpu", run__name=name)
    for key, value in changes.items():
        section, _, of = key.partition("__")
        tree.setdefault(section, {})[of] = value
    file = slurm.folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return tree, file


def script(file: Path, **more: Any) -> str:
    """The batch script of a run on two nodes."""
    return written(JobRequest(run=file, to="slurm", nodes=2, devices=1, **more))[1]


def submit(slurm: Cluster, text: str, name: str, *options: str) -> str:
    """Submit a batch script and return the number of its job."""
    file = slurm.folder / f"{name}.sbatch"
    file.write_text(text)
    return slurm.do("sbatch", "--parsable", *options, str(file))


def log(slurm: Cluster, name: str, job: str) -> str:
    return (slurm.folder / f"{name}-{job}.out").read_text()


def finish(slurm: Cluster, job: str, seconds: float = 300) -> str:
    """Wait until a job has ended, and return its state."""
    slurm.wait(lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"), seconds)
    return slurm.state(job)


def begin_again(slurm: Cluster, job: str, *changes: str) -> None:
    """Wait until a job is queued again, change it, and spare the two minutes for which Slurm keeps it."""
    slurm.wait(lambda: "Restarts=1 " in slurm.do("scontrol", "show", "job", job) and slurm.state(job) == "PENDING")
    time.sleep(2)  # slurmd refuses a job in the second in which it has ended: its credential is revoked
    slurm.do("scontrol", "update", f"JobId={job}", "StartTime=now", *changes)


def history(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir(tree) / "history.jsonl").read_text().splitlines()]


def starts(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in history(tree) if event["event"] == "start"]


def test_the_command_submits_and_both_nodes_train(slurm: Cluster) -> None:
    tree, file = runs_of(slurm, "whole", train__max_steps=3)
    command = ["-m", "fivefold", "launch", file.name, "--to", "slurm", "--nodes", "2", "--devices", "1", "--submit"]
    said = slurm.do(sys.executable, *command)
    assert said.startswith("wrote whole.sbatch, a batch script for sbatch\nSubmitted batch job ")
    job = said.split()[-1]
    assert finish(slurm, job) == "COMPLETED"
    (start,) = starts(tree)
    assert (start["world"], start["devices_per_node"]) == (2, 1)
    assert slurm.do("scontrol", "show", "hostnames", ",".join(NODES)).split() == [*NODES]
    assert steps(run_dir(tree) / "checkpoints") == [3]


def test_a_preempted_job_goes_on_bit_for_bit(slurm: Cluster) -> None:
    alone, file = runs_of(slurm, "alone")
    assert finish(slurm, submit(slurm, script(file), "alone")) == "COMPLETED"

    tree, file = runs_of(slurm, "preempted")
    job = submit(slurm, script(file), "preempted")
    slurm.wait(lambda: _last(run_dir(tree)) >= STEPS // 10)
    other = slurm.do("sbatch", "--parsable", "--partition=high", "--nodes=2", "--wrap=sleep 1")
    begin_again(slurm, job)
    assert finish(slurm, job) == "COMPLETED" and finish(slurm, other) == "COMPLETED"
    (begun, again), said = starts(tree), log(slurm, "preempted", job)
    assert "stopped by SIGTERM after step" in said and "which is saved" in said
    assert 0 < again["step"] < STEPS and begun["world"] == again["world"] == 2 and again["devices_per_node"] == 1
    assert column(tree, "train/loss") == column(alone, "train/loss")
    assert same(state(tree, STEPS), state(alone, STEPS))


def test_a_job_whose_time_is_nearly_over_saves_and_goes_on(slurm: Cluster) -> None:
    tree, file = runs_of(slurm, "late", train__max_steps=100_000)
    job = submit(slurm, script(file, time="1h"), "late")
    slurm.wait(lambda: _last(run_dir(tree)) >= 3)
    slurm.do("scontrol", "update", f"JobId={job}", "TimeLimit=4")  # less than 300 s: the signal comes at once
    begin_again(slurm, job, "TimeLimit=60")
    slurm.wait(lambda: len(starts(tree)) == 2)
    begun, again = starts(tree)
    assert 0 == begun["step"] < again["step"]
    said = log(slurm, "late", job)
    assert f"stopped by SIGTERM after step {again['step']} of 100000, which is saved" in said
    slurm.do("scancel", job)  # SIGTERM to the script too: it is not queued again
    assert finish(slurm, job) == "CANCELLED"
    assert len(starts(tree)) == 2


def test_an_array_trains_runs_with_seeds_of_their_own(slurm: Cluster) -> None:
    tree, file = runs_of(slurm, "many", train__max_steps=2)
    job = submit(slurm, script(file), "many", "--array=3-4")
    trees = [tree | {"run": tree["run"] | {"name": f"many-{number}"}} for number in (3, 4)]
    slurm.wait(lambda: all(steps(run_dir(each) / "checkpoints") == [2] for each in trees if run_dir(each).exists()))
    assert [finish(slurm, f"{job}_{number}") for number in (3, 4)] == ["COMPLETED", "COMPLETED"]
    seeds = [yaml.safe_load((run_dir(each) / "run.yaml").read_text())["train"]["seed"] for each in trees]
    assert seeds == [3, 4] and column(trees[0], "train/loss") != column(trees[1], "train/loss")


def test_a_wrong_request_ends_the_job(slurm: Cluster) -> None:
    _, file = runs_of(slurm, "wrong", train__max_steps=2)
    job = submit(slurm, script(file).replace("overrides=()", "overrides=(layout=tp3)"), "wrong")
    assert finish(slurm, job) == "FAILED"
    # The exit code is 2, or 143 of the rank that srun ended because of it: neither queues it again.
    assert "Restarts=0 " in slurm.do("scontrol", "show", "job", job) and "tp 3" in log(slurm, "wrong", job)
