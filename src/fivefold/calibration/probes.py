"""Measurements of one worker: matmuls by shape and type, attention, memory traffic, the launch of an operation, and
collectives by size, within its node and between nodes. All workers measure at once, as they train at once."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pydantic import TypeAdapter

from fivefold.calibration.fit import Attention, Collective, Matmul, Measurements, Sizes
from fivefold.core.units import GIB
from fivefold.launch.memory import resident, room
from fivefold.launch.once import as_worker
from fivefold.launch.world import World, multiplies_bf16
from fivefold.parallel import mesh, plain
from fivefold.parallel.dtypes import COMPUTE_DTYPES

BLOCKS = 5  # of repeats
CHAIN = 64  # operations of one autograd graph
HEAD = 64  # features of a head


def on_rank(request: Mapping[str, Any], world: World) -> Any:
    """Measure, and return what all ranks found, on the first rank; None on the others. `sizes`: fields of `Sizes`."""
    warnings.simplefilter("ignore", FutureWarning)  # torch renames collectives
    sizes = TypeAdapter(Sizes).validate_python(request["sizes"])
    device = torch.device(world.device)
    memory, context = _memory(device, world)
    timer = Timer(device, sizes.seconds)
    node, place = _groups(world)
    mesh.connect([node, dist.group.WORLD])  # as training does
    meets = device.type == "cpu"
    found = Measurements(
        matmuls=list(_matmuls(timer, sizes)),
        attention=list(_attention(timer, sizes)),
        traffic=_traffic(timer, sizes.traffic),
        launch=_launch(timer),
        collectives=list(_collectives(timer, sizes.messages, node)),
        memory=memory,
        context=context,
        host=_host(timer, sizes.traffic) if device.type == "cuda" else 0.0,
        meeting=_meeting(timer, sizes, node) if meets else 0.0,
        between=list(_collectives(timer, sizes.messages, dist.group.WORLD, sends=False)) if place else [],
        meeting_between=_meeting(timer, sizes, dist.group.WORLD) if place and meets else 0.0,
        one_per_node=list(_collectives(timer, sizes.messages, place)),
    )
    ranks = plain.everywhere(asdict(found)) if world.size > 1 else [asdict(found)]
    return {"local_size": world.local_size, "ranks": ranks} if world.is_first else None


on_worker = as_worker(on_rank)


def _groups(world: World) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this node's ranks, None for one rank alone, and that of the ranks with this one's place on all
    nodes, None if there are no others."""
    if world.size == 1:
        return None, None
    everywhere = plain.everywhere([world.rank - world.local_rank, world.local_rank])
    firsts, places = [[one[at] for one in everywhere] for at in (0, 1)]
    if len({*firsts}) == 1:
        return dist.group.WORLD, None

    def own(of: list[int], mine: int) -> dist.ProcessGroup:
        alike = {each: [rank for rank, its in enumerate(of) if its == each] for each in of}
        made: dist.ProcessGroup = {each: dist.new_group(ranks) for each, ranks in alike.items()}[mine]
        return made  # all ranks make all groups

    return own(firsts, world.rank - world.local_rank), own(places, world.local_rank)


@dataclass(frozen=True)
class Timer:
    """Timer of work on `device`, in blocks of repeats of about `least` seconds."""

    device: torch.device
    least: float
    clock: Callable[[], float] = time.perf_counter

    def own_seconds(self, work: Callable[[], object]) -> float:
        """Seconds of one call that waits for no other rank. With one thread on a CPU, this is CPU time, so that other
        processes of the machine do not count."""
        is_alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        return (replace(self, clock=time.thread_time) if is_alone else self).seconds(work)

    def seconds(
        self, work: Callable[[], object], *, together: bool = False, pick: Callable[[list[float]], float] | None = None
    ) -> float:
        """Seconds of one call. `together`: all ranks repeat it equally often. `pick`: of several blocks of repeats."""
        self.block(work, 1)  # warm-up
        repeats = max(1, min(1000, int(self.least / max(self.block(work, 1), 1e-6))))
        if together:
            most = torch.tensor(repeats, device=self.device)
            dist.all_reduce(most, dist.ReduceOp.MIN)
            repeats = int(most)
        # A collective takes as long as its slowest rank: the fastest block is least disturbed by other processes.
        pick = pick or (min if together else median)
        return pick([self.block(work, repeats) for _ in range(BLOCKS)]) / repeats

    def block(self, work: Callable[[], object], repeats: int) -> float:
        """Seconds of `repeats` calls."""
        self.wait()
        started = self.clock()
        for _ in range(repeats):
            work()
        self.wait()
        return self.clock() - started

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _matmuls(timer: Timer, sizes: Sizes) -> Iterator[Matmul]:
    """Time square matmuls and those of a feed-forward layer, in each type that training computes in: forward and both
    of backward, of which a third counts."""
    widths = [(width, width) for width in sizes.widths]
    widths += [(small, large) for small, large in zip(sizes.widths, sizes.widths[2:], strict=False)]
    for dtype, (inputs, outputs), rows in product(_dtypes(timer.device), widths, sizes.rows):
        weight, x = (_numbers(timer.device, dtype, size, inputs) for size in (outputs, rows))
        took = _passes(timer, lambda x=x, weight=weight: F.linear(x, weight), [x, weight])  # type: ignore[misc]
        yield dtype, rows, inputs, outputs, took / 3


