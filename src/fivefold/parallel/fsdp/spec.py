"""Parameters of a plan that FSDP gathers and reduces, or that are copied instead. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

from fivefold.core.errors import Violation
from fivefold.core.optimizers import block_length
from fivefold.core.units import many
from fivefold.models.anatomy import is_within
from fivefold.models.facts import ModelFacts
from fivefold.parallel.collectives import Call, Phase
from fivefold.parallel.fsdp.unshards import Unshards, of_slots, reduced_together
from fivefold.parallel.layout import KEYS, Layout
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.ranks import Over
from fivefold.parallel.step import Step


@dataclass(frozen=True)
class Unit:
    """One group of parameters that FSDP gathers and reduces together. `name`: its module; "" is the model's own unit.
    `frozen`: its parameters without a gradient, which are gathered but not reduced, such as a correction bias (ERNIE
    4.5)."""

    name: str
    parameters: tuple[str, ...]
    over: Over = "tp"  # the ranks that get the blocks of its parameters
    frozen: frozenset[str] = frozenset()


Sends = Literal["gather", "near", "reduce", "replicas"]
COPIED_BYTES = 2**30  # more memory than this is worth the time of FSDP's hooks


def computes_in_copies(facts: ModelFacts, layout: Layout) -> bool:
    """True if tensor ranks, or one process, that train in bf16 copy all their parameters at once. FSDP copies those of
    a unit when it is used. The copies must be small. Example: 500M parameters, 1 GB of copies."""
    numbers = sum(
        parameter.size for parameter in facts.parameters.values() if parameter.is_trained or not facts.has_adapter
    )
    is_plain = layout.world == layout.tp and layout.precision == "bf16" and not layout.schedule.splits_backward
    return is_plain and numbers * layout.compute_bytes <= COPIED_BYTES


def keeps_gathered(layout: Layout, unit: str) -> bool:
    """True if a unit stays gathered between forward and backward: backward begins with the model's own unit, ""."""
    return layout.zero < 3 or unit == ""


