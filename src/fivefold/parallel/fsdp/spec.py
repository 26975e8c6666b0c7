"""Parameters of a plan that FSDP gathers and reduces, or that are copied instead. No torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from fivefold.models.anatomy import is_within
from fivefold.models.facts import ModelFacts
from fivefold.parallel.collectives import Call, Phase
from fivefold.parallel.edits import Edit
from fivefold.parallel.fsdp.unshards import Unshards, of_slots
from fivefold.parallel.layout import Layout
from fivefold.parallel.pipeline.spec import PipelinePlan
from fivefold.parallel.plan import ParallelPlan
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
    """True if a unit's parameters stay gathered between forward and backward. The model's own unit ("") always does:
    backward begins with it."""
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
    def rests_in_dtensors(self) -> bool:
        """True if parameters and their gradients are DTensors, which refuse to be taken for whole tensors."""
        return self.is_used or self._plan.layout.world > 1

    @property
    def stood_in_for(self) -> tuple[str, ...]:
        """Parameters that other tensors replace in compute (`copies.py`), without FSDP."""
        return tuple(self._placement.shards) if self.rests_in_dtensors and not self.is_used else self.copied

    @property
    def sharded(self) -> tuple[Unit, ...]:
        """Units that FSDP gathers and reduces."""
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
        if not self.is_used:
            return 0, 0
        shards = self._placement.grid.fsdp_shards(unit.over)
        sizes = {name: _padded(self._placement.gathered_shape(name), shards) for name in unit.parameters}
        return sum(sizes.values()), sum(sizes[name] for name in sizes.keys() - unit.frozen)

    def gathered_bytes(self, unit: Unit) -> int:
        """Bytes that a unit gathers, with padding: numbers of the types in which they are sent. Without FSDP, bytes of
        its copies."""
        if not self.is_used:
            own = set(unit.parameters).intersection(self.copied)
            return sum(prod(self._placement.gathered_shape(name)) for name in own) * self._plan.layout.compute_bytes
        shards = self._placement.grid.fsdp_shards(unit.over)
        shapes = {name: self._placement.gathered_shape(name) for name in unit.parameters}
        return sum(int(_padded(shape, shards) * self._sent_in(name)) for name, shape in shapes.items())

    def _sent_in(self, name: str) -> float:
        """Bytes per number of a parameter that FSDP gathers."""
        return self._plan.matmuls.sent.get(name) or self._placement.rests_in(name, self._plan.layout.compute_bytes)

    def largest(self, unit: Unit) -> int:
        """Numbers of the largest parameter that a unit gathers."""
        return max((prod(self._placement.gathered_shape(name)) for name in unit.parameters), default=0)

    def users(self, unit: Unit) -> frozenset[int]:
        """Stages of this rank in which a unit's parameters get a gradient."""
        users = {stage for name in unit.parameters for stage in self._placement.stages.users(name)}
        return frozenset(users.intersection(self._placement.own_stages))

    def unshards(self, micro_batches: int) -> Mapping[str, Unshards]:
        """Count how often FSDP gathers and reduces each unit of this rank in a step."""
        users = {unit.name: self.users(unit) for unit in self.units}
        order = self._plan.feature(PipelinePlan).schedule(micro_batches).orders[self._placement.coords.pp]
        return of_slots(order, users, micro_batches, self._placement.own_stages, self._plan.layout.zero)


def _inside(module: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if is_within(name, [module]))


def _padded(shape: tuple[int, ...], shards: int) -> int:
    rows, rest = shape[0], prod(shape[1:])
    return -(-rows // shards) * shards * rest


def calls(step: Step) -> Iterator[Call]:
    """Collectives of FSDP, which gathers a unit before it is used and reduce-scatters its gradients. Replicas
    all-reduce their shards once a step."""
    fsdp, grid, shape = step.plan.feature(FsdpPlan), step.plan.placement.grid, step.shape
    counts = fsdp.unshards(shape.micro_batches)
    for unit in filter(lambda unit: unit.parameters, fsdp.units):
        shards, axis = grid.fsdp_shards(unit.over), grid.fsdp_axis(unit.over)
        _, reduced = fsdp.padded_sizes(unit)
        count, layer = counts[unit.name], unit.name
        both: tuple[tuple[Phase, int], ...] = (("forward", count.forward), ("backward", count.backward))
        size = fsdp.gathered_bytes(unit)
        for phase, times in both:
            if times:
                yield Call(
                    axis=axis, kind="all_gather", bytes=size, phase=phase, layer=layer, times=times, overlaps=True
                )
        if reduced:
            size = reduced * shape.reduce_bytes
            yield Call(
                axis=axis, kind="reduce_scatter", bytes=size, phase="backward", layer=layer, times=count.reductions,
                overlaps=True,
            )  # fmt: skip
            size = reduced // shards * shape.reduce_bytes
            if step.plan.layout.copies_apart == 1:
                yield Call(
                    axis="dp_replicate", kind="all_reduce", bytes=size, phase="backward", layer=layer, overlaps=True
                )


# ---- edits of modules ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard(Edit):
    """Gather and reduce the parameters of a unit as one."""

    kind = "shard"
    unit: Unit


@dataclass(frozen=True)
class PrefetchWithinStages(Edit):
    """Let a unit prefetch the layer before it in backward, if that is of the same stage. `stages`: the layers of each
    stage of this rank."""

    kind = "attribute"
    stages: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class RestAsDTensors(Edit):
    """Store parameters as DTensors if there is nothing to shard."""

    kind, needs_memory = "rest", True


@dataclass(frozen=True)
class StandIn(Edit):
    """Replace parameters by other tensors in compute."""

    kind, needs_memory = "hook", True


@dataclass(frozen=True)
class CastInputs(Edit):
    """Cast the inputs of a layer to its compute dtype."""

    kind, needs_memory = "pre-hook", True


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Shard units; without FSDP, replace parameters by other tensors."""
    fsdp, placement = plan.feature(FsdpPlan), plan.placement
    for unit in fsdp.sharded:
        axis = placement.grid.fsdp_axis(unit.over)
        yield Shard(unit.name, axis, "parameters gathered and reduced as one", unit)
    if placement.stages.count > 1:
        stages = tuple(placement.stages.layers_of_stage(stage) for stage in placement.own_stages)
        yield PrefetchWithinStages("", "pp", "backward gathers ahead within a stage", stages)
    if fsdp.rests_in_dtensors and not fsdp.is_used:
        yield RestAsDTensors("", "tp", "parameters rest as DTensors, which refuse to be taken for whole ones")
    if fsdp.stood_in_for:
        which = "copies in bf16" if fsdp.copied else "plain tensors"
        yield StandIn("", "bf16" if fsdp.copied else "tp", f"parameters give way to {which} until backward is done")
    for layer in placement.layers if fsdp.copied else ():
        yield CastInputs(layer, "bf16", "what enters it is cast to bf16")
