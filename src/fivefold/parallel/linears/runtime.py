"""Linears of any registered class that multiply by `ops/linear.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import nn

from fivefold.models import hf_internals
from fivefold.ops.linear import Linears, Role, WeightGradStore
from fivefold.parallel.fp8.runtime import products
from fivefold.parallel.fp8.scales import Fp8Scales
from fivefold.parallel.linears import spec
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.parallel.tensor.runtime import TensorParallel


@dataclass(frozen=True)
class LinearsOfModel(LivePart):
    linears: Linears

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        history = state.live(Fp8Scales).history
        store = WeightGradStore() if state.plan.layout.schedule.splits_backward else None
        by_role = products(state.model, state.mesh, history)
        return cls(Linears(store, by_role, state.plan.matmuls.multiplies, are_outside=bool(history.names)))


def builders(state: ParallelState) -> Builders:
    model, linears = state.model, state.live(LinearsOfModel).linears
    reduce = state.live(TensorParallel).leave  # sums the partial products of a row

    def multiply(linear: nn.Module, edit: spec.Multiply) -> None:
        is_transposed, is_plain = hf_internals.linear_dims(linear) == (1, 0), hf_internals.is_plain_linear(linear)
        own, summed = linears.of(edit.path), reduce if edit.role == "row" else None
        own.place(linear, edit.role, is_transposed=is_transposed, is_plain=is_plain, reduce=summed)

    def multiply_together(_: nn.Module, edit: spec.MultiplyTogether) -> None:
        place_together([model.get_submodule(name) for name in edit.modules], "column", linears)

    return {spec.Multiply: multiply, spec.MultiplyTogether: multiply_together}


def place_together(linears: Sequence[nn.Module], role: Role, how: Linears) -> None:
    """Let linears that share an input multiply as one, by `how`."""
    dims = {hf_internals.linear_dims(linear) for linear in linears}
    assert len(dims) == 1, "linears that share their input are of one kind"
    if all(map(hf_internals.is_plain_linear, linears)):
        how.place_together(linears, role, is_transposed=dims == {(1, 0)})
