"""Steps with the standing checks after each, as a run makes them, and faults for the checks to find.

A fault is planted around the first step: what stands before its `yield` happens before the step, the rest after it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.data import MicroBatch, PackedRows
from fivefold.parallel.dtensor import local
from fivefold.parallel.matrices.runtime import FullMatrices
from fivefold.parallel.state import state_of
from fivefold.parallel.tensor.runtime import TensorParallel
from fivefold.training import checks, standing_checks
from fivefold.training import run as run_module
from fivefold.training.checks import hashes
from fivefold.training.optimizers import build_optimizer, rule_of
from fivefold.training.optimizers.muon import Muon
from fivefold.training.step import train_step
from tests.parity import Case, build
from tests.training.bodies import Ran, on_rank

RATE = 3e-3
Plant = Callable[[Any, torch.optim.Optimizer], AbstractContextManager[None]]
Reading = Callable[[PackedRows, int, dict[str, int]], list[MicroBatch]]


def nothing(model: Any, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    return nullcontext()


def findings(
    case: Case, rows: PackedRows, plant: Plant = nothing, steps: int = 1, rate: float = RATE
) -> list[checks.Finding]:
    """What the checks find in so many steps."""
    model = build(case)
    optimizer, found = build_optimizer(model, case.options), []
    for step in range(steps):
        batch = rows.batch(step, **knobs_of(model, case))
        with plant(model, optimizer) if step == 0 else nullcontext():
            with checks.observing(model, optimizer) as update:
                result = train_step(model, optimizer, batch, learning_rate=rate, max_grad_norm=case.max_grad_norm)
            assert not result.skipped
        found += checks.replicas(model, optimizer) + checks.finite(model, optimizer)
        found += checks.ledger(model, batch, rows, step=step, global_batch_size=case.rows)
        found += checks.moved(model, optimizer, update, rule=rule_of(case.optimizer))
        found += checks.rates(model, optimizer, rate, updates=step + 1)
    return found


def knobs_of(model: Any, case: Case) -> dict[str, int]:
    """What says which rows of a step are this rank's."""
    state, layout = state_of(model), case.parsed
    return {
        "global_batch_size": case.rows, "data_rank": state.placement.data_rank, "data_ranks": layout.data_ranks,
        "micro_batch_size": layout.micro_batch_size, "row_multiple": layout.row_multiple,
    }  # fmt: skip


def misread(case: Case, rows: PackedRows, readings: Sequence[Reading]) -> list[list[checks.Finding]]:
    """What the ledger finds of each of some readings of the first step."""
    model = build(case)
    batches = [reading(rows, 0, knobs_of(model, case)) for reading in readings]
    return [checks.ledger(model, batch, rows, step=0, global_batch_size=case.rows) for batch in batches]


def with_slow_rank(tree: dict[str, Any], may_leave: bool) -> Ran:
    """Train on this rank, where rank 1 computes slowly. `may_leave`: nodes may be left out."""
    slow = patch.object(standing_checks, "_seconds", lambda _: 3.0 if dist.get_rank() == 1 else 1.0)
    with slow, patch.object(standing_checks, "may_leave_out", lambda _: may_leave):
        return on_rank(tree)


# ---- faults of weights and moments -----------------------------------------------------------------------------------


@contextmanager
def sums_lost(model: Any, optimizer: torch.optim.Optimizer, axis: str) -> Iterator[None]:
    """Gradients that an axis is to add up are not."""
    sums: Any = state_of(model).live(TensorParallel).partial_gradients
    assert sums[axis]
    with patch.dict(sums, {axis: []}):
        yield


@contextmanager
def no_gradient(model: Any, optimizer: torch.optim.Optimizer, name: str, on: Collection[int]) -> Iterator[None]:
    """The optimizer of some ranks passes a parameter over."""

    def drop(*_: Any) -> None:
        if dist.get_rank() in on:
            model.get_parameter(name).grad = None

    with optimizer.register_step_pre_hook(drop):
        yield


@contextmanager
def changed(
    model: Any, optimizer: torch.optim.Optimizer, name: str, on: Collection[int], how: str, kind: str = "weight"
) -> Iterator[None]:
    """After the step, one element is: the next number (`ulp`), no number (`nan`), infinite (`inf`), doubled, or the
    first two are `swapped`."""
    yield
    parameter = model.get_parameter(name)
    tensor = local((parameter if kind == "weight" else optimizer.state[parameter][kind]).detach())
    if dist.get_rank() in on and tensor.numel():
        flat = tensor.view(-1)
        if how == "swapped":
            flat[:2] = flat[:2].flip(0).clone()
        else:
            up = torch.nextafter(flat[-1], torch.tensor(9.0, dtype=flat.dtype))
            flat[-1] = {"ulp": up, "nan": torch.nan, "inf": torch.inf, "doubled": 2 * flat[-1]}[how]


@contextmanager
def dropped(model: Any, optimizer: torch.optim.Optimizer, name: str, on: Collection[int] = ()) -> Iterator[None]:
    """The optimizer does not know a parameter; `on`: of these ranks only."""
    if not on or dist.get_rank() in on:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p is not model.get_parameter(name)]
    yield


@contextmanager
def stale(model: Any, optimizer: torch.optim.Optimizer, name: str, on: Collection[int] = ()) -> Iterator[None]:
    """The step updates something else than the weights that the model goes on with."""
    weight = local(model.get_parameter(name).detach())
    before = weight.clone()

    def put_back(*_: Any) -> None:
        if not on or dist.get_rank() in on:
            weight.copy_(before)

    with optimizer.register_step_post_hook(put_back):
        yield


