"""Layers that are recomputed in backward."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fivefold.models.attention import KEEPS
from fivefold.ops.keep import Forward, contexts, graph_contexts, save_nothing, save_outputs, save_reduced_only
from fivefold.parallel.recompute.spec import RecomputeLayer, SaveAttention, SaveLinear, Saves
from fivefold.parallel.state import Builders, ParallelState

_SAVING: dict[Saves, Callable[[Forward], Forward]] = {
    "output": save_outputs, "sum": save_reduced_only, "nothing": save_nothing
}  # fmt: skip


def builders(state: ParallelState) -> Builders:
    """Builders of recompute. What saves results runs outside of graphs."""
    outside: Callable[..., Any] = torch.compiler.disable if state.plan.compiled else lambda forward: forward

    def save_linear(linear: Any, edit: SaveLinear) -> None:
        linear.forward = outside(_SAVING[edit.saves](linear.forward))

    def recompute(layer: Any, edit: RecomputeLayer) -> None:
        around = graph_contexts if edit.in_graph else contexts
        more: dict[str, Any] = {"context_fn": around} if edit.is_selective else {}
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **more)

    return {
        SaveAttention: lambda module, _: setattr(module, KEEPS, lambda forward: outside(save_outputs(forward))),
        SaveLinear: save_linear,
        RecomputeLayer: recompute,
    }
