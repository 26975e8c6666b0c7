"""An optimizer of the user's own: a class in a file that the run file names, `optimizer.path: my_optimizer.py:Lion`.

The class takes parameter groups, `lr`, `weight_decay` if it has any, and `optimizer.options`. It is tried twice before
the first step: here on a vector and a matrix, for what every run needs of it under any layout; and for what a rank
holds (`trial.py`).

A run that goes on builds the class anew and gives it what a checkpoint has: the weights, and the tensors and numbers in
`self.state` of each parameter. A class must then go on as if nothing had happened.
"""

import copy
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.checkpoint.records import DTYPES
from fivefold.config import OptimizerSection
from fivefold.core.errors import UserError, first_line
from fivefold.core.named_code import NamedCode
from fivefold.core.optimizers import OptimizerFacts, state_words
from fivefold.parallel.placement import Placement
from fivefold.parallel.plain import on_every_rank
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import UpdateRule, Weights
from fivefold.training.optimizers.trial import READ_MORE, Make, check_runs, check_update

_RATE = 0.01  # learning rate of a trial


def rule_at(options: OptimizerSection) -> "PythonOptimizer":
    """The rule of the class at `optimizer.path`, whose file is run, once for its contents. Raises `UserError`."""
    assert options.path is not None, "the run file sets it"
    return _rule(NamedCode.read(options.path, "optimizer.path"), options.model_dump_json())


@cache
def _rule(code: NamedCode, options: str) -> "PythonOptimizer":
    return PythonOptimizer(code, OptimizerSection(**json.loads(options)))


