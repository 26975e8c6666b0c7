"""torchrun, with the exit code of the worker that failed first; and the nodes of a SageMaker training job.

    python -m fivefold.launch.torchrun OPTIONS OF TORCHRUN -m fivefold.cli train RUN.yaml

torchrun exits with 1 on any failure. This wrapper exits with 2 for a wrong request, which would fail again, and with
143 after a stop on request, saved, so schedulers know whether to retry.

SageMaker starts one process on each host and names the hosts in a file; its toolkits repeat them in variables. A job of
one host is like any other machine. On several, each host becomes a node of torchrun, whose variables come first.
"""

import json
import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.errors import UserError
from fivefold.launch.workers import gpus, workers_of_node
from fivefold.launch.world import device_kind

RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
PORT = "7777"  # that of SageMaker's own torchrun
GRACE = "110"  # seconds for a save after SIGTERM: SageMaker kills after 120, torchrun would after 30


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun, and return the exit code: 128 and its number for a signal, as shells have it."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        options = run.parse_args(list(sys.argv[1:] if arguments is None else arguments))  # type: ignore[no-untyped-call]
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


@dataclass(frozen=True)
class Hosts:
    """All hosts of a job, in the same order on each; this one; and the network interface between them."""

    names: tuple[str, ...]
    here: str
    interface: str

    @property
    def rank(self) -> int:
        return self.names.index(self.here)


def find_hosts(env: Mapping[str, str] = os.environ, file: Path = RESOURCES) -> Hosts | None:
    """The hosts of this training job, or None if there is one host, or no job. Raises `UserError` for text that names
    none."""
    said = env.get("SM_RESOURCE_CONFIG") or (file.read_text(encoding="utf-8") if file.is_file() else "{}")
    try:
        config: dict[str, Any] = json.loads(said)
        names = tuple(sorted(json.loads(env["SM_HOSTS"]) if env.get("SM_HOSTS") else config.get("hosts", ())))
        here = env.get("SM_CURRENT_HOST") or config.get("current_host")
        interface = env.get("SM_NETWORK_INTERFACE_NAME") or config.get("network_interface_name") or "eth0"
    except (ValueError, TypeError, AttributeError) as error:
        raise _unreadable(f"cannot be read: {error}") from error
    if len(names) < 2:
        return None
    if not here or here not in names:
        raise _unreadable(f"name {here or 'no host'} as this one, and {', '.join(names)} as all")
    return Hosts(names, here, interface)


def _unreadable(what: str) -> UserError:
    return UserError(
        f"SM_RESOURCE_CONFIG, SM_HOSTS and SM_CURRENT_HOST, or {RESOURCES}, {what}",
        fix="unset the first three outside of a SageMaker training job, or start the workers with torchrun",
        more="fivefold docs start/sagemaker",
    )


def torchrun_command(
    hosts: Hosts, arguments: Sequence[str], nproc: int | None, env: Mapping[str, str] = os.environ
) -> list[str]:
    """The command that trains on this host as one node of `hosts`. `arguments`: of `fivefold train`. `nproc`: ranks of
    a host; None for every GPU, or 2 on a CPU."""
    devices = nproc or int(env.get("SM_NUM_GPUS") or 0)
    if not devices:
        kind = device_kind("auto")
        devices = workers_of_node(kind=kind, devices=gpus() if kind == "cuda" else 0, nproc=None)
    return [
        *(sys.executable, "-m", "fivefold.launch.torchrun"),
        *("--nnodes", str(len(hosts.names)), "--node-rank", str(hosts.rank), "--nproc-per-node", str(devices)),
        *("--master-addr", hosts.names[0], "--master-port", env.get("SM_MASTER_PORT", PORT)),
        *("-m", "fivefold.cli", "train", *arguments),
    ]


def set_for_hosts(hosts: Hosts, env: MutableMapping[str, str] = os.environ) -> None:
    """Set the environment of torchrun and its workers; the user's own settings win."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        env.setdefault(name, hosts.interface)
    env.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", GRACE)


if __name__ == "__main__":
    sys.exit(main())
