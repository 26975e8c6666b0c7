"""What a step needs of a rank's memory, by kind, from the plan alone. No torch.

The sum is the peak of a step. It leaves out buffers of collectives, work space of kernels and what the allocator keeps.
Saved activations come from the traced layer, every number in the compute type; a norm that keeps a copy in fp32 takes a
little more.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from fivefold.core.optimizers import OPTIMIZERS
from fivefold.core.schedule import Slot
from fivefold.parallel.collectives import StepShape

if TYPE_CHECKING:
    from fivefold.parallel.plan import ParallelPlan


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Bytes of this rank. `optimizer`: its state. `gathered`: parameters that FSDP has gathered. `unreduced`: gradients
    that wait to be reduced. `saved`: by layer, what forward passes leave for backward. `logits`: of one chunk of the
    loss. `buffers`: of routers."""

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    unreduced: int
    saved: Mapping[str, int]
    logits: int
    buffers: int

    @property
    def by_kind(self) -> dict[str, int]:
        """Each kind in words, with its bytes."""
        return {
            "parameters": self.parameters, "gradients": self.gradients, "optimizer state": self.optimizer,
            "gathered parameters": self.gathered, "unreduced gradients": self.unreduced,
            "saved activations": sum(self.saved.values()), "logits": self.logits, "router buffers": self.buffers,
        }  # fmt: skip

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def step_bytes(plan: "ParallelPlan", shape: StepShape) -> StepBytes:
    """Of one optimizer step."""
    held = {name: plan.held_bytes(name, shape.master_bytes) for name in plan.shards if plan.holds(name)}
    trained = {name: size for name, size in held.items() if plan.facts.parameters[name].is_trained}
    optimizer, matrices = OPTIMIZERS[shape.optimizer], set(plan.block_matrices)
    gathered, unreduced = unit_bytes([plan.padded_sizes(unit) for unit in plan.units], plan.layout.zero, shape)
    return StepBytes(
        parameters=sum(held.values()),
        gradients=sum(trained.values()),
        optimizer=sum(
            size
            for kind in optimizer.state
            for name, size in trained.items()
            if optimizer.keeps(kind, is_matrix=name in matrices)
        ),
        gathered=gathered,
        unreduced=unreduced,
        saved=_saved(plan, shape),
        logits=logit_bytes(plan, shape),
        buffers=buffer_bytes(plan.buffers),
    )


def buffer_bytes(buffers: Mapping[str, tuple[int, ...]]) -> int:
    """Of the routers' buffers, in fp32; `buffers`: their shapes."""
    return 4 * sum(map(prod, buffers.values()))


def unit_bytes(sizes: Sequence[tuple[int, int]], zero: int, shape: StepShape) -> tuple[int, int]:
    """Bytes of gathered parameters, and of gradients before they are reduced. `sizes`: of each FSDP unit the numbers
    that it gathers and that it reduces (`ParallelPlan.padded_sizes`); the model's own unit is the last.

    ZeRO-3 has gathered the model's own unit and two more: the unit that runs and the next. ZeRO-1 and 2 have gathered
    all units. ZeRO-1 keeps every unreduced gradient until the last micro batch; ZeRO-2 and 3 those of one unit.
    """
    *inner, (root, _) = sizes
    largest = sorted((size for size, _ in inner), reverse=True)[:2]
    everything = sum(size for size, _ in sizes)
    gathered = everything if zero < 3 else root + sum(largest)
    reduced = [size for _, size in sizes]
    waiting = sum(reduced) * shape.reduce_bytes if zero == 1 else max(reduced) * shape.compute_bytes
    return gathered * shape.compute_bytes, waiting


def _saved(plan: "ParallelPlan", shape: StepShape) -> dict[str, int]:
    """Layer -> bytes that its micro batches in flight keep for backward. With recompute a layer keeps only its input;
    the one layer that is being recomputed also has all that it saves."""
    tp, splits = plan.layout.tp, plan.splits_sequence
    costs = dict(zip(plan.anatomy.layers, plan.facts.layer_costs, strict=True))
    tokens = shape.rows * shape.tokens
    in_flight = under_way(plan.schedule(shape.micro_batches).orders[plan.coords.pp])
    found, whole = {}, {}
    for stage in plan.own_stages:
        for layer in plan.stages.layers[slice(*plan.stages.splits[stage])]:
            numbers = costs[layer].saved.on_rank(tp, sequence_parallel=splits) * tokens
            whole[layer] = round(numbers * shape.compute_bytes)
            entered = shape.hidden_bytes // (tp if splits else 1)
            found[layer] = in_flight[stage] * (entered if shape.recompute.wraps(layer) else whole[layer])
    if again := [layer for layer in found if shape.recompute.wraps(layer)]:
        dearest = max(again, key=lambda layer: whole[layer])
        found[dearest] += whole[dearest]
    return found


def under_way(order: Sequence[Slot]) -> dict[int, int]:
    """Stage of a rank whose slots come in `order` -> the most micro batches in flight at once, between their forward
    and their backward. Where gradients of weights come apart, the inputs of linears and the gradients of their outputs
    wait for them: about as much as forward left."""
    most, now = Counter[int](), Counter[int]()
    for slot in order:
        now[slot.stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[slot.kind]
        most[slot.stage] = max(most[slot.stage], now[slot.stage])
    return most


def logit_bytes(plan: "ParallelPlan", shape: StepShape) -> int:
    """The largest chunk of the loss: its logits in the compute type, and their gradient in fp32 (fp64)."""
    if not plan.has_ends[1]:
        return 0
    return max(shape.loss_chunks) * plan.vocabulary * (shape.compute_bytes + max(4, shape.compute_bytes))
