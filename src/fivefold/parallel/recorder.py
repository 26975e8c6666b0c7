"""Record what a run sends: every collective that this rank issues, noted at the dispatcher."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from fivefold.parallel.collectives import Collective
from fivefold.parallel.mesh import Mesh
from fivefold.torch_internals import Dispatch, group_among

# Operator name (namespaces c10d and _c10d_functional) -> (kind, which buffer is the larger one).
_KINDS = {
    "_allgather_base_": ("all_gather", "first"),
    "all_gather_into_tensor": ("all_gather", "result"),
    "_reduce_scatter_base_": ("reduce_scatter", "second"),
    "reduce_scatter_tensor": ("reduce_scatter", "first"),
    "allreduce_": ("all_reduce", "first"),
    "all_reduce": ("all_reduce", "first"),
    "all_reduce_": ("all_reduce", "first"),
    "broadcast_": ("broadcast", "first"),
    "alltoall_base_": ("all_to_all", "second"),
    "all_to_all_single": ("all_to_all", "first"),
    "send": ("send", "first"),
    "recv_": ("recv", "first"),
}


@contextmanager
def record(mesh: Mesh) -> Iterator[list[Collective]]:
    """Collect every collective that this rank issues inside the block (groups of one rank left out)."""
    found: list[Collective] = []

    def run(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operator(*args, **kwargs)
        name = operator.overloadpacket.__name__
        if operator.namespace in ("c10d", "_c10d_functional") and name in _KINDS:
            kind, which = _KINDS[name]
            group_name, size = group_among(args)
            if size > 1:
                buffer = result if which == "result" else args[which == "second"]
                volume = sum(tensor.nbytes for tensor in tree_leaves(buffer) if isinstance(tensor, torch.Tensor))
                found.append(Collective(mesh.axis_of(group_name), kind, 1, volume))
        return result

    with Dispatch(run):
        yield found
