"""Edits of a model's modules: values that a plan lists in order, and that `parallelize` applies one by one. No torch.

The model stays the class of `transformers`; from outside, parameters are cut, forwards are replaced and hooks are put
around modules. Nothing else changes how a module computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Kind = Literal["cut", "pre-hook", "hook", "forward", "attribute", "stub", "branch", "shard", "rest"]


@dataclass(frozen=True)
class Edit:
    """One edit of the module at `path` ("" is the model). Each edit of a feature is a class of its own in its
    `spec.py`; `builders` in its `runtime.py` apply it.

    `kind`: its parameters are `cut`; a hook runs before or after it; its `forward` is replaced; it gets an `attribute`;
    a `stub` replaces it; it gets a `branch`, whose output is added to its own; FSDP takes its parameters as one unit
    (`shard`); its parameters are stored in another form (`rest`). `by`: the dimension of parallelism, or the feature,
    that asks for it. `needs_memory`: it applies to allocated parameters, the others to the meta device.
    """

    kind: ClassVar[Kind]
    needs_memory: ClassVar[bool] = False
    path: str
    by: str
    why: str


Builders = Mapping[type[Edit], Callable[[Any], None]]  # class of an edit -> the function that applies it
