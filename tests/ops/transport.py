"""What ranks run in `test_shared_memory.py`: collectives over shared memory beside what one process computes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.ops.cpu import shared_memory
from fivefold.torch_internals import carried_by, carriers
from fivefold.training import watchdog

CHUNK = shared_memory._CHUNK
OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def group_of(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A new group whose ranks share memory."""
    group = dist.new_group(ranks)
    assert isinstance(group, dist.ProcessGroup)
    shared_memory.connect(group)
    assert carried_by(group), shared_memory.lacks()
    return group


def given(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What rank `rank` gives: any rank can draw it."""
    drawn = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * seed + rank))
    return (drawn * 100).to(dtype) if not dtype.is_floating_point else drawn.to(dtype)


def reduced(of: list[Tensor], how: str) -> Tensor:
    """In the order of the ranks: 16-bit types in fp32, rounded once."""
    dtype = of[0].dtype
    wide = [x.float() if dtype is torch.bfloat16 else x for x in of]
    found = wide[0]
    for x in wide[1:]:
        found = torch.maximum(found, x) if how == "max" else torch.minimum(found, x) if how == "min" else found + x
    return (found / len(of) if how == "avg" else found).to(dtype)


def equal(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def all_kinds(dtype: torch.dtype, counts: Sequence[int], hows: Sequence[str]) -> list[str]:
    """Every collective of `counts` numbers a rank; what came out wrong."""
    group, size, rank = group_of(), dist.get_world_size(), dist.get_rank()
    wrong = []
    for count in counts:
        mine, all_given = given(rank, count, dtype), [given(r, count, dtype) for r in range(size)]
        whole = torch.empty(count * size, dtype=dtype)
        dist.all_gather_into_tensor(whole, mine, group=group)
        checks = {"all_gather": equal(whole, torch.cat(all_given))}
        root = size - 1
        sent = mine.clone()
        dist.broadcast(sent, group=group, group_src=root)
        checks["broadcast"] = equal(sent, all_given[root])
        wide = [given(r, count * size, dtype, seed=1) for r in range(size)]
        out = torch.empty(count * size, dtype=dtype)
        dist.all_to_all_single(out, wide[rank], group=group)
        checks["all_to_all"] = equal(out, torch.cat([x.chunk(size)[rank] for x in wide]) if count else out)
        for how in hows:
            total = mine.clone()
            dist.all_reduce(total, OPS[how], group=group)
            checks[f"all_reduce {how}"] = equal(total, reduced(all_given, how))
            part = torch.empty(count, dtype=dtype)
            dist.reduce_scatter_tensor(part, wide[rank].clone(), OPS[how], group=group)
            own = reduced(wide, how)[rank * count : (rank + 1) * count]
            checks[f"reduce_scatter {how}"] = equal(part, own)
        wrong += [f"{name} of {count} {dtype}" for name, is_right in checks.items() if not is_right]
    dist.barrier(group)
    return wrong


def uneven(scale: int) -> bool:
    """An all-to-all whose ranks send each other unlike numbers of rows, some none; twice."""
    group, size, rank = group_of(), dist.get_world_size(), dist.get_rank()
    counts = [[((3 * r + 5 * s) % 4) * scale + (r != s) for s in range(size)] for r in range(size)]  # [from][to]
    counts[0][size - 1] = 0
    for seed in (1, 2):
        all_given = [given(r, 3 * sum(counts[r]), torch.float32, seed).view(-1, 3) for r in range(size)]
        received = [counts[r][rank] for r in range(size)]
        out = torch.empty(sum(received), 3)
        dist.all_to_all_single(out, all_given[rank], received, counts[rank], group=group)
        wanted = torch.cat([all_given[r].split(counts[r])[rank] for r in range(size)])
        if not torch.equal(out, wanted):
            return False
    return True


def asynchronous(count: int) -> list[str]:
    """Many under way at once, on two groups, waited for in an order of each rank's own."""
    one, two, size, rank = group_of(), group_of(), dist.get_world_size(), dist.get_rank()
    works: list[tuple[str, Any, Tensor, Tensor]] = []
    for seed in range(12):
        group = (one, two)[seed % 2]
        all_given = [given(r, count, torch.float32, seed) for r in range(size)]
        mine = all_given[rank].clone()
        if seed % 3:
            work = dist.all_reduce(mine, group=group, async_op=True)
            works.append((f"sum {seed}", work, mine, reduced(all_given, "sum")))
        else:
            whole = torch.empty(count * size)
            work = dist.all_gather_into_tensor(whole, mine, group=group, async_op=True)
            works.append((f"gather {seed}", work, whole, torch.cat(all_given)))
    turned = works[rank:] + works[:rank]
    for _, work, _, _ in turned if rank % 2 else turned[::-1]:
        work.wait()
        assert work.wait() is not False  # once more does nothing
    return [name for name, _, found, wanted in works if not torch.equal(found, wanted)]


def crossed(count: int) -> bool:
    """Two groups whose collectives the ranks call in opposite orders, and wait for in opposite orders."""
    one, two, rank = group_of(), group_of(), dist.get_rank()
    first, second = torch.full((count,), 1.0 + rank), torch.full((count,), 3.0 + rank)
    order = [(one, first), (two, second)]
    works = [dist.all_reduce(x, group=group, async_op=True) for group, x in (order if rank % 2 else order[::-1])]
    for work in works:
        assert work is not None
        work.wait()
    size = dist.get_world_size()
    ranks = size * (size - 1) / 2
    return bool((first == size + ranks).all() and (second == 3 * size + ranks).all())


def several_groups() -> list[float]:
    """Pairs of ranks besides all: (0 1) (2 3), (0 2) (1 3), the world."""
    pairs = [[dist.new_group(pair) for pair in axis] for axis in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    rank, world = dist.get_rank(), group_of()
    own = [pairs[0][rank // 2], pairs[1][rank % 2]]
    for group in own:
        assert isinstance(group, dist.ProcessGroup)
        shared_memory.connect(group)
        assert carried_by(group)
    found = []
    for group in (*own, world) * 3:
        x = torch.full((1000,), float(10**rank))
        dist.all_reduce(x, group=group)
        assert x.min() == x.max()
        found.append(float(x[0]))
    return found


def laid_out_otherwise() -> dict[str, bool]:
    """Tensors whose elements lie apart, or that share memory."""
    group, size, rank = group_of(), dist.get_world_size(), dist.get_rank()
    base = torch.zeros(4, 6)
    base[:, ::2] = rank + 1.0
    apart = base[:, ::2]
    dist.all_reduce(apart, group=group)
    total = float(sum(range(1, size + 1)))
    found = {"all_reduce": bool((base[:, ::2] == total).all() and (base[:, 1::2] == 0).all())}
    turned = torch.arange(12.0).view(3, 4).t() + rank
    whole = torch.empty(4 * size, 3)
    dist.all_gather_into_tensor(whole, turned, group=group)
    wanted = torch.cat([torch.arange(12.0).view(3, 4).t() + r for r in range(size)])
    found["all_gather"] = torch.equal(whole, wanted)
    inside = torch.full((size * 5,), -1.0)
    inside[rank * 5 : rank * 5 + 5] = float(rank)
    dist.all_gather_into_tensor(inside, inside[rank * 5 : rank * 5 + 5], group=group)
    found["in its place"] = torch.equal(inside, torch.arange(float(size)).repeat_interleave(5))
    moved = torch.full((size * 5,), float(rank))
    dist.all_gather_into_tensor(moved, moved[:5], group=group)
    found["over its source"] = torch.equal(moved, torch.arange(float(size)).repeat_interleave(5))
    sums = torch.arange(size * 2.0)
    dist.reduce_scatter_tensor(sums[:2], sums, group=group)
    found["sum over its source"] = torch.equal(sums[:2], torch.tensor([2.0 * rank, 2.0 * rank + 1]) * size)
    swapped = torch.arange(float(size)) + 10 * rank
    dist.all_to_all_single(swapped, swapped, group=group)
    found["exchange over its source"] = torch.equal(swapped, rank + 10 * torch.arange(float(size)))
    return found


def not_a_number() -> list[bool]:
    """A NaN of one rank reaches all."""
    group, found = group_of(), []
    for rank in range(dist.get_world_size()):
        for how in ("sum", "max", "min"):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                x = torch.full((3,), float("nan") if rank == dist.get_rank() else 1.0, dtype=dtype)
                dist.all_reduce(x, OPS[how], group=group)
                found.append(bool(x.isnan().all()))
    return found


def left_to_gloo() -> list[bool]:
    """Types, reductions and collectives that gloo serves, among others that it does not; a group of its own, with the
    timeout of a call."""
    group, size, rank = group_of(), dist.get_world_size(), dist.get_rank()
    half = torch.full((5,), 1.0, dtype=torch.float16)
    dist.all_reduce(half, group=group)
    product = torch.full((5,), 2.0)
    dist.all_reduce(product, dist.ReduceOp.PRODUCT, group=group)
    flags = torch.tensor([rank == 0, True])
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
    listed = [torch.empty(2) for _ in range(size)]
    dist.all_gather(listed, torch.full((2,), float(rank)), group=group)
    other = torch.tensor([rank])
    dist.reduce(other, group=group, group_dst=0)
    dist.barrier(group, async_op=True).wait()
    try:
        dist.all_gather_into_tensor(torch.empty(3), torch.empty(2), group=group)
        is_refused = False
    except (RuntimeError, ValueError):
        is_refused = True
    asked = dist.all_reduce(torch.ones(3, dtype=torch.float16), group=group, async_op=True)
    asked.wait()
    plain = dist.new_group()  # shares no memory
    assert isinstance(plain, dist.ProcessGroup)
    sent = torch.full((3,), float(rank))
    dist.broadcast(sent, group=plain, group_src=size - 1)
    numbers = torch.full((sum(range(size + 1)),), float(rank))  # 1 for the first rank, 2 for the second
    swapped = torch.empty((rank + 1) * size)
    dist.all_to_all_single(swapped, numbers, [rank + 1] * size, list(range(1, size + 1)), group=plain)
    options = dist.AllreduceOptions()
    options.timeout, options.asyncOp = timedelta(seconds=0.4), False
    try:
        is_kept = rank != 0 or not plain.allreduce([torch.ones(3)], options).wait()  # alone
    except RuntimeError:
        is_kept = True
    dist.barrier(group)
    return [
        bool((half == size).all()),
        bool((product == 2.0**size).all()),
        flags.tolist() == [False, True],
        all(bool((x == r).all()) for r, x in enumerate(listed)),
        rank != 0 or int(other) == sum(range(size)),
        is_refused,
        bool((sent == size - 1).all()),
        torch.equal(swapped, torch.arange(float(size)).repeat_interleave(rank + 1)),
        is_kept,
    ]


def operators() -> list[bool]:
    """The functional collectives, alone and in a compiled function."""
    group, size, rank = group_of(), dist.get_world_size(), dist.get_rank()
    ops, name = torch.ops._c10d_functional, group.group_name

    def block(x: Tensor) -> Tensor:
        total = ops.wait_tensor(ops.all_reduce(x * 2, "sum", name))
        whole = ops.wait_tensor(ops.all_gather_into_tensor(total + rank, size, name))
        part = ops.wait_tensor(ops.reduce_scatter_tensor(whole * 3, "sum", size, name))
        swapped = ops.wait_tensor(ops.all_to_all_single(part, [4 // size] * size, [4 // size] * size, name))
        return swapped.cos() + total.sum()

    x = torch.arange(12.0).view(4, 3) + rank
    before = sum(channel.last.number for channel in carriers() if channel.last)
    plain = block(x)
    carried = sum(channel.last.number for channel in carriers() if channel.last) - before
    total = sum(2 * (torch.arange(12.0).view(4, 3) + r) for r in range(size))
    whole = 3 * (total + rank) * size
    parts = [3 * (total + r) * size for r in range(size)]
    swapped = torch.cat([part.chunk(size)[rank] for part in parts])
    assert whole.shape == (4, 3)
    wanted = swapped.cos() + total.sum()
    compiled = torch.compile(block, fullgraph=True)(x)
    return [torch.allclose(plain, wanted), torch.allclose(compiled, wanted, rtol=1e-4), carried == 4]


def several_tensors() -> list[str]:
    """Operators that are given several tensors, of every reduction; what came out wrong. The last tensor is the
    longest: who waits for the first alone does not have it. A tensor list of one all-reduce is summed by gloo."""
    group, size, rank = group_of(), dist.get_world_size(), dist.get_rank()
    ops, name, counts = torch.ops._c10d_functional, group.group_name, (3, CHUNK * 5)
    every = [[given(r, count * size, torch.float32) for count in counts] for r in range(size)]
    found = {}
    for how in OPS:
        parts = ops.reduce_scatter_tensor_coalesced(every[rank], how, size, name)
        wanted = [reduced(list(each), how).chunk(size)[rank] for each in zip(*every, strict=True)]
        found[how] = all(map(equal, map(ops.wait_tensor, parts), wanted))
    wholes = ops.all_gather_into_tensor_coalesced(every[rank], size, name)
    found["gather"] = all(map(equal, map(ops.wait_tensor, wholes), map(torch.cat, zip(*every, strict=True))))
    two = [torch.full((5,), float(rank)), torch.full((5,), 10.0)]
    group.allreduce(two).wait()
    found["all_reduce"] = all(bool((x == size * 10.0 + size * (size - 1) / 2).all()) for x in two)
    return [what for what, is_right in found.items() if not is_right]


def in_turns(bodies: int) -> bool:
    """More chunks than there are slots, with a rank that is late now and then: memory is not reused too early."""
    group, size, rank = group_of(), dist.get_world_size(), dist.get_rank()
    count = CHUNK // 4 * 3 + 17
    for turn in range(bodies):
        if (turn + rank) % size == 0:
            time.sleep(0.004)
        x = torch.full((count,), float(turn * size + rank))
        work = dist.all_reduce(x, group=group, async_op=bool(turn % 2))
        if work is not None:
            work.wait()
        if not (x == sum(turn * size + r for r in range(size))).all():
            return False
    return True


def without_segment(patch: str) -> list[bool]:
    """One rank cannot: all leave it to gloo, together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    before = names()
    undo = _patched(patch) if rank == (0 if patch == "full" else 1) else lambda: None
    try:
        group = dist.new_group()
        shared_memory.connect(group)
    finally:
        undo()
    x = torch.ones(10)
    dist.all_reduce(x, group=group)
    return [not carried_by(group), bool((x == size).all()), not is_left_since(before)]


def names() -> set[str]:
    """Segments that have a name: those that are being opened, of whatever run."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("fivefold-")}


def is_left_since(before: set[str]) -> bool:
    """Whether a name stays that was not there before; another run's goes at once."""
    new = names() - before
    for _ in range(30):
        if not new & names():
            return False
        time.sleep(0.1)
    return True


def several_groups_left() -> None:
    """Groups that are forgotten."""
    for _ in range(3):
        dist.all_reduce(torch.ones(10), group=group_of())


def _patched(what: str) -> Callable[[], None]:
    """Make this process unable to; what undoes it."""
    if what == "full":
        kept = os.posix_fallocate

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        os.posix_fallocate = full
        return lambda: setattr(os, "posix_fallocate", kept)
    if what == "elsewhere":
        folder = shared_memory._FOLDER
        shared_memory._FOLDER = folder / "not-there"
        return lambda: setattr(shared_memory, "_FOLDER", folder)
    assert what == "switch"
    os.environ[shared_memory.SWITCH] = "gloo"
    return lambda: os.environ.pop(shared_memory.SWITCH) and None


def apart(body: str, rank: int, store: str, answers: Any) -> None:
    """A rank of a world of two of its own, one of which may end: `body` is a function below, and what it is given."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(store, 2))
    group = group_of([0, 1])
    dist.all_reduce(torch.ones(4), group=group)
    answers.put((rank, "ready"))
    time.sleep(0.3)  # the other one says so, too, before anything else
    try:
        name, *more = body.split()
        answers.put((rank, globals()[name](group, *more)))
    except RuntimeError as error:
        answers.put((rank, str(error)))
    if rank == 0:
        answers.close()
        answers.join_thread()
        os._exit(0)
    time.sleep(10)


def waits(group: dist.ProcessGroup) -> str:
    """Rank 0 waits for one that does not come: its test ends one of them."""
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        time.sleep(60)
    return "done"


def goes_on(group: dist.ProcessGroup) -> str:
    """Rank 0 waits for one that is stopped for a while."""
    if dist.get_rank() == 1:
        time.sleep(0.3)
    x = torch.ones(4)
    dist.all_reduce(x, group=group)
    return f"{x.sum():g}"


UNLIKE: dict[str, Callable[[int, dist.ProcessGroup], object]] = {  # of rank 0 and rank 1, other collectives
    "size": lambda rank, group: dist.all_reduce(torch.ones(4 + rank), group=group),
    "type": lambda rank, group: dist.all_reduce(torch.ones(4).to([torch.float, torch.int][rank]), group=group),
    "operation": lambda rank, group: dist.all_reduce(torch.ones(4), [OPS["sum"], OPS["max"]][rank], group=group),
    "root": lambda rank, group: dist.broadcast(torch.ones(4), 1 - rank, group=group),
    "kind": lambda rank, group: dist.all_reduce(torch.ones(4), group=group) if rank else dist.barrier(group),
    "rows": lambda rank, group: dist.all_to_all_single(
        torch.ones(4), torch.ones(4), [[3, 1], [2, 2]][rank], [[3, 1], [2, 2]][rank], group=group
    ),
}


def calls_another(group: dist.ProcessGroup, what: str) -> str:
    UNLIKE[what](dist.get_rank(), group)
    return "done"


def averages_integers(group: dist.ProcessGroup) -> str:
    """Left to torch, which refuses it."""
    dist.all_reduce(torch.tensor([1, 2]), dist.ReduceOp.AVG, group=group)
    return "done"


def exchanges_no_such_rows(group: dist.ProcessGroup) -> str:
    """More rows than there are would be read from beyond the tensor."""
    try:
        dist.all_to_all_single(torch.ones(4), torch.ones(4), [2, 2], [2, 3], group=group)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "done"


def sleeps(group: dist.ProcessGroup) -> str:
    """Rank 0 is stopped, by its test, for longer than it would wait."""
    if dist.get_rank() == 0:
        _waiting_for(group, 1.5)
    else:
        time.sleep(2.6)
        dist.all_reduce(torch.ones(4), group=group)
    return "done"


def _waiting_for(group: dist.ProcessGroup, seconds: float) -> None:
    options = dist.distributed_c10d.AllreduceOptions()  # type: ignore[attr-defined]
    options.timeout, options.asyncOp = timedelta(seconds=seconds), False
    group.allreduce([torch.ones(4)], options)


def is_patient(group: dist.ProcessGroup) -> str:
    """Rank 0 has a timeout of its own."""
    if dist.get_rank() == 0:
        _waiting_for(group, 0.4)
    else:
        time.sleep(60)
    return "done"


def is_last(group: dist.ProcessGroup) -> str:
    """Rank 1 ends as soon as it is done with the last collective, which rank 0 has only begun."""
    if dist.get_rank() == 1:
        works = [dist.all_reduce(torch.ones(4), group=group, async_op=True) for _ in range(3)]
        assert all(works)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    x = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(x, group=group)
    return f"{x.sum():g}"


def is_watched(group: dist.ProcessGroup) -> str:
    """What the watchdog hears of a rank that waits."""
    if dist.get_rank() == 1:
        time.sleep(60)
    heard: list[str] = []

    def look() -> None:
        time.sleep(0.3)
        waits = watchdog.Waits(None, 0.1)
        waits.look(0.2)
        waits.look(0.2)
        heard.append(f"{waits.are_under_way} {waits.are_stuck} {waits.in_words()}")

    thread = threading.Thread(target=look)
    thread.start()
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    assert work is not None
    try:
        work.wait(timedelta(seconds=1))
    except RuntimeError:
        thread.join()
    return heard[0]
