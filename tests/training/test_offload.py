"""Offloading changes where values lie, and no bit of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import fivefold as ff
from fivefold.core.errors import UserError
from fivefold.parallel.dtensor import local
from fivefold.parallel.offload import activations as offload_activations
from fivefold.parallel.offload import host_memory
from fivefold.parallel.offload import runtime as offload
from fivefold.parallel.offload.host_memory import HostMemory, Lane, most_bytes
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.optimizers import build_optimizer
from tests.parity import OPTIONS, Case, batch_of, build, documents, reference_model
from tests.pool import RankError, run_ranks
from tests.tiers import put_off
from tests.training.bodies import Stopped, column, run_file, same, state, train

CASES = {  # all levers, in turns with each fold; more micro batches than stages
    "dp2.shard2+mb2": {"family": "phi3"},  # saves parts of merged projections
    "shard2.tp2+full+mb1": {"optimizer": "muon"},
    "pp2+zb+v2+mb1": {"overrides": (("num_hidden_layers", 8),)},
    "shard2.ep2+selective+mb1": {"family": "mixtral"},
    "cp2+ring+mb2": {"optimizer": "muon", "overrides": (("tie_word_embeddings", True),)},
}


@dataclass(frozen=True)
class Bits:
    """What a rank has after some steps: losses, and every tensor by its kind and name. `moved`: bytes that went to host
    memory, of activations and of state."""

    losses: list[float]
    tensors: dict[str, Tensor]
    moved: tuple[int, int]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [each if each in ("dp2.shard2+mb2", "pp2+zb+v2+mb1") else put_off(each) for each in CASES]
)
def test_no_bit_changes(layout: str) -> None:
    """Losses, weights and state after three steps that are clipped, on every rank."""
    case = Case(layout, steps=3, max_grad_norm=0.05, **CASES[layout])
    plain, moved = plain_bits(case), bits(case, moves=True)
    for own, other in zip(plain, moved, strict=True):
        assert own.moved == (0, 0) and min(other.moved) > 0
        assert own.losses == other.losses and len(set(own.losses)) == 3
        assert own.tensors.keys() == other.tensors.keys()
        assert not [name for name, tensor in own.tensors.items() if not torch.equal(tensor, other.tensors[name])]


def bits(case: Case, *, moves: bool = False, fault: str = "") -> list[Bits]:
    """Of every rank; `moves`: all levers are on."""
    layout = f"{case.layout}{'+offload+offload_optimizer+offload_parameters' if moves else ''}"
    return run_ranks(case.parsed.world, on_rank, replace(case, layout=layout), fault)


@cache
def plain_bits(case: Case) -> list[Bits]:
    """Without any lever."""
    return bits(case)


class LateLane:
    """Copies as late as a stream of its own may make them: when somebody waits for them or for later ones. Until then
    targets hold what no memory holds by chance."""

    is_apart = True

    def __init__(self, device: torch.device) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []

    def copy(self, pairs: Any) -> Any:
        LateCopies.arrive()  # what this reads of host memory comes after what the compute stream has met
        for target, source in pairs:
            assert target.nbytes == source.nbytes
            target.view(torch.uint8).fill_(0xFE)
            self.waiting.append((target, source))
        return LateCopies(self.waiting, len(pairs))


class LateCopies:
    """`meet` orders what the device does next, and the host may still read what was there before; `wait` is the
    host's, too."""

    forgotten = 0  # which nobody met: on a GPU the memory that they read is given away meanwhile
    homes: ClassVar[set[int]] = set()  # memory of the host
    unseen: ClassVar[list[tuple[Tensor, Tensor]]] = []  # copies to it that only the device has met

    def __init__(self, waiting: list[tuple[Tensor, Tensor]], count: int) -> None:
        self.waiting, self.last, self.is_met = waiting, waiting[-1] if count else None, not count

    @classmethod
    def arrive(cls) -> None:
        while cls.unseen:
            target, values = cls.unseen.pop(0)
            target.copy_(values)

    def wait(self) -> None:
        self.meet()
        self.arrive()

    def meet(self) -> None:
        self._end()
        self.is_met = True

    def _end(self) -> None:
        while any(each is self.last for each in self.waiting):
            target, source = self.waiting.pop(0)
            if target.untyped_storage().data_ptr() in self.homes:
                self.unseen.append((target, source.clone()))
            else:
                target.copy_(source)

    def __del__(self) -> None:
        LateCopies.forgotten += not self.is_met


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", ["shard2.tp2+full+mb1", *map(put_off, ("pp2+zb+v2+mb1", "shard2.ep2+selective+mb1"))]
)
def test_no_bit_changes_however_late_copies_are(layout: str) -> None:
    case = Case(layout, steps=3, max_grad_norm=0.05, **CASES[layout])
    plain, moved = plain_bits(case), bits(case, moves=True, fault="late")
    for own, other in zip(plain, moved, strict=True):
        assert own.losses == other.losses and min(other.moved) > 0
        assert not [name for name, tensor in own.tensors.items() if not torch.equal(tensor, other.tensors[name])]


