"""Standing checks: invariants of any step of any run whose violation a loss curve does not show.

    replicas   tensors replicated over ranks have the same bits on all of them
    finite     weights and moments are finite
    moved      the optimizer's step changed every parameter that it had to change
    rates      the learning rates are those of the schedule, and the optimizer's count of updates is the run's
    ledger     the ranks read the rows of the step, each its own
    pace       no rank computes much more slowly than the others: it is named, which ends no run

All ranks call a check together and get the same findings: none if all is well.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from xxhash import xxh3_64

from fivefold.core import text
from fivefold.core.errors import RunFailed
from fivefold.data.batch import MicroBatch
from fivefold.data.rows import RowSource
from fivefold.launch.failure import Suspected
from fivefold.parallel import plain
from fivefold.parallel.dtensor import local
from fivefold.parallel.layout import Layout
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.parallel.state import ParallelState, state_of
from fivefold.torch_internals import magnitudes
from fivefold.training.optimizers import UNTOUCHED, Unmoved, UpdateRule
from fivefold.training.optimizers.states import restored_state
from fivefold.training.step import all_reduce_sum

SHOWN = 3  # findings in an error, after the first

Key = TypeVar("Key", bound=tuple[Any, ...])
Value = TypeVar("Value")


@dataclass(frozen=True)
class Finding:
    """One violation. `what`: the check; `where`: the parameter, rank or row; `detail`: how, and on which ranks.
    `suspects`: the ranks that are wrong, if the check can tell them from those that are right."""

    what: str
    where: str
    detail: str
    suspects: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where} {self.detail}"


def fail_on(
    findings: Sequence[Finding], *, step: int, passed: int | None, came_in: bool = False, has_parts: bool = False
) -> None:
    """Raise `RunFailed` for findings at `step`, if any; `Suspected` if each of them tells which ranks are wrong.
    `passed`: the last step of this start that passed, if any. `came_in`: no step of this start was taken yet.
    `has_parts`: of the user's own, which a proof leaves out."""
    if not findings:
        return
    first, *others = findings
    more = [*map(str, others[:SHOWN]), *([f"{len(others) - SHOWN} more"] if others[SHOWN:] else [])]
    suspect = "since this start" if passed is None else f"after step {passed}"
    look = "prove the layout with fivefold verify"
    if has_parts:
        look = "try without train.parts, which fivefold verify leaves out"
    trained = f"what was trained {suspect} is wrong: remove its checkpoints, and {look}"
    error = RunFailed(
        f"standing check {'before the first step' if came_in else f'at step {step}'}: {first}",
        fix="nothing was trained yet, and copies came in so: compare the files that the nodes read"
        if came_in
        else trained,
        more=(f"also: {'; '.join(more)}; " if more else "") + "see fivefold docs explain/checkpoints, Standing checks",
    )
    if all(finding.suspects for finding in findings):
        suspects = sorted({rank for finding in findings for rank in finding.suspects})
        raise Suspected(error.what, fix=error.fix, more=error.more, ranks=suspects)
    raise error


def seen_anywhere(mine: Mapping[Key, Value], device: torch.device) -> dict[Key, dict[int, Value]]:
    """Share what any rank saw: key -> rank -> value, sorted by key, on every rank. If empty, only one all-reduce."""
    if not all_reduce_sum(torch.tensor(len(mine), device=device)):
        return {}
    found: list[dict[Any, Any]] = [  # JSON has turned the tuples into lists
        {tuple(key): value for key, value in pairs} for pairs in plain.everywhere(list(mine.items()))
    ]
    keys = sorted({key for named in found for key in named})
    return {key: {rank: named[key] for rank, named in enumerate(found) if key in named} for key in keys}


