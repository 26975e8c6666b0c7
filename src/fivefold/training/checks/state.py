"""Checks of weights and optimizer state: replicas are bit-identical, and everything is finite."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.parallel import plain
from fivefold.parallel.dtensor import local
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.parallel.state import ParallelState, state_of
from fivefold.torch_internals import magnitudes
from fivefold.training.checks.findings import Finding, gather, ranks_text, seen_anywhere

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
        texts.append(" against ".join(ranks_text(camp) for camp in sorted(camps)))
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
        Finding("finite", _label(*tensors[at][:2]), f"is not finite on {ranks_text(by_rank)}", tuple(by_rank))
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
    """The device of a model's parameters."""
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
