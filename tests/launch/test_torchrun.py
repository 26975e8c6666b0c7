"""`python -m fivefold.launch.torchrun`: the exit code that a scheduler sees is that of the worker that failed first."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# Rank 1 fails as it is told to, and rank 0, which waits for nobody, is ended by torchrun.
WORKER = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
pathlib.Path(sys.argv[1] + os.environ["RANK"]).touch()
if os.environ["RANK"] == "1" and sys.argv[2] == "exit":
    sys.exit(2)
if os.environ["RANK"] == "1" and sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


@pytest.mark.full
def test_the_exit_code_is_that_of_the_worker_that_failed_first(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "fivefold.launch.torchrun", "--standalone", "--nproc-per-node=2", "worker.py"]
    started = {
        how: subprocess.Popen([*command, how, how], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for how in ("exit", "kill", "stop")
    }
    end = time.monotonic() + 60
    while not ((tmp_path / "stop0").exists() and (tmp_path / "stop1").exists()) and time.monotonic() < end:
        time.sleep(0.05)
    started["stop"].send_signal(signal.SIGTERM)
    said = {how: (process.communicate(timeout=60)[1], process.returncode) for how, process in started.items()}
    assert {how: code for how, (_, code) in said.items()} == {"exit": 2, "kill": 137, "stop": 143}, said
