"""fp8 in the header of a run."""

from fivefold.core.units import many
from fivefold.parallel.census import own_part
from fivefold.parallel.fp8.kernels import emulated
from fivefold.parallel.fp8.recipes import KERNELS, RECIPES
from fivefold.parallel.fp8.spec import Fp8Plan
from fivefold.parallel.plan import ParallelPlan


def lines(plan: ParallelPlan, seq_length: int, device: str) -> list[tuple[str, str]]:
    """Return (label, text) rows: the modules that multiply in fp8, and why that is not faster on `device`, if it is
    not."""
    recipe = plan.layout.fp8
    if recipe == "none":
        return []
    counts = (
        (len(plan.feature(Fp8Plan).linears), "linear"),
        (len(plan.feature(Fp8Plan).expert_modules), "expert module"),
    )
    cast = " and ".join(many(count, what) for count, what in counts if count) or "nothing"
    high = plan.layout.fp8_high_layers
    ends = f"the first and last {many(high, 'layer')}, head" if high else "head"
    part = f"{100 * own_part(plan):.0f} % of the matmuls' FLOPs"
    rows = [("fp8", f"{recipe}: {cast} of this rank, {part}; {ends}, norms and attention in {plan.layout.precision}")]
    precision = plan.layout.precision
    if why := emulated(recipe, device, precision):
        rows.append(("", f"the loss is that of fp8, the speed is not: {why}"))
    elif plan.feature(Fp8Plan).expert_modules and (lacks := emulated(recipe, device, precision, of_experts=True)):
        rows.append(("", f"the loss of experts is that of fp8, their speed is not: {lacks}"))
    layout = plan.layout
    tokens = layout.padded(seq_length) // layout.cp * layout.micro_batch_size
    if not why and (slow := plan.feature(Fp8Plan).unaligned(tokens)):
        step = KERNELS[RECIPES[recipe].block].summed
        more = f" and {len(slow) - 1} more" if len(slow) > 1 else ""
        rows.append(("", f"slower than in bf16, for sizes that are no multiples of {step}: {slow[0]}{more}"))
    return rows
