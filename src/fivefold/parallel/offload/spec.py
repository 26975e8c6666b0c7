"""Offload of saved activations to host memory. No torch."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from fivefold.core.state_dtypes import AT_ONCE, RESTORED
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.edits import Edit
from fivefold.parallel.moments import UPDATE
from fivefold.parallel.plan import ParallelPlan


@dataclass(frozen=True)
class OffloadActivations(Edit):
    """Keep the tensors that a layer saves for backward in host memory. `is_first`, `is_last`: of a stage."""

    kind = "forward"
    is_first: bool
    is_last: bool


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Keep the tensors that layers save in host memory."""
    firsts, lasts = plan.placement.stage_ends
    for layer in plan.placement.layers if plan.layout.offload_activations else ():
        why = "what it saves for backward lies in host memory"
        yield OffloadActivations(layer, "offload", why, layer in firsts, layer in lasts)


# ---- bytes ---------------------------------------------------------------------------------------------------------


SMALL = 16  # saved tensors below 1 / SMALL of a layer's input stay on the device: they are many and small


PARTS = 3  # of offloaded optimizer state, on the device at once: arriving, in update, leaving


PART_BYTES = 64 * 2**20  # of the parameters of a part; in a small model an eighth of them


def in_update(
    state: Mapping[str, int], largest: int, shape: StepShape, *, away: Collection[str], state_dtype: str
) -> dict[str, int]:
    """Add to `state` the memory of an update on the device: a piece of the state that is converted to the dtype of the
    weights, and the parts in transit of the kinds that are `away`, in host memory. `largest`: bytes of the largest
    parameter, which is a part of its own."""
    more = RESTORED[state_dtype] * min(AT_ONCE, largest // shape.master_bytes)
    part = part_bytes(state["parameters"])
    share = min(1.0, (max(part, largest) + (PARTS - 1) * part) / max(1, state["parameters"]))
    more += round(sum(state[what] for what in away) * share)
    return {**state, **dict.fromkeys(away, 0), UPDATE: more}


def part_bytes(parameters: int) -> int:
    """Size of a part of `parameters` bytes in all."""
    return min(PART_BYTES, parameters // 8)
