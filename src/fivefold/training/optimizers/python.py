"""An optimizer of the user's own: a class in a file that the run file names, `optimizer.path: my_optimizer.py:Lion`.

The class takes parameter groups, `lr`, `weight_decay` if it has any, and `optimizer.options`. It is tried twice before
the first step: here on two small tensors, for what a run needs of it; and for what a rank holds (`trial.py`).
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config import OptimizerSection
from fivefold.core.errors import UserError
from fivefold.core.named_code import NamedCode
from fivefold.core.optimizers import OptimizerFacts, state_words
from fivefold.parallel import plain
from fivefold.parallel.placement import Placement
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import UpdateRule, Weights
from fivefold.training.optimizers.trial import READ_MORE, check_runs, check_update

_SHAPES = {1: (4,), 2: (4, 6)}  # tensors of a trial, by their number of dimensions
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
        self.takes_decay = "weight_decay" in known
        if "lr" not in known:
            raise self._refusal(
                "it takes no lr", "def __init__(self, params, lr, ...): the schedule sets the lr of groups"
            )
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
        failed: dict[str, Any] | None = None
        try:
            check_update(optimizer, state.plan.layout)
            check_runs(optimizer, list(named.values()))
        except UserError as error:
            failed = self._told(error).to_json()
        if told := next(filter(None, plain.everywhere(failed)), None):
            raise UserError.from_json(told)
        return optimizer

    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        """The same class over whole tensors."""
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
        wanted = [{"lr": rate, **{key: value for key, value in group.items() if key != "params"}} for group in groups]
        try:
            made = self._class(groups, lr=rate, **(options.options or {}))
        except Exception as error:  # any error of the user's code
            raise self._code.error(error, more=READ_MORE) from error
        pairs = zip(wanted, made.param_groups, strict=True)
        if missed := [key for given, group in pairs for key in given if group.get(key) != given[key]]:
            raise self._refusal(
                f"its parameter groups do not have the {missed[0]} that it is given",
                f"super().__init__(params, {{'{missed[0]}': {missed[0]}, ...}}), and read group['{missed[0]}'] in step",
            )
        return made  # type: ignore[no-any-return]

    def _try(self, options: OptimizerSection) -> Mapping[int, Sequence[str]]:
        """Take steps over a vector and a matrix, and return the kinds of state that each has in its shape. Raises
        `UserError` for what a run could not resume, or would do otherwise than its schedule says."""
        tensors = {
            dims: nn.Parameter(torch.linspace(-1, 1, 4 * 6 ** (dims - 1)).view(_SHAPES[dims])) for dims in _SHAPES
        }
        with torch.random.fork_rng(devices=[]):
            optimizer = self._over([tensors[2]], [tensors[1]], options, _RATE)
            self._step(optimizer, tensors)
            before = self._counts(optimizer)
            self._step(optimizer, tensors)
            if changed := [where for where, number in self._counts(optimizer).items() if number != before.get(where)]:
                raise self._refusal(
                    f"it counts in {changed[0]}, which no checkpoint has",
                    "keep the count in self.state of a parameter: state['step'] = state.get('step', 0) + 1",
                )
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            was = [tensor.detach().clone() for tensor in tensors.values()]
            self._step(optimizer, tensors)
        if not all(map(torch.equal, was, tensors.values())):
            raise self._refusal(
                "it changes weights although the lr of its groups is 0: the schedule would not reach it",
                "read group['lr'] in step",
            )
        for state in optimizer.state.values():
            for key, value in state.items():
                if not isinstance(value, Tensor | int | float | None):
                    raise self._refusal(
                        f"it keeps {key} as a {type(value).__name__}, which no checkpoint holds",
                        "keep tensors and numbers in self.state of a parameter",
                    )
        states = {dims: optimizer.state.get(tensor, {}) for dims, tensor in tensors.items()}
        return {
            dims: [kind for kind, value in states[dims].items() if getattr(value, "shape", None) == _SHAPES[dims]]
            for dims in _SHAPES
        }

    def _step(self, optimizer: torch.optim.Optimizer, tensors: Mapping[int, nn.Parameter]) -> None:
        for tensor in tensors.values():
            tensor.grad = torch.full_like(tensor, 0.1)
        try:
            optimizer.step()
        except Exception as error:  # any error of the user's code
            raise self._code.error(error, more=READ_MORE) from error

    @staticmethod
    def _counts(optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """The numbers of an optimizer beside its state, by where they stand."""
        places = [("its parameter groups", group) for group in optimizer.param_groups] + [("self", vars(optimizer))]
        return {
            f"{key} of {where}": float(value)
            for where, values in places
            for key, value in values.items()
            if isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
        }

    def _refusal(self, what: str, fix: str) -> UserError:
        return UserError(f"optimizer.path: {self._code.path}: {self._code.name}: {what}", fix=fix, more=READ_MORE)

    def _told(self, error: UserError) -> UserError:
        """An error of a trial, with the file of the class."""
        return UserError(f"{self._code.path}: {error.what}", fix=error.fix, more=error.more)
