"""FSDP over two nodes with a slow link between them: bytes on the link, and seconds of a step beside the planner's.

    python benchmarks/slow_links.py                    1 Gbit/s, 200 and 50 Mbit/s, as root on Linux
    python benchmarks/slow_links.py --rates 200 --layouts shard4,shard4+hpz2 --steps 5

The nodes are two network namespaces of this machine, with two ranks each and a pair of virtual Ethernet devices
between them, which `tc ... tbf` limits in both directions. Ranks of a node share memory, and each node has a /dev/shm
of its own. Bytes are counted by the devices: all that a node sends, headers included. The planner has the chip `cpu`
with one number from here: a speed that makes the first layout without a limit take as long as it took. From then on
only the rate is changed. Writes benchmarks/results/slow_links.json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

NODES, RANKS, PORT = ("ffslow0", "ffslow1"), 2, 29631
ADDRESS = "10.77.0.1"
LAYOUTS = ("shard4", "dp2.shard2", "shard4+hpz2", "shard4+hier2", "shard4+hpz2+hier2", "shard4+hpz2+hier2+qwz")
RATES = (0, 1000, 200, 50)  # Mbit/s; 0: no limit
LENGTH, ROWS, ACCUMULATION = 256, 8, 2  # tokens of a row; rows and micro batches of a step
LLAMA = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 2048, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="Mbit/s; 0 is no limit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--node", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "slow_links.json")
    args = parser.parse_args(arguments)
    if args.node is not None:
        return run_node(args)
    if why := lacks():
        parser.exit(1, f"no slow link here: {why}\n")
    with tempfile.TemporaryDirectory() as folder, namespaces():
        out = Path(folder) / "rows.json"
        started = [start(node, args, out) for node in range(len(NODES))]
        if any([process.wait() for process in started]):
            parser.exit(1, "a node failed\n")
        rows = with_plans(json.loads(out.read_text()))
    args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


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
    """Two namespaces with an `eth0` each, joined. They are gone afterwards."""
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
        for name in NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def limit(rate: int) -> None:
    """Limit what this node sends to so many Mbit/s."""
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], capture_output=True)
    if rate:
        shape = ("tbf", "rate", f"{rate}mbit", "burst", "128kb", "latency", "100ms")
        subprocess.run(["tc", "qdisc", "add", "dev", "eth0", "root", *shape], check=True)


def sent_bytes() -> int:
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


# ---- a node ----------------------------------------------------------------------------------------------------------


def start(node: int, args: argparse.Namespace, out: Path) -> subprocess.Popen[bytes]:
    """Start a node: in its namespace, with a /dev/shm of its own."""
    own = [sys.executable, __file__, "--node", str(node), "--out", str(out), "--steps", str(args.steps)]
    own += ["--layouts", args.layouts, "--rates", args.rates]
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs shm /dev/shm && exec "$@"', "sh"]
    return subprocess.Popen(["ip", "netns", "exec", NODES[node], *alone, *own])


def run_node(args: argparse.Namespace) -> None:
    import torch.multiprocessing as mp

    mp.spawn(run_rank, (args.node, args), nprocs=RANKS)


def run_rank(local: int, node: int, args: argparse.Namespace) -> None:
    """One rank; the first of all writes the rows."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    rank, world = node * RANKS + local, len(NODES) * RANKS
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS}:{PORT}", rank=rank, world_size=world)
    rows = [row for layout in args.layouts.split(",") for row in measured(layout, args, is_first=local == 0)]
    if rank == 0:
        args.out.write_text(json.dumps(rows))
    dist.destroy_process_group()


def measured(layout: str, args: argparse.Namespace, *, is_first: bool) -> Iterator[Row]:
    """A layout under each rate: median seconds of a step, and MB that a node sends in one. `is_first`: of its node."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM, LlamaConfig

    import fivefold as ff

    torch.manual_seed(1)
    model = ff.parallelize(AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA)), layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, LLAMA["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(2))
    own = tokens[model.data_rank :: model.data_ranks].chunk(ACCUMULATION)
    batch = [{"input_ids": part, "labels": part} for part in own]
    for rate in map(int, args.rates.split(",")):
        if is_first:
            limit(rate)
        ff.train_step(model, optimizer, batch)
        seconds, loss, before = [], 0.0, sent_bytes()
        for _ in range(args.steps):
            dist.barrier()
            began = time.perf_counter()
            loss = ff.train_step(model, optimizer, batch).loss
            seconds.append(time.perf_counter() - began)
        dist.barrier()
        sent = (sent_bytes() - before) / args.steps
        yield {"layout": layout, "rate": rate, "seconds": median(seconds), "mb": sent / 1e6, "loss": loss}


# ---- the planner -----------------------------------------------------------------------------------------------------


def with_plans(rows: list[Row]) -> list[Row]:
    """Add the planner's seconds to the rows. Its chip is made as fast as the first row without a limit says."""
    from transformers import LlamaConfig

    from fivefold.hardware.cluster import Cluster
    from fivefold.models.build import build_meta
    from fivefold.models.discover import facts_of
    from fivefold.parallel.layout import Layout
    from fivefold.planner.engines import ENGINES
    from fivefold.planner.estimate import Step, Workload
    from fivefold.planner.price import PriceList

    facts, cluster = facts_of(build_meta(LlamaConfig(**LLAMA))), Cluster.parse(f"{len(NODES)}x{RANKS}xcpu")
    free = next((row for row in rows if row["rate"] == 0), None)

    def planned(row: Row, speed: float) -> float:
        gbs = (row["rate"] or 20_000) / 8e3 / RANKS  # of a device: ranks of a node share its link
        between = replace(cluster.node.between, gbs=gbs, fraction=0.95, decay=0.0)
        at = replace(cluster, chip=cluster.chip.times(speed), node=replace(cluster.node, between=between))
        prices, layout = PriceList(facts, at, ENGINES["fivefold"]), Layout.parse(row["layout"])
        rows_of_pass = ROWS // ACCUMULATION // layout.data_ranks
        return Step(prices, replace(layout, micro_batch_size=rows_of_pass), Workload(LENGTH, ROWS)).seconds

    speed = 1.0
    if free:
        low, high = 0.01, 100.0
        for _ in range(40):
            speed = (low * high) ** 0.5
            low, high = (speed, high) if planned(free, speed) > free["seconds"] else (low, speed)
    return [{**row, "planned": planned(row, speed)} for row in rows]


def table(rows: Sequence[Row]) -> str:
    """One line for each layout: MB that a node sends in a step; seconds, and the planner's, under each rate."""
    rates = list(dict.fromkeys(row["rate"] for row in rows))
    heads = [f"{rate} Mbit/s" if rate else "no limit" for rate in rates]
    lines = ["| " + " | ".join(["layout", "MB a node sends", *(f"{head}: s, planned" for head in heads)]) + " |"]
    lines.append("|" + " --- |" * (len(rates) + 2))
    for layout in dict.fromkeys(row["layout"] for row in rows):
        of = {row["rate"]: row for row in rows if row["layout"] == layout}
        times = [f"{of[rate]['seconds']:.2f}, {of[rate]['planned']:.2f}" for rate in rates]
        sent = median(row["mb"] for row in of.values())
        lines.append("| " + " | ".join([f"`{layout}`", f"{sent:.1f}", *times]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
