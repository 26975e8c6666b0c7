"""Checks that a user's optimizer may update what a rank holds: it is tried on small tensors, not looked up by name.

A rank holds shards of tensors. AdamW, SGD and similar optimizers update each element by its own gradient, so updates of
shards equal those of the whole. Muon, Adafactor and LAMB use rows, norms or whole matrices, and are right only if every
tensor is whole on some rank (a pipeline); Prodigy, LBFGS and other sums over all parameters, only if a rank has all.
"""

import copy
import inspect
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from fivefold.core.errors import UserError, first_line
from fivefold.parallel.layout import Layout
from fivefold.parallel.parts import mixes_nothing
from fivefold.torch_internals import Dispatch

READ_MORE = "fivefold docs howto/optimizers"
# Options that choose an implementation, not the update.
IMPLEMENTATION = ("foreach", "fused", "capturable", "differentiable")
_OF_TORCH = ("state", "param_groups", "defaults")  # attributes of every optimizer
_STEPS = 100  # steps of a trial
_RESUMED = 39  # the step after which others go on
_RATE = 0.01  # learning rate of a trial, if an optimizer has none
# Rounding differences of kernels for other lengths in fp64: relative to the distance moved, and absolute.
_CLOSE, _ROUNDED = 1e-6, 1e-13


# Builds an optimizer over parameter groups, without some options.
Make = Callable[[list[dict[str, Any]], Sequence[str]], torch.optim.Optimizer]


def check_update(optimizer: torch.optim.Optimizer, layout: Layout, make: Make | None = None) -> None:
    """Raise `UserError` if an update of what a rank holds would differ from that of one process. `make` builds others
    like it; None: from its class, its groups and its plain attributes."""
    hold = _what_ranks_hold(layout)
    _check_parts(optimizer, layout, make)
    if hold != "all" and not getattr(optimizer, "is_elementwise", False) and (wrong := why_not(optimizer, hold, make)):
        reason, right = wrong
        updates = "some of the tensors are updated at a time" if _is_offloaded(layout) else "a rank holds some of them"
        raise _refusal(
            f"{type(optimizer).__name__} under {layout}: {reason}, and "
            f"{'a rank holds parts of the tensors' if hold == 'parts' else updates}",
            fix=f"use an optimizer that updates each element by its own gradient (torch.optim.AdamW), or {right}; "
            "where you know that it does: optimizer.is_elementwise = True",
        )


def _check_parts(optimizer: torch.optim.Optimizer, layout: Layout, make: Make | None = None) -> None:
    """Raise `UserError` if the optimizer cannot update part after part, as with state in host memory: a group may have
    no parameters in a part."""
    if not _is_offloaded(layout) or getattr(optimizer, "walks_its_states", False):
        return
    small = [[torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)] for _ in optimizer.param_groups]
    twin = _Twin(optimizer, small, list, make)
    for last in range(len(small)):
        whole = [group["params"] for group in twin.optimizer.param_groups]
        for at, group in enumerate(twin.optimizer.param_groups):
            group["params"] = whole[at] if at == last else []
        try:
            twin.step(small)
        except Exception as error:
            raise _refusal(
                f"{type(optimizer).__name__} under {layout}, which updates part after part: its step fails where a "
                f"group has no parameters: {first_line(error)[:120]}",
                fix="leave such groups out in step: if not group['params']: continue",
            ) from error
        for group, parameters in zip(twin.optimizer.param_groups, whole, strict=True):
            group["params"] = parameters


def _what_ranks_hold(layout: Layout) -> Literal["all", "tensors", "parts"]:
    """All parameters whole (only replicas over dp_replicate), some of them whole (a pipeline, or an update part after
    part from host memory), or parts of them."""
    if layout.world == layout.dp_replicate:
        return "tensors" if _is_offloaded(layout) else "all"
    return "tensors" if layout.world == layout.dp_replicate * layout.pp else "parts"


