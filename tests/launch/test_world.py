"""Finding a world in the environment, and joining one."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fivefold.core.errors import RunFailed, UserError
from fivefold.core.system import cores
from fivefold.launch import world as world_module
from fivefold.launch.world import (
    World,
    alone,
    device_kind,
    find_world,
    first_host,
    server_environment,
    threads_per_worker,
    threads_warning,
    worker_environment,
)
from tests.pool import forks

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu-[007-008]",
    "SLURM_NODELIST": "gpu-[001-008]",
}


def test_nothing_in_the_environment_is_no_world() -> None:
    assert find_world("cpu", {}) is None
    assert find_world("cpu", {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4"}) is None  # inside salloc, outside srun


def test_torchrun() -> None:
    found = find_world("cpu", TORCHRUN)
    assert found == World(rank=5, local_rank=1, size=8, local_size=4, rendezvous="tcp://node-0:29500")
    assert not found.is_first


def test_torchrun_without_an_address_is_said() -> None:
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT"):
        find_world("cpu", {"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("RANK", "zero", "from 0 to 7"),
        ("RANK", "8", "from 0 to 7"),
        ("WORLD_SIZE", "0", "from 1 to"),
        ("LOCAL_WORLD_SIZE", "9", "from 1 to 8"),
        ("MASTER_PORT", "99999", "from 1 to 65535"),
        ("MASTER_PORT", "port", "from 1 to 65535"),
    ],
)
def test_a_variable_that_is_no_such_number_is_said(name: str, value: str, allowed: str) -> None:
    with pytest.raises(UserError) as caught:
        find_world("cpu", TORCHRUN | {name: value})
    assert caught.value.what.startswith(f"{name} is {value!r} in the environment, and has to be a number {allowed}")
    if name == "MASTER_PORT":
        with pytest.raises(UserError, match="MASTER_PORT is"):
            find_world("cpu", SRUN | {name: value})


def test_srun() -> None:
    found = find_world("cpu", SRUN)
    assert found is not None
    assert (found.rank, found.local_rank, found.size, found.local_size) == (5, 1, 7, 3)
    assert not found.is_local
    host, port = found.rendezvous.removeprefix("tcp://").split(":")
    assert host == "gpu-007"
    assert 1024 < int(port) < 32768


@pytest.mark.parametrize(("node", "tasks"), [(0, 4), (1, 4), (2, 3)])
def test_equal_nodes_stand_once_in_what_srun_says(node: int, tasks: int) -> None:
    found = find_world(
        "cpu", SRUN | {"SLURM_NTASKS": "11", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": str(node)}
    )
    assert found is not None and found.local_size == tasks


def test_every_task_of_a_step_meets_at_one_place_and_steps_at_different_ones() -> None:
    places = {find_world("cpu", SRUN | {"SLURM_PROCID": str(rank)}).rendezvous for rank in range(7)}  # type: ignore[union-attr]
    other = find_world("cpu", SRUN | {"SLURM_STEP_ID": "1"})
    assert len(places) == 1
    assert other is not None and other.rendezvous not in places


def test_srun_with_the_least_that_it_sets() -> None:
    least = {
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_LOCALID": "1",
        "SLURM_NODELIST": "n1",
        "SLURM_JOB_ID": "9",
    }
    found = find_world("cpu", least)
    assert found is not None
    assert (found.rank, found.size, found.rendezvous.split(":")[1]) == (1, 2, "//n1")


def test_a_named_master_wins_over_the_node_list() -> None:
    found = find_world("cpu", SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"})
    assert found is not None and found.rendezvous == "tcp://10.0.0.7:4000"


def test_a_batch_script_is_not_a_task() -> None:
    """sbatch gives the script the variables of task 0; only `srun` starts a world."""
    batch = {key: value for key, value in SRUN.items() if "STEP" not in key} | {"ENVIRONMENT": "BATCH"}
    assert find_world("cpu", batch) is None
    assert find_world("cpu", batch | {"SLURM_STEP_ID": "0"}) is not None


def test_a_step_of_one_task_is_a_place_to_start_workers_from() -> None:
    """`srun --pty bash` inside an allocation of seven tasks."""
    assert find_world("cpu", SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert find_world("cpu", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) is None
    assert find_world("cpu", {"SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-[003-007,012],login1", "gpu-003"),
        ("rack[1-2]node[30,40]", "rack1node30"),
        ("a-[5]-ib", "a-5-ib"),
        ("10.0.0.1", "10.0.0.1"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = pytest.importorskip("torch").cuda
    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "device_count", lambda: 4)
    found = find_world("auto", TORCHRUN)
    assert found is not None and (found.device, found.backend) == ("cuda:1", "nccl")
    monkeypatch.setattr(cuda, "device_count", lambda: 1)  # the scheduler shows each task its own GPU only
    found = find_world("cuda", TORCHRUN | {"CUDA_VISIBLE_DEVICES": "3"})
    assert found is not None and found.device == "cuda:0"
    with pytest.raises(UserError, match="4 workers started on this machine, which has 1 GPU"):
        find_world("cuda", TORCHRUN)
    assert device_kind("cpu") == "cpu"
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    assert alone("auto") == World()
    with pytest.raises(UserError, match="torch sees no GPU"):
        device_kind("cuda")


def test_threads_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cores() >= 1
    monkeypatch.setattr(world_module, "cores", lambda: 8)
    assert [threads_per_worker(n, {}) for n in (1, 2, 3, 16)] == [8, 4, 2, 1]


@pytest.mark.parametrize(
    ("env", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,1"}, 3),
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 4),  # what torchrun says where nobody has
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "x"}, 2),
        ({"OMP_NUM_THREADS": "many"}, 4),
    ],
)
def test_the_user_s_number_of_threads_counts(
    env: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_module, "cores", lambda: 8)
    assert threads_per_worker(2, env) == threads


def test_more_threads_than_cores_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(world_module, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_warning(World(size=4, local_size=4)) is None
    assert threads_warning(World(size=16, local_size=16)) is None  # a thread each is the least
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads_warning(World(size=4, local_size=2)) is None
    said = threads_warning(World(size=4, local_size=4))
    assert said and said.startswith("4 workers have 4 threads each (OMP_NUM_THREADS), on 8 cores")
    assert threads_warning(World(size=4, local_size=4, device="cuda:0")) is None


def test_a_worker_s_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(world_module, "cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = dict(os.environ)
    env = server_environment(2) | worker_environment(1, 2, tmp_path)
    assert dict(os.environ) == before
    found = find_world("cpu", env)
    assert found is not None and (found.rank, found.size, found.is_local) == (1, 2, True)
    assert found.rendezvous == f"file://{tmp_path}/store"
    assert (env["OMP_NUM_THREADS"], threads_per_worker(4, env)) == ("4", 2)  # ours may be shared out anew
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    env = server_environment(2) | worker_environment(1, 2, tmp_path)
    assert (env["OMP_NUM_THREADS"], threads_per_worker(4, env)) == ("3", 3)


def test_a_rank_that_ends_after_all_have_come_is_waited_for_no_longer_than_one_that_never_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for backend in ("GLOO", "NCCL"):
        monkeypatch.setenv(f"{backend}_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(world_module, "meet", lambda *_, **__: dist.HashStore())  # type: ignore[attr-defined]
    there = World(rank=0, size=2, local_size=2, rendezvous="tcp://127.0.0.1:1", is_local=True)
    with pytest.raises(RunFailed, match="rank 0 could not connect to the other ranks, which had all come: "):
        world_module._open_group(there, 0.1, None)
    assert not dist.is_initialized()


SCRIPT = """
import json, os
import torch, torch.distributed as dist
from fivefold.launch.world import alone, find_world, join