@contextmanager
def replaced(model: Any, optimizer: torch.optim.Optimizer, name: str) -> Iterator[None]:
    """The optimizer holds a copy that the model does not use."""
    parameter = model.get_parameter(name)
    for group in optimizer.param_groups:
        group["params"] = [p.detach().clone() if p is parameter else p for p in group["params"]]
    yield


@contextmanager
def forgotten(model: Any, optimizer: Muon, name: str) -> Iterator[None]:
    """Muon has a matrix in its group and passes it over."""
    names = [each for each in state_of(model).placement.block_matrices if each != name]
    with patch.object(optimizer, "_whole", FullMatrices(state_of(model).plan, names)):
        yield


@contextmanager
def frozen_step(model: Any, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer never steps."""
    with patch.object(optimizer, "step", lambda: None):
        yield


@contextmanager
def tiny_gradients(model: Any, optimizer: torch.optim.Optimizer, by: float) -> Iterator[None]:
    """No fault: gradients so small that rounding or `eps` swallows their update."""

    def shrink(*_: Any) -> None:
        for parameter in model.parameters():
            parameter.grad *= by

    with optimizer.register_step_pre_hook(shrink):
        yield


@contextmanager
def rate_is(model: Any, optimizer: torch.optim.Optimizer, rate: float, on: Collection[int]) -> Iterator[None]:
    """The last group of some ranks takes another rate."""

    def change(*_: Any) -> None:
        if dist.get_rank() in on:
            optimizer.param_groups[-1]["lr"] = rate

    with optimizer.register_step_pre_hook(change):
        yield


@contextmanager
def counts(model: Any, optimizer: torch.optim.Optimizer, by: int) -> Iterator[None]:
    """AdamW counts another number of steps."""
    yield
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] += by


# ---- faults of reading -----------------------------------------------------------------------------------------------


def all_read_the_first_s(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    return rows.batch(step, **{**knobs, "data_rank": 0})


def ranks_read_as_data_ranks(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    """Though tp ranks read the same."""
    return rows.batch(step, **{**knobs, "data_rank": dist.get_rank() % knobs["data_ranks"]})


def swapped_rows(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    """Together all rows of the step, but each data rank another's."""
    return rows.batch(step, **{**knobs, "data_rank": knobs["data_ranks"] - 1 - knobs["data_rank"]})


def with_places(rows: PackedRows, step: int, knobs: dict[str, int], change: Callable[[int], int]) -> list[MicroBatch]:
    plain = PackedRows.in_order
    with patch.object(PackedRows, "in_order", lambda self, places: plain(self, [change(each) for each in places])):
        return rows.batch(step, **knobs)


def shifted(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    return with_places(rows, step, knobs, lambda place: place + 1)


def the_second_twice(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    return with_places(rows, step, knobs, lambda place: 1 if place == 5 else place)


def the_step_before(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    return rows.batch(step + 1, **knobs)


def one_row_less(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    """In the last micro batch of rank 1."""
    batch, size = rows.batch(step, **knobs), knobs["global_batch_size"]
    if dist.get_rank() == 1:
        places = range(step * size + size - knobs["micro_batch_size"], step * size + size - 1)
        batch[-1] = rows.rows(rows.in_order(places), row_multiple=knobs["row_multiple"])
    return batch


def other_labels(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    """One label of rank 1 is another token."""
    batch = rows.batch(step, **knobs)
    if dist.get_rank() == 1:
        batch[-1].labels[-1, 0] = 5
    return batch


def other_bounds(rows: PackedRows, step: int, knobs: dict[str, int]) -> list[MicroBatch]:
    """Documents of rank 1 see each other."""
    batch = rows.batch(step, **knobs)
    if dist.get_rank() == 1:
        length = batch[0].input_ids.shape[1]
        object.__setattr__(batch[0], "cu_seqlens", batch[0].cu_seqlens[batch[0].cu_seqlens % length == 0])
    return batch


# ---- a run -----------------------------------------------------------------------------------------------------------


def train_and_break(tree: dict[str, Any], at: int) -> Ran:
    """After step `at` an element of a norm is the next number, on the last rank alone."""
    plain, calls = run_module.train_step, 0

    def train_step(model: Any, optimizer: torch.optim.Optimizer, *rest: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        last = dist.get_world_size() - 1
        with changed(model, optimizer, "model.norm.weight", [last], "ulp") if calls == at else nullcontext():
            return plain(model, optimizer, *rest, **options)

    with patch.object(run_module, "train_step", train_step):
        return on_rank(tree)


def train_unlike(tree: dict[str, Any]) -> Ran:
    """The last rank begins with another last element of the head."""
    plain = run_module.build_optimizer

    def build_optimizer(model: Any, *rest: Any) -> torch.optim.Optimizer:
        weight = local(model.lm_head.weight.detach())
        weight[-1, -1] = weight[-1, -1].nextafter(torch.tensor(2.0)) if dist.get_rank() else weight[-1, -1]
        return plain(model, *rest)

    with patch.object(run_module, "build_optimizer", build_optimizer):
        return on_rank(tree)


def train_and_note(tree: dict[str, Any]) -> tuple[Ran, list[int]]:
    """The steps that were checked, too."""
    checked, plain = [], standing_checks.StandingChecks.check

    def check(self: Any, run: Any, *rest: Any) -> None:
        plain(self, run, *rest)
        checked.append(run.step)

    with patch.object(standing_checks.StandingChecks, "check", check):
        return on_rank(tree), checked


# ---- the hash by itself ----------------------------------------------------------------------------------------------


def hash_of(*tensors: Tensor | None) -> list[int]:
    return hashes(tensors, torch.device("cpu")).tolist()
