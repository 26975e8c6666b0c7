"""What the forkserver of `tests/pool.py` imports once, so that no worker has to: the program, the engines of the tests,
and the `transformers` class of every family. And what workers of tests do without."""

import gc

gc.disable()  # a worker turns it on again: imports leave nothing to collect

import os  # noqa: E402
from typing import Any  # noqa: E402

from transformers import AutoConfig  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402

import tests.training.bodies  # noqa: E402
import tests.verification.mutation  # noqa: E402, F401
from fivefold.ops.cpu import shared_memory  # noqa: E402
from fivefold.training.optimizers import trial  # noqa: E402
from tests.parity import FAMILIES  # noqa: E402
from tests.pool import unsynchronised  # noqa: E402

for _values in FAMILIES.values():
    MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(_values["model_type"]))]

os.fsync = unsynchronised
shared_memory._SPIN_NS = 2_000  # cores are shared with the ranks of the other process of tests
_try, _tried = trial.why_not, dict[Any, Any]()


def _try_once(optimizer: Any, ranks_hold: Any, make: Any = None) -> Any:
    """A hundred steps on small tensors, of an optimizer of torch once in a worker for the same options and shapes."""
    if make or not type(optimizer).__module__.startswith("torch.optim."):
        return _try(optimizer, ranks_hold, make)
    shapes = [{tuple(each.shape) for each in group["params"]} for group in optimizer.param_groups]
    options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
    key = type(optimizer), ranks_hold, repr((shapes, options, optimizer.defaults))
    if key not in _tried:
        _tried[key] = _try(optimizer, ranks_hold)
    return _tried[key]


trial.why_not = _try_once
