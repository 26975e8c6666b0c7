"""A worker's measurements, and the fields of a hardware file that follow from them. No torch.

The fit uses the planner's own functions: `matmul_seconds` for matmuls, `links.seconds` for collectives. So a file has
the values whose prices come nearest to the measurements.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import exp, log
from statistics import mean, median
from typing import Any

import numpy as np

from fivefold.core.units import GIB
from fivefold.hardware.chip import LEAST, Chip
from fivefold.hardware.cluster import Cluster
from fivefold.parallel.collectives import Call
from fivefold.planner.timing import Product, collective_seconds, matmul_seconds

CPU_ROWS, CPU_WIDTHS = (64, 256, 1024), (128, 256, 512, 1024, 2048)
GPU_ROWS, GPU_WIDTHS = (512, 2048, 8192), (1024, 2048, 4096, 8192)

Matmul = tuple[str, int, int, int, float]  # dtype, rows, inputs, outputs, seconds
Attention = tuple[str, float, float]  # dtype, FLOPs of the computed half, seconds
Collective = tuple[str, int, float]  # kind, bytes as `Call` counts them, seconds


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure. `rows`, `widths`: of matmuls. `lengths`: of rows under attention. `traffic`: bytes of an array.
    `messages`: bytes of collectives. `seconds`: of one block of repeats."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    traffic: int
    messages: tuple[int, ...]
    seconds: float

    @staticmethod
    def of(device: str) -> "Sizes":
        """Sizes for `cpu` or `cuda`: in all about a minute."""
        if device == "cpu":
            return Sizes(CPU_ROWS, CPU_WIDTHS, (256, 1024), 2**26, tuple(4**power for power in range(6, 13)), 0.05)
        return Sizes(GPU_ROWS, GPU_WIDTHS, (2048, 8192), 2**30, tuple(4**power for power in range(6, 15)), 0.03)


@dataclass(frozen=True)
class Measurements:
    """Measurements of one worker, or of all together. `traffic`: bytes a second of element-wise work. `launch`: host
    seconds of an operation. `memory`, `context`: bytes of the device, and those taken before anything is allocated.
    `host`: bytes a second to host memory, each way; 0 on a CPU. `meeting`: additional seconds of a collective between
    computations, compared with one right after another, on a CPU. `collectives` are those of a node's ranks;
    `between` and `meeting_between` those of all ranks of several nodes; `one_per_node` are those of groups of one
    rank of each node, all at once."""

    matmuls: list[Matmul]
    attention: list[Attention]
    traffic: float
    launch: float
    collectives: list[Collective]
    memory: int
    context: int
    host: float
    meeting: float = 0.0
    between: list[Collective] = field(default_factory=list)
    meeting_between: float = 0.0
    one_per_node: list[Collective] = field(default_factory=list)


# ---- the fit ---------------------------------------------------------------------------------------------------------


Table = dict[str, Any]

# Candidates for `tile` and `tile_fill`, besides the chip's own.
TILES = tuple(product((1, 16, 32, 64, 128), (1, 16, 32, 64, 128, 256)))
FILLS = (0, 32, 64, 128, 256, 512)


def fitted(cluster: Cluster, found: Sequence[Measurements]) -> Table:
    """Fit the tables `chip` and `node` of a hardware file to the measurements of one machine's workers. `cluster`: this
    machine in the planner's tables."""
    chip, all_at_once = cluster.chip, _joined(found)
    traffic = _rate("memory_bandwidth_gbs", "memory_fraction", chip.memory_bandwidth_gbs, all_at_once.traffic / 1e9)
    chip = replace(chip, **traffic)
    curve = matmul_curve(chip, all_at_once.matmuls)
    fields: Table = {
        "doubt": 1.0,
        "efficiencies": "",
        "memory_gib": round(all_at_once.memory / GIB, 2),
        **traffic,
        "attention_fraction": attention_fraction(replace(chip, **curve), all_at_once.attention),
        "launch_us": _short(all_at_once.launch * 1e6),
        "context_gib": _short(all_at_once.context / GIB),
        **({"host_gbs": _short(all_at_once.host / 1e9)} if all_at_once.host else {}),
        **{key: list(value) if isinstance(value, tuple) else value for key, value in curve.items()},
    }
    node: Table = {"cores": cluster.devices_per_node} if chip.is_host else {}
    for tier, collectives, meeting in _tiers(all_at_once):
        if collectives:
            node[tier] = link(cluster, tier, collectives)
            node[tier] |= {"meet_us": _short(meeting * 1e6)} if chip.is_host else {}
            cluster = _with_link(cluster, tier, **{key: value for key, value in node[tier].items() if key != "meet_us"})
    if all_at_once.one_per_node and cluster.devices_per_node > 1:
        node["between"]["one_per_node"] = one_per_node(cluster, all_at_once.one_per_node)
    return {"chip": fields, "node": node}


