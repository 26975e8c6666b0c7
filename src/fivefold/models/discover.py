"""The facts of a model, found by running a copy of it, then cached in memory and on disk (`facts_store.py`).

The copy (`recorder.py`), with stand-ins for its large parts, runs a few tokens several times: once for the record that
the roles of parameters follow from, and again to find out what depends on the tokens, on random numbers, or on the
length of a row.

Tracing depends on the class and config of a model, on its trained parameters, and on the versions and code of the
tracer. The cache key covers all of these, so a second start, a second rank or a second layout reads the facts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.build import build_meta
from fivefold.models.experts import expert_features, router_buffers
from fivefold.models.facts import (
    AttentionShape,
    Counted,
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
from fivefold.models.forwards import base_gives, behind_padding, hand_on_cu_seqlens, head_only
from fivefold.models.partition import derive
from fivefold.models.record import WATCHED, BlockTrace, Kept, MixesTokens, Trace, Untraceable
from fivefold.models.recorder import ATTENTION, Recorder, register

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
    layers = anatomy_of(model).layers
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
    anatomy = anatomy_of(model)
    try:
        short = build_meta(fewer_layers(model.config, _TRACED), model_class=type(model))
    except UserError:
        return None
    own = anatomy_of(short).layers
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
    anatomy = anatomy_of(model)
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


# ---- the trace -------------------------------------------------------------------------------------------------------


PLACES = tuple(1024 << power for power in range(11))  # positions in a row at which a model's own count is tested

Run = Callable[..., Trace]


def trace(model: PreTrainedModel, anatomy: Anatomy) -> Trace:
    """Run a copy of `model`. Raises `Untraceable`."""
    register()
    traced = _traced(model, anatomy, [])
    if traced.forgetful and _traced(model, anatomy, traced.forgetful).forgetful:
        raise Untraceable("its attention is not given the bounds of packed documents")
    return traced


def _traced(model: PreTrainedModel, anatomy: Anatomy, forgetful: Sequence[tuple[str, str]]) -> Trace:
    copy = hf_internals.copy_on_meta(model, ATTENTION)
    copy.train()
    recorder = Recorder(copy, anatomy)
    hand_on_cu_seqlens(copy, forgetful)
    try:
        base = cast(PreTrainedModel, copy.get_submodule(anatomy.base))
    except AttributeError as error:
        raise Untraceable(f"it has no part {anatomy.base!r}, where its class says that its layers are") from error
    ids = torch.arange(recorder.tokens).unsqueeze(0) % model.config.get_text_config().vocab_size
    run = partial(recorder.run, base, input_ids=ids, use_cache=False, cu_seqlens=recorder.cu_seqlens)
    without_positions = run(stops_at_block=True)
    if recorder.longest:
        _check_masks(recorder, run, ids)
    whole = partial(run, position_ids=ids)
    traced = whole()
    if len(traced.blocks) != len(set(anatomy.layers)):
        raise Untraceable("its forward does not run every layer once")
    if not _same(without_positions.places, traced.places):
        traced.padding = _padding(run, ids, base.config.get_text_config().pad_token_id)
    traced.to_logits = _to_logits(recorder, copy, anatomy)
    _check_around(recorder, copy, anatomy, ids)
    traced.in_bf16 = _in_bf16(model, anatomy, forgetful)
    if traced.counts:
        traced.counted = Counted(traced.counts[0], _same_up_to(traced, whole))
    if traced.draws and not _same(traced.read, whole(noise=1).read):
        fix = "set its dropout, jitter or noise to 0 in model.overrides"
        raise Untraceable(f"{traced.draws[0]} computes with random numbers in training", fix=fix)
    return traced


def _in_bf16(model: PreTrainedModel, anatomy: Anatomy, forgetful: Sequence[tuple[str, str]]) -> list[BlockTrace]:
    """The blocks as they run in bf16; empty if the model's own code does not support that."""
    copy = hf_internals.copy_on_meta(model, ATTENTION)
    copy.train()
    recorder = Recorder(copy, anatomy, torch.bfloat16)
    hand_on_cu_seqlens(copy, forgetful)
    ids = torch.arange(recorder.tokens).unsqueeze(0) % model.config.get_text_config().vocab_size
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False, "cu_seqlens": recorder.cu_seqlens}
    with suppress(Untraceable):
        return recorder.run(cast(PreTrainedModel, copy.get_submodule(anatomy.base)), **inputs).blocks
    return []