def on_rank(case: Case, fault: str) -> Bits:
    moved = [0, 0]
    with _counting(moved), FAULTS[fault]():
        model = build(case)
        optimizer, losses = build_optimizer(model, case.options), []
        for step in range(case.steps):
            batch = batch_of(documents(case, step), case.parsed, state_of(model).placement.data_rank)
            result = training_step.train_step(
                model, optimizer, batch, learning_rate=OPTIONS.learning_rate, max_grad_norm=case.max_grad_norm
            )
            losses.append(result.loss)
    if case.parsed.offload_parameters:
        segments = [segment.untyped_storage().data_ptr() for segment in state_of(model).live(Offload).memory._segments]
        resting = [local(each).untyped_storage().data_ptr() for each in model.parameters()]
        assert set(resting) <= set(segments), "all parameters are in host memory again"
    found = {name: local(each).clone() for name, each in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for kind, value in optimizer.state.get(parameter, {}).items():
            found[f"{kind}/{name}"] = local(value).clone()
    return Bits(losses, found, (moved[0], moved[1]))


@contextmanager
def _counting(moved: list[int]) -> Iterator[None]:
    take, put = offload_activations.HostActivations.take, offload.OptimizerStates._put

    def taken(self: Any, values: Tensor) -> Any:
        moved[0] += values.nbytes
        return take(self, values)

    def putting(self: Any, optimizer: Any, part: Any, **options: Any) -> Any:
        moved[1] += sum(local(each).nbytes for each in part)
        return put(self, optimizer, part, **options)

    with (
        patch.object(offload_activations.HostActivations, "take", taken),
        patch.object(offload.OptimizerStates, "_put", putting),
    ):
        yield


# ---- planted faults --------------------------------------------------------------------------------------------------


@contextmanager
def _not_written_back() -> Iterator[None]:
    """State that was updated is dropped: its home keeps the values of the first step."""
    put = offload.OptimizerStates._put
    lost = patch.object(Lane, "copy", lambda self, pairs: offload.CopiesInFlight(()))

    def putting(self: Any, optimizer: Any, part: Any, **options: Any) -> Any:
        with lost if all(each in self._homes for each in part) else nullcontext():
            return put(self, optimizer, part, **options)

    with patch.object(offload.OptimizerStates, "_put", putting):
        yield


@contextmanager
def _stale() -> Iterator[None]:
    """A part is fetched two parts ahead of its turn, from where the one before it lies."""
    fetch, last = offload.OptimizerStates._fetch, list[Any]()

    def fetching(self: Any, optimizer: Any, part: Any, **options: Any) -> Any:
        values, copies = fetch(self, optimizer, part, **options)
        for each, (*_, before) in zip(values, last, strict=False):
            if each[2].shape == before.shape:
                each[2].copy_(before)
        last[:] = values
        return values, copies

    with patch.object(offload.OptimizerStates, "_fetch", fetching):
        yield


@contextmanager
def _by_address_alone() -> Iterator[None]:
    """What is saved is told by its address, in all layers: memory that is used again is taken for what was there."""
    init, seen = offload_activations._Saving.__init__, dict[Any, Any]()

    def remembering(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.found = seen

    with (
        patch.object(offload_activations, "storage_key", lambda tensor: tensor.untyped_storage().data_ptr()),
        patch.object(offload_activations._Saving, "__init__", remembering),
    ):
        yield


@contextmanager
def _given_back_early() -> Iterator[None]:
    """Host memory is used again while backward still needs what lies there."""
    take = HostMemory.take

    def taking(self: Any, size: int) -> Tensor:
        block = take(self, size)
        self.give_back(block)
        return block

    with (
        patch.object(offload_activations.HostActivations, "give_back", lambda *_: None),
        patch.object(HostMemory, "take", taking),
    ):
        yield


@contextmanager
def _late() -> Iterator[None]:
    """No fault: copies that end when somebody waits for them."""
    allocate = host_memory.allocate
    LateCopies.forgotten = 0
    LateCopies.homes.clear()
    LateCopies.unseen.clear()

    def allocating(size: int, dtype: torch.dtype) -> Tensor:
        found = allocate(size, dtype)
        LateCopies.homes.add(found.untyped_storage().data_ptr())
        return found

    with (
        patch.object(offload, "Lane", LateLane),
        patch.object(offload_activations, "Lane", LateLane),
        patch.object(host_memory, "allocate", allocating),
    ):
        yield
    assert not LateCopies.forgotten and LateCopies.homes


FAULTS: dict[str, Callable[[], Any]] = {
    "": nullcontext,
    "late": _late,
    "not written back": _not_written_back,
    "stale": _stale,
    "told by address": _by_address_alone,
    "given back early": _given_back_early,
}


@pytest.mark.full
@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("", "late")])
def test_faults_show(fault: str) -> None:
    case = Case("shard2+mb2", steps=3, max_grad_norm=0.05)
    plain = plain_bits(case)[0]
    try:
        found = bits(case, moves=True, fault=fault)[0]
    except RankError as loud:
        assert fault == "told by address" and "AssertionError" in str(loud)
        return
    assert [name for name, tensor in plain.tensors.items() if not torch.equal(tensor, found.tensors[name])]


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_goes_on_with_and_without_it(tmp_path: Path) -> None:
    """Saved with state in host memory and loaded without, and the other way round: the bits of the run left alone."""
    options: dict[str, Any] = {"train__max_steps": 4, "checkpoint__every": 2, "optimizer__max_grad_norm": 0.1}
    on = {f"memory__offload_{what}": True for what in ("optimizer", "activations", "parameters")}
    alone = run_file(tmp_path, **options, run__name="alone")
    assert train(alone).error is None
    for name, first, then in (("on", on, {}), ("off", {}, on)):
        assert isinstance(train(run_file(tmp_path, **options, **first, run__name=name), stop_at=3).error, Stopped)
        tree = run_file(tmp_path, **options, **then, run__name=name)
        ran = train(tree)
        assert ran.error is None and "step 2 of 4" in ran.screen
        assert column(tree, "train/loss") == column(alone, "train/loss")
        assert same(state(tree, 4), state(alone, 4))