def _tiers(found: Measurements) -> Iterator[tuple[str, Sequence[Collective], float]]:
    """The links of a cluster, as it names them: their collectives, and the seconds until ranks have met."""
    yield "inside", found.collectives, found.meeting
    yield "between", found.between, found.meeting_between


def _joined(found: Sequence[Measurements]) -> Measurements:
    """Combine workers: the median of each number; for collectives, the slowest."""

    def each(of: Iterable[Sequence[tuple[Any, ...]]], pick: Any) -> list[Any]:
        return [(*same[0][:-1], pick(one[-1] for one in same)) for same in zip(*of, strict=True)]

    return Measurements(
        matmuls=each((one.matmuls for one in found), median),
        attention=each((one.attention for one in found), median),
        traffic=median(one.traffic for one in found),
        launch=median(one.launch for one in found),
        collectives=each((one.collectives for one in found), max),
        memory=min(one.memory for one in found),
        context=max(one.context for one in found),
        host=min(one.host for one in found),
        meeting=max(one.meeting for one in found),
        between=each((one.between for one in found), max),
        meeting_between=max(one.meeting_between for one in found),
        one_per_node=each((one.one_per_node for one in found), max),
    )


def matmul_curve(chip: Chip, found: Sequence[Matmul]) -> Table:
    """Fit `peak_tflops` and `matmul_fraction` by type, `tile` and `tile_fill`: those with the least mean error over all
    shapes. The chip's own tile stays unless another is a tenth better: waves of tiles are known for GPUs."""

    def curve(tile: tuple[int, int], fill: int) -> tuple[float, Mapping[str, float]]:
        """Mean error, and the rate of each type in TFLOP/s."""
        shaped, errors, rates = replace(chip, tile=tile, tile_fill=fill), [], {}
        for dtype in dict.fromkeys(sample[0] for sample in found):
            of_type = [sample for sample in found if sample[0] == dtype]
            rates[dtype] = _best_rate(shaped, of_type)
            fast = _with_rate(shaped, dtype, rates[dtype])
            errors += [abs(log(_planned(fast, sample) / sample[-1])) for sample in of_type]
        return mean(errors), rates

    error, rates = curve(chip.tile, chip.tile_fill)
    tile, fill = chip.tile, chip.tile_fill
    for other, other_fill in product(TILES, FILLS):
        tried, those = curve(other, other_fill)
        if tried < error * (0.9 if tile == chip.tile else 1):
            error, rates, tile, fill = tried, those, other, other_fill
    peaks, fractions = dict(chip.peak_tflops), dict(chip.matmul_fraction)
    for dtype, rate in rates.items():
        split = _rate("peak", "fraction", peaks.get(dtype, rate), rate)
        peaks[dtype], fractions[dtype] = split.get("peak", peaks.get(dtype, rate)), split["fraction"]
    return {"tile": tile, "tile_fill": fill, "peak_tflops": peaks, "matmul_fraction": fractions}


def _best_rate(chip: Chip, found: Sequence[Matmul]) -> float:
    """Fit the TFLOP/s of large matmuls of one type, so that half of the shapes come out too fast, half too slow.
    Memory-bound shapes are ignored."""
    endless = replace(chip, memory_bandwidth_gbs=1e9)
    implied = [_planned(_with_rate(endless, sample[0], 1.0), sample) / sample[-1] for sample in found]
    rate = median(implied)
    for _ in range(3):
        with_rate = _with_rate(chip, found[0][0], rate), _with_rate(endless, found[0][0], rate)
        held_back = [_planned(with_rate[0], sample) > _planned(with_rate[1], sample) for sample in found]
        rate = median([one for one, is_held in zip(implied, held_back, strict=True) if not is_held] or implied)
    return rate


def _planned(chip: Chip, matmul: Matmul) -> float:
    dtype, rows, inputs, outputs, _ = matmul
    return matmul_seconds(chip, Product(rows, inputs, outputs), dtype)


def _with_rate(chip: Chip, dtype: str, tflops: float) -> Chip:
    return replace(chip, peak_tflops={dtype: tflops}, matmul_fraction={dtype: 1.0}, step_fraction=1.0)


def attention_fraction(chip: Chip, found: Sequence[Attention]) -> float:
    """Fit the part of the matmul rate that attention reaches: the median over types and lengths."""
    return _short(median(flops / took / (chip.flops_per_second(dtype) or flops) for dtype, flops, took in found))


