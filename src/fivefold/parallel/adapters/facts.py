"""LoRA (arXiv:2106.09685): two small trained matrices next to each linear of a frozen model.

    y = W x + b + scale * B (A x)        W [O, I] frozen, A [r, I], B [O, r]; scale = alpha / r (rslora: alpha / sqrt r)

The shards of A and B on a tp rank follow from the role of W:

| W | A | B | gradients to sum over tp |
|---|---|---|---|
| column: outputs are split | whole | split as the outputs of W | of A: each rank has those from its own outputs |
| row: inputs are split | split as the inputs of W | whole | of B: each rank has A's output for its own inputs |
| whole | whole | whole | those of W |

For a row, B (A x) is a partial sum like W x, and both are reduced together, once. Facts describe the model without
adapters; `adapted` adds the parameters. Names follow `peft`: `X.lora_A.weight`, `X.lora_B.weight` next to `X.weight`.

E experts in one parameter W [E, O, I] have an A [E, r, I] and a B [E, O, r], `X.lora_A.down_proj` and
`X.lora_B.down_proj` next to `X.down_proj`. They take the role of W: they are distributed expert by expert, and with
`expert_tp` they are split by the table above (`parallel/shard_rules.py`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from fivefold.core.errors import UserError
from fivefold.core.text import listed
from fivefold.models.anatomy import is_within
from fivefold.models.facts import BlockFormat, DropoutSite, ModelFacts, Parameter, Role
from fivefold.parallel.adapters.settings import AUTO, NF4_BLOCK, Lora, nf4_bytes

_T = TypeVar("_T")

A, B = "lora_A", "lora_B"
NF4 = BlockFormat(NF4_BLOCK, nf4_bytes(NF4_BLOCK))


@dataclass(frozen=True)
class Target:
    """A linear with an adapter, or one adapted `parameter` of a module of `of_experts` experts."""

    module: str
    inputs: int
    outputs: int
    parameter: str = "weight"
    of_experts: int = 0

    @property
    def weight(self) -> str:
        return f"{self.module}.{self.parameter}"

    @property
    def weights(self) -> tuple[str, str]:
        """The names of A and of B."""
        return f"{self.module}.{A}.{self.parameter}", f"{self.module}.{B}.{self.parameter}"

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Shapes of A and B, by name."""
        each = (self.of_experts,) if self.of_experts else ()
        return dict(zip(self.weights, ((*each, rank, self.inputs), (*each, self.outputs, rank)), strict=True))


def targets_of(facts: ModelFacts, lora: Lora) -> tuple[Target, ...]:
    """The adapted weights: linears in order, then experts. Raises `UserError` for a name that matches none."""
    found = tuple(_linears(facts))
    if lora.targets != (AUTO,):
        of_class = f"adapter.targets: no linear of a layer of {facts.model_class}"
        found = _chosen({target.module: target for target in found}, lora.targets, of_class, ", or auto")
    if lora.target_parameters:
        of_class = f"adapter.target_parameters: no matrix of experts of {facts.model_class}"
        found += _chosen({target.weight: target for target in _experts(facts)}, lora.target_parameters, of_class)
    return found


def _chosen(named: Mapping[str, Target], asked: Iterable[str], none_is: str, more: str = "") -> tuple[Target, ...]:
    for wanted in asked:
        if not any(_is_called(name, wanted) for name in named):
            leaves = sorted({name.rpartition(".")[2] for name in named})
            fix = f"name some of {listed(leaves, 12)}{more}" if named else "leave it out"
            raise UserError(f"{none_is} is called {wanted}", fix=fix)
    return tuple(target for name, target in named.items() if any(_is_called(name, wanted) for wanted in asked))


def _linears(facts: ModelFacts) -> Iterator[Target]:
    apart = [*(block.router for block in facts.experts), *(block.name for block in facts.experts)]
    for layer, cost in zip(facts.anatomy.layers, facts.layer_costs, strict=True):
        for matmul in cost.matmuls:
            name = f"{layer}.{matmul.name}"
            if name.endswith(".weight") and name in facts.parameters and not is_within(name, apart):
                yield Target(name.removesuffix(".weight"), matmul.inputs, matmul.outputs)