def _to_logits(recorder: Recorder, copy: PreTrainedModel, anatomy: Anatomy) -> tuple[str, ...]:
    """The modules with parameters between the base and the logits, in order; only the head if the trace cannot follow
    hidden states there."""
    hidden, found = torch.zeros(1, recorder.tokens, recorder.hidden), None
    with head_only(copy, anatomy) as logits_of, suppress(Untraceable):
        found = recorder.run(logits_of, hidden=hidden)
    if found is not None and found.dropouts:
        site, fix = found.dropouts[0], "set its dropout to 0 in model.overrides"
        raise Untraceable(
            f"{site.module or 'its forward'} drops between the last hidden states and the logits", fix=fix
        )
    return (anatomy.head,) if found is None else tuple(found.before)


def _check_around(recorder: Recorder, copy: PreTrainedModel, anatomy: Anatomy, ids: Tensor) -> None:
    """Check the model's forward around its base: training calls the base with tokens, and makes logits of some hidden
    states at a time. Raises `Untraceable` if the forward gives its base something else, or looks at tokens or at other
    hidden states to make the logits of one. If stand-ins cannot run it, the first training step will show it."""
    hidden = torch.randn(1, recorder.tokens, recorder.hidden, generator=torch.Generator().manual_seed(0))
    changed = hidden.clone()
    changed[0, WATCHED] += 1
    given, logits, base = list[dict[str, Any]](), list[Tensor](), copy.get_submodule(anatomy.base)
    for tokens, states in ((ids, hidden), (ids.flip(1), hidden), (ids, changed)):
        with base_gives(base, states) as took, suppress(Untraceable):
            recorder.run(lambda **inputs: logits.append(copy(**inputs).logits), input_ids=tokens, use_cache=False)
        given += took
    places = torch.arange(recorder.tokens).unsqueeze(0)
    with base_gives(base, hidden) as took, suppress(Untraceable):
        recorder.run(copy, input_ids=ids, position_ids=places, use_cache=False)
    positions = [kwargs["position_ids"] for kwargs in took if isinstance(kwargs.get("position_ids"), Tensor)]
    fix = f"do so inside of {anatomy.base}, whose forward is run in training, or in a layer"
    if any(kwargs.get("inputs_embeds") is not None for kwargs in given):
        raise Untraceable(f"its forward gives {anatomy.base} embeddings that it has made, and no tokens", fix=fix)
    if not all(_same([ids], [places]) for ids in positions):
        raise Untraceable(f"its forward gives {anatomy.base} other positions than it is given", fix=fix)
    if len(logits) < 3:
        return
    if not _same(logits[:1], logits[1:2]):
        raise Untraceable("its forward looks at the tokens again to make logits of hidden states", fix=fix)
    others = torch.arange(recorder.tokens) != WATCHED
    if not _same([logits[0][:, others]], [logits[2][:, others]]):
        raise MixesTokens("its forward lets tokens meet between the last hidden states and the logits")


def _padding(run: Run, ids: Tensor, padding: int | None) -> int:
    """The padding token, if the model counts its tokens from it. Raises `Untraceable` otherwise."""
    if padding is not None:
        ids = ids.clone()
        ids[0, WATCHED] = padding
        counted = behind_padding(ids, torch.arange(ids.shape[1]).unsqueeze(0), padding)
        found = [run(stops_at_block=True, input_ids=ids, position_ids=given).places for given in (None, counted)]
        if _same(*found):
            return int(padding)
    raise Untraceable("the positions that it counts for itself are not 0, 1, 2 and so on from a document's start")


