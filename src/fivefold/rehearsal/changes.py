"""All that a rehearsal replaces: the environment that `build` takes, and functions deeper down, listed with the
reason. Everything else is the code that trains."""

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.models.experts import sort_by_expert
from fivefold.ops import gpu_attention
from fivefold.parallel import apply, plain
from fivefold.parallel.balance.runtime import sums_on_host
from fivefold.parallel.experts.runtime import by_expert, counts_on_host, exchange_counts
from fivefold.parallel.offload import host_memory
from fivefold.parallel.state import fill
from fivefold.training.part import Environment, Resumed

Wrap = Callable[[Any], Any]  # original function -> its replacement


@dataclass(frozen=True)
class Replacement:
    """A replaced function. `on`: with the stand-in for the driver, where no kernel runs, or on the CPU, where all run.
    `place`: the module that imports the function and calls it; None: the module that defines it."""

    function: Callable[..., Any]
    why: str
    wrap: Wrap
    on: Literal["both", "stand-in", "cpu"] = "both"
    place: ModuleType | None = None

    @property
    def owner(self) -> ModuleType:
        return self.place or sys.modules[self.function.__module__]


# ---- unused values ---------------------------------------------------------------------------------------------------


def _nothing(_: Any) -> Any:
    return lambda *_, **__: None


# ---- answers of the other ranks --------------------------------------------------------------------------------------


def _alike(_: Any) -> Any:
    return lambda value, group=None: [value] * dist.get_world_size()


def _own(_: Any) -> Any:
    return lambda value, group=None: value


def _without_gloo(new_group: Any) -> Any:
    def make(*args: Any, backend: str | None = None, **options: Any) -> Any:
        return dist.group.WORLD if backend == "gloo" else new_group(*args, backend=backend, **options)

    return make


class AnswersAll(dist.Store):  # type: ignore[name-defined,misc]  # public, untyped
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

    def clone(self) -> "AnswersAll":
        return self


# ---- results of kernels: routing of tokens ---------------------------------------------------------------------------


def put(tensor: Tensor, values: Sequence[int]) -> Tensor:
    """Write `values` into the int64 memory of a tensor without calling CUDA: it is this process's own memory."""
    import ctypes

    ctypes.memmove(tensor.data_ptr(), (ctypes.c_int64 * len(values))(*values), 8 * len(values))
    return tensor


def even(total: int, parts: int) -> list[int]:
    """Deal `total` to `parts`: 10 to 4 is [3, 3, 2, 2]."""
    return [total // parts + (at < total % parts) for at in range(parts)]


def _sorted(usual: Any) -> Any:
    def sort_by_expert(index_NK: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        order_S, counts_E = usual(index_NK, experts)
        return order_S, put(counts_E, even(len(order_S), experts)) if counts_E.is_cuda else counts_E

    return sort_by_expert


def _exchanged(usual: Any) -> Any:
    def exchange_counts(counts_E: Tensor, held: Sequence[int], rank: int, group: Any) -> Tensor:
        received = usual(counts_E, held, rank, group)
        rows = int(sum(counts_E.tolist()))
        return torch.tensor(even(rows, received.numel())).view_as(received).to(received)

    return exchange_counts


def _counted(usual: Any) -> Any:
    def counts_on_host(counts_E: Tensor, counts_nE: Tensor) -> tuple[list[int], list[list[int]]]:
        own, come = usual(counts_E, counts_nE)
        if not counts_E.is_cuda:
            return own, come
        rows, (ranks, experts) = read(counts_E), counts_nE.shape
        shares = even(sum(rows), ranks * experts)
        return rows, [shares[at * experts :][:experts] for at in range(ranks)]

    return counts_on_host


def read(tensor: Tensor) -> list[int]:
    """Read a tensor that `put` has written."""
    import ctypes

    return list((ctypes.c_int64 * tensor.numel()).from_address(tensor.data_ptr()))


def _by_expert(usual: Any) -> Any:
    def by_expert(counts_nE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        order, counts_E = usual(counts_nE, rows)
        if not counts_nE.is_cuda:
            return order, counts_E
        ranks, experts = counts_nE.shape
        shares = even(rows, ranks * experts)
        return order, put(counts_E, [sum(shares[first::experts]) for first in range(experts)])

    return by_expert


def _ones(usual: Any) -> Any:
    return lambda numbers: torch.ones_like(usual(numbers))


# ---- the memory and the disk of the run's machine --------------------------------------------------------------------


NO_RESERVE = 0x4000  # of mmap(2), on Linux


def _unreserved(_: Any) -> Any:
    def allocate(size: int, dtype: torch.dtype) -> Tensor:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        memory = mmap.mmap(-1, max(size, 1) * dtype.itemsize, flags=flags)  # mmap refuses 0 bytes
        return torch.frombuffer(memory, dtype=dtype)[:size]

    return allocate


def _same(_: Any) -> Any:
    return lambda *_, **__: ""


CHANGES = (
    Replacement(fill, "no kernel reads weights, and to draw them takes long", _nothing, "stand-in", place=apply),
    Replacement(dist.new_group, "gloo's groups would look for the other ranks", _without_gloo, place=dist),
    Replacement(plain.everywhere, "the other ranks would say what this one says", _alike),
    Replacement(plain.of_first, "the first rank would say what this one says", _own),
    Replacement(sort_by_expert, "tokens go evenly to the experts", _sorted, "stand-in"),
    Replacement(exchange_counts, "the other ranks would send as many rows", _exchanged, "cpu"),
    Replacement(counts_on_host, "the other ranks would send as many rows", _counted, "stand-in"),
    Replacement(by_expert, "its sizes are counts that no kernel made", _by_expert, "stand-in"),
    Replacement(sums_on_host, "no kernel counted the tokens of experts", _ones, "stand-in"),
    Replacement(gpu_attention.differs, "no kernel ran whose numbers could be compared", _same, "stand-in"),
    Replacement(
        host_memory.allocate,
        "saves and offloading may take more memory than this machine has, and nothing large is copied into it",
        _unreserved,
        "stand-in",
    ),
)


def environment(*, is_full: bool) -> Environment:
    """The environment of a rehearsed run: no weights to start from, nothing to go on from, nothing written."""
    return Environment(
        load_source=lambda *_: None,
        resume=lambda *_: Resumed(),
        write=lambda *_, **__: [],  # the parts of the other ranks are not there, and this is not the disk of the run
        check_disk=lambda *_, **__: "",
        timing=lambda *_, **__: nullcontext(),  # it times the slots of the second step, with syncs of its own
        # On the CPU the sums are of gradients that other ranks would have sent.
        read=Tensor.tolist if is_full else lambda sums: [1.0] * len(sums),
    )


@contextmanager
def changed(*, is_full: bool) -> Iterator[None]:
    """Inside, apply the changes: those for the stand-in (`is_full`), or those for the CPU."""
    with ExitStack() as stack:
        for change in CHANGES:
            if change.on in ("both", "stand-in" if is_full else "cpu"):
                wrapped = change.wrap(change.function)
                stack.enter_context(patch.object(change.owner, change.function.__name__, wrapped))
        yield