def _experts(facts: ModelFacts) -> Iterator[Target]:
    """Experts in the order of the modules' parameters, in which `peft` wraps them."""
    for block in facts.experts:
        of = block.features
        assert of is not None, "they are found with the facts"
        for leaf in (of.first, "down_proj"):
            shape = facts.parameters[f"{block.name}.{leaf}"].shape
            yield Target(block.name, shape[of.read], shape[of.made], leaf, block.experts)


def _is_called(name: str, asked: str) -> bool:
    return name == asked or name.endswith(f".{asked}")


def adapted(facts: ModelFacts, lora: Lora | None) -> ModelFacts:
    """The facts of the model with adapters and everything else frozen. None: unchanged facts. Raises `UserError`."""
    if lora is None:
        return facts
    targets = targets_of(facts, lora)
    in_nf4 = {target.weight for target in targets} if lora.quantize == "nf4" else set()
    if in_nf4:
        _check_blocks(targets, facts)
    parameters = {
        name: replace(parameter, is_trained=False, packing=NF4 if name in in_nf4 else None)
        for name, parameter in facts.parameters.items()
    }
    new, roles = dict[str, Parameter](), dict[str, Role]()
    for target in targets:
        of = facts.partition.roles.get(target.weight)
        for (name, shape), role in zip(target.shapes(lora.rank).items(), _roles(of), strict=True):
            new[name] = Parameter(shape)
            if role is not None:
                roles[name] = role
    partition = replace(facts.partition, roles=_behind(facts.partition.roles, roles))
    dropping = targets if lora.dropout else ()
    sites = (DropoutSite(target.module, "branch", float(lora.dropout), target.inputs) for target in dropping)
    return replace(facts, parameters=_behind(parameters, new), partition=partition, dropouts=(*facts.dropouts, *sites))


def _check_blocks(targets: Iterable[Target], facts: ModelFacts) -> None:
    """Raise `UserError` for a weight that does not consist of rows [O, I] of whole blocks."""
    for target in targets:
        name, is_in_rows = target.weight, facts.parameters[target.weight].shape == (target.outputs, target.inputs)
        if target.of_experts:
            raise UserError(
                f"adapter.quantize: nf4 beside experts ({name}) is not built",
                fix="leave adapter.target_parameters out, or adapter.quantize: none",
                more="fivefold docs howto/adapters",
            )
        if not is_in_rows or target.inputs % NF4_BLOCK:
            rows = f"its rows have {target.inputs} numbers, which are no blocks of {NF4_BLOCK}"
            why = rows if is_in_rows else "it is stored the other way round"
            raise UserError(
                f"adapter.quantize: {name} cannot rest in four bits: {why}",
                fix="leave it out of adapter.targets, or adapter.quantize: none",
                more="fivefold docs howto/adapters",
            )


def _roles(of: Role | None) -> tuple[Role | None, Role | None]:
    """The roles of A and B next to a weight of role `of`."""
    if of is None:
        return None, None
    if of.kind == "column":
        whole = Role("latent", "makes the input of B on every rank, for its own outputs")
        return whole, replace(of, reason=f"an adapter: {of.reason}", dim=0)
    if of.kind == "row":
        return replace(of, reason=f"an adapter: {of.reason}", dim=1), Role("local", "reads what A makes of own inputs")
    return of, of


def _behind(own: Mapping[str, _T], new: Mapping[str, _T]) -> dict[str, _T]:
    """`own` with `new` inserted in model order: after the last parameter of their linear."""
    of_linear: dict[str, list[str]] = {}
    for name in sorted(new, key=lambda path: path.rsplit(".", 2)[1]):  # module order: each A, then each B
        of_linear.setdefault(name.rsplit(".", 2)[0], []).append(name)
    last = {name.rpartition(".")[0]: name for name in own}
    found = dict[str, _T]()
    for name, value in own.items():
        found[name] = value
        module = name.rpartition(".")[0]
        if last[module] == name:
            found |= {added: new[added] for added in of_linear.get(module, ())}
    return found