def test_blocks_are_used_again() -> None:
    memory = HostMemory(locks=False)
    first, second = memory.take(5_000_001), memory.take(40_000_000)
    first.fill_(3)
    second.fill_(4)
    assert int(first.sum(dtype=torch.int64)) == 15_000_003
    memory.give_back(first)
    again = memory.take(5_000_000)
    assert again.data_ptr() == first.data_ptr() and bool((second == 4).all())
    assert 45_000_001 <= memory.bytes <= 80 * 2**20
    # Blocks that are used again reach into no other one, and many of them have room in what is reserved.
    sizes = [70_001 * at for at in range(1, 40)]
    memory.reserve(most_bytes(sum(sizes), len(sizes)))
    before, blocks = memory.bytes, [memory.take(size) for size in sizes]
    assert memory.bytes == before
    for number, block in enumerate(blocks):
        block.fill_(number)
    for block in blocks[::2]:
        memory.give_back(block)
    for block in blocks[::2]:
        memory.take(rounded := host_memory._rounded(len(block))).fill_(77)
        assert rounded >= len(block)
    assert all(bool((block == number).all()) for number, block in list(enumerate(blocks))[1::2])
    # What is left of a segment is not taken for a block that is a little larger.
    tight = HostMemory(locks=False)
    tight.reserve(size := 5_000_001)
    tight.give_back(block := tight.take(size))
    assert block.untyped_storage().nbytes() >= block.storage_offset() + host_memory._rounded(size)


# ---- in a loop of one's own ------------------------------------------------------------------------------------------


def own_loop() -> list[str]:
    """What is said to a step without `ff.train_step`, and to an optimizer that counts in its groups; the hooks that ran
    in two steps, and whether the state is in host memory behind them."""
    model = ff.parallelize(reference_model(Case("single"), torch.float32), "single+offload_optimizer")
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    optimizer, ran = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), list[str]()
    optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
    optimizer.register_step_post_hook(lambda *_: ran.append("after"))
    for _ in range(2):
        ff.train_step(model, optimizer, batch)
    homes = state_of(model).live(Offload).states._homes
    ran.append(str(all(len(homes[each]) == 1 for each in model.parameters())))
    for wrong in (optimizer, _Counting(model.parameters(), lr=0.1)):
        try:
            wrong.step() if wrong is optimizer else ff.train_step(model, wrong, batch)
        except UserError as error:
            ran.append(error.what)
    return ran


class _Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


def set_anew(layout: str) -> list[Tensor]:
    """Parameters after steps, between which the state is set anew from a saved one, and by hand."""
    torch.manual_seed(0)
    model = ff.parallelize(reference_model(Case("single"), torch.float32), layout)
    batch = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.arange(24).view(2, 12)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ff.train_step(model, optimizer, batch)
    saved = optimizer.state_dict()
    saved["state"] = {at: {"momentum_buffer": each["momentum_buffer"].clone()} for at, each in saved["state"].items()}
    ff.train_step(model, optimizer, batch)
    optimizer.load_state_dict(saved)
    ff.train_step(model, optimizer, batch)
    for each in optimizer.state.values():
        each["momentum_buffer"] = torch.zeros_like(each["momentum_buffer"])
    ff.train_step(model, optimizer, batch)
    return [local(parameter).clone() for parameter in model.parameters()]


@pytest.mark.full
def test_state_that_is_set_anew_is_what_is_updated() -> None:
    """Not what lies in host memory of the steps before."""
    (plain,), (moved,) = (run_ranks(1, set_anew, f"single{words}") for words in ("", "+offload_optimizer"))
    assert all(torch.equal(own, other) for own, other in zip(plain, moved, strict=True))


@pytest.mark.full
def test_in_a_loop_of_ones_own() -> None:
    (ran,) = run_ranks(1, own_loop)
    assert ran[:5] == ["before", "after", "before", "after", "True"]
    assert "SGD.step() under single" in ran[5] and "counts in its parameter groups" in ran[6]
