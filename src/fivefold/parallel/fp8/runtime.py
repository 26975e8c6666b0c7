"""Products of linears and experts in fp8, by role; with delayed scaling by the history of `scales.py`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fivefold.core.units import many
from fivefold.ops.linear import Products, Role
from fivefold.parallel.census import own_part
from fivefold.parallel.fp8.kernels import Rounded, emulated
from fivefold.parallel.fp8.matmul import Agree, Float8, Float8Grouped, cast_to_fp8, scale_of
from fivefold.parallel.fp8.recipes import KERNELS, OPERANDS, RECIPES, SPLIT_OVER, Cast, Dim, Operand, Product, Recipe
from fivefold.parallel.fp8.scales import AmaxHistory
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.tensor.mappings import max_all


@dataclass(frozen=True)
class Delayed(Float8):
    """`Float8` with history scales of whole tensors. `rows`: the places of the linears in `history`, in order."""

    history: AmaxHistory
    rows: tuple[int, ...]

    def casts(
        self, which: Product, a_MK: Sequence[Tensor], b_NK: Sequence[Tensor]
    ) -> tuple[list[Rounded], list[Rounded]]:
        """Cast the first operands with scales from their histories; without a history cast as `Float8` does."""
        largest = self._known(OPERANDS[which][0], a_MK)
        if largest is None:
            return super().casts(which, a_MK, b_NK)
        cast, _ = getattr(self.recipe, which)
        return [_cast(x, cast, own) for x, own in zip(a_MK, largest, strict=True)], []

    def _known(self, operand: Operand, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Largest values of earlier steps, if all are known; notes those of now. All linears share the input."""
        groups = [self.rows] if operand == "input" else [(row,) for row in self.rows]
        found = []
        for tensor, rows in zip(tensors, groups, strict=True):
            now, before = tensor.detach().abs().amax(), self.history.largest(rows[0], operand)
            self.history.note(rows, operand, now)
            if before is not None:
                found.append(before + 0.0 * now)  # NaN where `now` is not finite, which a cast would hide
        return found if len(found) == len(groups) else None


def _cast(x: Tensor, cast: Cast, largest: Tensor) -> Rounded:
    scale = scale_of(largest.reshape(1, 1), cast, x)
    return cast_to_fp8(x, cast, scale), scale


def products(model: nn.Module, mesh: Mesh, amax: AmaxHistory) -> dict[Role, Callable[..., Products]]:
    """Make the products of each role; none without fp8. Ranks that split a dimension all-reduce amax."""
    if mesh.layout.fp8 == "none":
        return {}
    recipe, found = RECIPES[mesh.layout.fp8], dict[Role, Callable[..., Products]]()
    names = {module: f"{name}.weight" for name, module in model.named_modules()}
    for role, axes in SPLIT_OVER.items():
        groups = {dim: mesh.groups[axis] for dim, axis in axes.items() if axis in mesh.groups}
        agree = {dim: partial(max_all, group=own) for dim, own in groups.items()}
        found[role] = partial(_float8, recipe, agree, names, amax)
    return {**found, "expert": partial(Float8Grouped, recipe)}


def _float8(
    recipe: Recipe, agree: Mapping[Dim, Agree], names: Mapping[nn.Module, str], amax: AmaxHistory,
    linears: Sequence[nn.Module], is_transposed: bool,
) -> Float8:  # fmt: skip
    """Make the products of linears that share an input."""
    if not recipe.history:
        return Float8(recipe, agree, is_transposed)
    return Delayed(recipe, agree, is_transposed, amax, tuple(amax.names.index(names[linear]) for linear in linears))


def fp8_lines(plan: ParallelPlan, seq_length: int, device: str) -> list[tuple[str, str]]:
    """Rows of a run's header, (label, text): what multiplies in fp8, and why that is not faster on `device`, if so."""
    own, layout = plan.feature(Fp8Plan), plan.layout
    recipe, precision, high = layout.fp8, layout.precision, layout.fp8_high_layers
    if recipe == "none":
        return []
    counts = (len(own.linears), "linear"), (len(own.expert_modules), "expert module")
    cast = " and ".join(many(count, what) for count, what in counts if count) or "nothing"
    ends = f"the first and last {many(high, 'layer')}, head" if high else "head"
    part = f"{100 * own_part(plan):.0f} % of the matmuls' FLOPs"
    rows = [("fp8", f"{recipe}: {cast} of this rank, {part}; {ends}, norms and attention in {precision}")]
    if why := emulated(recipe, device, precision):
        rows.append(("", f"the loss is that of fp8, the speed is not: {why}"))
    elif own.expert_modules and (lacks := emulated(recipe, device, precision, of_experts=True)):
        rows.append(("", f"the loss of experts is that of fp8, their speed is not: {lacks}"))
    tokens = layout.padded(seq_length) // layout.cp * layout.micro_batch_size
    if not why and (slow := own.unaligned(tokens)):
        step = KERNELS[RECIPES[recipe].block].summed
        more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
        rows.append(("", f"slower than in bf16, for sizes that are no multiples of {step}: {slow[0]}{more}"))
    return rows
