"""Offload to host memory: of saved activations, of parameters and of the optimizer's state. No torch."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.step import UPDATE, LayerBytes, LayerNumbers, LayerStep

SMALL = 16  # saved tensors below 1 / SMALL of a layer's input stay on the device: they are many and small
PARTS = 3  # of offloaded optimizer state, on the device at once: arriving, in update, leaving
PART_BYTES = 64 * 2**20  # of the parameters of a part; in a small model an eighth of them


@dataclass(frozen=True)
class OffloadActivations(Edit):
    """Keep the tensors that a layer saves for backward in host memory. `is_first`, `is_last`: of a stage."""

    kind = "forward"
    is_first: bool
    is_last: bool


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    firsts, lasts = plan.placement.stage_ends
    for layer in plan.placement.layers if plan.layout.offload_activations else ():
        why = "what it saves for backward lies in host memory"
        yield OffloadActivations(layer, "offload", why, layer in firsts, layer in lasts)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def kept_bytes(step: LayerStep, numbers: LayerNumbers, layer: LayerBytes) -> LayerBytes:
    """Move what a layer keeps to host memory, but for the last layer of a stage, whose backward comes next."""
    is_moved = step.plan.layout.offload_activations and step.name not in step.plan.placement.stage_ends[1]
    return replace(layer, kept=0, host=layer.kept) if is_moved else layer


def host_bytes(plan: ParallelPlan, state: Mapping[str, int]) -> dict[str, int]:
    """Kind -> bytes of `state` that rest in host memory."""
    return {kind: state[kind] * (kind in plan.layout.rests_in_host) for kind in ("parameters", "optimizer state")}


def in_update(state: Mapping[str, int], largest: int, restored: int, *, away: Collection[str]) -> dict[str, int]:
    """Add to `state` the memory of an update on the device: `restored` bytes of converted state, and the parts in
    transit of the kinds that are `away`, in host memory. `largest`: bytes of the largest parameter, which is a part of
    its own."""
    part = part_bytes(state["parameters"])
    share = min(1.0, (max(part, largest) + (PARTS - 1) * part) / max(1, state["parameters"]))
    in_transit = round(sum(state[kind] for kind in away) * share)
    return {**state, **dict.fromkeys(away, 0), UPDATE: restored + in_transit}


def part_bytes(parameters: int) -> int:
    """Size of a part of `parameters` bytes in all."""
    return min(PART_BYTES, parameters // 8)
