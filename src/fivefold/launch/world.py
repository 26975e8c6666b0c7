"""The world of a worker: its rank, its device and its neighbours. The one module that reads the environment.

A world comes from `torchrun` (and every launcher that sets its variables: Kubeflow, Ray Train, SageMaker), from `srun`,
or is a single process. `find_world` only reads; `join` opens the process group and closes it again.
"""

import ctypes
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

from fivefold.config.schema import LaunchSection
from fivefold.core.code_cache import keep_compiled
from fivefold.core.errors import UserError, first_line
from fivefold.core.system import cores
from fivefold.launch.meeting import LOOPBACK, OthersGone, is_loopback, meet

FILE, TCP = "file://", "tcp://"
TIMEOUT = timedelta(hours=1)  # of one collective, a backstop for the watchdog (train.collective_timeout)

LAUNCHER = "FIVEFOLD_LAUNCHER"  # in the environment of our own workers: the process that started them
_FOLDER = "FIVEFOLD_WORKERS"  # in the environment of our own workers: `World.folder`
_MEETS = "FIVEFOLD_MEETS"  # in the environment of workers of several nodes: host:port of rank 0
_ROUND = "FIVEFOLD_ROUND"  # in the environment of workers of several nodes: `World.round`
_SHARED_OUT = "FIVEFOLD_SHARED_OUT"  # set with an OMP_NUM_THREADS that is ours, not the user's


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among all: `rank` of `size`, `local_rank` of `local_size` on this machine.

    `device` is `cpu` or `cuda:N`. `rendezvous` is the meeting point of the ranks: `tcp://host:port`, `file://path`, or
    empty for a single process, which needs no network. `is_local`: all ranks are known to be on this machine. `folder`:
    private to the workers and the launcher of this machine; empty under another launcher. `nodes`: machines, or parts
    of one, with a launcher of their own. `round`: of `train.nodes` (`launch/rounds.py`), from 1; 0: there are none.
    """

    rank: int = 0
    local_rank: int = 0
    size: int = 1
    local_size: int = 1
    device: str = "cpu"
    backend: str = "gloo"
    rendezvous: str = ""
    is_local: bool = False
    folder: str = ""
    nodes: int = 1
    round: int = 0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def local_ranks(self) -> range:
        """The ranks on this machine, which are consecutive."""
        first = self.rank - self.local_rank
        return range(first, first + self.local_size)


@dataclass(frozen=True, kw_only=True)
class NodeRanks:
    """The ranks of one node, from `first` on, among `size` of `nodes` nodes, of which this is number `node`.

    `meets`: `host:port` where rank 0 opens the store of all ranks.
    """

    first: int
    size: int
    node: int
    nodes: int
    meets: str
    round: int


def find_world(device: str = "auto", env: Mapping[str, str] = os.environ) -> World | None:
    """The world in which another launcher started this process, or None for a standalone process.

    `device` is `auto`, `cpu` or `cuda`. Raises `UserError` if the variables are incomplete or no numbers.
    """
    in_batch_script = env.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in env
    if "RANK" in env and "WORLD_SIZE" in env:
        found = _from_torchrun(env)
    # A step of one task, such as `srun --pty bash`, is an interactive shell: we start its workers.
    elif "SLURM_PROCID" in env and _tasks(env) > 1 and not in_batch_script:
        found = _from_srun(env)
    else:
        return None
    return _placed(found, device, env)


def is_started_by_node(world: World | None, env: Mapping[str, str] = os.environ) -> bool:
    """True if the ranks of several nodes are for this process to start: it is alone on its node, and no torchrun has
    started it. Raises `UserError` if srun has started more than one task on a node."""
    if world is None or "RANK" in env:
        return world is None
    if world.local_size > 1:
        raise UserError(
            f"train.nodes is set, and srun has started {world.local_size} tasks on a node",
            fix="srun --ntasks-per-node 1, for fivefold to start the ranks; or leave train.nodes out",
            more="fivefold docs howto/elastic",
        )
    return True


def check_nodes(nodes: tuple[int, int] | None, world: World | None) -> None:
    """Raise `UserError` if torchrun has started another number of nodes than `nodes`, the least and the most."""
    if nodes and world and not nodes[0] <= world.nodes <= nodes[1]:
        raise UserError(
            f"train.nodes is {nodes[0]} to {nodes[1]}, and torchrun has started {world.nodes}",
            fix=f"torchrun --nnodes {nodes[0]}:{nodes[1]}, or leave train.nodes out",
        )


def _tasks(env: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    return _number(env, name, 1, least=1)


def alone(device: str = "auto") -> World:
    return _placed(World(), device, os.environ)


def device_kind(device: str) -> str:
    """`cuda` if a GPU is usable, else `cpu`, for `auto`. Raises `UserError` if `cuda` is requested and absent."""
    if device != "cpu" and _may_have_gpu():
        from torch import cuda

        if cuda.is_available():
            return "cuda"
    if device == "cuda":
        raise UserError(
            "train.device is cuda, but torch sees no GPU", fix="set train.device: cpu, or run fivefold doctor"
        )
    return "cpu"


def _may_have_gpu() -> bool:
    """True if torch may see a GPU. Importing it takes seconds, and it sees none without CUDA support in its build, nor
    without a driver."""
    found = None if "torch" in sys.modules else find_spec("torch")
    if found is None or found.origin is None:
        return True
    built = run_path(str(Path(found.origin).with_name("version.py")))
    if built.get("hip") or not built.get("cuda"):
        return bool(built.get("hip"))
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def multiplies_bf16(device: str) -> bool:
    """True if `device` (`cpu` or `cuda:N`) has instructions for bf16 matmuls that PyTorch uses.

    Without them, as on CPUs with AVX2 at most, PyTorch multiplies in a plain loop on one core: a hundred times slower.
    """
    import torch

    if device != "cpu":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # type: ignore[no-untyped-call]


def threads_per_worker(local_size: int, env: Mapping[str, str] = os.environ) -> int:
    """CPU threads of each of `local_size` workers on this machine: OMP_NUM_THREADS, or else an equal share.

    The 1 that torchrun sets by default is ignored.
    """
    said = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    is_users = said.isdecimal() and int(said) > 0 and _SHARED_OUT not in env
    if is_users and not (said == "1" and "TORCHELASTIC_RUN_ID" in env):
        return int(said)
    return max(1, cores() // local_size)


def threads_warning(world: World) -> str | None:
    """A warning if the workers of this machine have more threads than it has cores: steps then take several times as
    long; else None. A GPU's worker waits for its GPU, and is not warned of."""
    threads, has = threads_per_worker(world.local_size), os.cpu_count() or 1
    if world.device != "cpu" or threads == 1 or threads * world.local_size <= has:
        return None
    asked = f"{world.local_size} workers have {threads} threads each (OMP_NUM_THREADS), on {has} cores"
    return f"{asked}: slow; without the variable they share the cores"


