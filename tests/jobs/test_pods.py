"""The commands of the pods of a file, run here: two pods as two processes that meet on the loopback interface."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fivefold.checkpoint import steps
from fivefold.jobs import pods
from fivefold.jobs.engines import engine
from fivefold.jobs.launch import JobRequest, job_of
from tests.training.bodies import run_dir, run_file

pytestmark = pytest.mark.campaign


def test_the_commands_of_two_pods_train_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pods, "FOLDER", str(tmp_path))  # of the volume
    tree = run_file(tmp_path, train__max_steps=3, train__compile=False, train__device="cpu")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    job = job_of(JobRequest(run=file, to="kubernetes", nodes=2, devices=1, image="an/image:1"))
    *_, document = yaml.safe_load_all(engine("kubernetes").text(job))
    container = document["spec"]["template"]["spec"]["containers"][0]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    here = {"run-0.run": "127.0.0.1", "29500": port, pods.RUN: str(file)}
    started = []
    for index in range(2):
        words = list(container["command"])
        for name, value in (here | {"$(JOB_COMPLETION_INDEX)": str(index)}).items():
            assert any(name in word for word in words)
            words = [word.replace(name, value) for word in words]
        started.append(subprocess.Popen([sys.executable, *words[1:]], cwd=tmp_path))
    assert [process.wait(240) for process in started] == [0, 0]
    (start,) = [
        event
        for event in map(json.loads, (run_dir(tree) / "history.jsonl").read_text().splitlines())
        if event["event"] == "start"
    ]
    assert (start["world"], start["devices_per_node"]) == (2, 1) and steps(run_dir(tree) / "checkpoints") == [3]
    probe_of_start = container["startupProbe"]["exec"]["command"]
    probe_of_start[2] = probe_of_start[2].replace(pods.RUN, str(file))
    for command in (probe_of_start, container["livenessProbe"]["exec"]["command"]):
        assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
        (run_dir(tree) / "metrics.jsonl").touch()
    os.utime(run_dir(tree) / "metrics.jsonl", (1, 1))
    for command in (probe_of_start, container["livenessProbe"]["exec"]["command"]):
        assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 1