def _is_offloaded(layout: Layout) -> bool:
    return layout.offload_optimizer or layout.offload_parameters


def check_runs(optimizer: torch.optim.Optimizer, parameters: Sequence[Any], make: Make | None = None) -> None:
    """Raise `UserError` if the optimizer needs operations that torch lacks for DTensors, the type of the parameters."""
    like = next((parameter for parameter in parameters if isinstance(parameter, DTensor)), None)
    if like is None:
        return

    def as_its_own(tensors: Sequence[Tensor]) -> list[Tensor]:
        own = (tensor.to(like.device) for tensor in tensors)
        return [DTensor.from_local(part, like.device_mesh, like.placements, run_check=False) for part in own]

    small = [[torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6)] for _ in optimizer.param_groups]
    try:
        twin = _Twin(optimizer, small, as_its_own, make, but=())
        for _ in range(3):
            twin.step(small)
        if like.device_mesh.size() > 1 and (kept := twin.beside_mesh()):
            raise TypeError(
                f"it keeps {kept} as a plain tensor of one rank's part, and a checkpoint would have one part"
            )
        resumed = _Twin(optimizer, small, as_its_own, make, but=())
        resumed.go_on_from(twin, list)
        resumed.step(small)
    except Exception as error:
        raise _refusal(
            f"{type(optimizer).__name__} cannot update parameters that are DTensors, as those of a parallelized model "
            f"are: {first_line(error)[:120]}",
            fix="keep state as zeros_like(p), and numbers of a tensor as numbers: float(p.norm()); or use another: "
            "torch.optim.AdamW(model.parameters(), lr=1e-4)",
        ) from error


def _refusal(what: str, fix: str) -> UserError:
    return UserError(what, fix=fix, more=READ_MORE)


# ---- trials on small tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """A way to distribute tensors: `share(tensors, rank=)` returns the part of one of two ranks. `reason`: why steps
    differ under it; `right`: the layout in which they do not."""

    share: Callable[..., list[Tensor]]
    reason: str
    right: str


def why_not(
    optimizer: torch.optim.Optimizer, ranks_hold: Literal["tensors", "parts"], make: Make | None = None
) -> tuple[str, str] | None:
    """Why steps over a rank's parameters, some of the tensors or parts of each, would differ from those of one process,
    and the right layout; None if they are the same.

    Optimizers like this one take `_STEPS` steps: one over some small tensors, others over two ranks' shares of them.
    Tensors, and parts of them, have gradients of different sizes, which jump one after another: an update that depends
    on more than one element differs on each rank. After that many steps warm-ups are over and periods have passed.
    """
    try:
        with torch.random.fork_rng(devices=[]), torch.compiler.set_stance("force_eager"):
            return _differing(optimizer, [_TENSORS] if ranks_hold == "tensors" else [_TENSORS, _PARTS], make)
    except Exception as error:  # any error of third-party code
        return f"it cannot be tried on small tensors ({type(error).__name__}: {first_line(error)[:80]})", _HAS_ALL


def _differing(optimizer: torch.optim.Optimizer, ways: Sequence[_Way], make: Make | None) -> tuple[str, str] | None:
    noise = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")
    start = [[noise(shape) for shape in _shapes(group["params"])] for group in optimizer.param_groups]
    sizes = [[_sized(noise(tensor.shape).sign(), at) for at, tensor in enumerate(group)] for group in start]
    mixed = set[str]()
    whole = _Twin(optimizer, start, list, make)
    twins = {way: [_Twin(optimizer, start, partial(way.share, rank=rank), make) for rank in (0, 1)] for way in ways}
    for step in range(_STEPS):
        gradients = [
            [size * (1 + 0.5 * noise(size.shape)) * (30.0 if (step + at) % 7 == 3 else 1.0) for at, size in numbered]
            for numbered in map(enumerate, sizes)
        ]
        with Dispatch(partial(_note, mixed)):
            whole.step(gradients)
        for twin in itertools.chain(*twins.values()):
            twin.step(gradients)
        for way, ranks in twins.items() if step == 0 or step % 10 == 9 else ():
            if any(twin.differs(whole, start) for twin in ranks):
                return way.reason, way.right
        if step == _RESUMED:  # ranks go on with the state of their tensors, as from another layout's checkpoint
            twins[_TENSORS] += [whole.resumed(partial(_TENSORS.share, rank=rank)) for rank in (0, 1)]
    _note_large(optimizer, mixed, make)
    pairs = zip(itertools.chain(*whole.parameters), itertools.chain(*start), strict=True)
    if all(itertools.starmap(torch.equal, pairs)):
        return "its steps change nothing in small tensors", _HAS_ALL
    if mixed and _PARTS in ways:
        return (
            f"its step takes {', '.join(sorted(mixed))} of tensors, which an update may depend on later",
            _PARTS.right,
        )
    return None


def _note(mixed: set[str], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; note its name if its results may each depend on several numbers."""
    out = operator(*args, **kwargs)
    reads = (
        tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor) and tensor.is_floating_point()
    )
    if not operator.is_view and any(tensor.numel() > 1 for tensor in reads) and not mixes_nothing(operator):
        mixed.add(operator.overloadpacket.__name__.strip("_"))
    return out


