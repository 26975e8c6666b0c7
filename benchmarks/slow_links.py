"""Layouts over two nodes with a slow link between them: bytes on the link, and seconds of a step beside the planner's.

    python benchmarks/slow_links.py                    1 Gbit/s, 200 and 50 Mbit/s, as root on Linux
    python benchmarks/slow_links.py --rates 200 --layouts shard4,shard4+hpz2 --steps 5 --out /tmp/some.json
    python benchmarks/slow_links.py --write-docs       the results into docs/explain/slow_links.md, and the picture

The nodes are two network namespaces of this machine, with two ranks each and a pair of virtual Ethernet devices
between them, which `tc ... tbf` limits in both directions. Ranks of a node share memory, and each node has a /dev/shm
of its own. Under each limit the ranks measure themselves as `fivefold calibrate --nodes` does, train as `fivefold
train` does, layout after layout, and measure themselves again: the speed of a machine wavers. A plan is the mean of
those with each of the two files. The planner knows these, and that two ranks share a core; it is not fitted to any
step.

- **MB a node sends** in a step are counted by the device: headers included.
- **waits** is what the limit adds: seconds of a step beyond those of the same layout without one.
- **loss** is that of step 20, without a limit.
- the best by plan stands beside the best by measurement, and beside them what `fivefold plan` chooses of all layouts.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, replace
from itertools import count, pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from pydantic import TypeAdapter

from pages import put_between

NODES, RANKS, PORT = ("ffslow0", "ffslow1"), 2, 29631
ADDRESS = "10.77.0.1"
OUTER = 20
LAYOUTS = (
    "shard4", "shard4+hpz2", "shard4+hier2", "shard4+hpz2+hier2", "shard4+hpz2+hier2+qwz",
    "shard4+hpz2+hier2+qwz+qgz", "dp2.shard2", "shard2.pp2", f"dp2.shard2+outer{OUTER}",
)  # fmt: skip
RATES = (0, 1000, 200, 50)  # Mbit/s; 0: no limit
LENGTH, ROWS = 256, 8  # tokens of a row, rows of a step
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
TEXT = Path(__file__).parents[1] / "README.md"
PAGE = Path(__file__).parents[1] / "docs" / "explain" / "slow_links.md"
PICTURE = PAGE.with_suffix(".svg")
RESULT = Path(__file__).parent / "results" / "slow_links.json"
BEGIN, END = "<!-- table: python benchmarks/slow_links.py --write-docs -->", "<!-- end of slow_links -->"
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="Mbit/s; 0 is no limit")
    parser.add_argument("--steps", type=int, default=4, help="steps that are timed under a limit")
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--write-docs", action="store_true", help="from what was measured before")
    args = parser.parse_args(arguments)
    if args.node is not None:
        return run_node(args)
    if args.write_docs:
        found = json.loads(RESULT.read_text())
        draw(found["rows"], PICTURE)
        text = f"![Seconds of a step under each limit, measured and planned]({PICTURE.name})"
        return put_between(BEGIN, END, f"{text}\n\n{table(found['rows'], found['chosen'])}", PAGE)
    if why := lacks():
        parser.exit(1, f"no slow link here: {why}\n")
    with tempfile.TemporaryDirectory() as folder, namespaces():
        args.folder = Path(folder)
        (args.folder / "model").mkdir()
        (args.folder / "model" / "config.json").write_text(json.dumps(LLAMA))
        started = [start(node, args) for node in range(len(NODES))]
        if any([process.wait() for process in started]):
            parser.exit(1, "a node failed\n")
        found = json.loads((args.folder / "found.json").read_text())
    from common import machine

    found |= with_plans(found["rows"], found["hardware"])
    args.out.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")
    print(table(found["rows"], found["chosen"]))


# ---- the link --------------------------------------------------------------------------------------------------------


def lacks() -> str:
    """Why no link can be limited here; "" if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "tc", "unshare", "mount") if shutil.which(tool) is None]:
        return f"{missing[0]} is not installed"
    probe = subprocess.run(["ip", "netns", "add", "ffslowtry"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", "ffslowtry"], capture_output=True)
    return probe.stderr.strip()


@contextmanager
def namespaces() -> Iterator[None]:
    """Two namespaces with an `eth0` each, joined. They are gone afterwards, and so is what a killed run has left."""

    def end() -> None:
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    end()
    try:
        for name in NODES:
            ip("netns", "add", name)
        ip("link", "add", "eth0", "netns", NODES[0], "type", "veth", "peer", "name", "eth0", "netns", NODES[1])
        for number, name in enumerate(NODES):
            ip("-n", name, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        end()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def limit(rate: int) -> None:
    """Limit what this node sends to so many Mbit/s."""
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
    if rate:
        burst = max(16, rate // 8)  # kilobytes: of a millisecond
        shape = ("tbf", "rate", f"{rate}mbit", "burst", f"{burst}kb", "latency", "100ms")
        subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", *shape], check=True)


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


# ---- a node ----------------------------------------------------------------------------------------------------------


def start(node: int, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a node: in its namespace, with a /dev/shm of its own."""
    own = [sys.executable, __file__, "--node", str(node), "--folder", str(args.folder), "--steps", str(args.steps)]
    own += ["--layouts", args.layouts, "--rates", args.rates]
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "sh"]
    return subprocess.Popen(["ip", "netns", "exec", NODES[node], *alone, *own])


def run_node(args: argparse.Namespace) -> None:
    import torch.multiprocessing as mp

    mp.spawn(run_rank, (args.node, args), nprocs=RANKS)


def run_rank(local: int, node: int, args: argparse.Namespace) -> None:
    """One rank; the first of all writes what was found: the hardware under each rate, and a row for each layout."""
    import torch

    from fivefold.calibration import probes
    from fivefold.launch.world import World
    from fivefold.training import run

    assert probes and run  # imported before the forks
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    world = World(rank=node * RANKS + local, size=len(NODES) * RANKS, local_rank=local, local_size=RANKS, nodes=2)
    hardware, rows, numbers = {}, [], count()

    def alone(work: Callable[..., Any], *given: Any) -> Any:
        """What `work` returns on the first rank, in a process and a group of its own."""
        number = next(numbers)
        if (child := os.fork()) == 0:
            os._exit(in_group(args.folder / f"{number}.json", number, world, work, *given))
        if os.waitpid(child, 0)[1]:
            raise SystemExit(1)
        return json.loads((args.folder / f"{number}.json").read_text()) if world.is_first else None

    for rate in map(int, args.rates.split(",")):
        if local == 0:
            limit(rate)
        before = alone(calibrated, world)
        rows += [alone(trained, layout, rate, world, args) for layout in args.layouts.split(",")]
        hardware[rate] = before, alone(calibrated, world)
        if world.is_first:
            print(*(json.dumps(row) for row in rows if row["rate"] == rate), sep="\n", flush=True)
    if world.is_first:
        (args.folder / "found.json").write_text(json.dumps({"hardware": hardware, "rows": rows}))


def in_group(out: Path, number: int, world: Any, work: Callable[..., Any], *given: Any) -> int:
    """Join the ranks for `work`, and write what it returns on the first of them. Returns an exit code."""
    import torch.distributed as dist

    address = f"tcp://{ADDRESS}:{PORT + number}"
    try:
        dist.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
        found = work(*given)
        if world.is_first:
            out.write_text(json.dumps(found))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def calibrated(world: Any) -> str:
    """The hardware file of `fivefold calibrate --nodes`, on the first rank, with messages as large as these layers'."""
    from fivefold.calibration import probes, written
    from fivefold.calibration.fit import Measurements, Sizes
    from fivefold.hardware.cluster import Cluster

    messages = (2**12, 2**16, 2**20, 2**21)
    sizes = Sizes((64, 256, 1024), (128, 256, 512, 1024), (LENGTH,), 2**24, messages, 0.02)
    told = probes.on_rank({"sizes": asdict(sizes)}, world)
    if told is None:
        return ""
    found = TypeAdapter(list[Measurements]).validate_python(told["ranks"])
    return written(Cluster.parse(f"{len(NODES)}x{RANKS}xcpu"), found)[0]


def trained(layout: str, rate: int, world: Any, args: argparse.Namespace) -> Row:
    """A run of a layout: seconds of a step, MB that a node sends in one, and the last loss. The first step warms up."""
    from fivefold.launch.events import Listener
    from fivefold.training.run import train

    steps = OUTER if "+outer" in layout or rate == 0 else 1 + args.steps
    seconds, sent, losses = list[float](), list[int](), list[float]()

    def on_step(row: Row) -> None:
        seconds.append(row["perf/step_seconds"])
        losses.append(row["train/loss"])
        sent.append(sent_bytes())

    config = config_of(args.folder / "model", layout, steps, args.folder / f"{layout}-{rate}")
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        train(config, world, events=Listener(on_step=on_step) if world.is_first else None)
    if not world.is_first:
        return {}
    usual = mean if "+outer" in layout else median  # some of its steps send, and others do not
    after = [second - first for first, second in pairwise(sent)]
    return {
        "layout": layout, "rate": rate, "seconds": usual(seconds[1:]), "mb": mean(after) / 1e6, "loss": losses[-1],
        "steps": steps,
    }  # fmt: skip


def config_of(model: Path, layout: str, steps: int, folder: Path) -> Any:
    """The run file: the same batches whatever the layout."""
    from fivefold.config import load_config

    return load_config(None, [
        f"model.name_or_path={model}", "model.init=random", "tokenizer.name_or_path=byte", f"data.train={TEXT}",
        f"data.seq_length={LENGTH}", "data.validation=0", "eval.every=0", "sample.every=0", f"train.max_steps={steps}",
        f"train.global_batch_size={ROWS}", "train.micro_batch_size=1", "optimizer.name=adamw",
        "optimizer.learning_rate=1e-3", "scheduler.warmup_steps=2", f"layout={layout}+fp32", f"run.dir={folder}",
    ])  # fmt: skip


# ---- the planner -----------------------------------------------------------------------------------------------------


def with_plans(rows: list[Row], hardware: dict[str, list[str]]) -> dict[str, Any]:
    """The rows with the planner's seconds, and the layout that the planner chooses under each rate, as it was first
    calibrated."""
    from transformers import LlamaConfig

    from fivefold.hardware.cluster import Cluster
    from fivefold.models.build import build_meta
    from fivefold.models.discover import facts_of
    from fivefold.planner.estimate import PricedStep, Workload
    from fivefold.planner.price import PriceList
    from fivefold.planner.search import search

    facts, cores = facts_of(build_meta(LlamaConfig(**LLAMA))), len(os.sched_getaffinity(0))

    def priced(file: str) -> PriceList:
        cluster = Cluster.of_toml(file, "what was calibrated")
        share = min(1.0, cores / cluster.world)  # of a core: both nodes are on this machine
        chip = replace(cluster.chip.times(share), launch_us=cluster.chip.launch_us / share)
        node = replace(cluster.node, cores=max(1, cores // cluster.nodes))  # a waiting stage leaves its core to others
        return PriceList(facts, replace(cluster, chip=chip, node=node))

    prices = {rate: [priced(file) for file in files] for rate, files in hardware.items()}
    workload = Workload(LENGTH, ROWS)

    def planned(row: Row) -> float:
        layout = config_of(Path("model"), row["layout"], 1, Path("runs/none")).layout.resolve(len(NODES) * RANKS)
        return mean(PricedStep(listed, layout, workload).seconds for listed in prices[str(row["rate"])])

    given = {"precision": "fp32"}  # as all rows are trained
    chosen = {rate: search(listed[0], workload, given=given).best[0] for rate, listed in prices.items()}
    return {
        "rows": [{**row, "planned": planned(row)} for row in rows],
        "chosen": {rate: {"layout": str(one.layout), "planned": one.step_seconds} for rate, one in chosen.items()},
    }


# ---- what is shown ---------------------------------------------------------------------------------------------------


def named(rate: int) -> str:
    return f"{rate:,} Mbit/s" if rate else "no limit"


def table(rows: Sequence[Row], chosen: dict[str, Row]) -> str:
    """For each layout: MB that a node sends in a step, the loss, and under each rate the seconds of a step, how many of
    them it waits for the link, and how far off the plan is. Then what is best under each rate, and what the planner
    chooses of all layouts."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    free = {row["layout"]: row["seconds"] for row in rows if row["rate"] == 0}
    lines = ["| layout | MB | loss | " + " | ".join(f"{named(rate)}: s (waits), planned" for rate in rates) + " |"]
    lines.append("| --- |" + " ---: |" * (len(rates) + 2))
    for layout in dict.fromkeys(row["layout"] for row in rows):
        of = {row["rate"]: row for row in rows if row["layout"] == layout}
        times = []
        for rate in rates:
            waits = f" ({max(of[rate]['seconds'] - free[layout], 0):.2f})" if rate and layout in free else ""
            off = of[rate]["planned"] / of[rate]["seconds"] - 1
            times.append(f"{of[rate]['seconds']:.2f}{waits}, {of[rate]['planned']:.2f} ({off:+.0%})")
        sent, loss = median(row["mb"] for row in of.values()), of[rates[0]]["loss"]
        lines.append(f"| `{layout}` | {sent:.1f} | {loss:.4f} | " + " | ".join(times) + " |")
    best = []
    for rate in rates:
        of_rate = [row for row in rows if row["rate"] == rate]
        by = [min(of_rate, key=lambda row, key=key: row[key])["layout"] for key in ("planned", "seconds")]  # type: ignore[misc]
        choice = chosen[str(rate)]
        best.append(f"| {named(rate)} | `{by[0]}` | `{by[1]}` | `{choice['layout']}`, {choice['planned']:.2f} s |")
    off = [abs(row["planned"] / row["seconds"] - 1) for row in rows]
    heads = ("link", "best by plan", "best by measurement", "`fivefold plan` chooses")
    lines += ["", f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), *best, ""]
    lines.append(f"The plan is {median(off):.0%} off at the median of {len(off)} steps, {max(off):.0%} at most.")
    return "\n".join(lines)


def draw(rows: Sequence[Row], target: Path) -> None:
    """Bars of the seconds of a step for each layout, a panel for each rate; the plan is a mark on each."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "fivefold"
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    free = {row["layout"]: row["seconds"] for row in rows if row["rate"] == 0}
    size = (3.1 * len(rates), 3.4)
    figure, (panels,) = plt.subplots(1, len(rates), figsize=size, sharey=True, layout="constrained", squeeze=False)
    for panel, rate in zip(panels, rates, strict=True):
        found = [row for row in rows if row["rate"] == rate][::-1]
        names = [row["layout"] for row in found]
        least = [min(row["seconds"], free.get(row["layout"], row["seconds"])) for row in found]
        waits = [row["seconds"] - own for row, own in zip(found, least, strict=True)]
        panel.barh(names, least, color="#7aa6c2", label="measured: as without a limit")
        panel.barh(names, waits, left=least, color="#d98b5f", label="measured: waits for the link")
        panel.plot([row["planned"] for row in found], names, "k|", markersize=12, markeredgewidth=2, label="planned")
        panel.set_title(named(rate), fontsize=10)
        panel.set_xlabel("seconds of a step")
    panels[-1].legend(fontsize=8)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)
    plt.close(figure)


if __name__ == "__main__":
    main()
