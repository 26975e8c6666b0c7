"""Which part of a block feeds which, found by running the model once with stand-ins for its large parts.

A copy of the model on the meta device runs a few tokens. Linears and embeddings return random numbers of the right
shape instead of multiplying (their weights stay on meta, so any size costs nothing), attention likewise; everything
between them, norms and rotary positions included, is the model's own code with real numbers. Each stand-in's output is
a leaf of the autograd graph, so that autograd answers the question "does this tensor depend on that projection, and on
which of its features?" exactly. It also answers whether tokens meet anywhere but in attention, which packed documents
rely on.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import isqrt
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.core.errors import UserError
from fivefold.models import attention, hf_internals, masks
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.facts import Counted, Experts
from fivefold.models.head import head_only
from fivefold.models.positions import behind_padding
from fivefold.models.recipe import buffer_values
from fivefold.torch_internals import TorchDispatchMode, is_convolution

_ONE = 2  # the token whose dependencies are looked at
_NONE = -1  # no token: of a row that is the same whatever the tokens are
RESIDUAL = "the residual stream"
PLACES = tuple(1024 << power for power in range(11))  # in a row, where what a model counts for itself is looked at
MOST_READ = 2**16  # weights of a linear that has values: some models compute with the smallest of theirs directly
MOST_SMALL = 2**22  # values of a module that is neither a linear nor an embedding

Kind = Literal["linear", "small", "attention", "experts", "opaque"]


class Untraceable(Exception):
    """Why a model cannot be traced, in words that follow its name; `fix`: what to do about it, where that is known."""

    def __init__(self, why: str, *, fix: str | None = None) -> None:
        super().__init__(why)
        self.fix = fix


class MixesTokens(Untraceable):
    """Documents packed in a row would see each other, and so would a token and its future."""


@dataclass(eq=False)
class Event:
    """One call: what a module read and gave, and the leaves that its input depends on, by name.

    `small`: a module with few parameters of its own, such as a norm. `wide`: one that sees all features of a projection
    at once. `experts`: one that holds the weights of all experts of a layer; `inputs` are tokens and their weights.
    `opaque`: any other that holds many weights and is no linear. Of an attention call
    `inputs` are query [1,H,T,D], key and value [1,G,T,D]; `parameters` are those of the calling module that were passed
    along, one number per query head. Of an experts call `router` is the module that gave the picks, if one did, and
    `has_logits` says whether it gave its logits as well.
    """

    kind: Kind
    name: str
    inputs: tuple[Tensor, ...]
    leaf: Tensor | None
    sources: frozenset[str]
    wide: bool = False
    parameters: tuple[str, ...] = ()
    experts: int = 0
    router: str | None = None
    has_logits: bool = False


@dataclass
class BlockTrace:
    """What happened in one block, in order. `hidden_arguments`: module -> the positions or keywords of the arguments in
    which it was given hidden states. `saved`: (module, memory, numbers of one token) of each tensor kept for
    backward."""

    layer: str
    leaves: dict[str, Tensor]
    events: list[Event] = field(default_factory=list)
    hidden_arguments: dict[str, list[int | str]] = field(default_factory=dict)
    saved: list[tuple[str, int, float]] = field(default_factory=list)

    def linear(self, name: str) -> Event:
        """The call of a linear."""
        return next(event for event in self.events if event.kind == "linear" and event.name == name)


@dataclass
class Trace:
    """What one run of the model showed.

    `before`, `after`: modules with parameters that ran before the first block and after the last.
    `forgetful`: (layer, attention module) where the layer is given `cu_seqlens` and does not pass them on.
    `in_tuples`: layers that return their hidden states in a tuple.
    `carried`: the reason why layers pass more than hidden states to each other, or None.
    `streams`: the reason why hidden states have several streams (Gemma 3n), or None.
    `counted`: the module that counts the tokens of a row for itself (`facts.Counted`), or None.
    `padding`: the padding token of a model that counts positions from it (`positions.py`), else None.
    `entered`: modules of the base that tokens reach.
    `to_logits`: modules with parameters between the last hidden states and the logits, in order.
    `looked_into`: embeddings whose weights the model reads directly.
    """

    blocks: list[BlockTrace] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    forgetful: list[tuple[str, str]] = field(default_factory=list)
    in_tuples: set[str] = field(default_factory=set)
    carried: str | None = None
    streams: str | None = None
    counted: Counted | None = None
    padding: int | None = None
    entered: set[str] = field(default_factory=set)
    to_logits: tuple[str, ...] = ()
    looked_into: set[str] = field(default_factory=set)

    @property
    def read(self) -> list[Tensor]:
        """All that stand-ins were given, in order."""
        return [x.detach() for block in self.blocks for event in block.events for x in event.inputs]

    @property
    def experts(self) -> list[Experts]:
        """The modules of experts, in order."""
        return [
            Experts(
                event.name,
                event.router or _router(block, event),
                event.experts,
                event.inputs[1].shape[-1],
                event is block.events[-1],
                event.has_logits,
            )
            for block in self.blocks
            for event in block.events
            if event.kind == "experts"
        ]


def _router(block: BlockTrace, experts: Event) -> str:
    """The router of an experts module: the last small module or linear with the same parent that ran before it."""
    parent = experts.name.rpartition(".")[0] + "."
    before = block.events[: block.events.index(experts)]
    beside = [event.name for event in before if event.kind in ("small", "linear") and event.name.startswith(parent)]
    if not beside:
        raise Untraceable(f"nothing beside {experts.name} says where tokens go")
    return beside[-1]


def trace(model: PreTrainedModel, anatomy: Anatomy) -> Trace:
    """Run a copy of `model`. Raises `Untraceable`."""
    hf_internals.register_attention(_ATTENTION, _attention, _mask)
    traced = _run(model, anatomy, [])
    if traced.forgetful and _run(model, anatomy, traced.forgetful).forgetful:
        raise Untraceable("its attention is not given the bounds of packed documents")
    return traced


def _run(model: PreTrainedModel, anatomy: Anatomy, forgetful: Sequence[tuple[str, str]]) -> Trace:
    copy = hf_internals.copy_on_meta(model, _ATTENTION)
    copy.train()
    tokens = _tokens(copy)
    recorder = _Recorder(copy, anatomy, tokens)
    hand_on_cu_seqlens(copy, forgetful)
    try:
        base = cast(PreTrainedModel, copy.get_submodule(anatomy.base))
    except AttributeError as error:
        raise Untraceable(f"it has no part {anatomy.base!r}, where its class says that its layers are") from error
    ids = torch.arange(tokens).unsqueeze(0) % model.config.get_text_config().vocab_size
    inputs = {"input_ids": ids, "use_cache": False, "cu_seqlens": recorder.cu_seqlens}
    recorder.begin(stops_at_block=True)
    _follow(recorder, base, **inputs)
    counted = recorder.places
    if recorder.longest:
        _check_masks(recorder, base, inputs)
    recorder.begin()
    _follow(recorder, base, position_ids=ids, **inputs)
    traced, noisy, places = recorder.trace, recorder.draws, recorder.places
    counts = recorder.counts
    if len(traced.blocks) != len(set(anatomy.layers)):
        raise Untraceable("its forward does not run every layer once")
    if not _same(counted, places):
        traced.padding = _padding(recorder, base, inputs)
    traced.to_logits = _to_logits(recorder, copy, anatomy)
    if counts:
        inputs["position_ids"] = ids
        traced.counted = Counted(counts[0], _same_up_to(recorder, lambda: _follow(recorder, base, **inputs), traced))
    if noisy:
        recorder.begin(noise=1)
        _follow(recorder, base, position_ids=ids, **inputs)
        if not _same(traced.read, recorder.trace.read):
            fix = "set its dropout, jitter or noise to 0 in model.overrides"
            raise Untraceable(f"{noisy[0]} computes with random numbers in training", fix=fix)
    return traced


def _to_logits(recorder: "_Recorder", copy: PreTrainedModel, anatomy: Anatomy) -> tuple[str, ...]:
    """The modules with parameters between the base and the logits, in order; only the head, if the trace cannot follow
    hidden states there."""
    recorder.begin()
    hidden = torch.zeros(1, recorder.tokens, recorder.hidden)
    with head_only(copy, anatomy) as logits_of, suppress(Untraceable):
        _follow(recorder, logits_of, hidden=hidden)
        return tuple(recorder.trace.before)
    return (anatomy.head,)


def _padding(recorder: "_Recorder", base: PreTrainedModel, inputs: dict[str, Any]) -> int:
    """The padding token, where the model counts its tokens from behind it. Raises `Untraceable` where it does not."""
    padding, ids = base.config.get_text_config().pad_token_id, inputs["input_ids"].clone()
    if padding is not None:
        ids[0, _ONE] = padding
        places = []
        for given in (None, behind_padding(ids, torch.arange(ids.shape[1]).unsqueeze(0), padding)):
            recorder.begin(stops_at_block=True)
            _follow(recorder, base, **{**inputs, "input_ids": ids, "position_ids": given})
            places.append(recorder.places)
        if _same(*places):
            return int(padding)
    raise Untraceable("the positions that it counts for itself are not 0, 1, 2 and so on from a document's start")


def _check_masks(recorder: "_Recorder", base: nn.Module, inputs: dict[str, Any]) -> None:
    """Compare each `Mask` with a mask function that looks at tokens (Gemma 4's, for images), in a long row of text."""
    tokens, recorder.tokens = recorder.tokens, recorder.longest
    recorder.begin(stops_at_block=True)
    ids = inputs["input_ids"]
    _follow(recorder, base, **{**inputs, "input_ids": ids[:, torch.arange(recorder.tokens) % ids.shape[1]]})
    recorder.tokens = tokens


def _same_up_to(recorder: "_Recorder", run: Callable[[], None], traced: Trace) -> int:
    """The longest row, found to an eighth, in which the model's own count of tokens changes nothing. Raises
    `Untraceable` if the count already matters in the shortest row that is tried."""

    def changes(place: int) -> bool:
        recorder.begin(place=place)
        try:
            run()
        except Untraceable:  # it has a place for as many tokens as there are
            return True
        return not _same(traced.read, recorder.trace.read)

    if changes(PLACES[0]):
        raise Untraceable(f"{recorder.counts[0]} counts the tokens of a row, whatever documents are in it")
    same, other = PLACES[0], next((place for place in PLACES if changes(place)), None)
    while other is None or other - same > same // 8:
        if other is None:
            return PLACES[-1]
        middle = (same + other) // 2
        same, other = (same, middle) if changes(middle) else (middle, other)
    return same


class _Enough(Exception):
    """A run has shown what it was for."""


def _follow(recorder: "_Recorder", base: Callable[..., Any], **inputs: Any) -> None:
    """Run the copy. Raises `Untraceable`, in words, whatever happens."""
    saving = torch.autograd.graph.saved_tensors_hooks(recorder.save, lambda kept: kept)
    with _recording(recorder), torch.random.fork_rng(devices=[]), torch.enable_grad(), saving, _Watch(recorder):
        torch.manual_seed(recorder.noise)
        try:
            base(**inputs)
        except _Enough:
            return
        except Untraceable:
            raise
        except UserError as error:  # of attention: what it would drop
            raise Untraceable(error.what, fix=error.fix) from error
        except masks.MaskOpened as error:
            raise Untraceable(str(error)) from error
        except Exception as error:  # the model's own code met something that it cannot do with stand-ins
            raise recorder.unfollowed(error) from error


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes where the model draws random numbers: stand-ins have a generator of their own. A single number decides
    whether a layer is dropped: it is 0, so that any chance at all drops it."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_tables(args)
        made = func(*args, **kwargs)
        if func._overloadpacket is torch.ops.aten.arange and len(made) == self.recorder.tokens:
            self.recorder.counts.append(self.recorder.innermost)
            return made + self.recorder.place
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return made
        if made.numel() == 1:
            return torch.zeros_like(made)
        self.recorder.draws.append(self.recorder.innermost)
        return made

    def _note_tables(self, args: Any) -> None:
        read = [each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor) and not each.is_meta]
        self.recorder.trace.looked_into |= {
            self.recorder.tables[place] for place in read if place in self.recorder.tables
        }


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Tensors on meta, which some models move ids to, have no values to differ in."""
    return len(one) == len(other) and all(
        x.shape == y.shape and (x.is_meta or torch.equal(x, y)) for x, y in zip(one, other, strict=True)
    )


def _tokens(model: PreTrainedModel) -> int:
    """The smallest prime from 5 that counts nothing else in the model: a dimension of this size counts tokens."""
    taken = {value for value in model.config.get_text_config().to_dict().values() if isinstance(value, int)}
    taken |= {size for parameter in model.parameters() for size in parameter.shape}
    return next(number for number in count(5) if number not in taken and _is_prime(number))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, isqrt(number) + 1))


def hand_on_cu_seqlens(model: nn.Module, forgetful: Sequence[tuple[str, str]]) -> None:
    """Let attention have the bounds of documents in layers that do not pass on what they do not know."""
    by_layer: dict[str, list[Any]] = {}
    for layer, name in forgetful:
        by_layer.setdefault(layer, []).append(model.get_submodule(name))
    for layer, modules in by_layer.items():
        block = model.get_submodule(layer)
        block.forward = partial(_with_cu_seqlens, block.forward, list(dict.fromkeys(modules)))


def _with_cu_seqlens(
    plain: Any, modules: Sequence[Any], *args: Any, cu_seqlens: Tensor | None = None, **kwargs: Any
) -> Any:
    """A block's forward; inside, its attention modules are given the bounds."""
    attends = [module.forward for module in modules]
    for module, attend in zip(modules, attends, strict=True):
        module.forward = partial(attend, cu_seqlens=cu_seqlens)
    try:
        return plain(*args, **kwargs)
    finally:
        for module, attend in zip(modules, attends, strict=True):
            module.forward = attend


