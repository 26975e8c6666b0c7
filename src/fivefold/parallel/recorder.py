"""Record what a run sends: every collective that this rank issues, noted at the dispatcher."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fivefold.parallel.collectives import Collective
from fivefold.parallel.mesh import Mesh
from fivefold.torch_internals import TorchDispatchMode, group_among

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


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, mesh: Mesh, found: list[Collective]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mesh, self.found = mesh, found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if namespace in ("c10d", "_c10d_functional") and name in _KINDS:
            self._note(name, args, result)
        return result

    def _note(self, name: str, args: Any, result: Any) -> None:
        kind, which = _KINDS[name]
        group_name, size = group_among(args)
        if size == 1:
            return
        buffer = {"first": args[0], "second": args[1], "result": result}[which]
        tensors = buffer if isinstance(buffer, (list, tuple)) else [buffer]
        volume = sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
        self.found.append(Collective(self.mesh.axis_of(group_name), kind, 1, volume))


@contextmanager
def record(mesh: Mesh) -> Iterator[list[Collective]]:
    """Collect every collective that this rank issues inside the block (groups of one rank left out)."""
    found: list[Collective] = []
    with _Recorder(mesh, found):
        yield found