def _check_masks(recorder: Recorder, run: Run, ids: Tensor) -> None:
    """Compare each `Mask` with a mask function that looks at tokens (Gemma 4's, for images), in a long row of text."""
    tokens, recorder.tokens = recorder.tokens, recorder.longest
    run(stops_at_block=True, input_ids=ids[:, torch.arange(recorder.tokens) % ids.shape[1]])
    recorder.tokens = tokens


def _same_up_to(traced: Trace, run: Run) -> int:
    """The longest row, found to an eighth, in which the model's own count of tokens changes nothing. Raises
    `Untraceable` if the count already matters in the shortest row tried."""

    def changes(place: int) -> bool:
        try:
            return not _same(traced.read, run(place=place).read)
        except Untraceable:  # the model has no entry for that place
            return True

    if changes(PLACES[0]):
        raise Untraceable(f"{traced.counts[0]} counts the tokens of a row, whatever documents are in it")
    other = next((place for place in PLACES[1:] if changes(place)), None)
    if other is None:
        return PLACES[-1]
    same = other // 2  # the place before it
    while other - same > same // 8:
        middle = (same + other) // 2
        same, other = (same, middle) if changes(middle) else (middle, other)
    return same


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """True if all tensors are equal. Tensors on meta, to which some models move ids, have no values to compare."""
    return len(one) == len(other) and all(
        x.shape == y.shape and (x.is_meta or torch.equal(x, y)) for x, y in zip(one, other, strict=True)
    )


# ---- the parts of a model --------------------------------------------------------------------------------------------


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    """The parts of `model`, which may be on the meta device. Raises `UserError` where a part cannot be found."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise UserError(f"{type(model).__name__} has no token embedding or no output head; only causal LMs are trained")
    return Anatomy(
        model_class=type(model).__name__,
        base=hf_internals.base_prefix(model),
        embedding=names[id(embedding)],
        layers=_layers(model, names),
        head=names[id(head)],
        tied=head.weight is embedding.weight,
    )


def _layers(model: PreTrainedModel, names: Mapping[int, str]) -> tuple[str, ...]:
    """The decoder blocks: the list in the base model of the classes that the model calls its blocks, or else the list
    with one entry per hidden layer. Among several (an image tower has layers too), the one that tokens reach."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    blocks = hf_internals.block_classes(model)
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    of_blocks = [m for m in lists if all(type(layer).__name__ in blocks for layer in m)]
    of_count = [m for m in of_blocks or lists if len(m) == count]
    stated = of_count or of_blocks
    if len(stated) > 1:
        reached = _reached(model, [names[id(module)] for module in stated])
        stated = [module for module in stated if names[id(module)] in reached] or stated
    if len(stated) == 1:
        return tuple(names[id(layer)] for layer in stated[0])
    name = type(model).__name__
    found = ", ".join(names[id(module)] for module in stated)
    raise UserError(
        f"{name} has {len(stated)} stacks of layers ({found})" if stated else f"{name} has no list of its layers",
        fix="use a model whose layers stand in one ModuleList; of one for images and text, the model of the text alone",
    )


def _reached(model: PreTrainedModel, stacks: Sequence[str]) -> set[str]:
    """The lists of layers that a forward of token ids reaches, as far as it runs without values. A list counts if the
    forward enters it, or the part of the model that holds this list alone."""
    copy = hf_internals.copy_on_meta(model, "eager")
    entered: set[str] = set()
    for stack in stacks:
        for name in (_holder(stack, stacks), f"{stack}.0"):
            copy.get_submodule(name).register_forward_pre_hook(lambda *_, stack=stack: entered.add(stack))
    ids = torch.zeros(1, 5, dtype=torch.long, device="meta")
    with torch.no_grad(), suppress(Exception):
        copy(input_ids=ids, use_cache=False)
    return entered


def _holder(stack: str, stacks: Sequence[str]) -> str:
    """The largest part of a model that contains `stack` and no other of `stacks`."""
    held = stack
    while (outer := held.rpartition(".")[0]) and [stack for stack in stacks if is_within(stack, [outer])] == [stack]:
        held = outer
    return held
