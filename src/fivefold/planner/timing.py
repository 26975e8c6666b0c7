"""Seconds of kernels and collectives on a cluster, and the traits of the runtime that issues them. No torch.

Kernels follow a roofline, less what unfavourable shapes lose of the peak. A matmul is cut into tiles, which are dealt
to the chip's multiprocessors in waves. A partial last wave leaves some of them idle; a short inner dimension does not
fill the pipeline of a tile.

A ring over n ranks moves (n - 1) / n of a buffer past every rank, an all-reduce twice that; each hop has a latency. An
all-reduce may use a tree of nodes instead, which moves as much in fewer hops: the faster is taken. An all-to-all keeps
traffic within a node off the network. A group that spans nodes uses the network links of all its ranks in a node
together: one for each device, or as many as one ring can use. Ranks on a CPU neither arrive at a collective nor wake up
at the same time. So each collective takes extra time to meet, except for a send, which waits for nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp, log2, sqrt
from typing import Any, Self

from fivefold.core.errors import UserError
from fivefold.hardware.chip import Chip
from fivefold.hardware.cluster import Cluster, Span
from fivefold.parallel.collectives import Call

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8": 1}


@dataclass(frozen=True)
class Product:
    """`count` identical matmuls of a micro batch on a rank: [rows, inputs] times [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs * self.count


def matmul_seconds(chip: Chip, product: Product, dtype: str) -> float:
    """Forward seconds: the longer of arithmetic and memory traffic."""
    rows, inputs, outputs, count = product.rows, product.inputs, product.outputs, product.count
    numbers = count * (rows * inputs + inputs * outputs + rows * outputs)
    rate = flops_per_second(chip, dtype) * chip.step_fraction
    arithmetic = product.flops / (rate * _fill(chip, rows, outputs, inputs, count))
    return max(arithmetic, traffic_seconds(chip, numbers * ITEMSIZE[dtype]))


def flops_per_second(chip: Chip, dtype: str) -> float:
    """FLOP/s of the best large matmul. Raises `UserError` if the chip lacks the dtype."""
    rate = chip.flops_per_second(dtype)
    if rate is None:
        raise UserError(f"{chip.name} has no {dtype}", fix=f"choose a precision of {', '.join(chip.peak_tflops)}")
    return rate


def _fill(chip: Chip, rows: int, outputs: int, inputs: int, count: int) -> float:
    """Part of the achievable peak that a shape reaches."""
    tile_m, tile_n = chip.tile
    tiles_m, tiles_n = -(-rows // tile_m), -(-outputs // tile_n)
    tiles = tiles_m * tiles_n * count
    of_tiles = rows * outputs / (tiles_m * tile_m * tiles_n * tile_n)
    of_waves = tiles / (-(-tiles // chip.sms) * chip.sms)
    return of_tiles * of_waves * inputs / (inputs + chip.tile_fill)


def attention_seconds(chip: Chip, flops: float, dtype: str) -> float:
    """Forward seconds of causal attention; `flops` counts only the half of the scores that is computed."""
    return flops / (flops_per_second(chip, dtype) * chip.attention_fraction)


def traffic_seconds(chip: Chip, size: float) -> float:
    """Seconds of element-wise work that reads and writes `size` bytes."""
    return size / chip.memory_bytes_per_second


def host_seconds(chip: Chip, size: Any) -> Any:
    """Seconds to copy `size` bytes (a number or an array) to host memory, or back; both ways at once take as long."""
    return size / (chip.host_gbs * 1e9)


# ---- collectives -----------------------------------------------------------------------------------------------------


def collective_seconds(cluster: Cluster, span: Span, call: Call) -> float:
    """Seconds of one collective over a group at `span`. `call.bytes`: of the larger buffer, or of what a rank sends."""
    if span.nodes * span.per_node < 2:
        return 0.0
    return _moving(cluster, span, call) + span.link.meet_us * 1e-6 * (call.kind != "send")


def _moving(cluster: Cluster, span: Span, call: Call) -> float:
    """Seconds to exchange the bytes once the ranks have met."""
    nodes, near = span.nodes, span.per_node
    ranks, size, inside = nodes * near, call.bytes, cluster.node.inside
    hop, latency = inside.latency_us * 1e-6, span.link.latency_us * 1e-6
    if call.kind in ("send", "recv"):
        return latency + size / span.link.bytes_per_second
    if call.kind == "all_to_all":
        over_network = (ranks - near) / ranks * size / span.link.bytes_per_second + latency if nodes > 1 else 0.0
        return max(over_network, (near - 1) / ranks * size / inside.bytes_per_second + hop)
    # gloo, the backend of CPUs, implements a reduce-scatter as an all-reduce of which each rank keeps its shard.
    passes = 2 if call.kind == "all_reduce" or (call.kind == "reduce_scatter" and cluster.chip.is_host) else 1
    hops = nodes * (near - 1) * hop + (nodes - 1) * latency
    if call.kind == "all_reduce":
        hops = min(hops, (near - 1) * hop + log2(nodes) * latency)
    return passes * (hops + (ranks - 1) / ranks * size / _bandwidth(cluster, span))


def _bandwidth(cluster: Cluster, span: Span) -> float:
    """Bytes a second past each rank of a ring. A ring that enters a node over k network links adds up all k, limited by
    the links inside, less what a ring loses over nodes.

    450 GB/s at .82 inside, 50 at .74 between, with p = .6: over 8 nodes a ring of one rank a node has 37 GB/s, and one
    of eight 106 of 8 x 37.
    """
    inside = cluster.node.inside.bytes_per_second
    together = min(span.per_node, span.link.rails or span.per_node)
    if span.nodes == 1:
        return inside
    return min(inside * float(span.nodes**-span.link.decay), span.link.bytes_per_second * together)


# ---- the runtime -----------------------------------------------------------------------------------------------------

# Rehearsals of the real step count launches, syncs and allocator peaks: an 8B takes 0.15 s of host time for 32 compiled
# layers; `slack` and `kept_back` are least squares of the cells of docs/evidence/planned_memory.md. Logits in bf16 are
# written, read three times and overwritten by their gradient (`parallel/loss/runtime.py`). The others are judgement:
# compiled element-wise work reads and writes each saved number about once, and FSDP overlaps compute.
# On a CPU, uncompiled: CPU seconds of one thread, over Llamas that differ in width, layers, micro batches and tokens
# (torch 2.13). Operations of a layer and micro batch, FSDP's hooks included; operations of the model's ends; bytes of
# memory traffic per byte saved by a layer, gathered (copied in and out), or reduced (copied twice, reduced, added up),
# and per logit.
LAUNCHES, LAUNCHES_OF_ENDS = 1100, 2400
EAGER_TRAFFIC, GATHER_TRAFFIC, REDUCE_TRAFFIC, EAGER_LOGIT_BYTES = 7.0, 5.5, 13.0, 48.0


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a runtime; the defaults are those of this one on a GPU.

    `compiled`: layers are compiled, so fused kernels save what the traced layer's fused form does (`LayerCost.fused`).
    `overlaps`: collectives that can overlap compute do.
    `slack`: reserved over allocated bytes. `kept_back`: the part of the largest buffers of unreduced gradients that the
    allocator reserves in addition, since no other tensor has their sizes.
    `traffic`: bytes of memory traffic outside matmuls and attention, forward and backward, per byte that the traced
    layer saves. `logit_bytes`: traffic of the loss per logit, forward and backward. `gather_traffic`,
    `reduce_traffic`: bytes of memory traffic per byte that FSDP gathers or reduces. `cast_bytes`: traffic per number
    that is cast for a matmul of another dtype.
    `host_seconds`: Python and launches of a layer and micro batch, forward and backward. `host_of_ends`: the same of
    the model's ends. `meet`: sharpness of the smooth maximum of device and host time; 1 adds them up.
    `step_seconds`: fixed seconds of a step.
    """

    compiled: bool = True
    overlaps: bool = True
    slack: float = 1.03
    kept_back: float = 0.49
    traffic: float = 3.5
    logit_bytes: float = 10
    gather_traffic: float = 0.0
    reduce_traffic: float = 0.0
    cast_bytes: float = 5.0
    host_seconds: float = 2.4e-3
    host_of_ends: float = 0.0
    meet: float = 8.0
    step_seconds: float = 2e-3

    def on(self, chip: Chip) -> Self:
        """The same on a chip. On a CPU operations are not compiled, and nothing overlaps."""
        own = replace(self, slack=chip.slack or self.slack, host_seconds=self.host_seconds * chip.host_scale)
        if not chip.is_host:
            return own
        launch = chip.launch_us * 1e-6 * chip.host_scale
        return replace(
            own, compiled=False, overlaps=False, traffic=EAGER_TRAFFIC, logit_bytes=EAGER_LOGIT_BYTES,
            gather_traffic=GATHER_TRAFFIC, reduce_traffic=REDUCE_TRAFFIC, host_seconds=LAUNCHES * launch,
            host_of_ends=LAUNCHES_OF_ENDS * launch, meet=1.0,
        )  # fmt: skip


# ---- doubt -----------------------------------------------------------------------------------------------------------
#
# Intervals hold the truth in 80 % of cases. Each term of a step's time is known up to a factor. Its doubt is the
# standard deviation of the logarithm of its seconds, and errors of terms are independent. So a step that is one half
# matmuls (doubt 0.12) and one half links (0.15) has a doubt of sqrt(0.06^2 + 0.075^2) = 0.096.

# The doubt of each term, and the items that it sums. Judgement: chosen so that the intervals hold 80 % of the
# published rows in bf16, on average over their sources: `python -m benchmarks.planner_accuracy`.
DOUBTS = {"matmuls": 0.12, "attention": 0.2, "memory traffic": 0.2, "host": 0.3, "links": 0.15}
OF_TERMS = {
    "matmuls": ("matmuls",), "attention": ("attention",), "memory traffic": ("element-wise", "optimizer"),
    "host": ("host",), "links": ("tp", "cp", "ep", "data", "edges of the step"),
}  # fmt: skip
LIKELY = 1.28  # standard deviations to each side that hold 80 %

# Factors of the planned memory: 80 % of the rehearsed ranks are between them (docs/evidence/planned_memory.md).
LEAST_MEMORY, MOST_MEMORY = 0.975, 1.065

Interval = tuple[float, float]


def terms(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds of each term. `seconds`: item -> its seconds."""
    return {term: sum(seconds.get(item, 0.0) for item in items) for term, items in OF_TERMS.items()}


def spread(seconds: Mapping[str, float], doubt: float) -> float:
    """Standard deviation of the sum of the terms, in seconds. `doubt`: uncertainty relative to a chip that was measured
    (`Chip.doubt`)."""
    return doubt * sqrt(sum((DOUBTS[term] * share) ** 2 for term, share in terms(seconds).items()))


def step_interval(seconds: Mapping[str, float], doubt: float) -> Interval:
    """80 % interval of a step's seconds. A pipeline's bubble is off by the same factor as the work it waits for."""
    whole, work = sum(seconds.values()), sum(terms(seconds).values())
    factor = exp(LIKELY * spread(seconds, doubt) / work)
    return whole / factor, whole * factor


def memory_interval(taken: float) -> Interval:
    return taken * LEAST_MEMORY, taken * MOST_MEMORY