world = find_world("cpu") or alone("cpu")
with join(world):
    with join(world):  # a group that exists is left as it is
        total = torch.tensor([float(world.rank + 1)])
        dist.all_reduce(total)
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and world.rank == 1:
        os._exit(3)
    again = torch.ones(1)
    dist.all_reduce(again)
assert not dist.is_initialized()
print(json.dumps({"rank": world.rank, "size": world.size, "sum": total.item(), "again": again.item()}), flush=True)
"""


def outputs(text: str) -> list[dict[str, float]]:
    """What each rank printed; ranks share a pipe, so that two of them may meet on one line."""
    return sorted((json.loads(found) for found in re.findall(r"\{[^{}]*\}", text)), key=lambda row: row["rank"])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "joins.py"
    file.write_text(SCRIPT)
    return file


@pytest.mark.full
def test_join_alone(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True)
    assert outputs(done.stdout) == [{"rank": 0, "size": 1, "sum": 1.0, "again": 1.0}]


@pytest.mark.full
def test_join_under_torchrun_which_starts_the_ranks_again(script: Path) -> None:
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [(row["rank"], row["size"], row["sum"], row["again"]) for row in outputs(done.stdout)] == [
        (0, 2, 3.0, 2.0),
        (1, 2, 3.0, 2.0),
    ]


NODES = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from fivefold.launch.world import find_world, join

world = find_world("cpu")
with join(world, timeout=60):
    dist.all_reduce(torch.ones(1))
    if world.rank == 0 and not Path(sys.argv[1]).exists():
        time.sleep(120)  # until torchrun ends it, as the other node asks for a new round
    elif not Path(sys.argv[1]).exists():
        Path(sys.argv[1]).touch()
        os._exit(3)
    dist.all_reduce(torch.ones(1))
print("met again with", os.environ["TORCHELASTIC_RESTART_COUNT"], "restarts", flush=True)
"""


