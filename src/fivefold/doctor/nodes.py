"""`fivefold doctor --nodes`: the ranks of an allocation compared, and the one that differs named. No torch.

`measure.py` is what each rank does. Here their findings are judged: software and files have to agree, and a rank, a
node or a link that is much slower than the others is named.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from fivefold.core.errors import UserError
from fivefold.core.files import expanded
from fivefold.core.text import listed
from fivefold.core.units import many
from fivefold.doctor.machine import Finding, State
from fivefold.hardware.cluster import Cluster, nodes_of
from fivefold.launch.cluster import cluster_here
from fivefold.launch.once import run_once
from fivefold.launch.workers import gpus, workers_of_node
from fivefold.launch.world import device_kind, find_world
from fivefold.parallel.collectives import Call
from fivefold.parallel.layout import Layout
from fivefold.parallel.ranks import RankGrid
from fivefold.planner.timing import collective_seconds
from fivefold.report.findings import Report

SLOW = 1.5  # times the others' time, of work on a rank alone
SLOW_LINK = 2.0  # of what goes over a link
SKEW = 1.0  # seconds between clocks: rows of logs are then out of order, and tokens of storage expire early
MEASURE = "fivefold.doctor.measure"
Found = Sequence[Mapping[str, Any]]  # of each rank, in order: what `measure.on_rank` gathers


def examine_nodes(
    *, nproc: int | None, device: str = "auto", layout: str = "", cluster: str = "", files: Sequence[str] = ()
) -> Report[Finding] | None:
    """Report on all ranks: those that torchrun or srun has started, else `nproc` on this machine. None on the ranks
    that do not report. Raises `UserError`."""
    if cluster:
        Cluster.parse(cluster)  # refused before anything is measured
    request = {"layout": layout, "files": [str(expanded(file).absolute()) for file in files]}
    here = find_world(device)
    if here is not None and nproc is not None:
        raise UserError("--nproc starts workers, and this process is one of several already", fix="leave --nproc out")
    workers = layout
    if here is None and not layout:
        kind = device_kind(device)
        usual = workers_of_node(kind=kind, devices=gpus() if kind == "cuda" else 0, nproc=None)
        workers = str(Layout(dp_shard=nproc or usual))
    told = run_once(MEASURE, request, layout=workers, device=device, what="doctor")
    return None if told is None else judge(told, cluster)


def judge(told: Mapping[str, Any], cluster: str = "") -> Report[Finding]:
    """The report on what `measure.on_rank` returned. `cluster`: its text or file; "" for the planner's own table."""
    found: Found = told["ranks"]
    machines, unknown = _cluster(told, cluster)
    rows = [
        _hosts(found), *_agreement(found), *_clocks(found), *_alone(found), *_pairs(found),
        *_axes(found, Layout.parse(told["layout"]), machines), _step(found, told["layout"]),
    ]  # fmt: skip
    if any(rank["is_crowded"] for rank in found):
        rows.append(
            Finding("cores", "help", "more ranks than cores: they take turns", "as many ranks as cores: --nproc")
        )
    if unknown:
        rows.append(Finding("expected", "help", unknown, "name them: --cluster 16x8xH100, or a file of your own"))
    wrong = [row for row in rows if row.state == "failed"]
    closing = f"look at {'; '.join(f'{row.what} ({row.found})' for row in wrong)}" if wrong else "all ranks are alike"
    title = f"fivefold doctor --nodes: {many(len(found), 'rank')}"
    return Report[Finding](title=title, rows=tuple(rows), ok=not wrong, closing=closing, details={"ranks": list(found)})


def _cluster(told: Mapping[str, Any], said: str) -> tuple[Cluster | None, str]:
    """The cluster in the planner's terms, or why there is none."""
    size, local_size = told["size"], told["local_size"]
    try:
        if said:
            return Cluster.parse(said, nodes_of(size, local_size)), ""
        return cluster_here(told["device"], size, local_size), ""
    except UserError as error:
        return None, error.what


# ---- what the ranks are ----------------------------------------------------------------------------------------------


def _hosts(found: Found) -> Finding:
    nodes = Counter((rank["node"], rank["host"]) for rank in found)
    names = listed([f"{host} ({count})" for (_, host), count in sorted(nodes.items())], 8)
    return Finding("hosts", "ok", f"{many(len(nodes), 'node')}: {names}")


