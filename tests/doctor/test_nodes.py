"""`fivefold doctor --nodes`: what it says of ranks that differ, from numbers, on two ranks, and over a slow link."""

import ctypes
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fivefold.doctor import measure
from fivefold.doctor.nodes import judge, slow_links
from fivefold.launch.world import World, join
from fivefold.ops.cpu.shared_memory import SWITCH
from tests.commands import fivefold
from tests.pool import forks, run_ranks

REQUEST = {"layout": "", "files": []}


def test_every_rank_has_one_partner_at_a_time(subtests: pytest.Subtests) -> None:
    for size in (2, 3, 4, 7, 16, 17, 40):
        with subtests.test(msg=str(size)):
            rounds = list(zip(*(measure.partners(rank, size) for rank in range(size)), strict=True))
            met = set()
            for others in rounds:
                pairs = {(rank, other) for rank, other in enumerate(others) if other is not None}
                assert all(others[other] == rank != other for rank, other in pairs)
                met |= {pair for pair in pairs if pair[0] < pair[1]}
            if size <= measure.MOST_ALL_PAIRS:
                assert met == {*combinations(range(size), 2)}
            else:
                assert {rank for pair in met for rank in pair} == {*range(size)} and len(rounds) <= 6


def test_a_slow_rank_is_told_from_a_slow_link(subtests: pytest.Subtests) -> None:
    pairs = dict.fromkeys(combinations(range(4), 2), 1.0)
    cases = [
        (pairs, ([], [])),
        ({pair: 9.0 if 2 in pair else took for pair, took in pairs.items()}, ([2], [])),
        ({**pairs, (1, 3): 9.0}, ([], [(1, 3)])),
        ({pair: 9.0 if 0 in pair or pair == (1, 2) else 1.0 for pair in pairs}, ([0], [(1, 2)])),
        ({(0, 1): 9.0}, ([], [])),  # nothing to compare with
    ]
    for given, found in cases:
        with subtests.test(msg=str(given)):
            assert slow_links(given) == found


