"""Bugs of an optimizer of the user's own: of the groups that its class is given, and of what becomes of its state."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from fivefold.checkpoint import load
from fivefold.training.optimizers.python import PythonOptimizer
from tests.verification.faults.fault import Model, fault

OWN = Model(optimizer="python")


def _given(change: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Any:
    """A parallelized model's class gets what `change(decayed, others, options)` makes of it; a reference's does not."""
    plain = PythonOptimizer.build

    def build(rule: Any, model: Any, options: Any) -> torch.optim.Optimizer:
        over = rule._over
        with patch.object(rule, "_over", lambda decayed, others, options, rate: over(
            *change(decayed, others, options), rate
        )):  # fmt: skip
            return plain(rule, model, options)

    return patch.object(PythonOptimizer, "build", build)


@fault(
    "norms and biases decay under a class of the user's own",
    known="one group of model.parameters()",
    layout="shard2", expects=[("update", r"norm|bias")], model=OWN,
)  # fmt: skip
def norms_decay_under_a_class() -> Any:
    return _given(lambda decayed, others, options: ([*decayed, *others], [], options))


@fault(
    "a class of the user's own does not get its options",
    known="an option that is read and not passed on",
    layout="tp2", expects=[("m", r"")], model=OWN,
)  # fmt: skip
def options_of_a_class_dropped() -> Any:
    return _given(lambda decayed, others, options: (decayed, others, options.model_copy(update={"options": {}})))


@fault(
    "a count that is a Python number comes back as a tensor in fp32",
    known="torch.optim.Optimizer.load_state_dict casts a state to the type of its parameter",
    layout="pp2", expects=[(".*", r"")], model=OWN, kind="load",
)  # fmt: skip
def count_restored_in_fp32() -> Any:
    plain = load.number_of_type
    return patch.object(load, "number_of_type", lambda value, kind, device: plain(value, "float32", device))
