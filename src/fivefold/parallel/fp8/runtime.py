"""Products of linears and experts in fp8, by role."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from fivefold.ops.linear import Products, Role
from fivefold.parallel.fp8.amax import AmaxHistory
from fivefold.parallel.fp8.delayed import Delayed
from fivefold.parallel.fp8.matmul import Agree, Float8, Float8Grouped
from fivefold.parallel.fp8.recipes import RECIPES, SPLIT_OVER, Dim, Recipe
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.tensor.mappings import max_all


def products(model: nn.Module, mesh: Mesh, amax: AmaxHistory) -> dict[Role, Callable[..., Products]]:
    """Make the products of each role; none without fp8. Ranks of the axis that splits a
    dimension all-reduce amax."""
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
