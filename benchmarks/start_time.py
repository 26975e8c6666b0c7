"""Time and CPU seconds from `fivefold train` (its data and facts in the cache) to its first step.

    python benchmarks/start_time.py                      5 starts of the demo; writes benchmarks/results/start_time.json
    python benchmarks/start_time.py --beside OTHER/src   another version of fivefold, start by start by turns
    python benchmarks/start_time.py --quick              one start, written nowhere
    python benchmarks/start_time.py --layers 16          Llama-3.2-1B instead, random weights, one process, 64 tokens

CPU seconds are those of all processes of the command up to the first row of metrics.jsonl; on a machine with other work
they say more than the time. Those of `--help` are measured too. Medians.

The 1B takes 16 GiB, its moments in bf16; it is refused where less than 18 are available. 4 layers take 6.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))

from common import RESULTS, machine

SOURCE = Path(__file__).parents[1] / "src"
TICKS = os.sysconf("SC_CLK_TCK")
KEYS = ("train.max_steps=1000", "eval.every=0", "sample.every=0", "checkpoint.every=0", "train.compile=false")
LARGE = """
model: {name_or_path: llama-3.2-1b, init: random, overrides: {vocab_size: 128256, num_hidden_layers: %d}}
tokenizer: {name_or_path: "train:1024"}
data: {train: python-stdlib, validation: 1%%, seq_length: 64}
train: {global_batch_size: 1}
optimizer: {state_dtype: bf16}
precision: {compute: fp32}
"""


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="starts of each version")
    parser.add_argument("--beside", type=Path, help="the src/ of another version")
    parser.add_argument("--quick", action="store_true", help="one start")
    parser.add_argument("--layers", type=int, help="Llama-3.2-1B with so many of its 16 layers, not the demo")
    args = parser.parse_args()
    if args.layers and (has := available_gib()) < (needs := 4 + 0.9 * args.layers):
        raise SystemExit(f"{args.layers} layers take {needs - 2:.0f} GiB and some, and {has:.0f} are available")
    versions = {"this": SOURCE} | ({"beside": args.beside.resolve()} if args.beside else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"FIVEFOLD_CACHE": f"{folder}/cache"}
        what = list(KEYS)
        if args.layers:
            Path(folder, "run.yaml").write_text(LARGE % args.layers)
            what = [f"{folder}/run.yaml", *KEYS, "--nproc", "1"]
        for repeat in range(-1, 1 if args.quick else args.repeats):  # the first one fills the cache
            for name, source in versions.items():
                measured = start(what, Path(folder, f"{name}{repeat}"), environment | {"PYTHONPATH": str(source)})
                if repeat >= 0:
                    found[name].append(measured)
    result = {"machine": machine(), "keys": KEYS, "layers of Llama-3.2-1B": args.layers}
    for name, starts in found.items():
        result[name] = {key: round(median(each[key] for each in starts), 2) for key in starts[0]} | {"starts": starts}
    print(json.dumps(result, indent=1))
    if not args.quick:
        name = f"start_time-{args.layers}_layers.json" if args.layers else "start_time.json"
        (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def start(what: Sequence[str], folder: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """Seconds and CPU seconds of one start, and of a command that starts nothing."""
    command = [sys.executable, "-m", "fivefold", "train", *what, f"run.dir={folder}", "run.name=run"]
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
        while process.poll() is None:  # until it leaves its workers no time, to save what nobody wants
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
    helped = cpu_of([sys.executable, "-m", "fivefold", "--help"], environment)
    spent = {"cpu_seconds": sum(cpu.values()), "launcher_cpu_seconds": cpu[process.pid], "help_cpu_seconds": helped}
    return {"seconds": seconds, **spent}


def available_gib() -> float:
    """Memory that a process may have."""
    words = Path("/proc/meminfo").read_text().split()
    return int(words[words.index("MemAvailable:") + 1]) / 2**20


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
