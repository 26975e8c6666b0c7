"""Bugs of linears in fp8."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fivefold.parallel.fp8 import matmul as fp8
from fivefold.parallel.fp8 import recipes
from fivefold.parallel.fp8 import runtime as products
from fivefold.parallel.fp8 import scales as fp8_scales
from fivefold.parallel.fp8.recipes import RECIPES, Cast, Recipe
from fivefold.parallel.linears import runtime as linears
from fivefold.parallel.linears.spec import LinearPlan
from tests.verification.faults.fault import Model, fault

DEEPSEEK, MIXTRAL = Model("deepseek_v3", kv_heads=4), Model("mixtral")


def _without_agreement_over(dim: str) -> Any:
    plain = recipes.shared_dims
    return patch.object(fp8, "shared_dims", lambda *args: tuple(each for each in plain(*args) if each != dim))


@fault(
    "a row of activations that tp splits is scaled by this rank's largest value",
    known="amax not reduced over tp: Transformer Engine reduces it, torchao's float8 linears under tp once did not",
    layout="tp2+fp8_rowwise",
    expects=[("output", r"o_proj|down_proj")],
)
def row_scale_of_one_rank() -> Any:
    return _without_agreement_over("inputs")


@fault(
    "gradients of a column that tp splits are scaled by this rank's largest value",
    known="the same in backward: the loss of the first step is exact",
    layout="tp2+fp8",
    expects=[("gradient of output", r"")],
)
def column_gradient_scale_of_one_rank() -> Any:
    plain = recipes.shared_dims

    def of_gradients(cast: Cast, free: Any, summed: Any) -> Any:
        return tuple(dim for dim in plain(cast, free, summed) if (cast.form, dim) != ("e5m2", "outputs"))

    return patch.object(fp8, "shared_dims", of_gradients)


@fault(
    "weight gradients are cast by the largest values of this rank's tokens",
    known="context parallelism without an agreement on scales",
    layout="cp2+fp8_rowwise",
    expects=[("gradient, raw", r"_proj")],
)
def token_scale_of_one_rank() -> Any:
    return _without_agreement_over("tokens")


@fault(
    "gradients in e4m3, whose range is forward's",
    known="arXiv:2209.05433 gives gradients e5m2; a recipe with one format",
    layout="shard2+fp8",
    expects=[("gradient of output", r"")],
)
def gradients_in_e4m3() -> Any:
    def forward_s(pair: tuple[Cast, Cast]) -> tuple[Cast, Cast]:
        return replace(pair[0], form="e4m3"), pair[1]

    plain = RECIPES["tensorwise"]
    wrong = Recipe(plain.output, forward_s(plain.input_grad), plain.weight_grad)
    return patch.dict(RECIPES, {"tensorwise": wrong})  # type: ignore[arg-type]


@fault(
    "scales as large as the next power of two: the largest values saturate",
    known="a scale rounded up instead of down",
    layout="shard2+mxfp8",
    expects=[("output", r"q_proj")],
)
def scales_rounded_up() -> Any:
    plain = fp8.scale_of
    return patch.object(fp8, "scale_of", lambda *args: 2 * plain(*args))


@fault(
    "latent projections in fp8: each tp rank casts the gradients of its own heads",
    known="a filter by name that does not know the model (torchao's filter functions)",
    layout="tp2+fp8_rowwise",
    model=DEEPSEEK,
    expects=[("output", r"kv_a_proj|q_a_proj")],
)
def latents_in_fp8() -> Any:
    roles, reasons = LinearPlan.roles.func, LinearPlan.reasons
    latents = set[str]()

    def as_dense(self: LinearPlan) -> Any:
        found = roles(self)
        latents.update(name for name, role in found.items() if role == "latent")
        return {name: "dense" if role == "latent" else role for name, role in found.items()}

    def with_latents(self: LinearPlan, module: str, role: Any) -> Any:
        return [*reasons(self, module, role), *([("fp8", "")] if module in latents else [])]

    return patch.multiple(LinearPlan, roles=property(as_dense), reasons=with_latents)


@fault(
    "one linear of a layer stays in the compute dtype",
    known="a stale filter by name: the loss is better than it should be, the speed worse",
    layout="pp2+fp8_rowwise",
    expects=[("output", r"k_proj")],
)
def one_linear_left_out() -> Any:
    plain = linears.place_together

    def but_the_second(modules: Any, *args: Any) -> None:
        plain(modules, *args)
        del modules[1].forward

    return patch.object(linears, "place_together", but_the_second)


@fault(
    "of linears that share their input, two hand on each other's output",
    known="one product for q, k and v whose parts are taken in another order than the model asks for them",
    layout="shard2+fp8_rowwise",
    expects=[("output", r"k_proj|v_proj")],
)
def outputs_of_each_other() -> Any:
    plain = linears.place_together

    def swapped(modules: Any, *args: Any) -> None:
        plain(modules, *args)
        if modules[1].weight.shape == modules[-1].weight.shape:
            modules[1].forward, modules[-1].forward = modules[-1].forward, modules[1].forward

    return patch.object(linears, "place_together", swapped)


@fault(
    "largest values that travel together come back one place further",
    known="a flat buffer cut at other offsets than it was put together from",
    layout="tp2+fp8_rowwise",
    expects=[("output", r"o_proj"), ("gradient of output", r"")],
)
def largest_values_shifted() -> Any:
    plain = products.max_all
    return patch.object(products, "max_all", lambda x, group: plain(x, group).roll(1))


@fault(
    "the cast input that waits for backward is divided by the gradient's scale",
    known="scales of two operands given in the wrong order to a scaled matmul",
    layout="shard2+fp8",
    expects=[("gradient, raw", r"_proj")],
)
def scale_of_the_other_operand() -> Any:
    plain = fp8.Float8._weight_grads

    def wrong(self: Any, grads: Any, x: Any, dtype: Any) -> Any:
        return plain(self, grads, (x[0], grads[0][1]), dtype)

    return patch.object(fp8.Float8, "_weight_grads", wrong)


@fault(
    "rows of experts are scaled by the largest value of all rows that have come",
    known="a tensor's scale under dropless routing: it follows what other ranks sent",
    layout="shard2.ep2+fp8",
    model=MIXTRAL,
    expects=[("output", r"mlp\.experts|mlp$")],
)
def experts_cast_as_a_tensor() -> Any:
    return patch.object(fp8, "by_row", lambda recipe: Recipe(recipe.output, recipe.input_grad, None))


@fault(
    "ranks agree on scales over their data ranks too",
    known="an agreement over the world (Transformer Engine's amax group of data, context and tensor ranks)",
    layout="shard2.tp2+fp8",
    expects=[("output", r"o_proj"), ("collectives", r"")],
)
def scales_of_other_rows() -> Any:
    plain = products.max_all

    def of_all(x: Tensor, group: Any) -> Tensor:
        return plain(x, dist.group.WORLD)

    return patch.object(products, "max_all", of_all)


# ---- weights that are gathered in fp8 --------------------------------------------------------------------------------


@fault(
    "a shard is cast by its own largest value, and gathered with the scale of the rank that uses it",
    known="torchao's precomputed scales for FSDP2 without their all-reduce",
    layout="shard2+fp8",
    expects=[("output", r"_proj")],
)
def weight_scale_of_one_rank() -> Any:
    plain = fp8_scales.dist.all_reduce

    def alone(x: Tensor, op: Any = ReduceOp.SUM, **options: Any) -> Any:
        return plain(x.clone() if x.dtype == torch.float64 and x.ndim == 1 and op == ReduceOp.MAX else x, op, **options)

    return patch.object(fp8_scales.dist, "all_reduce", alone)


@fault(
    "scales of weights are those of the first step",
    known="`precompute_float8_dynamic_scale_for_fsdp` left out after the optimizer's step: larger weights are cut",
    layout="shard2+fp8",
    expects=[("gradient, second step", r"")],
)
def weight_scale_of_the_first_step() -> Any:
    plain = fp8_scales.Fp8Scales.begin_passes

    def once(self: Any) -> None:
        if any(format.scale is None for _, format in self._weights.values()):
            plain(self)
        elif self._cast is not None:
            fp8_scales.dist.all_reduce(torch.zeros(len(self._names), dtype=torch.float64), ReduceOp.MAX)

    return patch.object(fp8_scales.Fp8Scales, "begin_passes", once)


# ---- delayed scaling -------------------------------------------------------------------------------------------------


@fault(
    "largest values of earlier steps are this rank's alone",
    known="Megatron-LM's amax reduction over tp only, and none over data ranks: copies scale by numbers of their own",
    layout="tp2+fp8_delayed",
    expects=[("gradient, second step", r"")],
)
def history_of_one_rank() -> Any:
    return patch.object(fp8_scales.dist, "all_reduce", _but_for_amax(fp8_scales.dist.all_reduce))


def _but_for_amax(plain: Any) -> Any:
    """The collective is there, and its result is not used."""
    return lambda x, op=ReduceOp.SUM, **options: plain(
        x.clone() if x.ndim == 2 and op == ReduceOp.MAX else x, op, **options
    )


@fault(
    "a history that takes the last micro batch for the step",
    known="amax overwritten, not maximised, over gradient accumulation",
    layout="shard2+fp8_delayed",
    expects=[("gradient, second step", r"")],
)
def history_of_the_last_micro_batch() -> Any:
    def overwritten(self: Any, rows: Any, operand: Any, largest: Tensor) -> None:
        if self._is_open:
            self._now[rows[0] : rows[-1] + 1, recipes.KINDS.index(operand)] = largest.to(self._now.dtype)

    return patch.object(fp8_scales.AmaxHistory, "note", overwritten)


@fault(
    "largest values of gradients are not kept: their scale stays 1",
    known="the history of forward alone; a first step without a history is exact",
    layout="shard2+fp8_delayed",
    expects=[("gradient, second step", r"")],
)
def history_of_forward_alone() -> Any:
    plain = fp8_scales.AmaxHistory.note

    def of_forward(self: Any, rows: Any, operand: Any, largest: Tensor) -> None:
        if operand != "gradient":
            plain(self, rows, operand, largest)

    return patch.object(fp8_scales.AmaxHistory, "note", of_forward)


@fault(
    "keys are scaled by the history of queries",
    known="amax buffers by position, not by the linear's name",
    layout="shard2+fp8_delayed",
    expects=[("gradient, second step", r"")],
)
def history_of_another_linear() -> Any:
    plain = fp8_scales.AmaxHistory.largest
    return patch.object(
        fp8_scales.AmaxHistory, "largest", lambda self, row, operand: plain(self, row - (row % 7 == 1), operand)
    )


@fault(
    "scales lag by one step more: the last one is not in the history yet",
    known="amax rolled before it is written, as a buffer's pointer that moves first",
    layout="single+fp8_delayed",
    expects=[("gradient, second step", r"")],
)
def history_without_the_last_step() -> Any:
    plain = fp8_scales.AmaxHistory._keep

    def late(self: Any, history: Tensor) -> None:
        self.history = history
        if len(history) > 1:
            plain(self, history[:-1])
            self.history = history

    return patch.object(fp8_scales.AmaxHistory, "_keep", late)
