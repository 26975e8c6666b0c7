"""Adapters in a frozen model: edits of modules, and layouts that are refused. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import Violation
from fivefold.core.units import human, many
from fivefold.models.anatomy import is_within
from fivefold.parallel.adapters.facts import A, B
from fivefold.parallel.adapters.settings import NF4_BLOCK, Lora
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.recompute.policy import budget_bytes


@dataclass(frozen=True)
class Freeze(Edit):
    kind = "attribute"


@dataclass(frozen=True)
class Attach(Edit):
    """Two small trained matrices beside the weight `leaf`, of the `shapes` of A and B; experts have a pair each."""

    kind = "branch"
    leaf: str
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    in_nf4: bool


@dataclass(frozen=True)
class SendGradient(Edit):
    kind = "forward"


@dataclass(frozen=True)
class RestFrozen(Edit):
    kind = "rest"


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    if not plan.facts.has_adapter:
        return
    yield Freeze("", "adapter", "its own parameters are frozen")
    parameters = plan.facts.parameters
    for name in parameters:
        module, is_a, leaf = name.partition(f".{A}.")
        if is_a:
            shapes = parameters[name].shape, parameters[f"{module}.{B}.{leaf}"].shape
            in_nf4 = parameters[f"{module}.{leaf}"].packing is not None
            yield Attach(module, "adapter", "two small matrices are trained beside a weight", leaf, shapes, in_nf4)


def edits_of_embedding(plan: ParallelPlan) -> Iterator[Edit]:
    """Backward goes through the first layer as through the others."""
    if plan.facts.has_adapter:
        yield SendGradient(plan.anatomy.embedding, "adapter", "it is sent a gradient, though it is frozen")


def edits_at_rest(plan: ParallelPlan) -> Iterator[Edit]:
    """Frozen parameters have no master weights."""
    if plan.facts.has_adapter:
        yield RestFrozen("", "adapter", "what is frozen rests in the type that it is computed with, or in four bits")


def violations(plan: ParallelPlan) -> Iterator[Violation]:
    yield from _of_recompute_and_matmuls(plan)
    yield from _of_nf4(plan)


def _of_recompute_and_matmuls(plan: ParallelPlan) -> Iterator[Violation]:
    """Under tp, selective recompute saves no products of a row, which B would read. Adapters of experts exclude fp8."""
    keeps = plan.layout.recompute == "selective" or budget_bytes(plan.layout.recompute) is not None
    if plan.facts.has_adapter and keeps and plan.reduces_rows:
        what = f"recompute {plan.layout.recompute} under tp keeps nothing that the gradient of an adapter needs"
        yield Violation("recompute", what, "use recompute full or none", more="fivefold docs howto/adapters")
    experts = [block.name for block in plan.facts.experts]
    beside = any(parameter.is_trained and is_within(name, experts) for name, parameter in plan.facts.parameters.items())
    if plan.facts.has_adapter and beside and plan.matmuls.is_used:
        key = plan.matmuls.key
        what = f"{key} with adapter.target_parameters, beside experts, is not built"
        fix = f"leave precision.{key} out, or adapter.target_parameters"
        yield Violation(key, what, fix, more="fivefold docs howto/adapters")


def _of_nf4(plan: ParallelPlan) -> Iterator[Violation]:
    """A block of four-bit weights shares a scale, so it must lie on one rank."""
    for name, spec in plan.placement.shards.items():
        if not plan.facts.parameters[name].packing:
            continue
        if plan.matmuls.is_used or plan.layout.offload_parameters:
            key = plan.matmuls.key if plan.matmuls.is_used else "offload_parameters"
            what = f"{key} with adapter.quantize: nf4 is not built"
            yield Violation(
                key, what, "use adapter.quantize: none, or leave it out", more="fivefold docs howto/adapters"
            )
            return
        if spec.cuts(NF4_BLOCK):
            what = f"adapter.quantize: {name} has blocks of {NF4_BLOCK} in a row of {spec.shape[1]}, and tp "
            what += f"{plan.layout.tp} cuts one"
            yield Violation("tp", what, "use less tp, or adapter.quantize: none", more="fivefold docs howto/adapters")
            return


def adapter_lines(plan: ParallelPlan, lora: Lora | None, path: str) -> Iterator[tuple[str, str]]:
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