@contextmanager
def join(world: World, *, timeout: float = LaunchSection().timeout, store: Any = None) -> Iterator[World]:
    """Inside, `torch.distributed` is ready and the device is chosen; an existing group is left unchanged.

    `timeout`: seconds until all ranks must be present, under another launcher. `store`: the rendezvous store; None is
    the one that `world` names.
    """
    import torch

    torch.set_num_threads(threads_per_worker(world.local_size))
    # Collectives that the flight recorder keeps: a CPU runs far ahead of its GPU, and an old one may be hanging.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    is_ours = open_world(world, timeout=timeout, store=store)
    try:
        yield world
    except BaseException:
        # Closing a NCCL group may wait for the other ranks; the process ends anyway.
        if is_ours and world.backend == "gloo":
            leave()
        raise
    if is_ours:
        leave()


def leave() -> None:
    """Close the process group of a joined world, if it is open; this process can join another afterwards."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def set_for_cuda(env: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment for training before CUDA starts; the user's own settings win."""
    # Expandable segments: otherwise blocks of different sizes waste a tenth to a third of the reserved memory.
    if "PYTORCH_ALLOC_CONF" not in env:
        env.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # The sends and receives of a pipeline have one order on all ranks: the warning does not apply.
    env.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def open_world(world: World | None = None, *, timeout: float = LaunchSection().timeout, store: Any = None) -> bool:
    """Choose the device and initialise `torch.distributed` if nobody has yet. Returns True if it did.

    `world`: None is the one in the environment, or this process alone. `timeout`, `store`: as in `join`.
    """
    import torch
    import torch.distributed as dist

    from fivefold.ops.cpu.tuning import tune

    if world is None and dist.is_initialized():
        if device_kind("auto") == "cpu":
            tune()
        return False
    set_for_cuda()
    world = world or find_world() or alone()
    if world.device == "cpu":
        tune()
    else:
        torch.cuda.set_device(world.device)
    if dist.is_initialized():
        return False
    _open_group(world, timeout, store)
    return True


