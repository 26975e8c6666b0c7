"""What is done to a model's modules. No torch.

The model stays the class of `transformers`; from outside, parameters are cut, forwards are replaced and hooks stand
around modules. Nothing else changes how a module computes.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["cut", "pre-hook", "hook", "forward", "attribute", "stub", "shard"]


@dataclass(frozen=True)
class Edit:
    """One thing done to the module at `path` ("" is the model).

    `kind`: its parameters are `cut`; a hook stands before it or after it; its `forward` is replaced; it is told a
    number (`attribute`); it gives way to a `stub`; FSDP takes its parameters as one unit (`shard`). `by`: the dimension
    of parallelism, or what else asks for it.
    """

    path: str
    kind: Kind
    by: str
    why: str
