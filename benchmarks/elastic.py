"""Does a run whose nodes are killed, and come back, go on with those that are left, and end as the run left alone?

    python benchmarks/elastic.py             all four; writes benchmarks/results/elastic.json
    python benchmarks/elastic.py --kills 10  that many kills in place of 100
    python benchmarks/elastic.py --minutes 3 so long a run for goodput in place of 10
    python benchmarks/elastic.py --namespaces  each node in a network namespace of its own (root, `ip`)

A node is a `fivefold train` with its workers; a kill is SIGKILL to all of its processes at once.

    next_step   the demo on 2 nodes, one is killed: seconds to the next step that counts
    memory      the same with copies on each node and no checkpoint: no step is done twice
    kills       random nodes are killed and started again, 4 -> 2 -> 3 -> 4 nodes: every step once, over the rows of the
                order (the ledger of rows is compared at every step), with the curve of the run left alone
    goodput     2 nodes, one killed every 60 s on average, at random times, and started again at once: the steps that
                count, as a part of those of a run left alone in the same time
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from common import RESULTS, machine
from fivefold.core.history import load
from fivefold.core.json_lines import read
from reliability.kills import below

SMALL = (
    "eval.every=0", "sample.every=0", "model.overrides.hidden_size=32", "model.overrides.intermediate_size=48",
    "model.overrides.head_dim=8", "model.overrides.num_hidden_layers=2", "tokenizer.name_or_path=byte",
    f"data.train={Path(__file__).parents[1] / 'README.md'}", "data.seq_length=64", "data.validation=0",
    "train.micro_batch_size=1", "train.global_batch_size=12", "train.check_every=1", "train.max_restarts=20",
)  # fmt: skip
# Rates that do not depend on the number of steps, and are small: at 1e-2 two sound layouts of this model, 1e-8 apart at
# first, are 1e-2 apart after 400 steps, as any rounding is.
STEADY = ("scheduler.name=constant", "scheduler.warmup_steps=20", "optimizer.learning_rate=1e-4")
TOLERANCE = 1e-4  # relative, of the loss of a step: sums in another order
PATIENCE = 180.0  # seconds without a new step until a run is given up
EVERY = 60.0  # seconds between two kills, on average, for goodput


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--namespaces", action="store_true", help="a network namespace for each node")
    parser.add_argument("--only", choices=("next_step", "memory", "kills", "goodput"))
    args = parser.parse_args()
    parts: dict[str, Callable[[Path, list[str]], dict[str, Any]]] = {
        "next_step": next_step,
        "memory": memory,
        "kills": lambda folder, places: kills(folder, places, args.kills),
        "goodput": lambda folder, places: goodput(folder, places, 60 * args.minutes),
    }
    found: dict[str, Any] = {"machine": machine(), "namespaces": args.namespaces}
    with ExitStack() as stack:
        places = stack.enter_context(namespaces(4)) if args.namespaces else [""] * 4
        for name, part in parts.items():
            if args.only in (None, name):
                found[name] = part(Path(stack.enter_context(tempfile.TemporaryDirectory())), places)
                print(name, json.dumps(found[name]), flush=True)
    if args.only is None:
        (RESULTS / "elastic.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(part["ok"] for part in found.values() if isinstance(part, dict) and "ok" in part) else 1


def next_step(folder: Path, places: list[str]) -> dict[str, Any]:
    """Kill one of two nodes of the demo, the first and then the second, and time the next step that counts."""
    seconds = []
    for number in (0, 1):
        with Run(folder, f"demo-{number}", "1:2", places, "checkpoint.every=10", "train.max_steps=2000") as run:
            run.start(0), run.start(1)
            run.wait(lambda run=run: run.step >= 25 and run.nodes == 2)  # type: ignore[misc]
            seconds.append(run.kill(number))
    return {"ok": max(seconds) <= 10, "seconds": [round(each, 1) for each in seconds]}


def memory(folder: Path, places: list[str]) -> dict[str, Any]:
    """`next_step` where each node holds all of the state, and nothing is saved; the steps that were done twice."""
    seconds, again = [], []
    copies = "layout.dp_replicate=-1", "layout.dp_shard=1", "checkpoint.every=0"
    for number in (0, 1):
        with Run(folder, f"memory-{number}", "1:2", places, *copies, "train.max_steps=2000") as run:
            run.start(0), run.start(1)
            run.wait(lambda run=run: run.step >= 25 and run.nodes == 2)  # type: ignore[misc]
            seconds.append(run.kill(number))
            starts = load(run.path).starts
            again.append(max(starts[-2].last or 0, 25) - starts[-1].step)
    return {
        "ok": max(seconds) <= 10 and max(again) <= 0, "seconds": [round(each, 1) for each in seconds],
        "steps_done_twice": [max(each, 0) for each in again],
    }  # fmt: skip


def kills(folder: Path, places: list[str], count: int) -> dict[str, Any]:
    """Kill and start random nodes until `count` have been killed while all that were wanted trained; stop all, start
    all again for the last steps, and compare with the run left alone."""
    rng, seconds, settings = random.Random(1), list[float](), (*SMALL, *STEADY, "checkpoint.every=5")
    with Run(folder, "run", "1:4", places, *settings, "train.max_steps=1M") as run:
        wanted = cycle([4, 2, 3])  # nodes at the end of each leg: 4 -> 2 -> 3 -> 4
        while len(seconds) < count:
            target = next(wanted)
            while len(run.there) > target and len(seconds) < count:
                seconds.append(run.kill(rng.choice(run.there)))
            for node in [node for node in range(4) if node not in run.there][: target - len(run.there)]:
                run.start(node)
            run.wait(lambda: run.nodes == len(run.there))
            step = run.step + rng.randrange(5, 25)
            run.wait(lambda step=step: run.step >= step)  # type: ignore[misc]
        run.stop()
        steps, codes = run.step + 20, list[int | None]()
        last = f"train.max_steps={steps}"
        for node in range(4):
            run.start(node, last)
        run.wait(lambda: run.ended is not None)
        codes.append(run.ended)
    with Run(folder, "alone", "", places, *settings, last) as alone:
        alone.start(0)
        alone.wait(lambda: alone.ended is not None)
        codes.append(alone.ended)
    rows, other = run.rows, alone.rows
    apart = max(
        (abs(a["train/loss"] / b["train/loss"] - 1) for a, b in zip(rows, other, strict=False)), default=float("inf")
    )
    every_step_once = [row["step"] for row in rows] == list(range(1, steps + 1)) == [row["step"] for row in other]
    same_rows = [row["train/tokens_seen"] for row in rows] == [row["train/tokens_seen"] for row in other]
    worlds = [start.about.get("nodes") for start in load(run.path).starts]
    return {
        "ok": codes == [0, 0] and every_step_once and same_rows and apart <= TOLERANCE,
        "kills": len(seconds), "steps": steps, "exit_codes": codes, "every_step_once": every_step_once,
        "same_tokens_at_every_step": same_rows, "largest_relative_difference_of_a_loss": apart,
        "last_loss": [row["train/loss"] for row in (rows[-1:] + other[-1:])],
        "starts_by_nodes": {str(nodes): worlds.count(nodes) for nodes in sorted({*worlds}, key=str)},
        "seconds_to_next_step": {"median": round(median(seconds), 1), "most": round(max(seconds), 1)},
    }  # fmt: skip


def goodput(folder: Path, places: list[str], seconds: float) -> dict[str, Any]:
    """Kill a random one of two nodes at random times, one for every `EVERY` seconds, and start it again. Compare the
    steps that count with those of a run left alone for a third of the time."""
    rng, settings = random.Random(2), (*SMALL, "checkpoint.every=5", "train.max_steps=1M")
    times = sorted(rng.uniform(0, seconds) for _ in range(round(seconds / EVERY)))
    rates = []
    for name, share in (("alone", 1 / 3), ("goodput", 1.0)):
        with Run(folder, name, "1:2", places, *settings) as run:
            run.start(0), run.start(1)
            run.wait(lambda run=run: run.nodes == 2)  # type: ignore[misc]
            began, first = time.monotonic(), run.step
            left = list(times) if share == 1 else []
            while (now := time.monotonic() - began) < share * seconds:
                if left and now >= left[0]:
                    left.pop(0)
                    node = rng.choice(run.there)
                    run.kill(node, wait=False)
                    run.start(node)
                time.sleep(0.1)
            rates.append((run.step - first) / now)
    part = rates[1] / rates[0]
    return {
        "ok": part >= 0.9, "goodput": round(part, 3), "kills": len(times), "seconds": round(seconds),
        "steps_per_second": {"alone": round(rates[0], 2), "killed": round(rates[1], 2)},
    }  # fmt: skip


class Run:
    """A run on up to four nodes: a context manager, which ends them."""

    def __init__(self, folder: Path, name: str, nodes: str, places: list[str], *settings: str) -> None:
        self.path, self._places = folder / name, places
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._command = [
            sys.executable, "-m", "fivefold", "train", f"run.dir={folder}", f"run.name={name}", "--nproc", "1",
            *([] if any(key.startswith("layout.") for key in settings) else ["layout.dp_shard=-1"]),
            *([f"train.nodes={nodes}"] if nodes else []), *settings,
        ]  # fmt: skip

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        for node in list(self._nodes):
            self._end(node)

    def start(self, node: int, *settings: str) -> None:
        """Start a node, or start it again."""
        place = self._places[node]
        env = os.environ | {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "eth0"} if place else {})
        with (self.path.parent / f"{self.path.name}-{node}.log").open("ab") as log:
            self._nodes[node] = subprocess.Popen(
                [*(["ip", "netns", "exec", place] if place else []), *self._command, *settings],
                stdout=log, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip

    def kill(self, node: int, *, wait: bool = True) -> float:
        """Kill all processes of a node. Returns the seconds to the next step of the others, if it is to `wait`."""
        starts, began = len(load(self.path).starts), time.monotonic()
        self._end(node)
        if wait:
            self.wait(lambda: self.ended is not None or self._has_begun(starts))
        return time.monotonic() - began

    def stop(self) -> None:
        """Ask all nodes to save and end."""
        for process in self._nodes.values():
            process.send_signal(signal.SIGTERM)
        for process in self._nodes.values():
            process.wait(PATIENCE)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait. Raises `TimeoutError` if no step is made meanwhile for long."""
        step, moved = self.step, time.monotonic()
        while not condition():
            time.sleep(0.1)
            if self.step != step:
                step, moved = self.step, time.monotonic()
            if time.monotonic() - moved > PATIENCE:
                raise TimeoutError(f"{self.path} stands at step {step}")

    @property
    def there(self) -> list[int]:
        """The nodes that run."""
        return sorted(node for node, process in self._nodes.items() if process.poll() is None)

    @property
    def nodes(self) -> int:
        """The number of nodes that train, once they have made a step."""
        starts = load(self.path).starts
        return int(starts[-1].about.get("nodes", 1)) if starts and self.step > starts[-1].step else 0

    @property
    def ended(self) -> int | None:
        """The worst exit code once every node that was not killed has ended."""
        codes = [process.poll() for process in self._nodes.values()]
        return None if None in codes or not codes else max(code for code in codes if code is not None)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of its metrics."""
        file = self.path / "metrics.jsonl"
        return list(read(file).rows) if file.exists() else []

    @property
    def step(self) -> int:
        """The last step that was logged: of the end of the file, as it is asked for ten times a second."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return 0
        with file.open("rb") as lines:
            lines.seek(max(0, lines.seek(0, os.SEEK_END) - 2**16))
            whole = lines.read().split(b"\n")[:-1]
        return int(json.loads(whole[-1])["step"]) if whole else 0

    def _has_begun(self, starts: int) -> bool:
        newer = load(self.path).starts[starts:]
        return bool(newer) and self.step > newer[-1].step

    def _end(self, node: int) -> None:
        process = self._nodes.pop(node)
        for pid in (process.pid, *below(process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


@contextmanager
def namespaces(count: int) -> Iterator[list[str]]:
    """Network namespaces that a bridge connects, by name."""
    names = [f"ffel{number}" for number in range(count)]
    commands = ["link add ffelbr type bridge", "link set ffelbr up"]
    for number, name in enumerate(names):
        commands += [
            f"netns add {name}", f"link add ffelv{number} type veth peer name eth0 netns {name}",
            f"link set ffelv{number} master ffelbr up", f"-n {name} link set lo up", f"-n {name} link set eth0 up",
            f"-n {name} addr add 10.77.0.{number + 1}/24 dev eth0",
        ]  # fmt: skip
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        yield names
    finally:
        for command in (*(f"netns del {name}" for name in names), "link del ffelbr"):
            subprocess.run(["ip", *command.split()], check=False)


if __name__ == "__main__":
    sys.exit(main())
