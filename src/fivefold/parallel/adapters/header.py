"""The line of a run's header about its adapter. No torch."""

from collections.abc import Iterator

from fivefold.core.units import human, many
from fivefold.parallel.adapters.facts import A
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.plan import ParallelPlan


def lines(plan: ParallelPlan, lora: Lora | None, path: str) -> Iterator[tuple[str, str]]:
    """The rank, scale, targets and trained parameters of the adapter, as (label, text). `path`: its first values."""
    if lora is None:
        return
    trained = {name: parameter.size for name, parameter in plan.facts.parameters.items() if parameter.is_trained}
    linears = sum(name.endswith(f".{A}.weight") for name in trained)
    of_experts = len(trained) // 2 - linears
    named = {many(linears, "linear"): linears, f"{many(of_experts, 'parameter')} of experts": of_experts}
    on = " and ".join(text for text, count in named.items() if count)
    rest = ", the others lie in four bits (NF4)" if lora.quantize == "nf4" else ""
    start = f", from {path}" if path else ""
    whole = sum(parameter.size for parameter in plan.facts.parameters.values())
    yield (
        "adapter",
        f"LoRA rank {lora.rank}, alpha {lora.alpha:g}, on {on}{start}: "
        f"{human(sum(trained.values()))} of {human(whole)} parameters are trained{rest}",
    )
