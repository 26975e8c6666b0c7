"""All changes that a rehearsal makes to fivefold, and why: they replace answers of other ranks, results of kernels, and
the disk of the run's machine. Everything else is the code that trains."""

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint.manifest import FileRecord

Wrap = Callable[[Any], Any]  # original function -> its replacement


@dataclass(frozen=True)
class Change:
    """A replaced function. `place`: the module or class, and the name of the function there. `on`: with the stand-in
    for the driver, where no kernel runs, or on the CPU, where all of them do."""

    place: str
    why: str
    wrap: Wrap
    on: Literal["both", "stand-in", "cpu"] = "both"


# ---- unused values ---------------------------------------------------------------------------------------------------


def _nothing(_: Any) -> Any:
    return lambda *_, **__: None


# ---- answers of the other ranks --------------------------------------------------------------------------------------


def _alike(_: Any) -> Any:
    return lambda value, group=None: [value] * dist.get_world_size()


def _own(_: Any) -> Any:
    return lambda value, group=None: value


def _first(_: Any) -> Any:
    return lambda action, group=None: action() if dist.get_rank() == 0 else None


def _afresh(_: Any) -> Any:
    from fivefold.training.checkpoints import Resumed

    return lambda self, config: Resumed()


def _without_gloo(new_group: Any) -> Any:
    def make(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return dist.group.WORLD if backend == "gloo" else new_group(*args, backend=backend, **options)

    return make


class _AnswersAll(dist.Store):  # type: ignore[name-defined,misc]  # public, untyped
    """Rendezvous store in which everything is present that other ranks would have left."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value if isinstance(value, bytes) else bytes(value, "utf-8")

    def get(self, key: str) -> bytes:
        return self.values.get(key, bytes(128))  # the size of a communicator's identity

    def add(self, key: str, amount: int) -> int:
        self.values[key] = str(total := int(self.values.get(key, b"0")) + amount).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Return at once: no other rank exists."""

    def set_timeout(self, timeout: Any) -> None:
        """Ignore the timeout: nothing waits."""

    def clone(self) -> "_AnswersAll":
        return self


_STORE: list[Any] = []  # torch keeps no reference to a store written in Python


def _met(_: Any) -> Any:
    def store(world: Any) -> Any:
        _STORE.append(_AnswersAll())
        return _STORE[-1]

    return store


# ---- results of kernels: routing of tokens ---------------------------------------------------------------------------


def put(tensor: Tensor, values: Sequence[int]) -> Tensor:
    """Write `values` into the int64 memory of a tensor without calling CUDA: it is this process's own memory."""
    import ctypes

    ctypes.memmove(tensor.data_ptr(), (ctypes.c_int64 * len(values))(*values), 8 * len(values))
    return tensor


def even(total: int, parts: int) -> list[int]:
    """Deal `total` to `parts`: 10 to 4 is [3, 3, 2, 2]."""
    return [total // parts + (at < total % parts) for at in range(parts)]


def _sorted(plain: Any) -> Any:
    def sort_by_expert(index_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        order_S, counts_E = plain(index_NK, experts)
        return order_S, put(counts_E, even(len(order_S), experts)) if counts_E.is_cuda else counts_E

    return sort_by_expert


def _exchanged(plain: Any) -> Any:
    def exchange_counts(counts_E: Tensor, held: Sequence[int], rank: int, group: Any) -> Tensor:
        received = plain(counts_E, held, rank, group)
        rows = int(sum(counts_E.tolist()))
        return torch.tensor(even(rows, received.numel())).view_as(received).to(received)

    return exchange_counts


def _on_host(plain: Any) -> Any:
    def on_host(counts_E: Tensor, counts_nE: Tensor) -> tuple[list[int], list[list[int]]]:
        own, come = plain(counts_E, counts_nE)
        if not counts_E.is_cuda:
            return own, come
        rows, (ranks, experts) = read(counts_E), counts_nE.shape
        shares = even(sum(rows), ranks * experts)
        return rows, [shares[at * experts :][:experts] for at in range(ranks)]

    return on_host


def read(tensor: Tensor) -> list[int]:
    """Read a tensor that `put` has written."""
    import ctypes

    return list((ctypes.c_int64 * tensor.numel()).from_address(tensor.data_ptr()))


def _by_expert(plain: Any) -> Any:
    def by_expert(counts_nE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        order, counts_E = plain(counts_nE, rows)
        if not counts_nE.is_cuda:
            return order, counts_E
        ranks, experts = counts_nE.shape
        shares = even(rows, ranks * experts)
        return order, put(counts_E, [sum(shares[each::experts]) for each in range(experts)])

    return by_expert


def _ones(plain: Any) -> Any:
    return lambda numbers: torch.ones_like(plain(numbers))


def _true(_: Any) -> Any:
    return lambda _: True


def _one(_: Any) -> Any:
    return lambda _: 1.0


def _around(_: Any) -> Any:
    return lambda *_, **__: nullcontext()


# ---- the memory and the disk of the run's machine --------------------------------------------------------------------


NO_RESERVE = 0x4000  # of mmap(2), on Linux


def _unreserved(_: Any) -> Any:
    def allocate(size: int, dtype: torch.dtype) -> Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize, flags=flags)  # mmap refuses 0 bytes
        return torch.frombuffer(memory, dtype=dtype)[:size]

    return allocate


def _unwritten(_: Any) -> Any:
    def write(path: Any, tensors: Any) -> tuple[FileRecord, dict[str, str]]:
        return FileRecord(sum(each.nbytes for each in tensors.values()), ""), dict.fromkeys(tensors, "")

    return write


def _fine(_: Any) -> Any:
    return lambda *_, **__: []


def _room(_: Any) -> Any:
    return lambda *_, **__: ""


CHANGES = (
    Change(
        "fivefold.parallel.apply.fill",
        "no kernel reads weights, and to draw them takes long",
        _nothing,
        "stand-in",
    ),
    Change("fivefold.training.run.load_source", "the weights to start from need not be here", _nothing),
    Change("fivefold.launch.world._store", "the ranks meet where the others seem to have been", _met, "stand-in"),
    Change("torch.distributed.new_group", "gloo's groups would look for the other ranks", _without_gloo),
    Change("fivefold.parallel.plain.everywhere", "the other ranks would say what this one says", _alike),
    Change("fivefold.parallel.plain.on_first", "the other ranks would say what this one says", _alike),
    Change("fivefold.parallel.plain.of_first", "the first rank would say what this one says", _own),
    Change("fivefold.checkpoint.save.on_first_rank", "the first rank would say what it has done", _first),
    Change("fivefold.checkpoint.on_first_rank", "the first rank would say what it has done", _first),
    Change("fivefold.training.checkpoints.CheckpointManager.resume", "there is nothing to go on from", _afresh),
    Change("fivefold.models.experts.sort_by_expert", "tokens go evenly to the experts", _sorted, "stand-in"),
    Change(
        "fivefold.parallel.experts.runtime.exchange_counts",
        "the other ranks would send as many rows",
        _exchanged,
        "cpu",
    ),
    Change(
        "fivefold.parallel.experts.runtime.on_host", "the other ranks would send as many rows", _on_host, "stand-in"
    ),
    Change(
        "fivefold.parallel.experts.runtime.by_expert",
        "its sizes are counts that no kernel made",
        _by_expert,
        "stand-in",
    ),
    Change("fivefold.parallel.balance.runtime.on_host", "no kernel counted the tokens of experts", _ones, "stand-in"),
    Change("fivefold.ops.gpu_attention.differs", "no kernel ran whose numbers could be compared", _room, "stand-in"),
    Change("fivefold.training.step.isfinite", "what other ranks would have sent is not there", _true, "cpu"),
    Change("fivefold.training.step.sqrt", "what other ranks would have sent is not there", _one, "cpu"),
    Change("fivefold.training.record.timing", "the slots of the second step are timed, with syncs of its own", _around),
    Change(
        "fivefold.parallel.offload.host_memory.allocate",
        "saves and offloading may take more memory than this machine has, and nothing large is copied into it",
        _unreserved,
        "stand-in",
    ),
    Change("fivefold.checkpoint.shard.write", "nothing is written to this machine's disk", _unwritten),
    Change("fivefold.checkpoint.shard.check", "nothing was written", _fine),
    Change("fivefold.checkpoint.save._publish", "the parts of the other ranks are not there", _nothing),
    Change("fivefold.training.preflight.check_disk", "this is not the disk of the run", _room),
)


@contextmanager
def changed(*, is_full: bool) -> Iterator[None]:
    """Inside, apply the changes: those for the stand-in (`is_full`), or those for the CPU."""
    with ExitStack() as stack:
        for each in CHANGES:
            if each.on in ("both", "stand-in" if is_full else "cpu"):
                owner, name = place_of(each)
                stack.enter_context(patch.object(owner, name, each.wrap(getattr(owner, name))))
        yield


def place_of(change: Change) -> tuple[Any, str]:
    """The module or class of a change, and the name there."""
    path, _, name = change.place.rpartition(".")
    try:
        return import_module(path), name
    except ModuleNotFoundError:
        module, _, owner = path.rpartition(".")
        return getattr(import_module(module), owner), name