@pytest.mark.campaign
def test_nodes_that_count_restarts_differently_meet_again(tmp_path: Path) -> None:
    """torchrun counts a restart where a rank failed, and not where the ranks are restarted for another node. Which of
    them counts depends on who sees what first."""
    (tmp_path / "nodes.py").write_text(NODES)
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{_free_port()}", "--rdzv-id", "two"]
    options = ["--nnodes", "2", "--nproc-per-node", "1", *place, "--max-restarts", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(tmp_path / "nodes.py"), str(tmp_path / "x")]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        said = [node.communicate(timeout=180)[0] for node in nodes]
    finally:
        for node in nodes:
            node.terminate()  # torchrun then ends its ranks
    assert all(re.fullmatch(r"met again with [01] restarts\n", each) for each in said), said


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.mark.full
def test_join_under_srun_s_variables(script: Path) -> None:
    port = _free_port()
    tasks = []
    for rank in range(2):
        step = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
        env = os.environ | step | {"SLURM_STEP_NODELIST": "127.0.0.1", "MASTER_PORT": str(port)}
        tasks.append(subprocess.Popen([sys.executable, str(script)], env=env, stdout=subprocess.PIPE, text=True))
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [row["sum"] for text in said for row in outputs(text)] == [3.0, 3.0]


def _meets(rank: int, folder: Path) -> None:
    """Rank 0 is slow to come back from torch; rank 1 leaves the world as soon as it is in it."""
    import torch.distributed as dist

    make_group = dist.init_process_group

    def slow(*args: object, **options: object) -> None:
        make_group(*args, **options)  # type: ignore[arg-type]
        time.sleep(rank == 0)
        (folder / f"made-{rank}").touch()

    dist.init_process_group = slow
    place = World(rank=rank, local_rank=rank, size=2, local_size=2, rendezvous=f"file://{folder}/store", is_local=True)
    with world_module.join(place):
        assert (folder / "made-0").exists()


@pytest.mark.full
def test_no_rank_is_in_a_world_before_all_are(tmp_path: Path) -> None:
    """A rank that left before a slow peer had taken its connection made the start of that peer fail, now and then."""
    context = forks()
    ranks = [context.Process(target=_meets, args=(rank, tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0]
