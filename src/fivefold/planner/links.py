"""Collective times on the links of a cluster. No torch.

A ring over n ranks moves (n - 1) / n of a buffer past every rank, an all-reduce twice that; each hop has a latency. An
all-reduce may use a tree of nodes instead, which moves as much in fewer hops: the faster is taken. An all-to-all keeps
traffic within a node off the network. A group that spans nodes uses the network links of all its ranks in a node
together: one for each device, or as many as one ring can use.

Ranks on a CPU neither arrive at a collective nor wake up at the same time. So each collective takes extra time to meet,
except for a send, which waits for nobody.
"""

from math import log2

from fivefold.hardware.cluster import Cluster, Span
from fivefold.parallel.collectives import Call


def seconds(cluster: Cluster, span: Span, call: Call) -> float:
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
