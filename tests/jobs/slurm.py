"""A real Slurm of two nodes on this machine: its own munged, slurmctld and two slurmd, with partitions to preempt."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "munge", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "sinfo")
NODES = ("gpu-a01", "big7")  # names without a common pattern, which no resolver knows
SEARCHED = f"/usr/sbin{os.pathsep}/usr/local/sbin"

CONF = """
ClusterName=two
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MessageTimeout=60
KillWait=20
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=low Nodes={nodes[0]},{nodes[1]} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes={nodes[0]},{nodes[1]} MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def missing() -> str:
    """Why there can be no Slurm here; "" if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "slurmd of several nodes starts as root alone"
    absent = [name for name in PROGRAMS if _program(name) is None]
    return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge" if absent else ""


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=SEARCHED)


@dataclass(frozen=True)
class Cluster:
    """A running cluster: `environment` is that of its commands."""

    folder: Path
    environment: dict[str, str]

    def do(self, *command: str) -> str:
        """The output of a command. Raises `CalledProcessError`."""
        return subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=True
        ).stdout.strip()

    def state(self, job: str) -> str:
        """`PENDING`, `RUNNING`, `COMPLETED` and the like, of a job or the task of an array."""
        said = self.do("scontrol", "show", "job", "--oneliner", job)
        return dict(word.split("=", 1) for word in said.splitlines()[0].split() if "=" in word)["JobState"]

    def wait(self, is_so: Callable[[], bool], seconds: float = 300) -> None:
        """Wait until something is so. Raises `TimeoutError` with the queue."""
        end = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > end:
                raise TimeoutError(self.do("squeue") + "\n" + self.do("sinfo"))
            time.sleep(0.1)


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """A Slurm of two nodes, until the end of the context."""
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(folder=folder, nodes=NODES, ports=_free_ports(3)))
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    beside = os.path.dirname(sys.executable)  # where the command fivefold is
    environment |= {"SLURM_CONF": str(conf), "PATH": os.pathsep.join([beside, os.environ["PATH"], SEARCHED])}
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    munged = [_program("munged") or "", "--force", "--foreground", f"--key-file={key}"]
    munged += [f"--{name}-file={folder}/munge.{name}" for name in ("pid", "seed", "log")]
    daemons = [[*munged, f"--socket={folder}/munge.socket", "--num-threads=2"]]
    daemons += [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    started: list[subprocess.Popen[bytes]] = []
    here = Cluster(folder, environment)
    try:
        for command in daemons:
            with (folder / "daemons.log").open("ab") as log:
                process = subprocess.Popen(
                    [_program(command[0]) or command[0], *command[1:]], env=environment, stdout=log, stderr=log
                )
            started.append(process)
            if command[0] not in ("slurmctld", "slurmd"):
                here.wait((folder / "munge.socket").exists, 10)
        here.wait(lambda: _idle(here) == len(NODES), 30)
        yield here
    finally:
        # Jobs outlive their daemons: they end first. A second scancel kills the script, which the first asks.
        with suppress(subprocess.CalledProcessError, TimeoutError):
            here.do("scancel", "--user=root", "--signal=KILL", "--full")
            here.do("scancel", "--user=root")
            here.wait(lambda: not here.do("squeue", "-h"), 60)
        for process in reversed(started):
            process.terminate()
        for process in started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _idle(here: Cluster) -> int:
    with suppress(subprocess.CalledProcessError):
        return sum(map(int, here.do("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D").split()))
    return 0


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
