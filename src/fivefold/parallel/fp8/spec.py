"""Linears and experts of a plan that multiply in fp8, and what they save for backward. No torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from fivefold.core.errors import Violation
from fivefold.core.units import many
from fivefold.models.anatomy import is_within
from fivefold.models.facts import Experts, Matmul
from fivefold.parallel.collectives import Call
from fivefold.parallel.fp8.recipes import KERNELS, KINDS, RECIPES, SPLIT_OVER, agreements
from fivefold.parallel.plan import MatmulLinear, ParallelPlan
from fivefold.parallel.recompute.spec import RecomputePlan
from fivefold.parallel.step import LayerNumbers, LayerStep, Step

# Kind of a parameter that multiplies in fp8 -> the axes that split the dimensions of its linear.
_SPLIT_OVER = {"column": SPLIT_OVER["column"], "row": SPLIT_OVER["row"], "replicated": SPLIT_OVER["dense"]}


class Fp8Plan:
    """Linears and experts of a rank that multiply in fp8, and what ranks agree on for them. A `MatmulPlan`."""

    key, kept_by, why = "fp8", "fp8_high_layers", "its products are those of eight bits"

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan, self._placement = plan, plan.placement

    @property
    def is_used(self) -> bool:
        return self._plan.layout.fp8 != "none"

    def covers(self, module: str) -> bool:
        """True if the layer of a module multiplies in fp8: a layer that is not at an end, and no branch."""
        layers, high = self._plan.anatomy.layers, self._plan.layout.fp8_high_layers
        if module.rpartition(".")[0] in self._plan.facts.branches:
            return False
        return self.is_used and is_within(f"{module}.", layers[high : len(layers) - high])

    def multiplies(self, module: str) -> bool:
        """True if this linear, or these experts, of this rank's layers multiply in fp8. A linear that gets a forward of
        fivefold's for another reason (a gate of shared experts that has an adapter) need not."""
        return module in self._modules

    @cached_property
    def _modules(self) -> frozenset[str]:
        experts = (block.name for block in self.expert_modules)
        return frozenset((*experts, *(linear.name.removesuffix(".weight") for linear in self.linears)))

    def unaligned(self, tokens: int) -> list[str]:
        """Describe what no fp8 kernel multiplies for its size; a micro batch has `tokens` tokens on this rank."""
        if not self.linears:
            return []
        recipe = RECIPES[self._plan.layout.fp8]
        step = KERNELS[recipe.block].summed
        found = [
            f"{linear.name.removesuffix('.weight')} [{linear.outputs}, {linear.inputs}]"
            for linear in self.linears
            if linear.inputs % step or linear.outputs % step
        ]
        in_backward = recipe.weight_grad is not None and tokens % step
        return found + [f"the gradients of weights, of {tokens:,} tokens"] * bool(in_backward)

    @property
    def expert_modules(self) -> tuple[Experts, ...]:
        """Experts of this rank's layers that multiply in fp8."""
        return tuple(block for block in self._plan.experts if self.covers(block.name))

    @cached_property
    def linears(self) -> tuple[MatmulLinear, ...]:
        """Linears of this rank's layers that multiply in fp8, without the experts.

        The head, routers and latent projections stay in the compute dtype. (A latent projection gets the
        gradients of this rank's heads. Cast one by one, their sum is not the cast sum.)
        """
        found = []
        for name, matmul in self.matmuls(self._placement.layers):
            shape, kind = self._placement.gathered_shape(name), self._plan.facts.partition.roles[name].kind
            is_transposed = self._placement.shards[name].shape != (matmul.outputs, matmul.inputs)
            outputs, inputs = reversed(shape) if is_transposed else shape
            found.append(MatmulLinear(name, inputs, outputs, _SPLIT_OVER[kind]))
        return tuple(found)

    @cached_property
    def inputs(self) -> tuple[tuple[MatmulLinear, ...], ...]:
        """`linears` by their input, which is cast once: q, k and v; gate and up; each other one by itself."""
        linears = {linear.name: linear for linear in self.linears}
        return tuple(tuple(linears[name] for name in group) for group in self._by_input(linears))

    def _by_input(self, weights: Iterable[str]) -> Iterator[Sequence[str]]:
        blocks = self._plan.facts.partition.tp_blocks
        groups = [[f"{name}.weight" for name in names] for block in blocks for names in block.shared]
        shared, later = {group[0]: group for group in groups}, {name for group in groups for name in group[1:]}
        return (shared.get(name, [name]) for name in weights if name not in later)

    def matmuls(self, layers: Sequence[str]) -> Iterator[tuple[str, Matmul]]:
        """Yield the weights of `layers` that multiply in fp8, without the experts, by name."""
        for layer, cost in zip(self._plan.anatomy.layers, self._plan.facts.layer_costs, strict=True):
            for matmul in cost.matmuls if layer in layers and self.covers(layer) else ():
                name = f"{layer}.{matmul.name}"
                if self._plan.facts.partition.roles[name].kind in _SPLIT_OVER:
                    yield name, matmul

    @property
    def amax_steps(self) -> int:
        """Number of steps whose largest values delayed scaling keeps; 0 for other recipes."""
        return RECIPES[self._plan.layout.fp8].history if self.is_used else 0

    @property
    def amax_names(self) -> tuple[str, ...]:
        """Weights of the whole model whose linears have a history of largest values (delayed scaling)."""
        return self.gathers if self.amax_steps else ()

    @cached_property
    def sent(self) -> Mapping[str, int]:
        return dict.fromkeys(self.gathers, 1)

    @cached_property
    def gathers(self) -> tuple[str, ...]:
        """Weights of the whole model that FSDP gathers in fp8: recipes cast them once. Neighbours share an input."""
        if not self.is_used or not RECIPES[self._plan.layout.fp8].casts_once:
            return ()
        names = [name for name, _ in self.matmuls(self._plan.anatomy.layers)]
        return tuple(name for group in self._by_input(names) for name in group)