def told(nodes: int = 2, a_node: int = 2) -> dict[str, Any]:
    """What sound ranks of H100 find under dp2.shard2: links inside nodes at 300 GB/s, between them at 35."""
    size = nodes * a_node
    ranks = []
    for rank in range(size):
        node = rank // a_node * a_node
        near = {str(other): 2**26 / (300e9 if other // a_node == rank // a_node else 35e9) for other in range(size)}
        near.pop(str(rank))
        ranks.append({
            "rank": rank, "node": node, "host": f"n{node}", "device": "NVIDIA H100", "is_crowded": False,
            "software": {"torch": "2.13.0", "driver": "570"}, "files": {"/run.yaml": "abc"}, "mhz": 1980.0,
            "clock": [0.001 * rank, 1e-4] if rank == node else None, "flops": 7e14, "traffic": 3e12,
            "message": 2**26, "pairs": near, "step": {"seconds": 0.1, "loss": 4.5},
            "axes": {
                "dp_replicate": {"all_reduce": [2**26, 2**26 / 30e9]},
                "dp_shard": {"all_reduce": [2**26, 2**26 / 200e9]},
            },
        })  # fmt: skip
    return {"device": "cuda", "size": size, "local_size": a_node, "layout": f"dp{nodes}.shard{a_node}", "ranks": ranks}


def test_one_that_differs_is_named(subtests: pytest.Subtests) -> None:
    def slow_card(ranks: list[Any]) -> None:
        for rank in ranks:
            for other in rank["pairs"]:
                if rank["rank"] // 2 != int(other) // 2 and 1 in (rank["rank"], int(other)):
                    rank["pairs"][other] *= 9

    assert judge(told(), "2x2xH100").ok
    cases = [
        (lambda ranks: ranks[3]["software"].update(torch="2.12.0"), "torch", "2.12.0 on rank 3, 2.13.0 on the others"),
        (lambda ranks: ranks[1]["files"].update({"/run.yaml": "missing"}), "/run.yaml", "missing on rank 1, abc on"),
        (lambda ranks: ranks[2].update(clock=[-7.0, 1e-4]), "clocks", "rank 2 on n2 is 7.0 s behind the others"),
        (lambda ranks: ranks[2].update(mhz=1200.0), "device clocks", "1200 MHz on rank 2"),
        (lambda ranks: ranks[0].update(flops=2e14), "matmuls", "rank 0 on n0: 3.5 times as long"),
        (lambda ranks: [ranks[at].update(traffic=1e12) for at in (2, 3)], "memory", "all of ranks 2, 3 on n2: 3 times"),
        (slow_card, "links between nodes", "rank 1 on n0: 3.9 to 35 GB/s"),
        (
            lambda ranks: [ranks[at]["axes"].update(dp_shard={"all_reduce": [2**26, 1.0]}) for at in (2, 3)],
            "dp_shard", "2 groups of 2 inside nodes: all_reduce of ranks 2, 3 takes",
        ),
        (
            lambda ranks: [r["axes"].update(dp_replicate={"all_reduce": [2**26, 2**26 / 2e9]}) for r in ranks],
            "dp_replicate", "2 groups of 2 between nodes: all_reduce 2 of 3",
        ),
        (lambda ranks: ranks[1].update(step={"seconds": 1, "loss": 4.6}), "a tiny step", "4.6 on rank 1, 4.5 on the"),
    ]  # fmt: skip
    for change, what, says in cases:
        with subtests.test(msg=what):
            found = told()
            change(found["ranks"])
            report = judge(deepcopy(found), "2x2xH100")
            bad = [row for row in report.rows if row.state == "failed"]
            assert [row.what for row in bad] == [what] and says in bad[0].found and bad[0].advice
            assert not report.ok and what in report.closing


def with_faults() -> Any:
    """Measure on two nodes of a rank each, of which the second has another torch, a wrong clock and a slow core."""
    rank = dist.get_rank()
    world = World(rank=rank, size=2, local_size=1)
    if rank == 0:
        return measure.on_rank(REQUEST, world)
    now, version_of, linear = time.time, measure.version_of, torch.nn.functional.linear

    def slowly(*tensors: Any) -> Any:
        time.sleep(0.05 * (tensors[0].shape[-1] == measure.WIDTH["cpu"]))
        return linear(*tensors)

    with (
        patch.object(time, "time", lambda: now() + 30),
        patch.object(measure, "version_of", lambda name: "2.0" if name == "torch" else version_of(name)),
        patch.object(measure.F, "linear", slowly),
    ):
        return measure.on_rank(REQUEST, world)


@pytest.mark.full
def test_two_ranks_of_which_one_has_faults() -> None:
    report = judge(run_ranks(2, with_faults)[0])
    rows = {row.what: row for row in report.rows}
    assert rows["hosts"].found.startswith("2 nodes") and rows["dp_shard"].found.startswith("1 group of 2 between")
    assert rows["torch"].found.startswith("2.0 on rank 1")
    assert "rank 1 on" in rows["clocks"].found and "30.0 s ahead" in rows["clocks"].found
    assert rows["matmuls"].state == "failed" and "rank 1" in rows["matmuls"].found
    assert rows["a tiny step"].state == "ok" and "shard2" in rows["a tiny step"].found


@pytest.mark.full
def test_the_command_shows_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {max_steps: 3}\n")
    with patch("fivefold.doctor.nodes.SLOW", 1e9), patch("fivefold.doctor.nodes.SLOW_LINK", 1e9):
        shown = fivefold(
            ["doctor", "--nodes", "--nproc", "2", "--device", "cpu", "--layout", "tp2", "--file", "run.yaml",
             "--json", "found.json"], tmp_path,
        )  # fmt: skip
    found = json.loads((tmp_path / "found.json").read_text())
    assert "2 ranks" in shown and "all ranks are alike" in shown and found["ok"]
    assert "tp" in found["ranks"][0]["axes"] and set(found["ranks"][0]["axes"]["tp"]) == {*measure.KINDS}
    assert any(row["what"].endswith("run.yaml") and row["state"] == "ok" for row in found["rows"])


# ---- four nodes on this machine --------------------------------------------------------------------------------------

NODES = 4
ADDRESS = "10.213.77.{}"
CLONE_NEWNET = 0x40000000


def ip(*words: str) -> None:
    subprocess.run([shutil.which("ip") or "ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Four network namespaces joined by a bridge at 1 Gbit/s, the third one's link at 40 Mbit/s."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("network namespaces need root, ip and tc")
    hub, names = f"ff{os.getpid()}hub", [f"ff{os.getpid()}n{number}" for number in range(NODES)]
    try:
        ip("netns", "add", hub)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number, name in enumerate(names):
            ip("netns", "add", name)
            ip("-n", hub, "link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "set", f"to{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"{ADDRESS.format(number + 1)}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            rate = "40mbit" if number == 2 else "1gbit"
            shape = ("qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
            try:
                ip("netns", "exec", name, "tc", *shape)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"tc cannot limit a link here: {error.stderr.decode().strip()}")
        yield names
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def on_node(name: str, rank: int, folder: Path) -> None:
    with open(f"/run/netns/{name}") as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", SWITCH: "gloo"}
    world = World(rank=rank, size=NODES, local_size=1, rendezvous=f"file://{folder}/store")
    with patch.dict(measure.MESSAGE, cpu=2**18), patch.object(measure, "REPEATS", 3), join(world):
        found = measure.on_rank(REQUEST, world)
    if found:
        (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.full
def test_the_node_behind_a_slow_link_is_named(namespaces: list[str], tmp_path: Path) -> None:
    context = forks()
    crew = [context.Process(target=on_node, args=(name, rank, tmp_path)) for rank, name in enumerate(namespaces)]
    for process in crew:
        process.start()
    for process in crew:
        process.join(60)
        process.kill()
    report = judge(json.loads((tmp_path / "found.json").read_text()))
    links = next(row for row in report.rows if row.what == "links between nodes")
    assert links.state == "failed" and links.found.startswith("rank 2 on "), report.rows
    slowest = float(links.found.split(": ")[1].split()[0])
    assert 0.002 < slowest < 0.02  # 40 Mbit/s one way, and the faster way back
