"""Blocks under `torch.compile`: one compiled function for all equal blocks, and a warning when Dynamo gives one up.

Dynamo recompiles a function whenever one of its guards fails. After a number of versions it runs the rest uncompiled,
and only its log says so: a run would go on at half its speed unnoticed.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch

from fivefold.parallel.graphs.spec import CompileLayer, Outside
from fivefold.parallel.plan import Edit
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.torch_internals import compiled_versions, heard_from_dynamo, keep_headers

VERSIONS = 64  # of one function; torch's 8 are used up by a model with several kinds of layers
# A graph waits for a collective where its result is first read, so that other kernels overlap it. In backward these are
# the matmuls after a gather or a sum over tp.
LATE_WAITS: dict[str, Any] = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits"],
}


@dataclass
class Compiled(LivePart):
    """Compiled blocks of one model. `is_on`: there are some. `given_up`: where Dynamo stopped compiling, and why."""

    is_on: bool = True
    given_up: dict[str, str] = field(default_factory=dict)
    _told: int = 0

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        return cls(state.plan.compiled)

    def block(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        if not self.is_on:
            return forward
        compiled_versions(at_least=VERSIONS)
        keep_headers()
        compiled = torch.compile(forward, options=LATE_WAITS)

        def run(*args: Any, **kwargs: Any) -> Any:
            with heard_from_dynamo(partial(self._given_up, name)):
                return compiled(*args, **kwargs)

        return run

    def news(self) -> list[str]:
        """Messages on the blocks that were given up since the last call."""
        new = list(self.given_up.items())[self._told :]
        self._told = len(self.given_up)
        return [said(name, reason) for name, reason in new]

    def _given_up(self, name: str, reason: str) -> None:
        if name not in self.given_up:
            self.given_up[name] = reason
            warnings.warn(said(name, reason), stacklevel=2)


def said(name: str, reason: str) -> str:
    return (
        f"torch.compile gave up at {name} after {compiled_versions()} versions of it: from here on it runs uncompiled, "
        f"and slower; train.compile: false does without compiling (Dynamo's reason: {reason})"
    )


def builders(state: ParallelState) -> Builders:
    compiled = state.live(Compiled)

    def outside(row: Any, _: Edit) -> None:
        row.forward = torch.compiler.disable(row.forward)  # type: ignore[no-untyped-call]

    def compile_layer(layer: Any, edit: Edit) -> None:
        layer.forward = compiled.block(edit.path, layer.forward)

    return {Outside: outside, CompileLayer: compile_layer}