def violations(plan: ParallelPlan) -> Iterator[Violation]:
    """Every rank must cast the numbers that one process would cast together: no rank has a part of a gradient, or of a
    block with one scale."""
    layout, layers, more = plan.layout, len(plan.anatomy.layers), "fivefold docs explain/fp8"
    if layout.fp8 != "none" and layout.fp8_high_layers * 2 >= layers:
        what = f"fp8_high_layers {layout.fp8_high_layers} at each end leaves none of {many(layers, 'layer')} to fp8"
        yield Violation("fp8_high_layers", what, f"at most {(layers - 1) // 2}", more=more)
    if layout.expert_tp and plan.facts.experts and layout.fp8 != "none":
        what = "fp8 does not multiply experts that are split over tp"
        yield Violation("expert_tp", what, "set layout.expert_tp: false")
    for linear in plan.feature(Fp8Plan).linears:
        spec = plan.placement.shards[linear.name]
        if spec.splits and spec.replicas > 1:
            what = f"fp8 {layout.fp8}: tp {layout.tp} ranks share {linear.name}, and each has a part of its gradient"
            yield Violation("tp", what, f"use tp {layout.tp // spec.replicas} or less", more=more)
        block = RECIPES[layout.fp8].block
        edges = {edge for part in spec.held for blocks in part for bounds in blocks for edge in bounds}
        if spec.splits and any(edge % block for edge in edges - {*spec.shape}):
            what = f"fp8 {layout.fp8} has blocks of {block} features, and tp {layout.tp} cuts {linear.name} inside one"
            yield Violation("tp", what, "use less tp, or fp8 rowwise", more=more)


def calls(step: Step) -> Iterator[Call]:
    """Collectives of ranks that split a dimension of linears that share an input, on the largest values of regions."""
    plan, shape = step.plan, step.shape
    if plan.feature(Fp8Plan).amax_names and shape.has_history:
        return
    for group in plan.feature(Fp8Plan).inputs:
        first, outputs = group[0], [linear.outputs for linear in group]
        recipe = RECIPES[plan.layout.fp8]
        for product, dim, numbers in agreements(recipe, shape.rows * shape.tokens, first.inputs, outputs):
            if axis := first.axes.get(dim):
                size = numbers * shape.compute_bytes
                if product == "output":
                    yield from step.forwards(
                        axis, "all_reduce", size, first.name, is_kept=plan.feature(RecomputePlan).keeps(first.name)
                    )
                else:
                    yield step.call(axis, "all_reduce", size, "backward", step.layer_of(first.name))


def scale_bytes(step: Step) -> Iterator[int]:
    """Yield the bytes of all-reduces of largest values over the world: before the passes those of weights that are
    gathered in fp8, unless a history has them; after the passes those of linears with a history."""
    own = step.plan.feature(Fp8Plan)
    if own.gathers and not (own.amax_names and step.shape.has_history):
        yield 8 * len(own.gathers)
    if own.amax_names:
        yield 8 * len(KINDS) * len(own.amax_names)


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Replace saved inputs of linears by their casts."""
    return replace(numbers, saved=numbers.saved + cast_numbers(step))


def cast_numbers(step: LayerStep) -> float:
    """Elements per token that fp8 linears of a layer save beyond those of the compute dtype; negative if fewer.

    If an input is cast for weight gradients, backward does not read the input itself. A compiled layer recomputes it,
    element by element, from what the preceding norm or activation saves, and casts it again by the same scale. There
    are exceptions:

    - Attention saves its output in any case. Over cp it is outside of graphs, and so is the norm before q, k and v.
    - A cast is saved, one byte a number, if the scale comes from other ranks. If the cast serves both products, it is
      saved also if the scale of the gradients comes from them.
    - A cast is saved if linears stay outside of graphs (delayed scaling). An activation before them saves its output.
    - Eager layers save the cast if it serves both products.
    """
    plan, shape = step.plan, step.shape
    groups = [group for group in plan.feature(Fp8Plan).inputs if is_within(group[0].name, [step.name])]
    if not groups or RECIPES[plan.layout.fp8].weight_grad is None:
        return 0.0
    recipe, total, blocks, grid = RECIPES[plan.layout.fp8], 0.0, plan.facts.partition.tp_blocks, plan.placement.grid
    products = ("output", "input_grad") if recipe.casts_once else ("output",)
    spanned = {dim for product, dim, _ in agreements(recipe, 1, 1, [1]) if product in products}
    rows = {f"{block.row}.weight": block.heads is not None for block in blocks}
    outside = [block.owner for block in blocks if block.heads and grid.size("cp") > 1]
    for linear in (group[0] for group in groups):
        is_row, of_attention = linear.name in rows, rows.get(linear.name, False)
        agrees = any(grid.size(linear.axes[dim]) > 1 for dim in spanned if dim in linear.axes)
        if shape.compiled:
            is_saved_anyway = of_attention or is_within(linear.name, outside)
            is_left_out = not (is_saved_anyway or (recipe.history and is_row))
            is_cast_kept = (agrees or recipe.history > 0) and (recipe.casts_once or not of_attention)
        else:
            is_left_out, is_cast_kept = recipe.casts_once and not of_attention, recipe.casts_once
        total += linear.inputs * (is_cast_kept / shape.compute_bytes - is_left_out)
    return total
