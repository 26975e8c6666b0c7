"""`lower(facts, layout, rank)`: a layout as a value, before any device is touched. No torch.

The plan says which part of every parameter a rank holds, which layers it runs, what is done to which module, every
collective of a step and the bytes that it needs. `parallelize` realises a plan and decides nothing itself; checkpoint,
verify, report and `fivefold doctor MODEL --layout TEXT` read it. It costs the same for a world of 16,384 ranks as for
one of two.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

from fivefold.core import heads, legality
from fivefold.core.fp8 import KERNELS, RECIPES, SPLIT_OVER, Dim
from fivefold.core.heads import CPMethod
from fivefold.core.layout import Layout
from fivefold.core.legality import Violation
from fivefold.core.lora import NF4_BLOCK
from fivefold.core.recompute import Recompute, budget_bytes
from fivefold.core.schedule import TYPICAL, SchedulePlan, Slot
from fivefold.core.state_dtypes import block_length
from fivefold.core.units import many
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.facts import AttentionShape, Experts, Matmul, ModelFacts, Partition, TPInput
from fivefold.parallel.collectives import StepShape, chunk_sizes
from fivefold.parallel.limits import limits_of
from fivefold.parallel.placement import Placement
from fivefold.parallel.ranks import Blocks, Over, RankGrid, tokens_by_rank
from fivefold.parallel.shard_rules import gradient_sums, kv_copies, partition_of, shard_specs
from fivefold.parallel.stage_plan import stage_plan
from fivefold.parallel.unshards import Unshards, of_slots

_OF_LINEARS = ("column", "row", "row_bias")  # roles of the parameters of an MLP


@dataclass(frozen=True)
class Unit:
    """One group of parameters that FSDP gathers and reduces together. `name`: its module; "" is the model's own unit.
    `frozen`: its parameters without a gradient, which are gathered but not reduced, such as a correction bias (ERNIE
    4.5)."""

    name: str
    parameters: tuple[str, ...]
    over: Over = "tp"  # whose ranks the blocks of its parameters go to
    frozen: frozenset[str] = frozenset()


# Kind of a parameter -> the axes over which the dimensions of its linear are split, of those that multiply in fp8.
_SPLIT_OVER = {"column": SPLIT_OVER["column"], "row": SPLIT_OVER["row"], "replicated": SPLIT_OVER["dense"]}


@dataclass(frozen=True)
class Fp8Linear:
    """A linear that multiplies in fp8: its weight's name, its size on this rank when gathered, and the axes over which
    its dimensions are split."""

    name: str
    inputs: int
    outputs: int
    axes: Mapping[Dim, str]


COPIED_BYTES = 2**30  # more memory than that is worth the time of FSDP's hooks


def computes_in_copies(facts: ModelFacts, layout: Layout) -> bool:
    """Whether tensor ranks, or one process, that train in bf16 copy all their parameters at once, where FSDP copies
    those of a unit when the unit is used: the copies are small. Example: 500M parameters, 1 GB of copies."""
    numbers = sum(each.size for each in facts.parameters.values() if each.is_trained or not facts.has_adapter)
    is_plain = layout.world == layout.tp and layout.precision == "bf16" and not layout.schedule.splits_backward
    return is_plain and numbers * layout.compute_bytes <= COPIED_BYTES


def keeps_gathered(layout: Layout, unit: str) -> bool:
    """Whether a unit's parameters stay gathered between forward and backward. The model's own unit ("") always does:
    backward begins with it."""
    return layout.zero < 3 or unit == ""


@dataclass(frozen=True)
class ParallelPlan:
    """How a model lies over the ranks of a layout and what a step does, seen from one rank.

    `placement`: which part of every parameter is where. `partition`: what tensor parallelism splits. `gradient_sums`:
    parameters whose gradients tp ranks hold in part -> the axis over which they are summed.
    """

    placement: Placement
    partition: Partition
    gradient_sums: Mapping[str, str]
    cp_method: CPMethod
    recompute: Recompute
    in_copies: bool = False  # see `computes_in_copies`

    @property
    def facts(self) -> ModelFacts:
        return self.placement.facts

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    # ---- the model ---------------------------------------------------------------------------------------------------

    @property
    def anatomy(self) -> Anatomy:
        return self.facts.anatomy

    @property
    def tied(self) -> str | None:
        """The parameter that is embedding and head, if there is one."""
        return self.anatomy.embedding_weight if self.anatomy.tied else None

    @property
    def head_weight(self) -> str:
        """The parameter that makes logits: the embedding, where the two are tied."""
        own = f"{self.anatomy.head}.weight"
        return own if own in self.placement.shards else self.anatomy.embedding_weight

    @property
    def vocabulary(self) -> int:
        """Logits of a token on this rank. (An embedding may have more rows: Mllama's has 8 for tokens of images.)"""
        return self.placement.gathered_shape(self.head_weight)[0]

    @cached_property
    def experts(self) -> tuple[Experts, ...]:
        """Of the layers of this rank."""
        return tuple(each for each in self.facts.experts if is_within(each.name, self.placement.layers))

    @property
    def watches_routers(self) -> bool:
        """Whether all routers give the logits that losses and counts are computed from."""
        return bool(self.facts.experts) and all(each.has_logits for each in self.facts.experts)

    @cached_property
    def fp32_routers(self) -> tuple[str, ...]:
        """Routers that compute in fp32 though the model computes in 16 bits: those with a matrix, perhaps of a module
        inside (Gemma 4), that has a row for each of the experts."""
        shapes = [(name, each.shape) for name, each in self.facts.parameters.items() if len(each.shape) == 2]
        return tuple(
            each.router
            for each in (self.facts.experts if self.layout.compute_bytes == 2 else ())
            if any(is_within(name, [each.router]) and shape[0] == each.experts for name, shape in shapes)
        )

    @property
    def splits_sequence(self) -> bool:
        """Whether activations between the pairs of linears are split by tokens over tp."""
        return self.layout.tp > 1 and self.layout.sequence_parallel

    @property
    def reduces_rows(self) -> bool:
        """Whether the last linear of a pair ends with a collective over tp."""
        return self.layout.tp > 1

    @cached_property
    def attends(self) -> Mapping[str, AttentionShape]:
        """Attention modules of this rank's layers -> the heads of a tp rank."""
        own = {name: shape for name, shape in self.facts.attends.items() if is_within(name, self.placement.layers)}
        return {name: _on_tp_rank(shape, self.layout.tp) for name, shape in own.items()}

    def is_fp8(self, module: str) -> bool:
        """Whether linears and experts multiply in fp8 in the layer of a module: of one that is not at an end."""
        layers, high = self.anatomy.layers, self.layout.fp8_high_layers
        if module.endswith((".lora_A", ".lora_B")):
            return False
        return self.layout.fp8 != "none" and is_within(f"{module}.", layers[high : len(layers) - high])

    def unaligned(self, tokens: int) -> list[str]:
        """What of fp8 no kernel multiplies for its size, in words; a micro batch has `tokens` tokens on this rank."""
        if not self.fp8_linears:
            return []
        recipe = RECIPES[self.layout.fp8]
        step = KERNELS[recipe.block].summed
        found = [
            f"{linear.name.removesuffix('.weight')} [{linear.outputs}, {linear.inputs}]"
            for linear in self.fp8_linears
            if linear.inputs % step or linear.outputs % step
        ]
        in_backward = recipe.weight_grad is not None and tokens % step
        return found + [f"the gradients of weights, of {tokens:,} tokens"] * bool(in_backward)

    @property
    def fp8_experts(self) -> tuple[Experts, ...]:
        """The experts of this rank's layers that multiply in fp8."""
        return tuple(each for each in self.experts if self.is_fp8(each.name))

    @cached_property
    def chunked_mlps(self) -> tuple[str, ...]:
        """The MLPs of this rank's layers that run in pieces: those made of linears alone and given hidden states alone.
        Experts are not, nor what stands beside them."""
        return _dense_mlps(self.facts, self.placement.layers) if self.layout.mlp_chunks > 1 else ()

    @cached_property
    def chunked_linears(self) -> frozenset[str]:
        """Their linears, by their names within a layer."""
        mlps = set(self.chunked_mlps)
        blocks = [each for each in self.facts.partition.tp_blocks if each.owner in mlps]
        names = {name for each in blocks for name in (*each.columns, each.row)}
        return frozenset(
            next(name[len(each) + 1 :] for each in self.placement.layers if is_within(name, [each])) for name in names
        )

    def pieces(self, tokens: int) -> tuple[int, ...]:
        """Of how many tokens of a row each piece of a chunked MLP is, of `tokens` that this rank has of it."""
        size = -(-tokens // self.layout.mlp_chunks)
        return tuple(min(size, tokens - start) for start in range(0, tokens, size))

    @cached_property
    def fp8_linears(self) -> tuple[Fp8Linear, ...]:
        """The linears of this rank's layers that multiply in fp8, beside the experts.

        The head, routers and latent projections stay in the compute dtype. (A latent projection gets the
        gradients of this rank's heads. Cast one by one, their sum is not the cast sum.)
        """
        found = []
        for name, matmul in self.fp8_matmuls(self.placement.layers):
            shape, kind = self.placement.gathered_shape(name), self.facts.partition.roles[name].kind
            is_transposed = self.placement.shards[name].shape != (matmul.outputs, matmul.inputs)
            outputs, inputs = reversed(shape) if is_transposed else shape
            found.append(Fp8Linear(name, inputs, outputs, _SPLIT_OVER[kind]))
        return tuple(found)

    def fp8_matmuls(self, layers: Sequence[str]) -> Iterator[tuple[str, Matmul]]:
        """The weights of `layers` that multiply in fp8, beside the experts, by name."""
        for layer, cost in zip(self.anatomy.layers, self.facts.layer_costs, strict=True):
            for matmul in cost.matmuls if layer in layers and self.is_fp8(layer) else ():
                name = f"{layer}.{matmul.name}"
                if self.facts.partition.roles[name].kind in _SPLIT_OVER:
                    yield name, matmul

    @property
    def amax_steps(self) -> int:
        """Steps of which delayed scaling keeps largest values; 0: other recipes keep none."""
        return 0 if self.layout.fp8 == "none" else RECIPES[self.layout.fp8].history

    @property
    def amax_names(self) -> tuple[str, ...]:
        """The weights of the whole model of whose linears delayed scaling keeps largest values."""
        return self.fp8_gathers if self.amax_steps else ()

    @cached_property
    def fp8_gathers(self) -> tuple[str, ...]:
        """The weights of the whole model that FSDP gathers in fp8, those that share their input one behind the other:
        of recipes that cast whole weights, once."""
        if self.layout.fp8 == "none" or not RECIPES[self.layout.fp8].casts_once:
            return ()
        names = [name for name, _ in self.fp8_matmuls(self.anatomy.layers)]
        shared = {
            f"{each[0]}.weight": [f"{one}.weight" for one in each]
            for block in self.facts.partition.tp_blocks
            for each in block.shared
        }
        later = {name for each in shared.values() for name in each[1:]}
        return tuple(name for first in names if first not in later for name in shared.get(first, [first]))

    @cached_property
    def kept_linears(self) -> frozenset[str]:
        """The linears of all layers whose results selective recompute keeps: all but routers and a layer's last one,
        which nothing behind it reads again."""
        routers = {each.router for each in self.facts.experts}
        last = {block.row for block in self.facts.partition.tp_blocks if block.is_last}
        names = (
            f"{layer}.{matmul.name}".removesuffix(".weight")
            for layer, cost in zip(self.anatomy.layers, self.facts.layer_costs, strict=True)
            for matmul in cost.matmuls
        )
        return frozenset(name for name in names if name not in last and not is_within(f"{name}.", routers))

    def keeps(self, weight: str) -> bool:
        """Whether selective recompute keeps the product with a weight."""
        return weight.removesuffix(".weight") in self.kept_linears

    def is_one_graph(self, layer: str) -> bool:
        """Whether a compiled layer is one graph. Attention that sends, experts, MLPs in pieces, and gradients of
        weights that are put off run outside of graphs; fp8 agrees on scales outside of its kernels."""
        parts = self.layout.schedule.splits_backward or self.layout.fp8 != "none" or self.placement.grid.size("cp") > 1
        outside = (*(each.name for each in self.facts.experts), *self.chunked_mlps)
        return not (parts or any(is_within(name, [layer]) for name in outside))

    def gathers_again(self, layer: str, entry: TPInput, shape: StepShape) -> bool:
        """Whether backward gathers again what enters a column/row pair of a compiled layer, so that forward keeps only
        this rank's tokens of it (Megatron's way, arXiv:2205.05198). A layer that is computed again has no use for that,
        nor has one in which nothing that reads this is trained. Where a layer is several graphs, products may stand
        outside of the graph that gathers: what enters is kept."""
        is_read = any(module in self._with_trained for module in entry.modules)
        is_one = shape.compiled and shape.gathers_again and self.is_one_graph(layer)
        return self.splits_sequence and is_read and is_one and not shape.recompute.wraps(layer)

    @cached_property
    def _with_trained(self) -> frozenset[str]:
        """The modules that have a trained parameter, or one below them."""
        trained = (name.split(".") for name, each in self.facts.parameters.items() if each.is_trained)
        return frozenset(".".join(parts[:size]) for parts in trained for size in range(1, len(parts)))

    @cached_property
    def fp8_inputs(self) -> tuple[tuple[Fp8Linear, ...], ...]:
        """`fp8_linears` by their input, which is cast once: q, k and v; gate and up; each other one by itself."""
        own = {linear.name.removesuffix(".weight"): linear for linear in self.fp8_linears}
        shared = {names[0]: names for block in self.facts.partition.tp_blocks for names in block.shared}
        later = {name for names in shared.values() for name in names[1:]}
        groups = (shared.get(name, (name,)) for name in own if name not in later)
        return tuple(tuple(own[name] for name in group) for group in groups)

    # ---- who holds what ----------------------------------------------------------------------------------------------

    def summed_bytes(self, itemsize: int, names: Iterable[str]) -> dict[str, int]:
        """Axis -> bytes of the gradients of `names` that are trained, summed over it once a step, on this rank."""
        sums = {"tp": 0, "tp_kv": 0}
        for name in names:
            if name in self.gradient_sums and self.facts.parameters[name].is_trained:
                sums[self.gradient_sums[name]] += self.placement.held_bytes(name, itemsize)
        return sums

    # ---- FSDP --------------------------------------------------------------------------------------------------------

    @cached_property
    def uses_fsdp(self) -> bool:
        """Whether FSDP has something to do: among tensor ranks alone, and on one process, only where experts are
        sharded, or parameters are computed with in another type, or from another place, than they rest in, and are not
        copied as a whole (`copies.py`)."""
        layout = self.layout
        is_shared = layout.world > layout.tp or self.placement.grid.fsdp_shards("ep") > 1
        as_they_rest = layout.precision != "bf16" or self.in_copies
        moves = layout.offload_parameters or bool(self.fp8_gathers)
        in_nf4 = any(each.in_nf4 for each in self.facts.parameters.values())
        return is_shared or not as_they_rest or moves or in_nf4

    @cached_property
    def copied(self) -> tuple[str, ...]:
        """The parameters that are computed with in copies of another type, without FSDP: those that do not rest in
        it."""
        if self.uses_fsdp or not self.in_copies:
            return ()
        return tuple(name for name in self.placement.shards if not self.placement.rests_as_computed(name))

    @property
    def rests_in_dtensors(self) -> bool:
        """Whether parameters are DTensors, and gradients so too, which refuse to be taken for whole ones."""
        return self.uses_fsdp or self.layout.world > 1

    @property
    def stood_in_for(self) -> tuple[str, ...]:
        """The parameters for which other tensors stand in while they are computed with (`copies.py`), without FSDP."""
        return tuple(self.placement.shards) if self.rests_in_dtensors and not self.uses_fsdp else self.copied

    @property
    def fsdp_units(self) -> tuple[Unit, ...]:
        """The units that FSDP gathers and reduces."""
        return self.units if self.uses_fsdp else ()

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """The parameters of this rank by what is gathered at once, inner before outer: the experts of each layer; the
        embedding; each layer; last the rest, which is the final norm and the head. An embedding that is tied, or whose
        weight the model reads outside of the module (Gemma 4), is gathered with the rest."""
        names, anatomy = [name for name in self.placement.shards if self.placement.holds(name)], self.anatomy
        frozen = frozenset(name for name in names if not self.facts.parameters[name].is_trained)
        is_apart = not anatomy.tied and anatomy.embedding not in self.facts.looked_into
        separate = (anatomy.embedding, *self.placement.layers) if is_apart else self.placement.layers
        found = [Unit(each.name, _inside(each.name, names), "ep") for each in self.experts]
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
        7 rows over 4 shards count as 8. None without FSDP: parameters and gradients are used where they are."""
        if not self.uses_fsdp:
            return 0, 0
        shards = self.placement.grid.fsdp_shards(unit.over)
        sizes = {name: _padded(self.placement.gathered_shape(name), shards) for name in unit.parameters}
        return sum(sizes.values()), sum(sizes[name] for name in sizes.keys() - unit.frozen)

    def gathered_bytes(self, unit: Unit) -> int:
        """Bytes that a unit gathers, with padding: numbers of the compute dtype, and of one byte. Without FSDP, of its
        copies."""
        if not self.uses_fsdp:
            numbers = sum(
                prod(self.placement.gathered_shape(name)) for name in set(unit.parameters).intersection(self.copied)
            )
            return numbers * self.layout.compute_bytes
        shards = self.placement.grid.fsdp_shards(unit.over)
        shapes = {name: self.placement.gathered_shape(name) for name in unit.parameters}
        return sum(int(_padded(each, shards) * self._sent_in(name)) for name, each in shapes.items())

    def _sent_in(self, name: str) -> float:
        """Bytes of a number of a parameter that FSDP gathers."""
        return 1 if name in self._in_fp8 else self.placement.rests_in(name, self.layout.compute_bytes)

    @cached_property
    def _in_fp8(self) -> frozenset[str]:
        return frozenset(self.fp8_gathers)

    def largest(self, unit: Unit) -> int:
        """Numbers of the largest parameter that a unit gathers."""
        return max((prod(self.placement.gathered_shape(name)) for name in unit.parameters), default=0)

    def users(self, unit: Unit) -> frozenset[int]:
        """The stages of this rank in which a unit's parameters get a gradient."""
        return frozenset(stage for name in unit.parameters for stage in self.placement.stages.users(name)) & {
            *self.placement.own_stages
        }

    def unshards(self, micro_batches: int) -> Mapping[str, Unshards]:
        """How often FSDP gathers and reduces each unit of this rank in a step."""
        users = {unit.name: self.users(unit) for unit in self.units}
        order = self.schedule(micro_batches).orders[self.placement.coords.pp]
        return of_slots(order, users, micro_batches, self.placement.own_stages, self.layout.zero)

    # ---- the passes --------------------------------------------------------------------------------------------------

    def schedule(self, micro_batches: int) -> SchedulePlan:
        """The order of the passes; without a pipeline, of one stage. Raises `UserError` where it does not take so many
        micro batches."""
        return _schedule(self.layout, micro_batches)

    def slot_duration(self, slot: Slot) -> float:
        """Duration of a slot from the cost of its stage. The forward of a stage of mean cost takes 1."""
        costs = self._stage_costs
        return TYPICAL[slot.kind] * costs[slot.stage] * len(costs) / sum(costs)

    @cached_property
    def _stage_costs(self) -> tuple[int, ...]:
        of_layers = [cost.active for cost in self.facts.layer_costs]
        costs = [sum(of_layers[first:last]) for first, last in self.placement.stages.splits]
        return (*costs[:-1], costs[-1] + self.facts.head_cost)

    def rings(self, tokens: int) -> tuple[Blocks, ...]:
        """The token blocks of each rank of this rank's ring; a rank of cp has `tokens` tokens of a row.

        The u neighbours of a Ulysses group together hold the tokens of one rank of a ring of cp / u.
        """
        return tokens_by_rank(tokens * self.layout.cp, self.layout.cp // self.cp_method.ulysses)

    def step_shape(
        self,
        rows: int,
        tokens: int,
        micro_batches: int,
        *,
        loss_chunks: int | None = None,
        reduce_bytes: int | None = None,
    ) -> StepShape:
        """One step of [rows, tokens] micro batches: what its calls and its bytes are computed from."""
        layout, own_tokens = self.layout, tokens // self.layout.cp
        compute = layout.compute_bytes
        return StepShape(
            rows=rows,
            tokens=own_tokens,
            hidden=self.facts.hidden_size,
            micro_batches=micro_batches,
            loss_chunks=chunk_sizes(rows * own_tokens, self.vocabulary, self.facts.hidden_size, loss_chunks),
            compute_bytes=compute,
            master_bytes=max(compute, 4),
            reduce_bytes=reduce_bytes or max(compute, 4),
            recompute=self.recompute,
            gathers_again=not layout.schedule.splits_backward,
        )


def lower(facts: ModelFacts, layout: Layout, rank: int) -> ParallelPlan:
    """The plan of `layout` for `rank`; `layout` is resolved: it says its world.

    Raises `UserError`, with the arithmetic, where the layout does not fit the model.
    """
    legality.refuse(legality.violations(layout, limits_of(facts)))
    partition, shards = partition_of(facts, layout.tp), shard_specs(facts, layout)
    stages = stage_plan(facts, layout)
    pp_ranks = {name: stages.holders(name) for name in (*shards, *facts.router_buffers)}
    method = _cp_method(facts, layout)
    grid = RankGrid(
        layout,
        kv_copies=kv_copies(facts, layout.tp),
        has_experts=bool(facts.experts),
        embedding_ranks=pp_ranks[facts.anatomy.embedding_weight] if facts.anatomy.tied else (),
        ulysses=method.ulysses,
    )
    placement = Placement(facts, layout, rank, grid, shards, stages, pp_ranks)
    sums = gradient_sums(partition, shards, sequence_parallel=layout.sequence_parallel)
    # Those that are frozen too: a loop of one's own may train them later.
    own = {name: axis for name, axis in sums.items() if placement.holds(name)}
    in_copies = computes_in_copies(facts, layout)
    plan = ParallelPlan(placement, partition, own, method, Recompute(layout.recompute), in_copies)
    legality.refuse([*_of_fp8(plan), *_of_states(plan), *_of_chunked_mlps(plan), *_of_adapters(plan), *_of_nf4(plan)])
    return plan


def _of_fp8(plan: ParallelPlan) -> Iterator[Violation]:
    """Every rank casts the numbers that one process would cast together: none has a part of a gradient, and none a part
    of a block with one scale."""
    layout = plan.layout
    layers = len(plan.anatomy.layers)
    if layout.fp8 != "none" and layout.fp8_high_layers * 2 >= layers:
        what = f"fp8_high_layers {layout.fp8_high_layers} at each end leaves none of {many(layers, 'layer')} to fp8"
        yield Violation("fp8_high_layers", what, f"at most {(layers - 1) // 2}", more="docs/fp8.md")
    if layout.expert_tp and plan.facts.experts and layout.fp8 != "none":
        yield Violation(
            "expert_tp", "fp8 does not multiply experts that are split over tp", "set layout.expert_tp: false"
        )
    for linear in plan.fp8_linears:
        spec = plan.placement.shards[linear.name]
        if spec.splits and spec.replicas > 1:
            what = f"fp8 {layout.fp8}: tp {layout.tp} ranks share {linear.name}, and each has a part of its gradient"
            yield Violation("tp", what, f"use tp {layout.tp // spec.replicas} or less", more="docs/fp8.md")
        block = RECIPES[layout.fp8].block
        edges = {edge for part in spec.held for blocks in part for each in blocks for edge in each}
        if spec.splits and any(edge % block for edge in edges - {*spec.shape}):
            what = f"fp8 {layout.fp8} has blocks of {block} features, and tp {layout.tp} cuts {linear.name} inside one"
            yield Violation("tp", what, "use less tp, or fp8 rowwise", more="docs/fp8.md")


def _dense_mlps(facts: ModelFacts, layers: Sequence[str]) -> tuple[str, ...]:
    """The MLPs of layers that compute token by token: pairs of linears alone, given hidden states alone."""
    found, outer = facts.partition.of_layers(layers), [each.name.rpartition(".")[0] for each in facts.experts]
    return tuple(
        block.owner for block in found.tp_blocks
        if block.heads is None and block.entries[0].modules == (block.owner,) and not is_within(block.owner, outer)
        and all(found.roles[name].kind in _OF_LINEARS for name in _inside(block.owner, [*found.roles]))
    )  # fmt: skip


def _of_chunked_mlps(plan: ParallelPlan) -> Iterator[Violation]:
    """There are MLPs to run in pieces."""
    if plan.layout.mlp_chunks > 1 and not _dense_mlps(plan.facts, plan.anatomy.layers):
        what = f"mlp_chunks {plan.layout.mlp_chunks}: {plan.facts.model_class} has no dense MLP that is known to be one"
        yield Violation("mlp_chunks", what, "set memory.mlp_chunks: 1", (1,), more="docs/memory.md")


def _of_adapters(plan: ParallelPlan) -> Iterator[Violation]:
    """What a row makes is kept behind its sum over tp, and its products are not: B would read none."""
    keeps = plan.layout.recompute == "selective" or budget_bytes(plan.layout.recompute) is not None
    if plan.placement.has_adapter and keeps and plan.reduces_rows:
        what = f"recompute {plan.layout.recompute} under tp keeps nothing that the gradient of an adapter needs"
        yield Violation("recompute", what, "use recompute full or none", more="docs/adapters.md")
    experts = [each.name for each in plan.facts.experts]
    beside = any(each.is_trained and is_within(name, experts) for name, each in plan.facts.parameters.items())
    if plan.placement.has_adapter and beside and plan.layout.fp8 != "none":
        what = "fp8 with adapter.target_parameters, beside experts, is not built"
        yield Violation("fp8", what, "leave precision.fp8 out, or adapter.target_parameters", more="docs/adapters.md")


def _of_nf4(plan: ParallelPlan) -> Iterator[Violation]:
    """A block of four-bit weights, which has one scale, lies on one rank."""
    for name, spec in plan.placement.shards.items():
        if not plan.facts.parameters[name].in_nf4:
            continue
        if plan.layout.fp8 != "none" or plan.layout.offload_parameters:
            key = "fp8" if plan.layout.fp8 != "none" else "offload_parameters"
            what = f"{key} with adapter.quantize: nf4 is not built"
            yield Violation(key, what, "use adapter.quantize: none, or leave it out", more="docs/adapters.md")
            return
        if any(edge % NF4_BLOCK for part in spec.held for each in part[1] for edge in each):
            what = f"adapter.quantize: {name} has blocks of {NF4_BLOCK} in a row of {spec.shape[1]}, and tp "
            what += f"{plan.layout.tp} cuts one"
            yield Violation("tp", what, "use less tp, or adapter.quantize: none", more="docs/adapters.md")
            return


def _of_states(plan: ParallelPlan) -> Iterator[Violation]:
    """A block of the optimizer's state, which has one scale, lies on one rank."""
    for name, spec in plan.placement.shards.items():
        if plan.placement.kept_in(name) != "8bit":
            continue
        block, last = block_length(spec.shape[-1]), len(spec.shape) - 1
        if any(edge % block for part in spec.held for each in part[last] for edge in each):
            what = f"8bit states of {name} have blocks of {block} in a row of {spec.shape[-1]}, and tp {plan.layout.tp}"
            yield Violation(
                "tp", f"{what} cuts one", "use less tp, or optimizer.state_dtype: bf16", more="docs/memory.md"
            )


def _cp_method(facts: ModelFacts, layout: Layout) -> CPMethod:
    """How the ranks of cp attend, by the attention with the fewest heads."""
    if layout.cp == 1:
        return CPMethod(1, 1)
    of_rank = [_on_tp_rank(shape, layout.tp) for shape in facts.attends.values()]
    query, kv = min(shape.query for shape in of_rank), min(shape.kv for shape in of_rank)
    return heads.context_method(layout.cp_method, layout.cp, query, kv)


def _on_tp_rank(shape: AttentionShape, tp: int) -> AttentionShape:
    return replace(shape, query=shape.query // tp, kv=max(1, shape.kv // tp))


def _inside(module: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if is_within(name, [module]))


def _padded(shape: tuple[int, ...], shards: int) -> int:
    rows, rest = shape[0], prod(shape[1:])
    return -(-rows // shards) * shards * rest


@lru_cache(maxsize=16)
def _schedule(layout: Layout, micro_batches: int) -> SchedulePlan:
    legality.refuse(legality.of_micro_batches(layout, micro_batches))
    return SchedulePlan.of(layout, micro_batches)