def _agreement(found: Found) -> Iterator[Finding]:
    """Devices, software and files: one row for all that agree, and one for each that differs."""
    told: dict[str, list[str]] = {"device": [rank["device"] for rank in found]}
    for name in dict.fromkeys(name for rank in found for name in rank["software"]):
        told[name] = [rank["software"].get(name, "not installed") for rank in found]
    apart = {name: values for name, values in told.items() if len({*values}) > 1}
    alike = [f"{name} {values[0]}" for name, values in told.items() if name not in apart and name != "device"]
    if "device" not in apart:
        yield Finding("device", "ok", told["device"][0])
    yield Finding("software", "ok", ", ".join(alike))
    for name, values in apart.items():
        yield Finding(name, "failed", _differing(values), "install the same on every node")
    for path in dict.fromkeys(path for rank in found for path in rank["files"]):
        values = [rank["files"][path] for rank in found]
        if len({*values}) > 1:
            yield Finding(path, "failed", _differing(values), "copy it to every node, or put it on shared storage")
        elif values[0] == "missing":
            yield Finding(path, "failed", "missing on every rank", "look at its path")
        else:
            yield Finding(path, "ok", f"the same on every rank ({values[0]})")


def _differing(values: Sequence[str]) -> str:
    """`2.12.0 on rank 3, 2.13.0 on the others`: the rarest first."""
    by_value = {value: [rank for rank, own in enumerate(values) if own == value] for value in dict.fromkeys(values)}
    *rare, (common, _) = sorted(by_value.items(), key=lambda item: (len(item[1]), -item[1][0]))
    return ", ".join([*(f"{value} on {_ranks(ranks)}" for value, ranks in rare), f"{common} on the others"])


def _clocks(found: Found) -> Iterator[Finding]:
    """Difference between the clocks of nodes, and the speed that devices are allowed."""
    ahead = {rank["rank"]: rank["clock"] for rank in found if rank["clock"] is not None}
    if len(ahead) > 1:
        seconds = {rank: offset for rank, (offset, _) in ahead.items()}
        middle = median_low(seconds.values()) if len(seconds) > 2 else 0.0  # of two nodes, neither is the outlier
        far = [rank for rank in seconds if abs(seconds[rank] - middle) > SKEW + ahead[rank][1]]
        worst = max(seconds, key=lambda rank: abs(seconds[rank] - middle))
        says = f"{_where(found, worst)} is {abs(seconds[worst] - middle):.1f} s "
        says += "ahead of the others" if seconds[worst] > middle else "behind the others"
        spread = max(seconds.values()) - min(seconds.values())
        if far:
            yield Finding("clocks", "failed", says, "start chrony or ntpd on that node")
        else:
            doubt = max(doubt for _, doubt in ahead.values())
            yield Finding("clocks", "ok", f"at most {spread + doubt:.1g} s apart")
    limits = [rank["mhz"] for rank in found]
    is_gpu = any("driver" in rank["software"] for rank in found)
    if is_gpu and len({*limits}) > 1:
        values = [f"{limit:.0f} MHz" for limit in limits]
        yield Finding(
            "device clocks", "failed", _differing(values), "look at power limits: nvidia-smi -q -d CLOCK,POWER"
        )
    elif limits[0]:
        yield Finding("device clocks", "ok", f"{min(limits):.0f} to {max(limits):.0f} MHz")


def _bad(found: Found) -> State:
    """State of work that is slow on some ranks: more ranks than cores take turns."""
    return "help" if any(rank["is_crowded"] for rank in found) else "failed"


# ---- what they do ----------------------------------------------------------------------------------------------------


def _alone(found: Found) -> Iterator[Finding]:
    """Work of each rank alone."""
    for what, key, unit, name in (("matmuls", "flops", 1e12, "TFLOP/s"), ("memory", "traffic", 1e9, "GB/s")):
        rates = {rank["rank"]: rank[key] for rank in found}
        usual = median_low(1 / rate for rate in rates.values())
        slow = [rank for rank, rate in rates.items() if 1 / rate > SLOW * usual]
        span = f"{min(rates.values()) / unit:.2g} to {max(rates.values()) / unit:.2g} {name} a rank"
        if slow:
            factor = max(1 / rates[rank] for rank in slow) / usual
            says = f"{_places(found, slow)}: {factor:.2g} times as long as on the others, {span}"
            yield Finding(what, _bad(found), says, "look for other processes, heat and power limits there")
        else:
            yield Finding(what, "ok", span)


def _pairs(found: Found) -> Iterator[Finding]:
    """Links between two ranks, inside nodes and between them. A rank that is slow with every partner is named, then
    links that are slow between two others."""
    node = [rank["node"] for rank in found]
    message = _message(found)
    for tier, inside in (("inside nodes", True), ("between nodes", False)):
        pairs = _slowest_of_both(found, lambda a, b, inside=inside: (node[a] == node[b]) == inside)  # type: ignore[misc]
        if not pairs:
            continue
        rates = [message / took / 1e9 for took in pairs.values()]
        span = f"{min(rates):.2g} to {max(rates):.2g} GB/s"
        ranks, links = slow_links(pairs)
        if not (ranks or links):
            yield Finding(f"links {tier}", "ok", f"{span}, {many(len(pairs), 'pair')}")
            continue
        named = [_places(found, ranks)] * bool(ranks)
        named += [f"the link of {_where(found, a)} to {_where(found, b)}" for a, b in links[:4]]
        says = f"{' and '.join(named)}: {span}"
        yield Finding(f"links {tier}", _bad(found), says, "look at its network card, cable and switch port")


