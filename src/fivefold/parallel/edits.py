"""What is done to a model's modules: values that a plan lists in order, and that `parallelize` builds one by one. No
torch.

The model stays the class of `transformers`; from outside, parameters are cut, forwards are replaced and hooks stand
around modules. Nothing else changes how a module computes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Kind = Literal["cut", "pre-hook", "hook", "forward", "attribute", "stub", "shard", "rest"]


@dataclass(frozen=True)
class Edit:
    """One thing done to the module at `path` ("" is the model). Each thing that a feature does is a class of its own,
    in its `spec.py`; `builders` in its `runtime.py` says how it is done.

    `kind`: its parameters are `cut`; a hook stands before it or after it; its `forward` is replaced; it is told
    something (`attribute`); it gives way to a `stub`; FSDP takes its parameters as one unit (`shard`); its parameters
    are kept in another form (`rest`). `by`: the dimension of parallelism, or what else asks for it. `needs_memory`:
    it is done to parameters that have been allocated, the others on the meta device.
    """

    kind: ClassVar[Kind]
    needs_memory: ClassVar[bool] = False
    path: str
    by: str
    why: str


Builders = Mapping[type[Edit], Callable[[Any], None]]  # of each class of edits, what builds one of them
