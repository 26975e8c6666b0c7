"""Does a run that is killed again and again end as the run left alone? SIGKILL to a worker at random moments, chained.

    python benchmarks/reliability/kills.py            20 kills; writes benchmarks/results/
    python benchmarks/reliability/kills.py --quick    3 kills, written nowhere

Both runs are `fivefold train` on the demo's text with a tiny model, two workers, asynchronous checkpoints. The launcher
starts the workers again each time. Compared at the end, bit for bit: weights, both moments, and the loss of every step.
Reported besides: the seconds from a kill to the next logged step. Exits with 1 when anything differs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from common import RESULTS, machine
from fivefold.checkpoint import Checkpoint, step_folder
from fivefold.core.json_lines import read

EVERY = 10  # steps between checkpoints


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three kills")
    args = parser.parse_args()
    kills = 3 if args.quick else 20
    steps = 60 * kills
    with tempfile.TemporaryDirectory() as folder:
        alone, killed = Path(folder, "alone"), Path(folder, "killed")
        start(alone, steps).wait()
        process = start(killed, steps)
        seconds = [kill_one(process, killed, random.Random(index), kills - index) for index in range(kills)]
        code = process.wait()
        result: dict[str, Any] = {
            "machine": machine(),
            "kills": kills,
            "steps": steps,
            "exit_code": code,
            "recovered": sum(each is not None for each in seconds),
            "seconds_to_next_step": {"median": median(s for s in seconds if s), "most": max(s for s in seconds if s)},
            "losses_equal": losses(alone) == losses(killed) and len(losses(alone)) == steps,
            "state_equal": equal(alone, killed, steps),
        }
    print(json.dumps(result, indent=1))
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    same = f"losses equal {result['losses_equal']}, state {result['state_equal']}"
    print(f"{result['recovered']} of {kills} kills recovered; {same}")
    fine = code == 0 and result["recovered"] == kills and result["losses_equal"] and result["state_equal"]
    return 0 if fine else 1


def start(run: Path, steps: int) -> "subprocess.Popen[bytes]":
    """`fivefold train` in the background."""
    keys = [
        f"run.dir={run.parent}", f"run.name={run.name}", f"train.max_steps={steps}", f"checkpoint.every={EVERY}",
        "eval.every=0", "sample.every=0", "train.global_batch_size=4", "train.micro_batch_size=2",
        "model.overrides.hidden_size=64", "model.overrides.intermediate_size=96", "model.overrides.head_dim=16",
        "data.seq_length=64", "tokenizer.name_or_path=byte",
    ]  # fmt: skip
    command = [sys.executable, "-m", "fivefold", "train", *keys]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def kill_one(process: "subprocess.Popen[bytes]", run: Path, rng: random.Random, left: int) -> float | None:
    """Kill a random worker a random while after the newest step; seconds until a later step is logged again."""
    before = last_step(run)
    target = before + rng.randrange(5, 40)
    _wait(process, lambda: last_step(run) >= min(target, before + 40))
    time.sleep(rng.random() * 0.2)
    workers = find_workers(process.pid)
    if not workers:
        return None
    os.kill(rng.choice(workers), signal.SIGKILL)
    killed = time.monotonic()
    stamp = (run / "metrics.jsonl").stat().st_mtime_ns
    _wait(process, lambda: not set(workers) & set(find_workers(process.pid)) and bool(find_workers(process.pid)))
    _wait(process, lambda: (run / "metrics.jsonl").stat().st_mtime_ns > stamp and _is_growing(run))
    return time.monotonic() - killed if process.poll() is None else None


def _is_growing(run: Path) -> bool:
    before = (run / "metrics.jsonl").stat().st_size
    time.sleep(0.05)
    return (run / "metrics.jsonl").stat().st_size > before


def find_workers(parent: int) -> list[int]:
    """The launcher's worker processes: the children of its child that forks them."""
    parents = {}
    for task in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(task.name)] = int((task / "stat").read_text().rpartition(")")[2].split()[1])
    return [pid for pid, its in parents.items() if parents.get(its) == parent]


def _wait(process: "subprocess.Popen[bytes]", condition: Any) -> None:
    deadline = time.monotonic() + 300
    while not condition() and process.poll() is None:
        if time.monotonic() > deadline:
            raise SystemExit("nothing happened for five minutes")
        time.sleep(0.02)


def rows(run: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    return list(read(run / "metrics.jsonl").rows)


def last_step(run: Path) -> int:
    """The last step that is logged."""
    return int(rows(run)[-1]["step"]) if rows(run) else 0


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of every step."""
    return [(row["step"], row["train/loss"]) for row in rows(run)]


def equal(one: Path, other: Path, step: int) -> bool:
    """Whether two runs hold the same bits at a step."""
    a, b = (Checkpoint.open(run / "checkpoints" / step_folder(step)) for run in (one, other))
    return a.kinds == b.kinds and all(
        torch.equal(a.source(kind).whole(name), b.source(kind).whole(name))
        for kind in a.kinds
        for name in a.source(kind).ordered
    )


if __name__ == "__main__":
    sys.exit(main())