def gather(mine: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All-gather tensors of equal length: [ranks, elements]."""
    gathered = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(gathered), mine, group=group)
    return gathered


def listed(what: str, numbers: Iterable[int]) -> str:
    """A text such as "rank 0" or "ranks 0, 2", with at most eight numbers; "" for none."""
    given = list(numbers)
    return f"{what}{'s' if len(given) > 1 else ''} {text.listed(given, 8)}" if given else ""


# Elements hashed at a time: bounded by memory on a GPU, by a core's cache on a CPU, where 2**20 take five to twenty
# times as long.
PIECE, PIECE_OF_CPU = 2**20, 2**15
GOLDEN, MIX, MIX_AGAIN = -7046029254386353131, -4658895280553007687, -7723592293110705685  # splitmix64's, all odd


def replicas(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Finding]:
    """Findings for weights and optimizer state whose replicas differ in any bit. Of replicas that train apart, only
    the weights are compared, once an outer step has made them equal.

    Replicas exist over dp_replicate, over tp for unsharded parameters and shared key/value heads, and over the two
    pipeline ranks that hold a tied embedding.
    """
    state, device = state_of(model), device_of(model)
    has_copies = state.plan.layout.dp_replicate > 1
    shared = {
        name
        for name, spec in state.placement.shards.items()
        if spec.replicas > 1 or len(state.placement.pp_ranks[name]) > 1
    }
    names = [name for name in state.placement.shards if has_copies or name in shared]
    if not names:
        return []
    tensors = _tensors(model, optimizer, names)
    own = hashes([tensor for *_, tensor in tensors], device)
    mine: dict[tuple[int, str], tuple[list[int], int]] = {}
    outer = state.live(OuterSteps)
    met = [not outer.is_on or (outer.have_met and kind == "weight") for kind, *_ in tensors]
    for axis, group, alike in _copies(state, [name for _, name, _ in tensors], met):
        apart = ((gather(own, group) != own) & alike.to(device)).any(0)
        ranks = torch.tensor(dist.get_process_group_ranks(group))
        for at in apart.nonzero().flatten().tolist():
            copies = ranks[alike[:, at]].tolist()
            mine[at, axis] = copies, int(own[at])
    return [
        Finding("replicas", _label(*tensors[at][:2]), f"differs over {axis}: {_against(by_rank)}", _outvoted(by_rank))
        for (at, axis), by_rank in seen_anywhere(mine, device).items()
    ]


def _copies(
    state: ParallelState, names: Sequence[str], met: list[bool]
) -> Iterator[tuple[str, dist.ProcessGroup, Tensor]]:
    """Yield an axis, this rank's group over it, and bool [ranks of the group, names]: who replicates this rank's part.
    `met`: which are equal on all of dp_replicate.

    Ranks that differ in two axes are compared through a third rank.
    """
    specs, own = [state.placement.shards[name] for name in names], state.placement.coords.tp
    alike: dict[str, Callable[[int], list[bool]]] = {
        "tp": lambda rank: [rank == own if s.over != "tp" else s.held[rank] == s.held[own] for s in specs],
        "dp_replicate": lambda _: met,
        "pp_ends": lambda _: [len(state.placement.pp_ranks[name]) > 1 for name in names],
    }
    for axis, of_rank in alike.items():
        group = state.mesh.groups.get(axis)
        if group is not None:
            yield axis.removesuffix("_ends"), group, torch.tensor([of_rank(rank) for rank in range(group.size())])


def _against(by_rank: Mapping[int, tuple[list[int], int]]) -> str:
    """A text that lists, for each set of replicas, the groups of ranks that agree."""
    texts = []
    ordered = sorted((copies, value, rank) for rank, (copies, value) in by_rank.items())
    for _, of_copies in groupby(ordered, key=lambda pair: pair[0]):
        camps = [[rank for *_, rank in camp] for _, camp in groupby(of_copies, key=lambda pair: pair[1])]
        texts.append(" against ".join(listed("rank", camp) for camp in sorted(camps)))
    return ", ".join(texts)


def _outvoted(by_rank: Mapping[int, tuple[list[int], int]]) -> tuple[int, ...]:
    """The ranks whose bits are not those of most of their replicas; none if there is no majority in a set of them."""
    values: dict[tuple[int, ...], dict[int, list[int]]] = {}
    for rank, (copies, value) in by_rank.items():
        values.setdefault(tuple(copies), {}).setdefault(value, []).append(rank)
    wrong = set[int]()
    for replicas, camps in values.items():
        most = max(camps.values(), key=len)
        if 2 * len(most) <= len(replicas):
            return ()
        wrong |= {*replicas} - {*most}
    return tuple(sorted(wrong))


def finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Finding]:
    """Findings for weights and moments that hold an infinity or NaN."""
    tensors, device = _tensors(model, optimizer, list(state_of(model).placement.shards)), device_of(model)
    numbers = largest([tensor for *_, tensor in tensors], device).isfinite()
    mine = {(at,): True for at in (~numbers).nonzero().flatten().tolist()}
    return [
        Finding("finite", _label(*tensors[at][:2]), f"is not finite on {listed('rank', by_rank)}", tuple(by_rank))
        for (at,), by_rank in seen_anywhere(mine, device).items()
    ]


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> list[tuple[str, str, Tensor | None]]:
    """Triples (kind, name, this rank's part) of the weights, then of each kind of state: the same list on every rank.
    The part is None for a parameter of another pipeline rank."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    weights = [("weight", name, local(p) if (p := parameters.get(name)) is not None else None) for name in names]
    states = [(name, optimizer.state.get(parameters[name]) or {} if name in parameters else {}) for name in names]
    mine = {kind for _, state in states for kind, value in state.items() if isinstance(value, Tensor)}
    kinds = sorted({kind for rank in plain.everywhere(sorted(mine)) for kind in rank})
    kept = [(kind, name, state.get(kind)) for kind in kinds for name, state in states]
    return [*weights, *((kind, name, local(x) if isinstance(x, Tensor) else None) for kind, name, x in kept)]


def _label(kind: str, name: str) -> str:
    return name if kind == "weight" else f"{kind} of {name}"


def largest(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """The largest magnitude in each tensor, fp64 [tensors]; NaN if it has one; -1 for no tensor, 0 for an empty one. 0
    also for 8-bit codes, which are always finite; their scales may not be."""
    found = torch.tensor([-1.0 if tensor is None else 0.0 for tensor in tensors], dtype=torch.float64, device=device)
    full = {
        at: tensor
        for at, tensor in enumerate(tensors)
        if tensor is not None and tensor.numel() and tensor.is_floating_point()
    }
    if full:
        found[list(full)] = torch.stack(
            [magnitude.to(device, torch.float64) for magnitude in magnitudes(list(full.values()))]
        )
    return found


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


# ---- a hash of the bits of tensors, computed on their device: compares replicas, and before with after -------------


def hashes(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """A 64-bit hash of each tensor, int64 [tensors], without waiting for the device; 0 for None or an empty one.

    The elements as integers times odd numbers, summed mod 2^64. A change of one element always changes the hash; a
    change of order does, but for one case in 2^32 or fewer.
    """
    longest = max((_words(tensor.detach()).numel() for tensor in tensors if tensor is not None), default=0)
    factors = _odd_numbers(min(longest, PIECE_OF_CPU if device.type == "cpu" else PIECE), device)
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    return torch.stack([_hash(t.to(device), factors) if t is not None and t.numel() else nothing for t in tensors])


def _hash(tensor: Tensor, factors: Tensor) -> Tensor:
    value = torch.ones((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(_words(tensor.detach()), len(factors)):
        value = value * GOLDEN + (piece * factors[: len(piece)]).sum()
    return value


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as integers: fp64 as halves, or a sign would be one bit; 8-bit codes as they are."""
    types = {1: torch.uint8, 2: torch.int16}
    return tensor.reshape(-1).view(types.get(tensor.element_size(), torch.int32))


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """Pseudorandom odd numbers, int64 [count]: splitmix64 (Steele, Lea, Flood 2014), with arithmetic shifts."""
    x = torch.arange(1, count + 1, device=device) * GOLDEN
    x = (x ^ (x >> 30)) * MIX
    x = (x ^ (x >> 27)) * MIX_AGAIN
    return (x ^ (x >> 31)) | 1


@dataclass
class Update:
    """Weights and gradients, per parameter, of this rank as the optimizer began its step; None if it never did."""

    bits: Tensor | None = None  # hashes of the weights, int64
    gradients: Tensor | None = None  # the largest magnitude after clipping; -1 without a gradient


@contextmanager
def observing(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Update]:
    """Record for `moved` the weights and gradients when the optimizer's step begins inside the block. Local."""
    update, device = Update(), device_of(model)

    def note(*_: Any) -> None:
        parameters = _parameters(model)
        update.bits = hashes([None if p is None else local(p) for p in parameters], device)
        update.gradients = largest([None if p is None or p.grad is None else local(p.grad) for p in parameters], device)

    hook = optimizer.register_step_pre_hook(note)
    try:
        yield update
    finally:
        hook.remove()


def moved(model: nn.Module, optimizer: torch.optim.Optimizer, update: Update, *, rule: UpdateRule) -> list[Finding]:
    """Findings for parameters that should have changed in the step inside `observing` and did not.

    A parameter should change if (a) it has a gradient but no group of the optimizer holds it, or (b) by the optimizer's
    `rule` the update exceeds rounding. A skipped step changes nothing, and is not checked.
    """
    parameters, state, mine = _parameters(model), state_of(model), dict[tuple[int, str], bool]()
    labels = [*state.placement.shards, "the optimizer"]
    if update.bits is None or update.gradients is None:
        mine[len(parameters), "took no step"] = True
    else:
        bits = hashes([None if p is None else local(p) for p in parameters], device_of(model))
        gradients = update.gradients.tolist()
        for at in (bits == update.bits).nonzero().flatten().tolist():
            shape, parameter = state.placement.shards[labels[at]].shape, parameters[at]
            if parameter is not None and (why := _overdue(optimizer, rule, parameter, shape, gradients[at])):
                mine[at, why] = gradients[at] > 0
    return [
        Finding("moved", labels[at], f"{why} on {listed('rank', by_rank)}")
        for (at, why), by_rank in seen_anywhere(mine, device_of(model)).items()
        if why != UNTOUCHED or (any(by_rank.values()) and by_rank.keys() >= _holders(state, labels[at]))
    ]


def _parameters(model: nn.Module) -> list[Tensor | None]:
    """Every parameter of the whole model, in order; None for those of other pipeline ranks."""
    named = dict(model.named_parameters())
    return [named.get(name) for name in state_of(model).placement.shards]


def _overdue(
    optimizer: torch.optim.Optimizer, rule: UpdateRule, parameter: Tensor, shape: tuple[int, ...], gradient: float
) -> str | None:
    """The reason why this rank's unchanged part of a parameter should have changed; None if it need not."""
    group = next((group for group in optimizer.param_groups if any(p is parameter for p in group["params"])), None)
    if gradient < 0 or not local(parameter).numel() or (group and float(group["lr"]) == 0):
        return None
    if group is None:
        return "is in no group of the optimizer" if gradient else None
    state = restored_state(optimizer, parameter)
    return rule.overdue(Unmoved(group, state, local(parameter), shape, gradient))


def _holders(state: ParallelState, name: str) -> set[int]:
    return {rank for rank in range(dist.get_world_size()) if state.placement.regions(name, rank)}


def rates(
    model: nn.Module, optimizer: torch.optim.Optimizer, expected: float, *, updates: int | None = None
) -> list[Finding]:
    """Findings for learning rates other than the first rank's `expected`, and for a wrong count of updates.

    `updates`: steps of the run that were not skipped, resumed ones included; None: unknown. AdamW keeps its own count.
    """
    device = device_of(model)
    first = torch.tensor([expected], dtype=torch.float64, device=device)
    dist.broadcast(first, 0)
    wanted = first.item()
    used = [(f"of group {at}", float(group["lr"])) for at, group in enumerate(optimizer.param_groups)]
    mine = {("the learning rate", f"{of} is {rate}, not {wanted},"): True for of, rate in used if rate != wanted}
    counts = [torch.as_tensor(state["step"], device=device) for state in optimizer.state.values() if "step" in state]
    if updates is not None and counts and (counted := int(torch.stack(counts).max())) != updates:
        mine["the optimizer", f"counts {counted} updates, not {updates},"] = True
    seen = seen_anywhere(mine, device)
    return [
        Finding("rates", where, f"{detail} on {listed('rank', by_rank)}") for (where, detail), by_rank in seen.items()
    ]


def ledger(
    model: nn.Module, batch: Sequence[MicroBatch], rows: RowSource, *, step: int, global_batch_size: int,
    balance: bool = False,
) -> list[Finding]:  # fmt: skip
    """Findings for rows that ranks read wrongly at `step` (from 0), by content. `batch`: the rows this rank trained on.
    `balance`: they are shared out by cost.

    The first rank reads the global batch itself, in order. All ranks of a data rank have its places of the batch.
    """
    layout, device = state_of(model).plan.layout, device_of(model)
    places = range(step * global_batch_size, (step + 1) * global_batch_size)
    wanted = torch.zeros(global_batch_size, dtype=torch.int64, device=device)
    if dist.get_rank() == 0:
        own_reading = [rows.rows([row], row_multiple=layout.row_multiple) for row in rows.in_order(places)]
        wanted.copy_(torch.tensor([row_hash(reading, 0) for reading in own_reading]))
    dist.broadcast(wanted, 0)
    share = global_batch_size // layout.data_ranks
    read = [row_hash(rows, b) for rows in batch for b in range(len(rows.input_ids))]
    mine = torch.tensor([len(read), *(read + [0] * share)[:share]], device=device)  # the count shows excess rows
    shared = rows.shares(
        step, global_batch_size=global_batch_size, data_ranks=layout.data_ranks,
        micro_batch_size=layout.micro_batch_size, balance=balance,
    )  # fmt: skip
    return _misread(gather(mine).tolist(), wanted.tolist(), shared, layout, first=places.start)


def _misread(
    gathered: Sequence[Sequence[int]], wanted: Sequence[int], shared: NDArray[np.int64], layout: Layout, *, first: int
) -> list[Finding]:
    """Findings from `gathered`, each rank's row count and row hashes, against `wanted`, the hashes of the batch, and
    `shared`, which says who has which."""
    place_of = {hash_: first + at for at, hash_ in reversed(list(enumerate(wanted)))}  # equal rows: the first one
    inner = layout.tp * layout.cp  # consecutive ranks that read the same rows
    own = [shared[:, data_rank].flatten().tolist() for data_rank in range(layout.data_ranks)]
    found: dict[str, list[int]] = {}
    for rank, (count, *read) in enumerate(gathered):
        mine = own[rank // inner % layout.data_ranks]
        wrong = {at: hash_ for at, hash_ in zip(mine, read, strict=True) if hash_ != wanted[at]}
        if count != len(mine):
            found.setdefault(f"read {count} rows, not {len(mine)}", []).append(rank)
        elif wrong:
            known = listed("row", [place_of[hash_] for hash_ in wrong.values() if hash_ in place_of])
            instead = (
                f"{known or 'what is no row of this step'} in place of {listed('row', [first + at for at in wrong])}"
            )
            found.setdefault(f"read {instead}", []).append(rank)
    readers = gathered[: inner * layout.data_ranks : inner]  # in a pipeline, those of the first stage
    taken = Counter(hash_ for _, *read in readers for hash_ in read)
    uneven = (("more than once", taken - Counter(wanted)), ("by nobody", Counter(wanted) - taken))
    by_row = [
        (listed("row", sorted(place_of[hash_] for hash_ in few if hash_ in place_of)), how) for how, few in uneven
    ]
    misreaders = tuple(sorted({rank for ranks in found.values() for rank in ranks}))
    return [
        *(Finding("ledger", listed("rank", ranks), text, tuple(ranks)) for text, ranks in found.items()),
        *(Finding("ledger", where, f"read {how}", misreaders) for where, how in by_row if where),
    ]


def row_hash(batch: MicroBatch, b: int) -> int:
    """A hash of row `b`, int64, over its tokens, labels, positions and document boundaries."""
    length = batch.input_ids.shape[1]
    inside = (batch.cu_seqlens >= b * length) & (batch.cu_seqlens <= (b + 1) * length)
    hasher = xxh3_64((batch.cu_seqlens[inside] - b * length).tobytes())
    for array in (batch.input_ids, batch.labels, batch.position_ids):
        hasher.update(np.ascontiguousarray(array[b]).data)
    return hasher.intdigest() - 2**63
