"""Time and CPU seconds from `fivefold train` (the demo, its data and facts in the cache) to its first step.

    python benchmarks/start_time.py                      5 starts; writes benchmarks/results/start_time.json
    python benchmarks/start_time.py --beside OTHER/src   another version of fivefold, start by start by turns
    python benchmarks/start_time.py --quick              one start, written nowhere

CPU seconds are those of all processes of the command up to the first row of metrics.jsonl; on a machine with other work
they say more than the time. Those of `--help` are measured too. Medians.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from common import RESULTS, machine

SOURCE = Path(__file__).parents[1] / "src"
TICKS = os.sysconf("SC_CLK_TCK")
KEYS = ("train.max_steps=1000", "eval.every=0", "sample.every=0", "checkpoint.every=0", "train.compile=false")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="starts of each version")
    parser.add_argument("--beside", type=Path, help="the src/ of another version")
    parser.add_argument("--quick", action="store_true", help="one start")
    args = parser.parse_args()
    versions = {"this": SOURCE} | ({"beside": args.beside.resolve()} if args.beside else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"FIVEFOLD_CACHE": f"{folder}/cache"}
        for repeat in range(-1, 1 if args.quick else args.repeats):  # the first one fills the cache
            for name, source in versions.items():
                measured = start(Path(folder, f"{name}{repeat}"), environment | {"PYTHONPATH": str(source)})
                if repeat >= 0:
                    found[name].append(measured)
    result = {"machine": machine(), "keys": KEYS}
    for name, starts in found.items():
        result[name] = {key: round(median(each[key] for each in starts), 2) for key in starts[0]} | {"starts": starts}
    print(json.dumps(result, indent=1))
    if not args.quick:
        (RESULTS / "start_time.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


def start(folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds and CPU seconds of one start, and of a command that starts nothing."""
    command = [sys.executable, "-m", "fivefold", "train", *KEYS, f"run.dir={folder}", "run.name=run"]
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    metrics = folder / "run" / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            time.sleep(0.02)
        seconds, cpu = time.perf_counter() - began, cpu_seconds(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    helped = cpu_of([sys.executable, "-m", "fivefold", "--help"], environment)
    spent = {"cpu_seconds": sum(cpu.values()), "launcher_cpu_seconds": cpu[process.pid], "help_cpu_seconds": helped}
    return {"seconds": seconds, **spent}


def cpu_seconds(pid: int) -> dict[int, float]:
    """Process -> the CPU seconds of it and of its ended children, for `pid` and what came from it."""
    parents, seconds = {}, {}
    for task in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (task / "stat").read_text().rpartition(")")[2].split()
            parents[int(task.name)], seconds[int(task.name)] = int(words[1]), sum(map(int, words[11:15])) / TICKS
    family = {pid}
    while grown := {each for each, parent in parents.items() if parent in family} - family:
        family |= grown
    return {each: seconds[each] for each in sorted(family)}


def cpu_of(command: list[str], environment: Mapping[str, str]) -> float:
    """CPU seconds of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