class PythonOptimizer(UpdateRule):
    """A class of the user's own. `takes_decay`: it has a `weight_decay`."""

    def __init__(self, code: NamedCode, options: OptimizerSection) -> None:
        """Run the file and try the class. Raises `UserError` with the line of an error."""
        self._code, self._class, self.digest = code, code.load(), code.digest
        if not (isinstance(self._class, type) and issubclass(self._class, torch.optim.Optimizer)):
            raise self._refusal(
                "it is no class of a torch.optim.Optimizer", f"class {code.name}(torch.optim.Optimizer)"
            )
        known = inspect.signature(self._class).parameters
        if "lr" not in known:
            raise self._refusal(
                "it takes no lr", "def __init__(self, params, lr, ...): the schedule sets the lr of groups"
            )
        _, *taken = inspect.signature(self._class.step).parameters.values()
        if needed := [one.name for one in taken if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]:
            raise self._refusal(
                f"its step needs {needed[0]}, and a run calls step() once, after the backward pass of the batch",
                f"def step(self, {needed[0]}=None)",
            )
        if all(callable(getattr(self._class, name, None)) for name in ("train", "eval")):
            raise self._refusal(
                "it has train() and eval(): evaluation is of other weights than training, and no run calls them",
                "use a class whose parameters are the weights to evaluate",
            )
        # A class may take a decay by **options.
        self.takes_decay = "weight_decay" in known or "weight_decay" in self._default_group(options)
        if options.weight_decay and not self.takes_decay:
            raise self._refusal(
                f"optimizer.weight_decay is {options.weight_decay:g}, and it takes none",
                "leave optimizer.weight_decay out, or give its __init__ a weight_decay that is that of its groups",
            )
        self._kinds = self._try(options)
        words, kinds = state_words(), dict.fromkeys(kind for of_dims in self._kinds.values() for kind in of_dims)
        self.facts = OptimizerFacts(
            name=code.name, state={kind: words.get(kind, kind.replace("_", " ")) for kind in kinds}
        )

    def build(self, model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        """Build it over every trained parameter. Raises `UserError`, on every rank, if it would be wrong on any."""
        state = state_of(model)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        dims = {name: state.placement.shards[name].dims for name in named}
        optimizer = self._over(
            [p for name, p in named.items() if dims[name] > 1], [p for name, p in named.items() if dims[name] <= 1],
            options, options.learning_rate,
        )  # fmt: skip

        def check() -> None:
            make = self.like(options)
            try:
                check_update(optimizer, state.plan.layout, make)
                check_runs(optimizer, list(named.values()), make)
            except UserError as error:
                raise UserError(f"{self._code.path}: {error.what}", fix=error.fix, more=error.more) from error

        on_every_rank(check)
        return optimizer

    def like(self, options: OptimizerSection) -> Make:
        def make(groups: list[dict[str, Any]], but: Sequence[str]) -> torch.optim.Optimizer:
            return self._made(groups, options, float(groups[0]["lr"]), but)

        return make

    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        return [self._over([*weights.blocks, *weights.matrices], weights.vectors, options, rate)]

    def state(self, placement: Placement) -> dict[str, list[str]]:
        trained = [name for name in placement.shards if placement.facts.parameters[name].is_trained]
        dims = {name: min(max(placement.shards[name].dims, 1), 2) for name in trained}
        return {kind: [name for name in trained if kind in self._kinds[dims[name]]] for kind in self.facts.state}

    def _over(
        self, decayed: Sequence[Tensor], others: Sequence[Tensor], options: OptimizerSection, rate: float
    ) -> torch.optim.Optimizer:
        """The class over two groups, of which norms and biases do not decay; over one if it has no decay."""
        groups: list[dict[str, Any]] = [{"params": [*decayed, *others]}]
        if self.takes_decay:
            both = (decayed, options.weight_decay), (others, 0.0)
            groups = [{"params": list(params), "weight_decay": decay} for params, decay in both]
            groups = [group for group in groups if group["params"]] or groups[:1]
        made = self._made(groups, options, rate)
        of_parameter = {p: group for group in made.param_groups for p in group["params"]}
        for group in groups:
            wanted = {"lr": rate, **{key: value for key, value in group.items() if key != "params"}}
            for parameter in group["params"]:
                if parameter not in of_parameter:
                    raise self._refusal(
                        "its parameter groups leave out parameters that it is given",
                        "super().__init__(params, {'lr': lr, ...}), with the groups as they are given",
                    )
                if missed := [key for key in wanted if of_parameter[parameter].get(key) != wanted[key]]:
                    raise self._refusal(
                        f"its parameter groups do not have the {missed[0]} that it is given",
                        f"super().__init__(params, {{'{missed[0]}': {missed[0]}, ...}}), and read "
                        f"group['{missed[0]}'] in step",
                    )
        return made

    def _made(
        self, groups: Sequence[dict[str, Any]], options: OptimizerSection, rate: float, but: Sequence[str] = ()
    ) -> torch.optim.Optimizer:
        """The class over groups, without the options in `but`."""
        given = {key: value for key, value in (options.options or {}).items() if key not in but}
        if "weight_decay" in inspect.signature(self._class).parameters:
            given["weight_decay"] = options.weight_decay  # one that is not that of groups would be its default
        try:
            # Copies: torch adds the defaults to the groups that it is given.
            return self._class([dict(group) for group in groups], lr=rate, **given)  # type: ignore[no-any-return]
        except Exception as error:  # any error of the user's code
            raise self._code.error(error, more=READ_MORE) from error

    def _default_group(self, options: OptimizerSection) -> Mapping[str, Any]:
        return self._made([{"params": [nn.Parameter(torch.zeros(4, 6))]}], options, _RATE).param_groups[0]

    def _try(self, options: OptimizerSection) -> Mapping[int, Sequence[str]]:
        """Try the class, and return the kinds of state that a vector and a matrix have in their shape. Raises
        `UserError` for what a run could not resume, or would do otherwise than its file says."""

        def build(matrix: Tensor, vector: Tensor) -> torch.optim.Optimizer:
            return self._over([matrix], [vector], options, _RATE)

        probe = Probe(build)
        try:
            unfit = why_unfit(probe) or self._ignores_decay(options)
        except UserError:
            raise
        except Exception as error:  # any error of the user's code
            raise self._code.error(error, more=READ_MORE) from error
        if unfit:
            raise self._refusal(*unfit)
        return probe.kinds

    def _ignores_decay(self, options: OptimizerSection) -> tuple[str, str] | None:
        """The refusal of a class that is to decay, and updates alike whatever the decay of its groups is."""
        if not options.weight_decay:
            return None

        def build(decay: float, matrix: Tensor, vector: Tensor) -> torch.optim.Optimizer:
            return self._made([{"params": [matrix, vector], "weight_decay": decay}], options, _RATE)

        probes = [Probe(partial(build, decay)) for decay in (0.0, 0.5)]
        for probe in probes * 3:
            probe.step()
        if probes[0].has_values_of(probes[1]):
            return "its update does not depend on the weight_decay of its groups", "read group['weight_decay'] in step"
        return None

    def _refusal(self, what: str, fix: str) -> UserError:
        return UserError(f"optimizer.path: {self._code.path}: {self._code.name}: {what}", fix=fix, more=READ_MORE)


# ---- the trial on a vector and a matrix ------------------------------------------------------------------------------

_SHAPES = {1: (4,), 2: (4, 6)}  # tensors of a trial, by their number of dimensions
_AFTER = 30  # steps after a resume: periods of some steps have passed
_KEEP = "keep what its steps change in self.state of every parameter, as tensors and numbers: state['step'] = 0"
Build = Callable[[Tensor, Tensor], torch.optim.Optimizer]  # over a matrix and a vector


class Probe:
    """An optimizer over a vector and a matrix."""

    def __init__(self, build: Build, values: Mapping[int, Tensor] | None = None, taken: int = 0) -> None:
        """`values`: those of the tensors, after `taken` steps; None: at the start."""
        self._build, self._taken = build, taken
        start = {dims: torch.linspace(-1, 1, 4 * 6 ** (dims - 1)).view(shape) for dims, shape in _SHAPES.items()}
        self.tensors = {dims: nn.Parameter(value.detach().clone()) for dims, value in (values or start).items()}
        self.optimizer = build(self.tensors[2], self.tensors[1])

    def step(self) -> None:
        """Take one step, with gradients that differ from those of the last one."""
        self._taken += 1
        for dims, tensor in self.tensors.items():
            angles = torch.arange(tensor.numel(), dtype=tensor.dtype) * self._taken + dims
            tensor.grad = angles.sin().mul_(0.1).view_as(tensor)
        self.optimizer.step()

    def resumed(self) -> "Probe":
        """Another one, as a checkpoint restores it."""
        found = Probe(self._build, self.tensors, self._taken)
        for dims, tensor in self.tensors.items():
            kept = self.optimizer.state.get(tensor, {}).items()
            found.optimizer.state[found.tensors[dims]] = {
                key: copy.deepcopy(value) for key, value in kept if value is not None
            }
        return found

    def has_values_of(self, other: "Probe") -> bool:
        return all(torch.equal(tensor, other.tensors[dims]) for dims, tensor in self.tensors.items())

    @property
    def kinds(self) -> Mapping[int, list[str]]:
        """The kinds of state in the shape of their parameter, by the number of its dimensions."""
        states = {dims: self.optimizer.state.get(tensor, {}) for dims, tensor in self.tensors.items()}
        return {
            dims: [kind for kind, value in states[dims].items() if getattr(value, "shape", None) == _SHAPES[dims]]
            for dims in _SHAPES
        }


def why_unfit(probe: Probe) -> tuple[str, str] | None:
    """Why a run cannot use the class of `probe`, which has taken no step, and the fix; None if it can."""
    with torch.random.fork_rng(devices=[]):
        return next(_reasons(probe), None)


def _reasons(probe: Probe) -> Iterator[tuple[str, str]]:
    """The reasons, in an order in which a later check relies on the earlier ones."""
    optimizer, drawn = probe.optimizer, _generators()
    memory = [tensor.data_ptr() for tensor in probe.tensors.values()]
    probe.step()
    if wrong := _not_kept(optimizer):
        yield wrong, "keep tensors and numbers in self.state of a parameter"
    before = _counts(optimizer)
    probe.step()
    if changed := [where for where, number in _counts(optimizer).items() if number != before.get(where)]:
        yield f"it counts in {changed[0]}, which no checkpoint has", _KEEP
    if _generators() != drawn:
        yield (
            "it draws random numbers, and no checkpoint has the state of their generator",
            "draw from a generator of its own, seeded by a count: torch.Generator().manual_seed(state['step'])",
        )
    if [tensor.data_ptr() for tensor in probe.tensors.values()] != memory:
        yield (
            "it gives parameters other memory (p.data = ...), of which a parallelized model does not learn",
            "change them in place: p.add_(...), p.copy_(...)",
        )
    resumed = probe.resumed()
    try:
        for _ in range(_AFTER):
            probe.step()
            resumed.step()
    except Exception as error:  # any error of the user's code
        yield f"from a checkpoint its step raises {type(error).__name__}: {first_line(error)}", _KEEP
    if not resumed.has_values_of(probe):
        yield "from a checkpoint it goes on otherwise: it depends on more than self.state of the parameters", _KEEP
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    still = Probe(lambda *_: optimizer, probe.tensors)
    probe.step()
    if not still.has_values_of(probe):
        yield (
            "it changes weights although the lr of its groups is 0: the schedule would not reach it",
            "read group['lr'] in step",
        )


def _not_kept(optimizer: torch.optim.Optimizer) -> str:
    """State that no checkpoint has, in words; empty if there is none."""
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            return f"it keeps self.state[{parameter!r}], which belongs to no parameter, and no checkpoint has"
        for key, value in state.items():
            if not isinstance(value, Tensor | int | float | None):
                return f"it keeps {key} as a {type(value).__name__}, which no checkpoint holds"
            if isinstance(value, Tensor) and value.ndim and str(value.dtype).removeprefix("torch.") not in DTYPES:
                return f"it keeps {key} in {value.dtype}, which no checkpoint holds"
    return ""


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """The numbers of an optimizer beside its state, by where they stand."""
    places = [("its parameter groups", group) for group in optimizer.param_groups] + [("self", vars(optimizer))]
    return {
        f"{key} of {where}": float(value)
        for where, values in places
        for key, value in values.items()
        if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    }


def _generators() -> tuple[Any, ...]:
    """The state of the generators that code draws from unless it makes its own."""
    numbers: Any = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), numbers["key"].tobytes(), numbers["pos"]