class FsdpPlan:
    """Units of a rank, their sizes, and how often each is gathered and reduced."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan, self._placement = plan, plan.placement

    @cached_property
    def is_used(self) -> bool:
        """True if FSDP has something to do. On tensor ranks alone, and in one process, only if experts are sharded, or
        if parameters compute in another dtype or place than they are stored in and are not copied as a whole
        (`copies.py`)."""
        layout = self._plan.layout
        is_shared = layout.world > layout.tp or self._placement.grid.fsdp_shards("ep") > 1
        as_they_rest = layout.precision != "bf16" or self._plan.in_copies
        moves = layout.offload_parameters or bool(self._plan.matmuls.sent)
        is_packed = any(parameter.packing for parameter in self._plan.facts.parameters.values())
        return is_shared or not as_they_rest or moves or is_packed

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """Parameters that compute in copies of another dtype, without FSDP: those that are not stored in it."""
        if self.is_used or not self._plan.in_copies:
            return ()
        return tuple(name for name in self._placement.shards if not self._placement.rests_as_computed(name))

    @property
    def stood_in_for(self) -> tuple[str, ...]:
        """Parameters that other tensors replace in compute (`copies.py`), without FSDP: those of several tensor ranks
        are stored as DTensors, which refuse to be taken for whole tensors."""
        is_one = self.is_used or self._plan.layout.world == 1
        return self.copied if is_one else tuple(self._placement.shards)

    @property
    def sharded(self) -> tuple[Unit, ...]:
        return self.units if self.is_used else ()

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """Parameters of this rank by what is gathered at once, inner before outer: the experts of each layer; the
        embedding; each layer; last the rest, which is the final norm and the head. An embedding that is tied, or whose
        weight the model reads outside of the module (Gemma 4), is gathered with the rest."""
        placement, anatomy = self._placement, self._plan.anatomy
        names = [name for name in placement.shards if placement.holds(name)]
        frozen = frozenset(name for name in names if not self._plan.facts.parameters[name].is_trained)
        is_apart = not anatomy.tied and anatomy.embedding not in self._plan.facts.looked_into
        separate = (anatomy.embedding, *placement.layers) if is_apart else placement.layers
        found = [Unit(block.name, _inside(block.name, names), "ep") for block in self._plan.experts]
        inner = {name for unit in found for name in unit.parameters}
        found += [Unit(module, tuple(n for n in _inside(module, names) if n not in inner)) for module in separate]
        taken = {name for unit in found for name in unit.parameters}
        rest = Unit("", tuple(name for name in names if name not in taken))
        return tuple(
            replace(unit, frozen=frozen.intersection(unit.parameters))
            for unit in (*(unit for unit in found if unit.parameters), rest)
        )

    def padded_sizes(self, unit: Unit) -> tuple[int, int]:
        """(numbers that a unit gathers, numbers that it reduces). FSDP pads dimension 0 up to a multiple of the shards:
        7 rows over 4 shards count as 8. 0 without FSDP: parameters and gradients are used in place."""
        sizes = self._sizes(unit) if self.is_used else {}
        return sum(sizes.values()), sum(sizes[name] for name in sizes.keys() - unit.frozen)

    def _sizes(self, unit: Unit) -> dict[str, int]:
        """Numbers of each parameter of a unit that FSDP gathers, with padding."""
        shards = self._placement.grid.fsdp_shards(unit.over)
        return {name: _padded(self._placement.gathered_shape(name), shards) for name in unit.parameters}

    def gathered_bytes(self, unit: Unit) -> int:
        """Bytes that a unit gathers, as they are sent, with padding. Without FSDP, bytes of its copies."""
        if not self.is_used:
            own = set(unit.parameters).intersection(self.copied)
            return sum(prod(self._placement.gathered_shape(name)) for name in own) * self._plan.layout.compute_bytes
        sent, compute = self._plan.matmuls.sent, self._plan.layout.compute_bytes
        each = {name: sent.get(name) or self._placement.rests_in(name, compute) for name in unit.parameters}
        return sum(int(size * each[name]) for name, size in self._sizes(unit).items())

    def largest(self, unit: Unit) -> int:
        return max((prod(self._placement.gathered_shape(name)) for name in unit.parameters), default=0)

    def node_ranks(self, unit: Unit) -> int:
        """Ranks that share the secondary copy of a unit, which a step's first forward leaves and its other passes
        gather from; 1: each rank keeps the unit gathered; 0: there is no copy."""
        if not (self._plan.layout.hpz and self.is_used) or keeps_gathered(self._plan.layout, unit.name):
            return 0
        return self._placement.grid.size(self._placement.grid.node_axis(unit.over))

    def has_levels(self, unit: Unit) -> bool:
        """True if a unit is gathered and reduced in two levels: within nodes, and between them."""
        return self.is_used and self._placement.grid.size(self._placement.grid.across_axis(unit.over)) > 1

    def block(self, name: str) -> int:
        """Numbers of a parameter that share a scale in a gather; 0 if it is sent as it is computed with."""
        shape = self._placement.shards[name].shape
        return block_length(shape[-1]) if self._plan.layout.gathers == "int8" and len(shape) > 1 else 0

    def reduced_block(self, name: str) -> int:
        """Numbers of a gradient that share a scale in a reduction; 0 if it is sent as it is. Gradients that ranks hold
        in part and sum after the reduction are sent as they are."""
        plan, shape = self._plan, self._placement.shards[name].shape
        is_tied_over_stages = name == plan.tied and plan.layout.pp > 1
        if plan.layout.reductions != "int8" or len(shape) < 2 or name in plan.gradient_sums or is_tied_over_stages:
            return 0
        return block_length(shape[-1])

    def is_coded(self, unit: Unit) -> bool:
        """True if a gather of a unit sends eight bits for some of its parameters."""
        return self.is_used and any(map(self.block, unit.parameters))

    def reduces_coded(self, unit: Unit) -> bool:
        """True if a reduction of a unit sends eight bits for some of its gradients."""
        return self.is_used and any(self.reduced_block(name) for name in unit.parameters if name not in unit.frozen)

    def summed_before(self, unit: Unit) -> int:
        """Neighbouring ranks of a copy of a stage whose tokens' gradients are one sum before a reduction rounds it:
        those that share a shard's work, and in two levels all of a node."""
        grid = self._placement.grid
        across = grid.size(grid.across_axis(unit.over)) if self.has_levels(unit) else grid.fsdp_shards(unit.over)
        return grid.fsdp_size * self._plan.layout.tp // across

    def sent_bytes(self, unit: Unit) -> int:
        """Bytes of one gather of a unit over all ranks. A block of n numbers in eight bits is n + 4 (fp64: 8) bytes."""
        if not self.is_coded(unit):
            return self.gathered_bytes(unit)
        compute = self._plan.layout.compute_bytes
        return sum(_coded_bytes(size, self.block(name), compute) for name, size in self._sizes(unit).items())

    def reduced_bytes(self, unit: Unit, reduce_bytes: int) -> int:
        """Bytes of the gradients of a unit as they are sent between nodes, or in one level between all ranks."""
        sizes = {name: size for name, size in self._sizes(unit).items() if name not in unit.frozen}
        return sum(_coded_bytes(size, self.reduced_block(name), reduce_bytes) for name, size in sizes.items())

    def sends(self, unit: Unit, reduce_bytes: int) -> dict[Sends, tuple[Call, ...]]:
        """Collectives of one gather of a unit, of one gather from its secondary copy, of one reduction, and of one sum
        over replicas.

        In two levels each rank gathers its places' parts from the other nodes, and then those of its node. A reduction
        sums within the node first; the parts of a rank's place are then exchanged between nodes, and summed. A
        reduction in eight bits is such an exchange in one level, too.
        """
        grid, size, layer = self._placement.grid, self.sent_bytes(unit), unit.name
        shards, numbers = grid.fsdp_shards(unit.over), self.padded_sizes(unit)[1]
        whole, node, across = grid.fsdp_axis(unit.over), grid.node_axis(unit.over), grid.across_axis(unit.over)

        def call(axis: str, kind: str, size: int, phase: Phase = "backward") -> Call:
            return Call(axis=axis, kind=kind, bytes=size, phase=phase, layer=layer, overlaps=True)

        reduced, ranks = numbers * reduce_bytes, grid.size(node)
        in_two, coded = self.has_levels(unit), self.reduced_bytes(unit, reduce_bytes)
        return {
            "gather": (call(across, "all_gather", size // ranks), call(node, "all_gather", size)) if in_two
            else (call(whole, "all_gather", size),),
            "near": (call(node, "all_gather", self.gathered_bytes(unit)),),
            "reduce": (call(node, "reduce_scatter", reduced), call(across, "all_to_all", coded // ranks)) if in_two
            else (call(whole, "all_to_all", coded) if self.reduces_coded(unit)
            else call(whole, "reduce_scatter", reduced),),
            "replicas": (call("dp_replicate", "all_reduce", numbers // shards * reduce_bytes),),
        }  # fmt: skip

    def copy_bytes(self, unit: Unit) -> int:
        """Bytes of this rank's part of a unit's secondary copy."""
        ranks = self.node_ranks(unit)
        return self.gathered_bytes(unit) // ranks if ranks else 0

    def users(self, unit: Unit) -> frozenset[int]:
        """Stages of this rank in which a unit's parameters get a gradient."""
        users = {stage for name in unit.parameters for stage in self._placement.stages.users(name)}
        return frozenset(users.intersection(self._placement.own_stages))

    def unshards(self, micro_batches: int) -> Mapping[str, Unshards]:
        """Count how often FSDP gathers and reduces each unit of this rank in a step."""
        users = {unit.name: self.users(unit) for unit in self.units}
        order = self._plan.feature(PipelinePlan).order(micro_batches)
        copied = {unit.name for unit in self.units if self.node_ranks(unit)}
        return of_slots(order, users, micro_batches, self._placement.own_stages, self._plan.layout.zero, copied)

    def reduced_together(self, unit: Unit, micro_batches: int) -> list[frozenset[int]]:
        """The micro batches of each of this rank's reductions of a unit."""
        order, zero = self._plan.feature(PipelinePlan).order(micro_batches), self._plan.layout.zero
        return reduced_together(order, self.users(unit), micro_batches, self._placement.own_stages, zero)


def _inside(module: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if is_within(name, [module]))


def _padded(shape: tuple[int, ...], shards: int) -> int:
    rows, rest = shape[0], prod(shape[1:])
    return -(-rows // shards) * shards * rest


def _coded_bytes(numbers: int, block: int, dtype_bytes: int) -> int:
    """Bytes of so many numbers in blocks of eight bits, with their scales; `block` 0: as they are."""
    return numbers + max(4, dtype_bytes) * (numbers // block) if block else numbers * dtype_bytes


def calls(step: Step) -> Iterator[Call]:
    """Collectives of FSDP, which gathers a unit before it is used and reduce-scatters its gradients. Replicas
    all-reduce their shards once a step. Gathers from a secondary copy go over the ranks that share it."""
    fsdp, shape = step.plan.feature(FsdpPlan), step.shape
    counts = fsdp.unshards(shape.micro_batches)
    for unit in filter(lambda unit: unit.parameters, fsdp.units):
        sent, count = fsdp.sends(unit, shape.reduce_bytes), counts[unit.name]
        gathers: tuple[tuple[Sends, Phase, int], ...] = (
            ("gather", "forward", count.forward), ("near", "forward", count.near_forward),
            ("gather", "backward", count.backward), ("near", "backward", count.near_backward),
        )  # fmt: skip
        for what, phase, times in gathers:
            yield from (replace(call, phase=phase, times=times) for call in sent[what] if times)
        if fsdp.padded_sizes(unit)[1]:
            yield from (replace(call, times=count.reductions) for call in sent["reduce"])
            yield from sent["replicas"] if step.plan.layout.copies_apart == 1 else ()


def violations(plan: ParallelPlan) -> Iterator[Violation]:
    """A secondary copy and a gather in eight bits are made of plain tensors in the compute dtype. tp cuts no block of
    eight bits. A reduction in eight bits rounds gradients of whole rows."""
    layout, why, more = plan.layout, "", "fivefold docs explain/slow_links"
    keys = {"hpz": layout.hpz > 0, "gathers": layout.gathers != "none"}
    if layout.offload_parameters:
        why = "memory.offload_parameters, whose gathers come from host memory"
    elif plan.matmuls.sent:
        why = f"{layout.matmul_words}, whose weights are sent in eight bits"
    for name in (name for name, is_set in keys.items() if is_set and why):
        what, place = f"{name} {getattr(layout, name)} with {why}", KEYS[name].place
        yield Violation(name, what, f"leave {place} out", more=more)
    if keys["gathers"] and plan.facts.has_adapter:
        what = f"gathers {layout.gathers} with an adapter, whose frozen weights rest in the type that is computed in"
        yield Violation("gathers", what, "leave precision.gathers out", more=more)
    fsdp = plan.feature(FsdpPlan)
    for name, spec in plan.placement.shards.items():
        block = fsdp.block(name) or fsdp.reduced_block(name)
        if block and spec.cuts(block):
            sent = "gathers" if fsdp.block(name) else "reductions"
            what = f"{sent} int8 of {name} have blocks of {block} in a row of {spec.shape[-1]}"
            yield Violation("tp", f"{what}, and tp {layout.tp} cuts one", f"use less tp, or no int8 {sent}", more=more)
    of_rows = layout.cp * layout.tp
    parts = [unit for unit in fsdp.sharded if fsdp.reduces_coded(unit) and fsdp.summed_before(unit) % of_rows]
    for unit in parts[:1]:
        over = f"cp {layout.cp} x tp {layout.tp} ranks share a row"
        what = f"reductions int8 of {unit.name or 'the head'}: {over}, and each has a part of its gradient"
        fix = "set layout.hierarchical to ranks that share whole rows, which are summed first, or leave int8 out"
        yield Violation("reductions", what, fix, more=more)


# ---- edits of modules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardUnit(Edit):
    kind = "shard"
    unit: Unit


@dataclass(frozen=True)
class PrefetchWithinStages(Edit):
    """Let backward prefetch within stages. `stages`: the layers of each stage of this rank."""

    kind = "attribute"
    stages: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class KeepCopy(Edit):
    kind = "attribute"
    unit: Unit


@dataclass(frozen=True)
class SendOtherwise(Edit):
    kind = "attribute"
    unit: Unit


@dataclass(frozen=True)
class RestAsDTensors(Edit):
    kind, needs_memory = "rest", True


@dataclass(frozen=True)
class StandIn(Edit):
    kind, needs_memory = "hook", True


@dataclass(frozen=True)
class CastInputs(Edit):
    kind, needs_memory = "pre-hook", True


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    fsdp, placement = plan.feature(FsdpPlan), plan.placement
    for unit in fsdp.sharded:
        axis = placement.grid.fsdp_axis(unit.over)
        yield ShardUnit(unit.name, axis, "parameters gathered and reduced as one", unit)
    for unit in filter(fsdp.node_ranks, fsdp.sharded):
        axis, ranks = placement.grid.node_axis(unit.over), fsdp.node_ranks(unit)
        yield KeepCopy(unit.name, axis, f"gathered once a step, then from a copy over {many(ranks, 'rank')}", unit)
    for unit in fsdp.sharded:
        if fsdp.has_levels(unit):
            axis = placement.grid.across_axis(unit.over)
            yield SendOtherwise(unit.name, axis, "gathered and reduced within a node and between nodes", unit)
        elif done := ["gathered"] * fsdp.is_coded(unit) + ["reduced"] * fsdp.reduces_coded(unit):
            axis = placement.grid.fsdp_axis(unit.over)
            yield SendOtherwise(unit.name, axis, f"{' and '.join(done)} in eight bits", unit)
    if placement.stages.count > 1:
        stages = tuple(placement.stages.layers_of_stage(stage) for stage in placement.own_stages)
        yield PrefetchWithinStages("", "pp", "backward gathers ahead within a stage", stages)
    if plan.layout.world > 1 and not fsdp.is_used:
        yield RestAsDTensors("", "tp", "parameters rest as DTensors, which refuse to be taken for whole ones")
    if fsdp.stood_in_for:
        which = "copies in bf16" if fsdp.copied else "plain tensors"
        yield StandIn("", "bf16" if fsdp.copied else "tp", f"parameters give way to {which} until backward is done")
    for layer in placement.layers if fsdp.copied else ():
        yield CastInputs(layer, "bf16", "what enters it is cast to bf16")
