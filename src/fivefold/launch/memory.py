"""The memory of this machine: its size, the share of its processes, and kills by the system for lack of it."""

import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import RunFailed
from fivefold.core.kept_steps import round_folder
from fivefold.core.units import GIB
from fivefold.launch.processes import scratch_folder

SCARCE = 0.03  # share of all memory: with less free, a killed process was killed for lack of memory
LOOK_SECONDS = 0.25
_UNLIMITED = 2**60  # the value of cgroup v1 for no limit


@dataclass(frozen=True)
class Room:
    """Bytes of memory (and swap) that this process and its neighbours may use, and the free part of it now."""

    total: int
    free: int


@dataclass(frozen=True)
class Needs:
    """The total need of the ranks on this machine, in bytes. Activations are an estimate, the others are exact."""

    parameters: int  # number of parameters of the whole model
    ranks: int
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def state(self) -> int:
        """Everything kept from step to step, and gradients."""
        return self.weights + self.gradients + self.optimizer

    def __str__(self) -> str:
        parts = [f"{name} {getattr(self, name) / GIB:.2f}" for name in ("weights", "gradients", "optimizer")]
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else "1 rank"
        return f"{', '.join(parts)}, activations about {self.activations / GIB:.2f} GiB for {ranks} here"

    def advice(self, room: int) -> str:
        if self.state > room:
            return (
                f"{self.parameters / 1e9:.2f} billion parameters need {self.state / GIB:.2f} GiB at the least; "
                "take a smaller model or more machines; optimizer.name: muon keeps one number a weight instead of two"
            )
        helps = "train.micro_batch_size, data.seq_length and memory.recompute: full make activations smaller"
        return f"{self}; {helps}, the {self.state / GIB:.2f} GiB of the others stay"


def room(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Room | None:
    """The memory of the machine, or of this process's control group if that has less; None if unknown."""
    try:
        kib = dict(re.findall(r"(\w+):\s+(\d+) kB", (proc / "meminfo").read_text(encoding="utf-8")))
        swap = int(kib["SwapTotal"]), int(kib["SwapFree"])
        found = Room((int(kib["MemTotal"]) + swap[0]) * 1024, (int(kib["MemAvailable"]) + swap[1]) * 1024)
    except (OSError, KeyError):
        return None
    for folder in _groups(proc, groups):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is None or limit >= _UNLIMITED:
            continue
        free = limit - (used or 0) + _reclaimable(folder)
        found = Room(min(found.total, limit), min(found.free, max(0, free)))
    return found


class Pressure:
    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc, self._groups = proc, groups
        self._kills = self._count()
        self._scarce, self._looked = False, 0.0
        self.held = 0  # the most bytes that the processes held together

    def look(self, pids: Iterable[int]) -> None:
        """Check the free memory, and the memory of `pids`, if it is time to."""
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self.held = max(self.held, sum(_resident(self._proc, pid) for pid in pids))
        now = room(self._proc, self._groups)
        self._scarce = now is not None and now.free < SCARCE * now.total

    @property
    def killed(self) -> bool:
        """True if the system killed a process for lack of memory since construction, or almost none was free at the
        last check."""
        now = self._count()
        return self._scarce or any(count > self._kills.get(name, 0) for name, count in now.items())

    def _count(self) -> Mapping[str, int]:
        """Processes killed by the system so far, per counter: the machine, and each control group."""
        files = [self._proc / "vmstat"]
        for folder in _groups(self._proc, self._groups):
            files += [folder / "memory.events", folder / "memory.oom_control"]
        return {
            str(file): int(found[1]) for file in files if (found := re.search(r"^oom_kill (\d+)", _text(file), re.M))
        }


def _groups(proc: Path, root: Path) -> Iterator[Path]:
    """The folders of this process's memory control group and its ancestors, of version 2 or 1."""
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        inner = Path(path.lstrip("/"))
        # Inside a container the path may be the host's, and the container's own group is at the root.
        yield from dict.fromkeys(base / group for group in (inner, *inner.parents) if (base / group).is_dir())


def _number(folder: Path, *names: str) -> int | None:
    text = next((text for name in names if (text := _text(folder / name).strip())), "")
    return int(text) if text.isdecimal() else None


def _reclaimable(folder: Path) -> int:
    """Bytes of cached files that the group gives up when memory is needed."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.M)
    return int(found[1]) if found else 0


def _resident(proc: Path, pid: int) -> int:
    words = _text(proc / str(pid) / "statm").split()
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 0


def resident(key: str) -> int | None:
    """A field of /proc/self/status in KiB; None if the system does not report it."""
    found = re.search(rf"^{key}:\s*(\d+)", _text(Path("/proc/self/status")), re.M)
    return int(found[1]) if found else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def out_of_gpu_memory(error: BaseException, rank: int) -> RunFailed | None:
    """The message for a GPU out of memory; None for another error. It would recur: no restart helps."""
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return None
    asked, has = (re.search(pattern, str(error)) for pattern in (_ASKED, _HAS))
    tried = f": {asked[1]} more were asked for" if asked else ""
    there = f", {has[2]} of {has[1]} were free" if has else ""
    return RunFailed(
        f"rank {rank}: the memory of its GPU does not suffice{tried}{there}",
        fix="set memory.recompute: full, lower train.micro_batch_size or data.seq_length, or put the model over more "
        "GPUs with layout.dp_shard or layout.tp",
        more="--debug shows where",
    )


_ASKED = r"Tried to allocate ([\d.]+ \w+)"
_HAS = r"total capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free"


# ---- steps that workers keep in the memory of a node: see `core/kept_steps.py` ---------------------------------------

PLACE = Path("/dev/shm")
SPARE = 1 / 8  # the part of free memory that is left free
ENDING = "ending"  # in the folder where workers meet: the launcher ends them


class Memory:
    """A folder in the memory of this node that ends with this process: a context manager. `folder`: None on a machine
    without such a `place`, where nothing is kept."""

    def __init__(self, place: Path = PLACE) -> None:
        self._place = place
        self.folder: Path | None = None

    def __enter__(self) -> "Memory":
        with suppress(OSError):
            self.folder = scratch_folder("memory", self._place)
        return self

    def __exit__(self, *_: object) -> None:
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def forget(self, but: int = 0) -> None:
        """Remove what is kept, but for one round."""
        for folder in self.folder.glob("round-*") if self.folder else ():
            if folder != round_folder(folder.parent, but):
                shutil.rmtree(folder, ignore_errors=True)

    def is_awaited(self, number: int, ranks: Sequence[int]) -> bool:
        """True if one of these ranks of a round may still write."""
        folder = self.folder and round_folder(self.folder, number)
        return folder is not None and any((folder / f"ready-{rank}").exists() for rank in ranks)


def free_bytes(folder: Path) -> int:
    """Bytes that may be written to a folder in memory; 0 if it has been removed."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    there = room()
    return int(min(found.f_bavail * found.f_frsize, there.free if there else 2**62) * (1 - SPARE))