def server_environment(size: int) -> dict[str, str]:
    """The environment of the process that forks `size` workers."""
    # NVML counts GPUs without initialising CUDA, which would break in the forked workers.
    asked = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", LAUNCHER: str(os.getpid())}
    env = {**os.environ, **asked, "OMP_NUM_THREADS": str(threads_per_worker(size))}
    keep_compiled(env)
    return env


def worker_environment(rank: int, size: int, folder: Path, among: NodeRanks | None = None) -> dict[str, str]:
    """Additional environment of worker `rank` of `size` on this machine; the workers meet in `folder`. `among`: they
    are the ranks of one of several nodes, and meet at a port."""
    place: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": size, _MEETS: "", _ROUND: 0}
    if among:
        place = {"RANK": among.first + rank, "WORLD_SIZE": among.size, _MEETS: among.meets}
        place |= {"GROUP_RANK": among.node, "GROUP_WORLD_SIZE": among.nodes, _ROUND: among.round}
    place |= {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, _FOLDER: folder}
    if "OMP_NUM_THREADS" not in os.environ:
        place[_SHARED_OUT] = 1
    return {name: str(value) for name, value in place.items()}


def _open_group(world: World, timeout: float, store: Any) -> None:
    import torch
    import torch.distributed as dist

    met_here = is_loopback(world.rendezvous.removeprefix(TCP).rpartition(":")[0])
    if (world.is_local or world.size == 1 or met_here) and sys.platform == "linux":
        # The loopback interface is unreachable from outside and needs no name lookup.
        os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    device = torch.device(world.device) if world.device != "cpu" else None
    is_met = world.rendezvous.startswith(TCP)  # otherwise our launcher notices a rank that ends
    ends = time.monotonic() + timeout
    store = store or _store(world, timeout)
    left = timedelta(seconds=max(ends - time.monotonic(), 1)) if is_met else TIMEOUT
    store.set_timeout(left)
    try:
        dist.init_process_group(
            world.backend, store=store, rank=world.rank, world_size=world.size, timeout=left, device_id=device
        )
        if world.backend == "gloo":
            # A rank counts as connected before its peers have accepted its connection. If it left the group at once, as
            # after a refusal on all ranks, a slow peer would fail to start: "Connection closed by peer".
            dist.barrier()
    except RuntimeError as error:
        if not is_met:
            raise
        raise OthersGone(
            f"rank {world.rank} could not connect to the other ranks, which had all come: {first_line(error)}",
            fix="look at what they have said: one may have ended; or let the network between their machines pass",
            more="fivefold docs explain/machine",
        ) from error
    if is_met:
        store.set_timeout(TIMEOUT)
        assert dist.group.WORLD is not None
        dist.group.WORLD.set_timeout(TIMEOUT)


def _store(world: World, timeout: float) -> Any:
    """The rendezvous store: a file, or a port of rank 0 or of torchrun's agent."""
    from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]  # public, untyped

    if not world.rendezvous:
        return HashStore()
    if world.rendezvous.startswith(FILE):
        return FileStore(world.rendezvous.removeprefix(FILE), world.size)
    host, _, port = world.rendezvous.removeprefix(TCP).rpartition(":")
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if world.is_local and not has_agent:
        host = LOOPBACK
    hosts = world.is_first and not has_agent
    return meet(world.rank, world.size, host, int(port), hosts=hosts, timeout=timeout)


