"""Schedulers send SIGTERM several times, to one process of a job or to all: whenever it comes again, the step is saved.

Here under torchrun, and as tasks of srun by its variables; `benchmarks/reliability/kills.py` does it to the launcher.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from fivefold.checkpoint import Checkpoint, step_folder, steps
from tests.launch.test_restart import _last, _name_and_parent, _wait
from tests.training.bodies import run_dir, run_file

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a job in /proc"),
]

# A save takes time.
BIG = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 6}
FIVEFOLD = ["-m", "fivefold", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(by: str, file: Path) -> list[subprocess.Popen[str]]:
    """The processes of a job that a scheduler knows; rank 0 is, or is started by, the first."""
    environments: list[dict[str, str]] = [{}]
    if by == "srun":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            place = {
                "MASTER_PORT": str(probe.getsockname()[1]),
                "SLURM_NTASKS": "2",
                "SLURM_STEP_NODELIST": "127.0.0.1",
            }
        environments = [place | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_STEP_ID": "0"} for rank in "01"]
    return [
        subprocess.Popen(
            [sys.executable, *(TORCHRUN if by == "torchrun" else []), *FIVEFOLD, str(file)],
            env=os.environ | {"FIVEFOLD_CACHE": str(file.parent / "cache")} | each,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for each in environments
    ]


def with_descendants(pids: list[int]) -> Iterator[int]:
    """A process, and those that it has started, in turn."""
    parents = {}
    for task in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(task.name)] = int(_name_and_parent(task)[1])
    while pids:
        yield from pids
        pids = [pid for pid, parent in parents.items() if parent in pids]


@pytest.mark.parametrize(("times", "pause"), [(1, 0.0), (2, 0.0), (3, 0.2), (3, 1.0), (2, 5.0)])
@pytest.mark.parametrize(("by", "to_all"), [("torchrun", False), ("torchrun", True), ("srun", True)])
def test_the_step_is_saved(by: str, to_all: bool, times: int, pause: float, tmp_path: Path) -> None:
    tree: dict[str, Any] = run_file(tmp_path, train__max_steps=300, train__compile=False, model__overrides=BIG)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    job, run = start(by, tmp_path / "run.yaml"), run_dir(tree)
    try:
        _wait(lambda: any(each.poll() is not None for each in job) or _last(run) >= 3)
        for _ in range(times):
            pids = [each.pid for each in job if each.poll() is None]
            for pid in list(with_descendants(pids)) if to_all else pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            time.sleep(pause)
        out = "".join(each.communicate(timeout=120)[0] for each in job)  # once all that write to it have ended
    finally:
        for pid in list(with_descendants([each.pid for each in job])):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    codes = {each.returncode for each in job}
    assert codes <= {143, -signal.SIGTERM} or by == "torchrun", out  # the last one may come when all is done
    (saved,) = steps(run / "checkpoints")
    assert f"stopped by SIGTERM after step {saved} of 300, which is saved" in out and _last(run) == saved
    Checkpoint.open(run / "checkpoints" / step_folder(saved)).verify()
