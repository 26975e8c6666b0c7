"""LoRA (arXiv:2106.09685): beside the linears of a frozen model, two small matrices each, which are trained.

    y = W x + b + scale * B (A x)        W [O, I] frozen, A [r, I], B [O, r]; scale = alpha / r (rslora: alpha / sqrt r)

What a tp rank has of A and B follows from the role of W:

| W | A | B | which gradients the ranks hold in part |
|---|---|---|---|
| column: outputs are split | whole | split as the outputs of W | of A: each rank sends back from its own outputs |
| row: inputs are split | split as the inputs of W | whole | of B: each rank reads what A makes of its own inputs |
| whole | whole | whole | those of W |

B (A x) of a row is a partial sum like W x, and is summed with it, once. Facts are those of the model without adapters:
`adapted` adds the parameters. Names are those of `peft`: `X.lora_A.weight`, `X.lora_B.weight` beside `X.weight`.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fivefold.core.errors import UserError
from fivefold.core.lora import AUTO, NF4_BLOCK, Lora
from fivefold.core.text import listed
from fivefold.models.anatomy import is_within
from fivefold.models.facts import Matmul, ModelFacts, Parameter, Role

_T = TypeVar("_T")

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class Target:
    """A linear that has an adapter."""

    module: str
    inputs: int
    outputs: int

    @property
    def weights(self) -> tuple[str, str]:
        """The names of A and of B."""
        return f"{self.module}.{A}.weight", f"{self.module}.{B}.weight"


def targets_of(facts: ModelFacts, lora: Lora) -> tuple[Target, ...]:
    """The linears of the model that have one, in order. Raises `UserError` for a name that none has."""
    linears = list(_linears(facts))
    if lora.targets == (AUTO,):
        return tuple(Target(name, each.inputs, each.outputs) for name, each in linears)
    for asked in lora.targets:
        if not any(_is_called(name, asked) for name, _ in linears):
            leaves = sorted({name.rpartition(".")[2] for name, _ in linears})
            raise UserError(
                f"adapter.targets: no linear of a layer of {facts.model_class} is called {asked}",
                fix=f"name some of {listed(leaves, 12)}, or auto",
            )
    return tuple(
        Target(name, each.inputs, each.outputs)
        for name, each in linears
        if any(_is_called(name, asked) for asked in lora.targets)
    )


def _linears(facts: ModelFacts) -> Iterator[tuple[str, Matmul]]:
    apart = [*(each.router for each in facts.experts), *(each.name for each in facts.experts)]
    for layer, cost in zip(facts.anatomy.layers, facts.layer_costs, strict=True):
        for matmul in cost.matmuls:
            name = f"{layer}.{matmul.name}"
            if name.endswith(".weight") and name in facts.parameters and not is_within(name, apart):
                yield name.removesuffix(".weight"), matmul


def _is_called(module: str, asked: str) -> bool:
    return module == asked or module.endswith(f".{asked}")


def adapted(facts: ModelFacts, lora: Lora | None) -> ModelFacts:
    """The facts of the model with adapters: all else is frozen. None: the facts as they are. Raises `UserError`."""
    if lora is None:
        return facts
    targets = {each.module: each for each in targets_of(facts, lora)}
    in_nf4 = {f"{module}.weight" for module in targets} if lora.quantize == "nf4" else set()
    _check_blocks(targets.values(), facts, in_nf4)
    parameters = {
        name: replace(each, is_trained=False, in_nf4=name in in_nf4) for name, each in facts.parameters.items()
    }
    new, roles = dict[str, Parameter](), dict[str, Role]()
    for target in targets.values():
        shapes = (lora.rank, target.inputs), (target.outputs, lora.rank)
        of = facts.partition.roles.get(f"{target.module}.weight")
        for name, shape, role in zip(target.weights, shapes, _roles(of), strict=True):
            new[name] = Parameter(shape)
            if role is not None:
                roles[name] = role
    partition = replace(facts.partition, roles=_behind(facts.partition.roles, roles))
    return replace(facts, parameters=_behind(parameters, new), partition=partition)


def _check_blocks(targets: Iterable[Target], facts: ModelFacts, in_nf4: Collection[str]) -> None:
    """Raises `UserError` for a weight that is not rows [O, I] of whole blocks."""
    for each in targets:
        name = f"{each.module}.weight"
        shape = facts.parameters[name].shape
        if name not in in_nf4 or (shape == (each.outputs, each.inputs) and each.inputs % NF4_BLOCK == 0):
            continue
        why = (
            f"its rows have {each.inputs} numbers, which are no blocks of {NF4_BLOCK}"
            if shape == (each.outputs, each.inputs) else "it is stored the other way round"
        )  # fmt: skip
        raise UserError(
            f"adapter.quantize: {name} cannot rest in four bits: {why}",
            fix="leave it out of adapter.targets, or adapter.quantize: none", more="docs/adapters.md",
        )  # fmt: skip


def _roles(of: Role | None) -> tuple[Role | None, Role | None]:
    """Of A and of B beside a weight."""
    if of is None:
        return None, None
    if of.kind == "column":
        whole = Role("latent", "makes the input of B on every rank, for its own outputs")
        return whole, replace(of, reason=f"an adapter: {of.reason}", dim=0)
    if of.kind == "row":
        return replace(of, reason=f"an adapter: {of.reason}", dim=1), Role("local", "reads what A makes of own inputs")
    return of, of


def _behind(own: Mapping[str, _T], new: Mapping[str, _T]) -> dict[str, _T]:
    """`own`, and `new` where a model has them: behind the last parameter of their linear."""
    of_linear: dict[str, list[str]] = {}
    for name in new:
        of_linear.setdefault(name.rsplit(".", 2)[0], []).append(name)
    last = {name.rpartition(".")[0]: name for name in own}
    found = dict[str, _T]()
    for name, value in own.items():
        found[name] = value
        module = name.rpartition(".")[0]
        if last[module] == name:
            found |= {each: new[each] for each in of_linear.get(module, ())}
    return found