def _from_torchrun(env: Mapping[str, str]) -> World:
    """The world of a worker of `torchrun`, or of one that `launch/processes.py` has started on this machine."""
    folder = env.get(_FOLDER, "")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name) and not folder]
    if missing:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} not",
            fix="start the workers with torchrun, or unset RANK and WORLD_SIZE to let fivefold start them",
        )
    size = _number(env, "WORLD_SIZE", least=1)
    rank = _number(env, "RANK", most=size - 1)
    meets = env.get(_MEETS, "") if folder else f"{env['MASTER_ADDR']}:{_port(env)}"
    meeting = f"{TCP}{meets}" if meets else f"{FILE}{folder}/store"
    return World(
        rank=rank,
        local_rank=_number(env, "LOCAL_RANK", rank, most=size - 1),
        size=size,
        local_size=_number(env, "LOCAL_WORLD_SIZE", size, least=1, most=size),
        rendezvous=meeting if size > 1 else "",
        is_local=env.get("LOCAL_WORLD_SIZE") == str(size),
        folder=folder,
        nodes=_number(env, "GROUP_WORLD_SIZE", 1, least=1, most=size),
        round=_number(env, _ROUND, 0) if folder else 0,
    )


def _from_srun(env: Mapping[str, str]) -> World:
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST") or env.get("SLURM_JOB_NODELIST") or LOOPBACK
    size = _tasks(env)
    local_rank = _number(env, "SLURM_LOCALID", 0)
    layout = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or "")
    node = _number(env, "SLURM_NODEID", 0)
    local_size = layout[node] if node < len(layout) else max(local_rank + 1, size if nodes == LOOPBACK else 1)
    host = env.get("MASTER_ADDR") or first_host(nodes)
    port = _port(env) if env.get("MASTER_PORT") else _port_of_step(env)
    return World(
        rank=_number(env, "SLURM_PROCID", most=size - 1),
        local_rank=local_rank,
        size=size,
        local_size=local_size,
        rendezvous=f"{TCP}{host}:{port}",
        is_local=layout == [size] or nodes == LOOPBACK,
    )


def _placed(world: World, device: str, env: Mapping[str, str]) -> World:
    """The same world with the device of this rank. `device`: `auto`, `cpu` or `cuda`."""
    if device_kind(device) == "cpu":
        return world
    from torch import cuda

    # If a scheduler shows each task only its own GPU, that GPU is number 0 everywhere.
    devices = cuda.device_count()
    is_bound = devices == 1 and "CUDA_VISIBLE_DEVICES" in env
    if world.local_size > devices and not is_bound:
        raise UserError(
            f"{world.local_size} workers started on this machine, which has {devices} GPU{'s' * (devices != 1)}",
            fix=f"start {devices} a machine, or set train.device: cpu",
            more="fivefold doctor",
        )
    return replace(world, device=f"cuda:{world.local_rank % devices}", backend="nccl")


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu-[003-007,012],login1` is `gpu-003`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0] if first else nodes)


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's `4(x2),3` as `[4, 4, 3]`; empty if unset."""
    counts: list[int] = []
    for tasks, repeats in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(tasks)] * int(repeats or 1)
    return counts


def _port(env: Mapping[str, str]) -> int:
    return _number(env, "MASTER_PORT", least=1, most=2**16 - 1)


def _port_of_step(env: Mapping[str, str]) -> int:
    """A port that every task of a job step agrees on, and that two steps on one machine rarely share."""
    job, step = (int(text) if text.isdigit() else 0 for text in map(env.get, ("SLURM_JOB_ID", "SLURM_STEP_ID"), "00"))
    return 10_000 + (job * 16 + step) % 20_000


def _number(env: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0, most: int = 2**31) -> int:
    """A numeric variable of the launcher. Raises `UserError` if it is no number from `least` to `most`."""
    text = env.get(name, str(default)).strip()
    if re.fullmatch("[0-9]{1,10}", text) and least <= int(text) <= most:
        return int(text)
    raise UserError(
        f"{name} is {text!r} in the environment, and has to be a number from {least} to {most}",
        fix="unset RANK and WORLD_SIZE where another job has left them; torchrun and srun set what they need",
    )