def _note_large(optimizer: torch.optim.Optimizer, mixed: set[str], make: Make | None) -> None:
    """Note the operators of a step on tensors of the parameters' real sizes, without values: some optimizers treat
    large tensors differently."""
    shapes = [
        dict.fromkeys(tuple(parameter.shape) for parameter in group["params"]) for group in optimizer.param_groups
    ]
    large = [[torch.empty(shape, device="meta") for shape in group] for group in shapes]
    with suppress(Exception), Dispatch(partial(_note, mixed)):  # reading a value fails on meta
        twin = _Twin(optimizer, large, list, make)
        for _ in range(2):
            twin.step(large)


def _shapes(parameters: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Two tensors for each number of dimensions in `parameters`, large enough for rules about large ones."""
    known = {0: (), 1: (512,), 2: (128, 160)}
    dims = sorted({parameter.ndim for parameter in parameters} or {2})
    return [known.get(n, (4,) * (n - 2) + (16, 24)) for n in dims for _ in range(2)]


def _sized(signs: Tensor, at: int) -> Tensor:
    """Gradients of tensor number `at`: ten times as large in the first rank's part."""
    for dim in range(signs.ndim):
        signs.narrow(dim, 0, signs.shape[dim] // 4).mul_(10)
    return signs * 10.0 ** -(at % 3)


def _part(tensor: Tensor, at: int, rank: int) -> Tensor:
    """A quarter of the rows or columns for the first rank, the rest for the second; a single number is on both."""
    dim = -1 if at % 2 else 0
    return tensor.tensor_split([tensor.shape[dim] // 4], dim)[rank] if tensor.ndim else tensor


_HAS_ALL = "a layout that has all parameters on every rank (dp); ff.clip_grad_norm_ clips by the norm of a whole model"
_TENSORS = _Way(
    lambda tensors, rank: list(tensors[rank::2]), "its update of a tensor depends on other tensors", _HAS_ALL
)
_PARTS = _Way(
    lambda tensors, rank: [_part(tensor, at, rank) for at, tensor in enumerate(tensors)],
    "its update of an element depends on others of the tensor",
    "a layout of whole tensors (dp, pp); fivefold's own Muon takes parts: ff.train, optimizer.name=muon",
)


class _Twin:
    """An optimizer like another one, over its share of small tensors, group by group."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, tensors: Sequence[Sequence[Tensor]], share: Callable[[Any], list[Any]],
        make: Make | None = None, but: Sequence[str] = IMPLEMENTATION,
    ) -> None:  # fmt: skip
        """`but`: options to leave out; some are not available on a CPU."""
        self._share, self._source = share, (optimizer, make)
        self.parameters = [[nn.Parameter(own.detach().clone()) for own in share(group)] for group in tensors]
        self.optimizer = _like(optimizer, self.parameters, but, make)

    def resumed(self, share: Callable[[Any], list[Any]]) -> "_Twin":
        """Another one over a share of these tensors, with their values and their state of now."""
        optimizer, make = self._source
        found = _Twin(optimizer, self.parameters, share, make)
        found.go_on_from(self, share)
        return found

    def go_on_from(self, other: "_Twin", share: Callable[[Any], list[Any]]) -> None:
        """Take the state of a share of another one's tensors, as a checkpoint restores it."""
        for mine, theirs in zip(self.parameters, map(share, other.parameters), strict=True):
            for parameter, before in zip(mine, theirs, strict=True):
                if before in other.optimizer.state:
                    state = other.optimizer.state[before]
                    self.optimizer.state[parameter] = {key: _restored(state[key], parameter) for key in state}

    def beside_mesh(self) -> str | None:
        """A kind of state that is no number, and no DTensor."""
        kept = ((key, value) for state in self.optimizer.state.values() for key, value in state.items())
        return next((k for k, v in kept if isinstance(v, Tensor) and v.ndim and not isinstance(v, DTensor)), None)

    def step(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        for parameters, given in zip(self.parameters, gradients, strict=True):
            for parameter, gradient in zip(parameters, self._share(given), strict=True):
                parameter.grad = gradient.clone()
        self.optimizer.step()

    @torch.no_grad()
    def differs(self, whole: "_Twin", start: Sequence[Sequence[Tensor]]) -> bool:
        """True if a tensor deviates from its counterpart in `whole`, relative to that one's distance from `start`."""
        return any(
            not torch.allclose(own, other, rtol=0, atol=_CLOSE * float((other - first).abs().max()) + _ROUNDED)
            for mine, theirs, before in zip(self.parameters, whole.parameters, start, strict=True)
            for own, other, first in zip(mine, self._share(theirs), self._share(before), strict=True)
        )


def _restored(value: Any, parameter: Tensor) -> Any:
    """A state as a checkpoint restores it beside a parameter: 0-d tensors are plain, and others like the parameter."""
    if isinstance(value, DTensor) and not value.ndim:
        return value.full_tensor()
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.ndim and not isinstance(value, DTensor):
        mesh = parameter.device_mesh
        return DTensor.from_local(value.clone(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copy.deepcopy(value)


def _like(
    optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]], but: Sequence[str], make: Make | None
) -> torch.optim.Optimizer:
    """A new optimizer of the same class and settings over other parameters, without the options in `but`."""
    own = [
        {**_options(group, optimizer.defaults, but), "params": list(parameters)}
        for group, parameters in zip(optimizer.param_groups, groups, strict=True)
    ]
    if make:
        return make(own, but)
    known = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    given = {key: value for key, value in vars(optimizer).items() if key in known and _is_plain(value)}
    given |= {key: value for key, value in optimizer.defaults.items() if key in known or takes_all}
    given |= {"lr": _RATE} if "lr" in known and given.get("lr", 0) == 0 else {}
    made = type(optimizer)(own, **{key: value for key, value in given.items() if key not in but})
    # Options that it keeps under names of its own.
    mine = {key: value for key, value in vars(optimizer).items() if key not in _OF_TORCH and _is_plain(value)}
    vars(made).update(copy.deepcopy(mine))
    return made


def _options(group: dict[str, Any], defaults: dict[str, Any], but: Sequence[str]) -> dict[str, Any]:
    """The options of a group, at the largest of its rates: a warm-up may begin at zero."""
    rates = [group.get("initial_lr"), group.get("lr"), defaults.get("lr")]
    largest = max((float(rate) for rate in rates if isinstance(rate, int | float | Tensor)), default=None)
    kept = copy.deepcopy({key: value for key, value in group.items() if key not in ("params", "param_names", *but)})
    return kept if largest is None else kept | {"lr": largest or _RATE}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
