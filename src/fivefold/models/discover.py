"""The facts of a model, found by running a copy of it once, then cached in memory and on disk (`facts_store.py`).

Tracing depends on the class and config of a model, on its trained parameters, and on the versions and code of the
tracer. The cache key covers all of these, so a second start, a second rank or a second layout reads the facts.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.build import build_meta
from fivefold.models.experts import expert_features, router_buffers
from fivefold.models.facts import (
    AttentionShape,
    Experts,
    LayerCost,
    Matmul,
    ModelFacts,
    Parameter,
    Partition,
    Saved,
    Untrainable,
)
from fivefold.models.facts_store import about_code, kept
from fivefold.models.fewer_layers import fewer_layers, layers_kept
from fivefold.models.partition import derive
from fivefold.models.record import BlockTrace, Kept, Untraceable
from fivefold.models.trace import trace

_KNOWN: dict[str, ModelFacts] = {}  # by key: facts that this process has found or read
_TRACED = 2  # traced layers of each kind
_OURS = ("transformers.", "torch.", "fivefold.")  # modules whose code is identified by a version or by `about_code`


def facts_of(model: Any) -> ModelFacts:
    """The facts of a `transformers` causal language model, which may be on the meta device and stays unchanged.

    If several processes ask at once, one traces and the others read. Raises `UserError` for a model whose tokens meet
    outside of attention (packed documents would see each other), or whose parts cannot be identified.
    """
    key = _key(model)
    if key is None:
        return _found(model)
    if key not in _KNOWN:
        _KNOWN[key] = kept(key, lambda: _found(model))
    return _KNOWN[key]


def facts_of_deep(model: Any) -> ModelFacts:
    """`facts_of` for a deep model on the meta device: traces only a few layers of each kind."""
    layers = Anatomy.of(model).layers
    if (cut := cut_of(model)) is not None:
        short, like = cut
        with suppress(ValueError):
            facts = facts_of(short).with_layers(layers, like)
            if facts.parameters == _parameters(model):
                return facts
    return facts_of(model)


def cut_of(model: Any) -> tuple[Any, list[int]] | None:
    """The same model with a few layers of each kind, and the matching short layer for each original layer; None if it
    cannot be cut.

    Layers match if the config says the same of both and their parameters have the same names and shapes. DeepSeek-V3
    with 61 layers is cut to a dense one and one with experts, [0, 0, 0, 1, 1, ..., 1].
    """
    anatomy = Anatomy.of(model)
    try:
        short = build_meta(fewer_layers(model.config, _TRACED), model_class=type(model))
    except UserError:
        return None
    own = Anatomy.of(short).layers
    if len(own) >= len(anatomy.layers):
        return None
    kept, said = layers_kept(model.config, _TRACED)
    kinds = [(said[layer], _shapes(short, name)) for layer, name in zip(kept, own, strict=True)]
    with suppress(ValueError):
        return short, [kinds.index((said[at], _shapes(model, name))) for at, name in enumerate(anatomy.layers)]
    return None


def _shapes(model: nn.Module, layer: str) -> list[tuple[str, tuple[int, ...], bool]]:
    named = model.get_submodule(layer).named_parameters()
    return [(name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in named]


def _key(model: Any) -> str | None:
    """The cache key of everything that the facts depend on. None if third-party code runs in the model: no version
    identifies it, and its file may change while this process runs."""
    modules = [(name, type(module), module) for name, module in model.named_modules()]
    code = {of for _, kind, module in modules for of in (kind.__module__, getattr(module.forward, "__module__", None))}
    if any(of is None or not of.startswith(_OURS) for of in code):
        return None
    parameters = [
        [name, list(parameter.shape), parameter.requires_grad] for name, parameter in model.named_parameters()
    ]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [[name, list(buffer.shape)] for name, buffer in model.named_buffers()]
    kinds = [
        [name, f"{kind.__module__}.{kind.__qualname__}", hf_internals.own_numbers(module), getattr(module, "p", None)]
        for name, kind, module in modules
    ]
    values = {key: value for key, value in model.config.to_dict().items() if key != "_name_or_path"}
    return key_of(*about_code(), kinds, parameters, names, buffers, repr(values))


# ---- found -----------------------------------------------------------------------------------------------------------


def _found(model: Any) -> ModelFacts:
    anatomy = Anatomy.of(model)
    try:
        traced = trace(model, anatomy)
        experts = tuple(_with_features(model, block) for block in traced.experts)
    except Untraceable as error:
        raise Untrainable(
            f"{type(model).__name__} cannot be trained here: {error}",
            fix=error.fix
            or "use a model whose layers mix tokens through the attention functions of transformers alone",
        ) from error
    partition = derive(model, anatomy, traced)
    if changed := hf_internals.unlike_its_class(model):
        refusal = f"{anatomy.model_class} was changed after it was made: {changed}, and no test holds its parts"
        partition = replace(partition, refusal=partition.refusal or refusal)
    hidden_size = model.config.get_text_config().hidden_size
    in_bf16 = traced.in_bf16 or traced.blocks
    of_layers = [
        _cost(model, block, low, 2 if traced.in_bf16 else 4, partition, experts, hidden_size)
        for block, low in zip(traced.blocks, in_bf16, strict=True)
    ]
    costs = tuple(dict.fromkeys(of_layers))
    return ModelFacts(
        anatomy=anatomy,
        hidden_size=hidden_size,
        parameters=_parameters(model),
        partition=partition,
        experts=experts,
        attends=_attends(traced.blocks),
        before=tuple(traced.before),
        after=tuple(traced.after),
        forgetful=tuple(traced.forgetful),
        looked_into=tuple(sorted(traced.looked_into)),
        in_tuples=tuple(traced.in_tuples),
        carried=traced.carried,
        counted=traced.counted,
        padding=traced.padding,
        router_buffers={name: tuple(model.get_buffer(name).shape) for name in router_buffers(model)},
        costs=costs,
        kinds=tuple(map(costs.index, of_layers)),
        outside=tuple(_outside(model, anatomy)),
        dropouts=tuple(traced.dropouts),
    )


def _parameters(model: nn.Module) -> dict[str, Parameter]:
    return {
        name: Parameter(tuple(parameter.shape), parameter.requires_grad) for name, parameter in model.named_parameters()
    }


def _with_features(model: nn.Module, experts: Experts) -> Experts:
    module = model.get_submodule(experts.name)
    return Experts(**vars(experts) | {"features": expert_features(module)})


def _attends(blocks: Sequence[BlockTrace]) -> dict[str, AttentionShape]:
    events = {event.name: event for block in blocks for event in block.events if event.kind == "attention"}
    found = {}
    for name, event in events.items():
        (query, key, value), mask = event.inputs, event.mask
        found[name] = AttentionShape(
            query.shape[1], key.shape[1], key.shape[3], value.shape[3], mask.window, mask.chunk
        )
    return found


# ---- the cost of a layer ---------------------------------------------------------------------------------------------


def _outside(model: nn.Module, anatomy: Anatomy) -> Iterator[Matmul]:
    """Linears outside of the layers. (An embedding is a lookup and costs nothing.)"""
    for name, module in model.named_modules():
        if hf_internals.linear_dims(module) is not None and not is_within(name, anatomy.layers):
            dims = hf_internals.linear_dims(module) or (0, 1)
            outputs, inputs = (module.weight.shape[dim] for dim in dims)
            yield Matmul(name, inputs, outputs)


def _cost(
    model: nn.Module, block: BlockTrace, low: BlockTrace, low_bytes: int, partition: Partition,
    experts: Sequence[Experts], hidden_size: int,
) -> LayerCost:  # fmt: skip
    """The cost of a layer; names are relative to the layer, so equal layers compare equal. `low`: its trace in bf16,
    with numbers of `low_bytes`."""
    picks = {routed.name: routed.top_k for routed in experts if is_within(routed.name, [block.layer])}
    matmuls = []
    for name, parameter in model.get_submodule(block.layer).named_parameters():
        times = next((times for held, times in picks.items() if is_within(f"{block.layer}.{name}", [held])), 0)
        if parameter.ndim == (3 if times else 2):
            is_transposed = hf_internals.linear_dims(_owner(model, f"{block.layer}.{name}")) == (1, 0)
            outputs, inputs = reversed(parameter.shape) if is_transposed else parameter.shape[-2:]
            matmuls.append(Matmul(name, inputs, outputs, times or 1))
    attention = tuple(_attends([block]).values())
    of_experts = [(times, _saved_by_expert(model.get_submodule(name), hidden_size)) for name, times in picks.items()]
    rows, features = (sum(float(times * matmul[which]) for times, matmul in of_experts) for which in (0, 1))
    statistics = 2.0 * sum(heads.query for heads in attention)  # one per head, in fp32

    def in_all(kept: Sequence[Kept], itemsize: int, inside: float = 0.0) -> Saved:
        found = _saved(block.layer, kept, partition)
        of = {where: round(size / itemsize, 3) for where, size in found.items()}
        return Saved(of["residual"], of["entered"], of["inside"] + inside, rows, features)

    return LayerCost(
        tuple(matmuls), attention, in_all(block.saved, 4), in_all(low.saved, low_bytes, statistics),
        in_all(low.fused, low_bytes, statistics),
    )  # fmt: skip


def _owner(model: nn.Module, parameter: str) -> nn.Module:
    return model.get_submodule(parameter.rpartition(".")[0])


def _saved_by_expert(module: Any, hidden_size: int) -> tuple[int, int]:
    """Numbers that one row of an expert saves: as wide as hidden states, its input and its output; as wide as features,
    the output of the first matmul and the activation twice."""
    shapes = [tuple(parameter.shape) for parameter in module.parameters() if parameter.ndim == 3]
    made = max((max(set(shape[1:]) - {hidden_size}, default=hidden_size) for shape in shapes), default=hidden_size)
    return 2 * hidden_size, 2 * made


def _saved(layer: str, kept: Sequence[Kept], partition: Partition) -> dict[str, float]:
    """Bytes per token that a layer saves for its backward pass, each tensor once: see `Saved`."""
    tp_blocks = [tp_block for tp_block in partition.tp_blocks if is_within(tp_block.row, [layer])]
    columns = {name for tp_block in tp_blocks for name in tp_block.columns}
    owners = [tp_block.owner for tp_block in tp_blocks if tp_block.owner != layer]
    rows = {tp_block.row for tp_block in tp_blocks}
    found: dict[int, tuple[str, float]] = {}
    for candidate in kept:
        is_inside = (
            candidate.module in columns | rows or candidate.module in owners or is_within(candidate.module, owners)
        )
        if candidate.module in columns and not candidate.is_output:
            where = "entered"
        else:
            where = "inside" if is_inside and not (candidate.is_output and candidate.module in rows) else "residual"
        if candidate.memory not in found or where == "entered":
            found[candidate.memory] = where, candidate.size
    return {
        where: sum(size for kind, size in found.values() if kind == where)
        for where in ("residual", "entered", "inside")
    }
