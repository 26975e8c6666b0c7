"""How long a collective takes on the links of a cluster. No torch.

A ring over n ranks moves (n - 1) / n of a buffer past every rank, an all-reduce twice that; each hop has a latency. An
all-reduce may go up and down a tree of nodes instead, which moves as much and has fewer hops: the faster is taken. An
all-to-all keeps what goes to ranks of the same node off the network. Where a group spans nodes, its ranks of one node
have the node's network links together, one for each device, or as many as one ring can use.

Ranks on a CPU do not come to a collective at the same time, nor wake up at once: each collective but a send, which
waits for nobody, takes the time that they need to meet.
"""

from math import log2

from fivefold.parallel.collectives import Call
from fivefold.planner.cluster import Cluster, Span


def seconds(cluster: Cluster, span: Span, call: Call) -> float:
    """One collective of `call.bytes`, those of the larger buffer or of what a rank sends, over a group at `span`."""
    if span.nodes * span.per_node < 2:
        return 0.0
    return _moving(cluster, span, call) + span.link.meet_us * 1e-6 * (call.kind != "send")


def _moving(cluster: Cluster, span: Span, call: Call) -> float:
    """Seconds in which ranks that have met exchange the bytes."""
    nodes, near = span.nodes, span.per_node
    ranks, size, inside = nodes * near, call.bytes, cluster.node.inside
    hop, latency = inside.latency_us * 1e-6, span.link.latency_us * 1e-6
    if call.kind in ("send", "recv"):
        return latency + size / span.link.bytes_per_second
    if call.kind == "all_to_all":
        over_network = (ranks - near) / ranks * size / span.link.bytes_per_second + latency if nodes > 1 else 0.0
        return max(over_network, (near - 1) / ranks * size / inside.bytes_per_second + hop)
    # gloo, which is what sends between CPUs, reduces and scatters by an all-reduce of which each rank keeps its part.
    passes = 2 if call.kind == "all_reduce" or (call.kind == "reduce_scatter" and cluster.chip.is_host) else 1
    hops = nodes * (near - 1) * hop + (nodes - 1) * latency
    if call.kind == "all_reduce":
        hops = min(hops, (near - 1) * hop + log2(nodes) * latency)
    return passes * (hops + (ranks - 1) / ranks * size / _bandwidth(cluster, span))


def _bandwidth(cluster: Cluster, span: Span) -> float:
    """Bytes a second past each rank of a ring. A ring that enters a node over k network links has the k together, up to
    what the links inside carry, less what a ring loses with its nodes.

    450 GB/s at .82 inside, 50 at .74 between, with p = .6: over 8 nodes a ring of one rank a node has 37 GB/s, and one
    of eight 106 of 8 x 37.
    """
    inside = cluster.node.inside.bytes_per_second
    together = min(span.per_node, span.link.rails or span.per_node)
    if span.nodes == 1:
        return inside
    return min(inside * float(span.nodes**-span.link.decay), span.link.bytes_per_second * together)