def link(cluster: Cluster, tier: str, found: Sequence[Collective]) -> Table:
    """Fit the link `inside` a node to collectives over its devices, or the one `between` nodes to those over all: the
    latency of a hop and the bandwidth with the smallest relative errors. The hops inside, which are fitted first, are
    not counted again; their bytes move while others pass between nodes."""
    endless = {"gbs": 1e9, "fraction": 1.0, "decay": 0.0}
    around = _with_link(cluster, "inside", **endless) if tier == "between" else cluster

    def priced(**link: float) -> list[float]:
        return [_priced(_with_link(around, tier, **{**endless, **link}), tier, sample) for sample in found]

    alone = priced(latency_us=0.0)
    by_hop, by_byte = priced(latency_us=1.0), priced(latency_us=0.0, gbs=1.0)
    taken = [max(sample[-1] - least, sample[-1] / 10) for sample, least in zip(found, alone, strict=True)]
    columns = (np.array([by_hop, by_byte]) - np.array(alone)).T / np.array(taken)[:, None]
    latency, inverse = _positive(columns)
    table = getattr(cluster.node, tier).gbs
    decay = {"decay": 0.0} if tier == "between" else {}  # of more nodes than these nothing is known
    latency = 0.0 if latency < LEAST else latency
    return {**_rate("gbs", "fraction", table, 1 / inverse), "latency_us": _short(latency), **decay}


def one_per_node(cluster: Cluster, found: Sequence[Collective]) -> float:
    """Fit `Link.one_per_node` to collectives over groups of one rank of each node: the median of the factors of the
    bandwidth that large messages imply, whose bytes take longer than their hops. `cluster`: with the link that was
    fitted."""
    ranks = range(0, cluster.world, cluster.devices_per_node)

    def priced(**link: float) -> list[float]:
        there = _with_link(cluster, "between", meet_us=0.0, **link)
        return [_seconds(there, ranks, sample) for sample in found]

    samples = zip(found, priced(gbs=1e9, fraction=1.0), priced(one_per_node=1.0), strict=True)
    implied = [
        (whole - alone) / max(took - alone, took / 10) for (*_, took), alone, whole in samples if whole > 2 * alone
    ]
    return _short(median(implied)) if implied else 1.0


def _with_link(cluster: Cluster, tier: str, **fields: float) -> Cluster:
    changed = replace(getattr(cluster.node, tier), **fields)
    return replace(cluster, node=replace(cluster.node, **{tier: changed}))


def _priced(cluster: Cluster, tier: str, of: Collective) -> float:
    """Price a collective right after another, when all ranks are there."""
    ranks = range(cluster.world if tier == "between" else cluster.devices_per_node)
    return _seconds(_with_link(cluster, tier, meet_us=0.0), ranks, of)


def _seconds(cluster: Cluster, ranks: range, of: Collective) -> float:
    """Price a collective over these ranks."""
    kind, size, _ = of
    return collective_seconds(cluster, cluster.tier_of(ranks), Call(axis="", kind=kind, bytes=size, phase="forward"))


def _positive(columns: np.ndarray) -> tuple[float, float]:
    """Two positive factors with which the columns add up to about 1 in each row. Errors count by their size, not their
    square, as for a median."""
    weights = np.ones(len(columns))
    for _ in range(30):
        scaled = columns * weights[:, None]
        both, *_ = np.linalg.lstsq(scaled, weights, rcond=None)
        for lost, kept in ((0, 1), (1, 0)):
            if both[lost] <= 0:
                alone = float(scaled[:, kept] @ weights / (scaled[:, kept] @ scaled[:, kept]))
                both = np.array([alone, 1e-9]) if kept == 0 else np.array([1e-9, alone])
        weights = 1 / np.sqrt(np.maximum(np.abs(columns @ both - 1), 0.02))
    return float(both[0]), float(both[1])


def errors(cluster: Cluster, found: Sequence[Measurements]) -> tuple[float, float]:
    """Median relative errors of matmuls and of collectives, as a fitted cluster prices them."""
    one, span = _joined(found), [0.0]
    matmuls = [abs(log(_planned(cluster.chip, matmul) / matmul[-1])) for matmul in one.matmuls]
    span += [
        abs(log(_priced(cluster, tier, collective) / collective[-1]))
        for tier, collectives, _ in _tiers(one)
        for collective in collectives
    ]
    return exp(median(matmuls)) - 1, exp(median(span)) - 1


def _rate(nominal: str, fraction: str, table: float, measured: float) -> Table:
    """Split a rate into a nominal one and a part of it. A measured rate above the table's becomes the nominal one."""
    if measured <= table:
        return {fraction: _short(measured / table)}
    return {nominal: _short(measured), fraction: 1.0}


def _short(number: float) -> float:
    """Round to three digits."""
    return float(f"{number:.3g}")