def depends(output: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """For each leaf: which of its features (last dimension, bool) `output` depends on; None for none at all."""
    masks = [None if grad is None else (grad != 0).flatten(0, -2).any(0) for grad in gradients(output, leaves)]
    return [mask if mask is not None and bool(mask.any()) else None for mask in masks]


def gradients(output: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """For each leaf, the gradient of a random mixture of `output`. It is zero or None where `output` does not depend on
    the leaf."""
    if not output.requires_grad:
        return [None] * len(leaves)
    weights = torch.rand(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    found: Sequence[Tensor | None] = torch.autograd.grad(output, leaves, weights, retain_graph=True, allow_unused=True)
    return found


class _Recorder:
    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, tokens: int) -> None:
        self.tokens = tokens
        self.cu_seqlens = torch.tensor([0, tokens])  # must reach attention
        self.every = torch.arange(tokens)
        self.convolutions: list[str] = []
        self.rows: dict[str, tuple[int, Tensor]] = {}  # leaf -> the dimension of its tokens, and the token of each row
        self.random = torch.Generator()
        self.tables: dict[int, str] = {}  # where the stand-in of an embedding's weight lies -> the embedding
        self.longest = 0  # tokens of a row in which every mask can be checked, where some look at tokens
        self.begin()
        self.hidden = int(getattr(model.config.get_text_config(), "hidden_size", 0))
        if not self.hidden:
            raise Untraceable("its config has no hidden_size")
        self.names = {id(module): name for name, module in model.named_modules()}
        self.layers = set(anatomy.layers)
        values = dict(model.named_buffers())
        if any(each.is_meta for each in values.values()):
            values = buffer_values(model)
        for name, module in model.named_modules():
            for leaf, _ in list(module.named_buffers(recurse=False)):
                module._buffers[leaf] = values[f"{name}.{leaf}" if name else leaf]
            module.register_forward_pre_hook(partial(self._begin, name or "its forward"))
            self._prepare(name, module)
            module.register_forward_hook(partial(self._end, name))

    def _begin(self, name: str, *_: Any) -> None:
        self.under_way.append(name)
        self.trace.entered.add(name)

    def _end(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        self.under_way.pop()
        for each in output if isinstance(output, tuple) else ():
            if isinstance(each, Tensor) and not each.is_floating_point():
                self.picks.setdefault(id(each), (name, output))

    def _prepare(self, name: str, module: Any) -> None:
        if name in self.layers:
            module.register_forward_pre_hook(self._enter_block(name), with_kwargs=True)
            module.register_forward_hook(self._leave_block)
        elif (dims := hf_internals.linear_dims(module)) is not None:
            module.forward = self._linear(name, module.weight.shape[dims[0]])
            if module.weight.numel() <= MOST_READ:
                module.weight = nn.Parameter(self._drawn(*module.weight.shape), requires_grad=False)
            return
        elif isinstance(module, nn.Embedding):
            module.forward = self._embedding(name, module.embedding_dim)  # type: ignore[method-assign]
            rows = self._drawn(1, module.embedding_dim).expand_as(module.weight)  # some models look a row up themselves
            module.weight = nn.Parameter(rows, requires_grad=False)
            self.tables[rows.untyped_storage().data_ptr()] = name
            return
        else:
            module.register_forward_pre_hook(self._note_arguments(name), with_kwargs=True)
        own = list(module.named_parameters(recurse=False))
        if hf_internals.is_experts(module):
            module.forward = self._experts(name, next(module.parameters()).shape[0])
            return
        if is_convolution(module):
            self.convolutions.append(name)
            module.forward = self._convolution(name)
            return
        if any(p.ndim > 2 for _, p in own) or sum(p.numel() for _, p in own) > MOST_SMALL:
            module.forward = self._opaque(name, module)
            return
        for leaf, parameter in own:
            values = torch.rand(parameter.shape, generator=self.random) + 0.5
            if parameter.ndim > 1:  # a wide sum stays where softmax and sigmoid have gradients
                values *= parameter.shape[-1] ** -0.5
            module._parameters[leaf] = nn.Parameter(values, requires_grad=False)
        if own and not any(True for _ in module.children()):
            module.forward = self._small(name, module)

    @property
    def innermost(self) -> str:
        """The module under way."""
        return self.under_way[-1] if self.under_way else "its forward"

    def begin(self, *, stops_at_block: bool = False, noise: int = 0, place: int = 0) -> None:
        """Before each run of the model. `noise`: the seed of whatever the model draws. `place`: of the first token in
        its row, where the model counts for itself."""
        self.trace, self.stops_at_block, self.noise, self.place = Trace(), stops_at_block, noise, place
        self.picks: dict[
            int, tuple[str, tuple[Any, ...]]
        ] = {}  # integers -> the module that gave them, and all it gave
        self.draws: list[str] = []  # modules that draw random numbers
        self.counts: list[str] = []
        self.under_way: list[str] = []  # modules, the innermost last
        self.places: list[Tensor] = []  # what tells the first layer where its tokens stand
        self.block: BlockTrace | None = None
        self.random.manual_seed(0)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def save(self, x: Tensor, name: str = "", memory: int = 0) -> Tensor:
        """Note what backward keeps of a layer's tokens; `name`: the module that keeps it, the innermost by default."""
        if self.block is not None and not x.is_meta and self.tokens in x.shape:
            numbers = x.untyped_storage().nbytes() / x.element_size() / self.tokens
            self.block.saved.append((name or self.innermost, memory or x.untyped_storage().data_ptr(), numbers))
        return x.detach()

    # ---- stand-ins ---------------------------------------------------------------------------------------------------

    def _linear(self, name: str, features: int) -> Any:
        def forward(x: Tensor) -> Tensor:
            return self._record("linear", name, (x,), self._drawn(*x.shape[:-1], features))

        return forward

    def _embedding(self, name: str, features: int) -> Any:
        def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self._outside(name)
            if self.block is None:
                self.places.append(ids)
            return self._drawn(*ids.shape, features).requires_grad_(self.block is None)

        return forward

    def _experts(self, name: str, experts: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            read = tuple(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())
            out = self._record("experts", name, read, self._drawn(*read[0].shape))
            if self.block is not None:
                event = self.block.events[-1]
                event.experts = experts
                index = next(
                    x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.is_floating_point()
                )
                event.router, given = self.picks.get(id(index), (None, ()))
                event.has_logits = _gives_logits(given, experts, index)
            return out

        return forward

    def _opaque(self, name: str, module: nn.Module) -> Any:
        plain = None if any(True for _ in module.children()) else module.forward

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
            if not given:
                raise Untraceable(f"{name} is given no hidden states")
            drawn = self._drawn(*_shape_given(plain, args, kwargs, given[0]))
            return self._record("opaque", name, (given[0],), drawn)

        return forward

    def _convolution(self, name: str) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            raise MixesTokens(f"{name} is a convolution, which lets tokens meet outside of the attention function")

        return forward

    def _small(self, name: str, module: nn.Module) -> Any:
        plain, own = module.forward, {parameter.numel() for parameter in module.parameters()}

        def forward(*args: Any, **kwargs: Any) -> Any:
            x = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
            if self.block is None or x is None:
                self._outside(name)
                return plain(*args, **kwargs)
            self.save(x, name, id(module) * 2 + 1)  # a copy of its own, for the gradient of its weights
            event = Event("small", name, (x,), None, self._sources(x))
            self.block.events.append(event)
            event.wide = x.ndim == 3 and own == {x.shape[-1]} and not self._reads_residual(event)
            out = plain(*args, **kwargs)
            if event.wide:
                self._sources(out)
            return x * 1 if event.wide else out  # so that features stay apart

        return forward

    def attention(self, module: nn.Module, tensors: tuple[Tensor, ...], extra: dict[str, Any]) -> Tensor:
        """The stand-in of attention: [1,T,H,D]."""
        if self.block is None:
            raise Untraceable("it attends outside of its layers")
        query, _, value = tensors
        mine = {id(parameter): name for name, parameter in module.named_parameters(recurse=False)}
        name = self.names[id(module)]
        if extra.get("cu_seqlens") is not self.cu_seqlens:
            self.trace.forgetful.append((self.block.layer, name))
        passed = tuple(f"{name}.{mine[id(each)]}" for each in extra.values() if id(each) in mine)
        drawn = self._drawn(*query.transpose(1, 2).shape[:3], value.shape[-1])
        return self._record("attention", name, tensors, drawn, passed)

    def _record(
        self, kind: Kind, name: str, inputs: tuple[Tensor, ...], values: Tensor, parameters: tuple[str, ...] = ()
    ) -> Tensor:
        if self.block is None:
            self._outside(name)
            return values
        sources = frozenset().union(*(self._sources(each) for each in inputs))
        leaf = values.requires_grad_()
        for kept in inputs if kind in ("linear", "attention") else ():
            self.save(kept, name)
        leaf_name = f"{name} (attention)" if kind == "attention" else name
        self.rows[leaf_name] = self._rows_like(leaf, inputs[0])
        self.block.events.append(Event(kind, name, inputs, leaf, sources, parameters=parameters))
        self.block.leaves[leaf_name] = leaf
        return leaf * 1  # a model may change it in place

    def _sources(self, x: Tensor) -> frozenset[str]:
        """The leaves that `x` depends on. Raises `Untraceable` when one of its tokens depends on another."""
        assert self.block is not None
        dim = self._token_dim(x)
        if x.shape[dim] != self.tokens:
            return self._tokens_by_row(x, dim)[0]
        found, tokens = self._behind(x.select(dim, _ONE))
        if tokens - {_ONE}:
            raise self.tokens_meet()
        return found

    def unfollowed(self, error: Exception) -> Untraceable:
        """Why a module stopped with stand-ins around it."""
        if self.block is not None and any(is_within(name, [self.block.layer]) for name in self.convolutions):
            return self.tokens_meet()
        what = f"{type(error).__name__}: {error}"
        return Untraceable(f"{self.innermost} computes in a way that cannot be followed without weights ({what})")

    def tokens_meet(self) -> MixesTokens:
        """What is wrong with the block under way."""
        assert self.block is not None
        convolution = next((name for name in self.convolutions if is_within(name, [self.block.layer])), None)
        how = f" ({convolution} is a convolution)" if convolution else ""
        return MixesTokens(f"{self.block.layer} lets tokens meet outside of the attention function{how}")

    def _behind(self, part: Tensor) -> tuple[frozenset[str], set[int]]:
        """The leaves that a part of a tensor depends on, and which of their tokens."""
        assert self.block is not None
        found, tokens = set(), set()
        leaves = self.block.leaves
        for name, grad in zip(leaves, gradients(part, list(leaves.values())), strict=True):
            if grad is None or not bool(grad.any()):
                continue
            found.add(name)
            dim, rows = self.rows[name]
            tokens |= set(rows[grad.movedim(dim, 0).flatten(1).any(1)].tolist())
        return frozenset(found), tokens - {_NONE}

    def _tokens_by_row(self, x: Tensor, dim: int) -> tuple[frozenset[str], Tensor]:
        """Of a tensor with several rows per token, in whatever order: the leaves behind it, and each row's token."""
        assert self.block is not None
        found: frozenset[str] = frozenset()
        rows = []
        for row in range(x.shape[dim]):
            names, tokens = self._behind(x.select(dim, row))
            if len(tokens) > 1:
                raise self.tokens_meet()
            found |= names
            rows.append(next(iter(tokens), _NONE))
        return found, torch.tensor(rows)

    def _rows_like(self, leaf: Tensor, read: Tensor) -> tuple[int, Tensor]:
        """Which dimension of a new leaf counts tokens, and the token of each row: as in what was read for it."""
        dim = self._token_dim(leaf)
        if leaf.shape[dim] == self.tokens:
            return dim, self.every
        return dim, self._tokens_by_row(read, self._token_dim(read))[1]

    def _token_dim(self, tensor: Tensor) -> int:
        """Which dimension counts the tokens, or several rows of each. Raises `Untraceable` where none or several do."""
        found = [dim for dim, size in enumerate(tensor.shape) if size == self.tokens]
        found = found or [dim for dim, size in enumerate(tensor.shape[:-1]) if size and size % self.tokens == 0][:1]
        if len(found) != 1:
            layer = self.block.layer if self.block else "a layer"
            raise Untraceable(
                f"{layer} computes with a tensor of shape {list(tensor.shape)}, of which no dimension counts tokens"
            )
        return found[0]

    def _reads_residual(self, event: Event) -> bool:
        """Whether its input is of the width of the residual stream for a reason: it, or a projection back to it."""
        assert self.block is not None
        leaves = self.block.leaves
        back = {name for name in event.sources if name != RESIDUAL and leaves[name].shape[-1] == self.hidden}
        rows = {each.name for each in self.block.events if each.kind == "linear" and RESIDUAL not in each.sources}
        return RESIDUAL in event.sources or bool(back & rows)

    def _outside(self, name: str) -> None:
        (self.trace.after if self.trace.blocks else self.trace.before).append(name)

    # ---- where blocks begin and end ----------------------------------------------------------------------------------

    def _enter_block(self, layer: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            where = self._hidden_arguments(args, kwargs) or self._streams(args, kwargs)
            if len(where) != 1:
                raise Untraceable(
                    f"{layer} is given {len(where) or 'no'} tensors of hidden states (of each token its hidden size, "
                    "in one stream or several), where one is expected"
                )
            if kwargs.get("cu_seqlens") is not self.cu_seqlens:
                raise Untraceable("it does not hand the bounds of packed documents on to its layers")
            old = args[where[0]] if isinstance(where[0], int) else kwargs[where[0]]
            others = [part for each in (*args, *kwargs.values()) if each is not old for part in _flat(each)]
            if not self.trace.blocks:
                self.places += [x for x in others if isinstance(x, Tensor) and x.is_floating_point()]
            if self.stops_at_block:
                raise _Enough
            self._note_carried(layer, [each for each in (*args, *kwargs.values()) if each is not old])
            if old.ndim > 3:
                self.trace.streams = (
                    self.trace.streams or f"{layer} is given several streams of hidden states, {list(old.shape)}"
                )
                self.trace.carried = self.trace.carried or self.trace.streams
            leaf = old.detach().clone().requires_grad_()
            self.rows = {RESIDUAL: self._rows_like(leaf, leaf)}
            self.block = BlockTrace(layer, {RESIDUAL: leaf})
            self.trace.blocks.append(self.block)
            changed = leaf * 1
            if isinstance(where[0], int):
                return tuple(changed if each is old else each for each in args), kwargs
            return args, {**kwargs, where[0]: changed}

        return hook

    def _leave_block(self, _: nn.Module, args: Any, output: Any) -> Any:
        self._sources(output if isinstance(output, Tensor) else output[0])
        layer, self.block = cast(BlockTrace, self.block).layer, None
        if isinstance(output, Tensor):
            return output.detach()
        self.trace.in_tuples.add(layer)
        if any(isinstance(each, Tensor) for each in output[1:]):
            self.trace.carried = self.trace.carried or f"{layer} gives more than hidden states"
        return tuple(each.detach() if isinstance(each, Tensor) else each for each in output)

    def _note_carried(self, layer: str, others: list[Any]) -> None:
        """What a layer is given besides hidden states must not come from an embedding or another layer."""
        if any(isinstance(each, Tensor) and each.requires_grad for value in others for each in _flat(value)):
            self.trace.carried = self.trace.carried or f"{layer} is given more of the tokens than hidden states"

    def _note_arguments(self, name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.block is not None:
                self.block.hidden_arguments[name] = self._hidden_arguments(args, kwargs)

        return hook

    def _streams(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
        """Where hidden states with one dimension more are given: several streams for each token."""
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return [
            where
            for where, x in named
            if isinstance(x, Tensor) and x.ndim == 4 and x.shape[-1] == self.hidden and self.tokens in x.shape[:-1]
            and x.is_floating_point()
        ]  # fmt: skip

    def _hidden_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | str]:
        shapes = ((1, self.tokens, self.hidden), (self.tokens, self.hidden))
        named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return [
            where
            for where, each in named
            if isinstance(each, Tensor) and tuple(each.shape) in shapes and each.is_floating_point()
        ]


def _gives_logits(given: tuple[Any, ...], experts: int, index: Tensor) -> bool:
    """Whether what a router gives are logits of all `experts`, no probabilities, and weights of its picks."""
    floats = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
    if len(floats) < 2 or floats[0].shape[-1] != experts or floats[1].shape != index.shape:
        return False
    total = floats[0].detach().double().sum(-1)
    return not torch.allclose(total, torch.ones_like(total), atol=1e-3)


def _flat(value: Any) -> list[Any]:
    """The items of a tuple, list or dict, or the value itself."""
    if isinstance(value, dict):
        return [part for each in value.values() for part in _flat(each)]
    return [part for each in value for part in _flat(each)] if isinstance(value, tuple | list) else [value]


def _shape_given(plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any], x: Tensor) -> tuple[int, ...]:
    """The shape of what a module would give, whose weights are on meta; that of `x` where it cannot be told."""

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    try:
        with torch.no_grad():
            out = plain(*map(on_meta, args), **{key: on_meta(value) for key, value in kwargs.items()})
        return tuple(out.shape)
    except Exception:  # the model's own code, which may look at values
        return tuple(x.shape)


# ---- the attention function of the copy ------------------------------------------------------------------------------

_ATTENTION = "fivefold-trace"
_recorders: list[_Recorder] = []


@contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **extra: Any,
) -> tuple[Tensor, None]:
    recorder = _recorders[-1]
    attention.check_call(module, attention_mask, dropout, extra)
    if attention_mask is None:
        raise Untraceable(f"{recorder.names[id(module)]} attends without the mask that its model asks for")
    return recorder.attention(module, (query, key, value), extra), None


def _mask(*args: Any, mask_function: masks.MaskFunction, **kwargs: Any) -> masks.Mask:
    mask, recorder = masks.asked_for(*args, **kwargs), _recorders[-1]
    try:
        masks.check(mask, mask_function)
    except masks.NeedsTokens:
        if recorder.tokens >= masks.shown_in(mask):
            raise
        recorder.longest = max(recorder.longest, masks.shown_in(mask))
    return mask