def _message(found: Found) -> int:
    return int(found[0]["message"])


def _slowest_of_both(found: Found, is_in: Callable[[int, int], bool]) -> dict[tuple[int, int], float]:
    """Seconds of a message by pair, as the slower of the two ranks saw it."""
    pairs: dict[tuple[int, int], float] = {}
    for rank in found:
        for other, took in rank["pairs"].items():
            pair = min(rank["rank"], int(other)), max(rank["rank"], int(other))
            if is_in(*pair):
                pairs[pair] = max(took, pairs.get(pair, 0.0))
    return pairs


def slow_links(pairs: Mapping[tuple[int, int], float]) -> tuple[list[int], list[tuple[int, int]]]:
    """Ranks whose best link is slow, and slow links between other ranks. Two ranks alone have no measure of slow."""
    best: dict[int, float] = {}
    for pair, took in pairs.items():
        for rank in pair:
            best[rank] = min(took, best.get(rank, took))
    usual = median_low(best.values())
    ranks = sorted(rank for rank, took in best.items() if took > SLOW_LINK * usual)
    links = {pair: took for pair, took in pairs.items() if not {*ranks} & {*pair}}
    usual = median_low(links.values()) if links else 0.0
    return ranks, [pair for pair, took in links.items() if took > SLOW_LINK * usual]


def _axes(found: Found, layout: Layout, cluster: Cluster | None) -> Iterator[Finding]:
    """Collectives of each axis of the layout, against the chip's file and between the groups of the axis."""
    grid = RankGrid(layout)
    for axis in found[0]["axes"]:
        groups = list(grid.groups(axis))
        between = len({found[rank]["node"] for rank in groups[0]}) > 1
        where = f"{many(len(groups), 'group')} of {len(groups[0])} {'between' if between else 'inside'} nodes"
        told, slow, is_slow = [], list[str](), False
        for kind, (size, _) in found[0]["axes"][axis].items():
            took = [max(found[rank]["axes"][axis][kind][1] for rank in group) for group in groups]
            usual = median_low(took)
            says = f"{kind} {size / usual / 1e9:.2g}"
            if cluster:
                expects = collective_seconds(
                    cluster, cluster.tier_of(groups[0]), Call(axis=axis, kind=kind, bytes=size, phase="step")
                )
                says += f" of {size / expects / 1e9:.2g}"
                is_slow |= usual > SLOW_LINK * expects and not cluster.chip.is_guess
            told.append(says)
            if max(took) > SLOW_LINK * usual:
                group = groups[took.index(max(took))]
                slow.append(f"{kind} of {_ranks(group)} takes {max(took) / usual:.2g} times as long as in other groups")
        says = f"{', '.join(told)} GB/s{' expected' * bool(cluster)}"
        if slow:
            yield Finding(axis, _bad(found), f"{where}: {slow[0]}: {says}", "look at the links of these ranks")
        elif is_slow:
            yield Finding(
                axis, "failed", f"{where}: {says}", "look at NCCL_DEBUG=INFO: which network, which transport?"
            )
        else:
            guess = " (the table of this chip is a guess)" * bool(cluster and cluster.chip.is_guess)
            yield Finding(axis, "ok", f"{where}: {says}{guess}")


def _step(found: Found, layout: str) -> Finding:
    """The tiny step: the same loss everywhere."""
    losses = [f"{rank['step']['loss']:.6g}" for rank in found]
    took = max(rank["step"]["seconds"] for rank in found)
    if len({*losses}) > 1:
        return Finding(
            "a tiny step", "failed", f"losses differ: {_differing(losses)}", f"fivefold verify --layouts {layout}"
        )
    return Finding("a tiny step", "ok", f"{1e3 * took:.3g} ms under {layout}, the same loss on every rank")


# ---- names -----------------------------------------------------------------------------------------------------------


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(list(ranks), 8)}"


def _where(found: Found, rank: int) -> str:
    return f"rank {rank} on {found[rank]['host']}"


def _places(found: Found, ranks: Sequence[int]) -> str:
    """Ranks, as whole nodes where all ranks of one are among them."""
    named: list[str] = []
    for node in sorted({found[rank]["node"] for rank in ranks}):
        members = [rank["rank"] for rank in found if rank["node"] == node]
        mine = [rank for rank in ranks if rank in members]
        whole = len(mine) == len(members) > 1
        named.append(f"{'all of ' * whole}{_ranks(mine)} on {found[mine[0]]['host']}")
    return listed(named, 8)
