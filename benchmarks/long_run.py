"""Whether a run gets slower, or larger, the longer it lasts: medians of a step early and late, and resident memory.

    python benchmarks/long_run.py               10,000 steps of a tiny model in one process; some minutes
    python benchmarks/long_run.py --steps 500   fewer

Saves, evaluations and samples come every 1,000 steps, and the standing checks every 100, as in any run.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip


def run_file(folder: Path, steps: int) -> Path:
    every = max(1, steps // 10)
    tree = {
        "model": {"name_or_path": "demo", "init": "random", "overrides": SHAPE}, "tokenizer": {"name_or_path": "byte"},
        "data": {"train": "python-stdlib", "validation": "1%", "seq_length": 64},
        "train": {"max_steps": steps, "global_batch_size": 4, "micro_batch_size": 4},
        "layout": "single", "precision": {"compute": "fp32"}, "eval": {"every": every, "max_tokens": 2048},
        "sample": {"every": every, "prompts": ["def "]}, "checkpoint": {"every": every, "keep": 2},
        "run": {"name": "long", "dir": str(folder)},
    }  # fmt: skip
    path = folder / "long.yaml"
    path.write_text(json.dumps(tree))
    return path


class Resident(threading.Thread):
    """Resident MiB of a process and its children, second by second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.seen = pid, list[tuple[float, float]]()
        self.began = time.monotonic()

    def run(self) -> None:
        while Path(f"/proc/{self.pid}").exists():
            self.seen.append((time.monotonic() - self.began, _mib(self.pid)))
            time.sleep(1)


def _mib(pid: int) -> float:
    pages, queue = 0, [pid]
    while queue:
        one = queue.pop()
        try:
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
            queue += map(int, Path(f"/proc/{one}/task/{one}/children").read_text().split())
        except (OSError, IndexError):
            continue
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as scratch:
        file = run_file(Path(scratch), steps)
        command = [sys.executable, "-m", "fivefold.cli", "train", str(file)]
        started = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        resident = Resident(started.pid)
        resident.start()
        if started.wait():
            return 1
        lines = Path(scratch, "long", "metrics.jsonl").read_text().splitlines()
    seconds = [json.loads(line)["perf/step_seconds"] for line in lines]
    tenth = max(1, len(seconds) // 10)
    early, late = median(seconds[tenth // 10 : tenth]), median(seconds[-tenth:])
    memory = [mib for _, mib in resident.seen]
    first, last = median(memory[len(memory) // 5 : 2 * len(memory) // 5]), median(memory[-max(1, len(memory) // 5) :])
    print(
        f"{len(seconds):,} steps: a step takes {1e3 * early:.2f} ms in the first tenth, {1e3 * late:.2f} ms in the last"
    )
    print(
        f"resident memory of all processes: {first:,.0f} MiB in the second fifth of the time, {last:,.0f} in the last"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