def _attention(timer: Timer, sizes: Sizes) -> Iterator[Attention]:
    """Time causal attention of whole rows, as training calls it: forward and backward, which counts 2.5 times."""
    heads = 8
    for dtype, length in product(_dtypes(timer.device), sizes.lengths):
        rows = max(1, sizes.lengths[-1] // length)
        q, k, v = (_numbers(timer.device, dtype, rows, heads, length, HEAD) for _ in range(3))
        took = _passes(
            timer,
            lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),  # type: ignore[misc]
            [q, k, v],
        )
        yield dtype, 2.0 * HEAD * heads * rows * length**2, took / 3.5


def _passes(timer: Timer, forward: Callable[[], torch.Tensor], of: list[torch.Tensor]) -> float:
    """Seconds of a forward and its backward."""
    given = torch.ones_like(forward())
    return timer.own_seconds(lambda: torch.autograd.grad(forward(), of, given))


def _numbers(device: torch.device, dtype: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=COMPUTE_DTYPES[dtype], requires_grad=True)


def _dtypes(device: torch.device) -> list[str]:
    """Types worth measuring; fp64 is for proofs."""
    return ["fp32", "bf16"] if multiplies_bf16(str(device)) else ["fp32"]


def _traffic(timer: Timer, size: int) -> float:
    """Bytes a second that an element-wise operation on large arrays reads and writes."""
    a, b = (torch.zeros(size // 4, device=timer.device) for _ in range(2))
    return 3 * size / timer.own_seconds(lambda: torch.add(a, b, out=a))


def _launch(timer: Timer) -> float:
    """Host seconds of an operation on a few numbers, forward or backward."""
    x, factor = torch.ones(8, device=timer.device, requires_grad=True), torch.ones(8, device=timer.device)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            y = y * factor
        y.sum().backward()  # type: ignore[no-untyped-call]

    return timer.own_seconds(chain) / (2 * CHAIN)


def _collectives(
    timer: Timer, messages: tuple[int, ...], group: dist.ProcessGroup | None, *, sends: bool = True
) -> Iterator[Collective]:
    """Time training's collectives, over a group. Bytes are of the larger buffer, or of what a rank sends. `sends`: time
    those, too: between nodes, a rank sends to one with its own place in another node."""
    if group is None or group.size() == 1:
        return
    for size in messages:
        for kind, whole, issue in issues(timer.device, size, group.size(), group):
            if sends or kind != "send":
                dist.barrier()
                yield kind, whole, timer.seconds(issue, together=True)


def issues(
    device: torch.device, size: int, ranks: int, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Each kind of collective of about `size` bytes over a group of `ranks` (None: the world): its name, its bytes, and
    a function that issues it."""
    numbers = max(size // 4 // ranks, 1)
    part = torch.zeros(numbers, device=device)
    whole, other = (torch.zeros(numbers * ranks, device=device) for _ in range(2))
    work: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": lambda: _pass_on(whole, other, group),
    }
    yield from ((kind, whole.numel() * 4, issue) for kind, issue in work.items())


def _meeting(timer: Timer, sizes: Sizes, group: dist.ProcessGroup | None) -> float:
    """Additional seconds of a collective after a matmul, as training issues it, compared with one after another: ranks
    arrive at different times, and waiting ranks have lost their core. The median over kinds and some sizes."""
    if group is None or group.size() == 1:
        return 0.0
    width, found = sizes.widths[len(sizes.widths) // 2], []
    weight, x = (torch.zeros(rows, width) for rows in (width, sizes.rows[-1]))
    for size in sizes.messages[::3]:
        for kind, _, issue in issues(timer.device, size, group.size(), group):
            work = (lambda: F.linear(x, weight)), issue, (lambda issue=issue: (F.linear(x, weight), issue()))
            dist.barrier()
            alone, behind, both = (timer.seconds(function, together=True, pick=median) for function in work)
            found += [both - alone - behind] * (kind != "send")
    return max(0.0, median(found))


def _pass_on(mine: torch.Tensor, theirs: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Send to the next rank of a group, while receiving from the one before."""
    ranks = dist.get_process_group_ranks(group)
    at = ranks.index(dist.get_rank())
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    sends = [dist.P2POp(dist.irecv, theirs, before, group), dist.P2POp(dist.isend, mine, after, group)]
    for pending in dist.batch_isend_irecv(sends):
        pending.wait()


def _memory(device: torch.device, world: World) -> tuple[int, int]:
    """Bytes of the device, and those taken before anything is allocated: a context, or the libraries of a process.
    Processes on a CPU share its memory equally."""
    if device.type == "cuda":
        torch.zeros(1, device=device)
        free, total = torch.cuda.mem_get_info(device)
        return total, total - free - torch.cuda.memory_reserved(device)
    there = room()
    return (there.total if there else 8 * GIB) // world.local_size, 1024 * (resident("VmRSS") or 0)


def _host(timer: Timer, size: int) -> float:
    """Bytes a second between a GPU and pinned memory."""
    there, here = torch.zeros(size // 4, device=timer.device), torch.zeros(size // 4, pin_memory=True)
    return size / timer.seconds(lambda: here.copy_(there, non_blocking=True))
