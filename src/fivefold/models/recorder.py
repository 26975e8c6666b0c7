"""A copy of a model that records the inputs and outputs of its parts.

Linears, embeddings and attention of the copy, which is on the meta device, return random numbers of the right shape
instead of multiplying (their weights stay on meta, so any size costs nothing). Everything between them, norms and
rotary positions included, is the model's own code with real numbers. Each stand-in's output is a leaf of the autograd
graph, so autograd answers exactly: does this tensor depend on that projection, and on which of its features? It also
detects tokens that meet outside of attention, which would break packed documents.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from math import isqrt
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.core.errors import UserError
from fivefold.models import attention, hf_internals
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.attention import Mask, MaskFunction
from fivefold.models.facts import DropoutKind, DropoutSite
from fivefold.models.recipe import buffer_values
from fivefold.models.record import RESIDUAL, BlockTrace, Kept, Kind, MixesTokens, ModuleCall, Trace, Untraceable
from fivefold.ops.dropout import CallsServed
from fivefold.torch_internals import Dispatch

ATTENTION = "fivefold-trace"  # the attention function of the copy
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
MOST_READ = 2**16  # most weights of a linear with real values: some models compute with small weights directly
MOST_SMALL = 2**22  # most values of a small module, neither a linear nor an embedding

Args = tuple[Any, ...]
Keywords = dict[str, Any]


class _Enough(Exception):
    """Stops a run that has shown enough."""


class Recorder:
    """Stand-ins and hooks in `model`, a copy on the meta device; `run` calls it.

    `tokens`: the length of its row. `cu_seqlens`: the bounds that must reach attention. `hidden`: features of its
    residual stream. `longest`: the length of a row in which every mask can be checked, if some masks look at tokens;
    else 0. `dtype`: of stand-ins, and of the parameters that compute. The parameters of small modules are trained in
    bf16, so that tensors saved for their own gradient are seen in that type.
    """

    def __init__(self, model: PreTrainedModel, anatomy: Anatomy, dtype: torch.dtype = torch.float32) -> None:
        self.dtype, self.tokens = dtype, _tokens(model)
        self.cu_seqlens = torch.tensor([0, self.tokens])
        self.longest = 0
        self._every = torch.arange(self.tokens)  # made here: inside a run it would be recorded as the model's own
        self.hidden = int(getattr(model.config.get_text_config(), "hidden_size", 0))
        if not self.hidden:
            raise Untraceable("its config has no hidden_size")
        self._convolutions: list[str] = []
        self._random = torch.Generator()
        self._tables: dict[int, str] = {}  # memory of the stand-in of an embedding's weight -> the embedding
        self._begin()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._modules = dict(model.named_modules())
        self._layers = set(anatomy.layers)
        values = dict(model.named_buffers())
        if any(value.is_meta for value in values.values()):
            values = buffer_values(model)
        for name, module in model.named_modules():
            for leaf, _ in list(module.named_buffers(recurse=False)):
                module._buffers[leaf] = values[f"{name}.{leaf}" if name else leaf]
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            self._prepare(name, module)
            module.register_forward_hook(partial(self._leave, name))

    def run(
        self,
        forward: Callable[..., Any],
        *,
        stops_at_block: bool = False,
        noise: int = 0,
        place: int = 0,
        **inputs: Any,
    ) -> Trace:
        """Call the copy, or a part of it, and return the trace. Raises `Untraceable`, in words, for any failure.

        `stops_at_block`: only up to the first layer. `noise`: the seed of the model's random draws. `place`: the
        position of the first token in its row, for models that count for themselves.
        """
        self._begin(stops_at_block)
        saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda kept: kept)
        watch = Dispatch(partial(self._watch, place))
        with (
            _recording(self), torch.random.fork_rng(devices=[]), torch.enable_grad(), saving, watch,
            CallsServed(self._dropout, self._uniform),
        ):  # fmt: skip
            torch.manual_seed(noise)
            try:
                forward(**inputs)
            except _Enough:
                pass
            except Untraceable:
                raise
            except UserError as error:  # attention refuses an option that it would drop
                raise Untraceable(error.what, fix=error.fix) from error
            except attention.MaskOpened as error:
                raise Untraceable(str(error)) from error
            except Exception as error:  # the model's own code failed on stand-ins
                if self._block is not None and self._block.convolution:
                    raise self._block.tokens_meet() from error
                how = f"in a way that cannot be followed without weights ({type(error).__name__}: {error})"
                raise Untraceable(f"{self._innermost} computes {how}") from error
        return self._trace

    def _watch(self, place: int, operator: Any, args: Args, kwargs: Keywords) -> Any:
        """Run an operator of the model and note its effects; stand-ins have a generator of their own."""
        read = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor) and not arg.is_meta]
        self._trace.looked_into |= {self._tables[memory] for memory in read if memory in self._tables}
        made = operator(*args, **kwargs)
        if self._block is not None:
            self._follow(args, made)
        if operator.overloadpacket is torch.ops.aten.arange and len(made) == self.tokens:
            self._trace.counts.append(self._innermost)
            return made + place
        if torch.Tag.nondeterministic_seeded not in operator.tags or kwargs.get("generator") is not None:
            return made
        if made.numel() == 1:  # it decides if a layer is dropped: 0 drops it at any chance
            return torch.zeros_like(made)
        self._trace.draws.append(self._innermost)
        return made

    def _follow(self, args: Args, made: Any) -> None:
        """Note the stand-ins' outputs on which an operator's results depend."""
        behind = frozenset[int]().union(
            *(self._made_of.get(_memory(arg), ()) for arg in _flat(args) if isinstance(arg, Tensor))
        )
        self._made_of |= {_memory(tensor): behind for tensor in _flat(made) if isinstance(tensor, Tensor)}

    def _begin(self, stops_at_block: bool = False) -> None:
        self._trace, self._stops_at_block = Trace(), stops_at_block
        self._picks: dict[int, tuple[str, Args]] = {}  # id of integers -> their module and all its outputs
        self._under_way: list[str] = []  # running modules, the innermost last
        self._block: BlockTrace | None = None
        self._alive: list[Tensor] = []  # tensors saved for backward, held so that their memory addresses stay unique
        self._given: set[int] = set()  # memory of a layer's other inputs, which all layers share
        self._made_of: dict[int, frozenset[int]] = {}  # memory -> memory of the stand-ins' outputs that it depends on
        self._calls: dict[tuple[str, DropoutKind], int] = {}  # module -> its calls of dropout, and of noise
        self._callers: dict[str, str] = {}  # `nn.Dropout` -> the module that calls it
        self._random.manual_seed(0)

    @property
    def _innermost(self) -> str:
        return (self._under_way[-1] if self._under_way else "") or "its forward"

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Note a site of dropout, in place of `F.dropout`. Nothing is dropped here."""
        if training and p:
            name = self._under_way[-1] if self._under_way else ""
            kind: DropoutKind = "module" if isinstance(self._modules[name], nn.Dropout) else "call"
            self._add_site(name, kind, float(p), x.shape[-1])
            if kind == "module":
                self._note_caller(name)
        return x

    def _note_caller(self, name: str) -> None:
        """Note who calls an `nn.Dropout` again, which tells its calls apart: one module inside of a layer."""
        caller = self._under_way[-2] if len(self._under_way) > 1 else ""
        if self._callers.setdefault(name, caller) == caller and self._calls[name, "module"] == 1:
            return
        if self._callers[name] != caller or not (caller in self._layers or is_within(caller, self._layers)):
            fix = "set its dropout to 0 in model.overrides, or give each call a module of its own"
            raise Untraceable(f"{name} drops several tensors, and not all of them in one module of a layer", fix=fix)
        self._trace.dropouts = [
            replace(site, caller=caller) if site.module == name else site for site in self._trace.dropouts
        ]

    def _uniform(self, x: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
        """Note a site of noise, in place of `Tensor.uniform_`; the mean stands for the noise. Only noise of hidden
        states is one. Other draws are PyTorch's, and `_watch` notes them."""
        if options or not self._is_hidden(x):
            return x.uniform_(low, high, **options)
        self._add_site(self._under_way[-1] if self._under_way else "", "noise", (high - low) / 2, x.shape[-1])
        return x.fill_((low + high) / 2)

    def _add_site(self, name: str, kind: DropoutKind, p: float, features: int) -> None:
        number = self._calls.get((name, kind), 0)
        self._calls[name, kind] = number + 1
        self._trace.dropouts.append(DropoutSite(name, kind, p, features, number))

    # ---- every module ------------------------------------------------------------------------------------------------

    def _enter(self, name: str, _: nn.Module, args: Args, kwargs: Keywords) -> tuple[Args, Keywords] | None:
        self._under_way.append(name)
        self._trace.entered.add(name)
        if name in self._layers:
            return self._enter_block(name, args, kwargs)
        if self._block is not None:
            self._block.hidden_arguments[name] = _where(self._is_hidden, args, kwargs)
        return None

    def _leave(self, name: str, _: nn.Module, args: Args, output: Any) -> Any:
        if name in self._layers:
            output = self._leave_block(name, output)
        self._under_way.pop()
        for tensor in output if isinstance(output, tuple) else ():
            if isinstance(tensor, Tensor) and not tensor.is_floating_point():
                self._picks.setdefault(id(tensor), (name, output))
        return output

    def _prepare(self, name: str, module: Any) -> None:
        """Put a stand-in in place of the module's forward, or values in place of its parameters."""
        own = list(module.named_parameters(recurse=False))
        is_leaf = next(module.children(), None) is None
        if name not in self._layers and (dims := hf_internals.linear_dims(module)) is not None:
            module.forward = partial(self._linear, name, module.weight.shape[dims[0]])
            if module.weight.numel() <= MOST_READ:
                module.weight = nn.Parameter(self._drawn(*module.weight.shape), requires_grad=False)
        elif name not in self._layers and isinstance(module, nn.Embedding):
            module.forward = partial(self._embedding, name, module.embedding_dim)  # type: ignore[method-assign]
            rows = self._drawn(1, module.embedding_dim).expand_as(module.weight)  # some models index it directly
            module.weight = nn.Parameter(rows, requires_grad=False)
            self._tables[rows.untyped_storage().data_ptr()] = name
        elif hf_internals.is_experts(module):
            module.forward = partial(self._experts, name, next(module.parameters()).shape[0])
        elif isinstance(module, CONVOLUTIONS):
            self._convolutions.append(name)
            module.forward = partial(self._convolution, name)  # type: ignore[method-assign]
        elif any(p.ndim > 2 for _, p in own) or sum(p.numel() for _, p in own) > MOST_SMALL:
            module.forward = partial(self._opaque, name, module.forward if is_leaf else None)
        else:
            for leaf, parameter in own:
                values = torch.rand(parameter.shape, generator=self._random) + 0.5
                if parameter.ndim > 1:  # keeps wide sums where softmax and sigmoid have gradients
                    values *= parameter.shape[-1] ** -0.5
                is_trained = self.dtype == torch.bfloat16
                module._parameters[leaf] = nn.Parameter(values.to(self.dtype), requires_grad=is_trained)
            if own and is_leaf:
                module.forward = partial(self._small, name, module, module.forward)

    def _drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random).to(self.dtype)

    def _save(self, x: Tensor, name: str = "", memory: int = 0) -> Tensor:
        """Note a tensor of a layer's tokens saved for backward, by module `name` (default: the innermost)."""
        if self._block is not None and not x.is_meta and self.tokens in x.shape and not self._is_given(x):
            kept = Kept(name or self._innermost, memory or _memory(x), x.untyped_storage().nbytes() / self.tokens)
            self._block.saved.append(kept)
            if not memory:
                self._block.behind[kept.memory] = self._made_of.get(kept.memory, frozenset())
            self._alive.append(x.detach())
        return x.detach()

    def _is_given(self, x: Tensor) -> bool:
        """True if layers share the tensor (cosines and sines); in fp32, each layer's counts."""
        return self.dtype == torch.bfloat16 and _memory(x) in self._given

    def _outside(self, name: str) -> None:
        (self._trace.after if self._trace.blocks else self._trace.before).append(name)

    # ---- stand-ins ---------------------------------------------------------------------------------------------------

    def _linear(self, name: str, features: int, /, x: Tensor) -> Tensor:
        return self._record("linear", name, (x,), self._drawn(*x.shape[:-1], features))

    def _embedding(self, name: str, features: int, /, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._block is None:
            self._outside(name)
            self._trace.places.append(ids)
        return self._drawn(*ids.shape, features).requires_grad_(self._block is None)

    def _experts(self, name: str, experts: int, /, *args: Any, **kwargs: Any) -> Tensor:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        read = tuple(x for x in given if x.is_floating_point())
        out = self._record("experts", name, read, self._drawn(*read[0].shape))
        if self._block is not None:
            event, index = self._block.events[-1], next(x for x in given if not x.is_floating_point())
            event.router, router_gave = self._picks.get(id(index), (None, ()))
            event.experts, event.has_logits = experts, _gives_logits(router_gave, experts, index)
        return out

    def _opaque(self, name: str, plain: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Tensor:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point()]
        if not given:
            raise Untraceable(f"{name} is given no hidden states")
        drawn = self._drawn(*_shape_given(plain, args, kwargs, given[0]))
        return self._record("opaque", name, (given[0],), drawn)

    def _convolution(self, name: str, /, *_: Any, **__: Any) -> Tensor:
        raise MixesTokens(f"{name} is a convolution, which lets tokens meet outside of the attention function")

    def _small(self, name: str, module: nn.Module, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        x = next((arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)), None)
        if self._block is None or x is None:
            self._outside(name)
            return plain(*args, **kwargs)
        if self.dtype != torch.bfloat16:  # counted separately: saved for the gradient of its weights
            self._save(x, name, id(module) * 2 + 1)
        event = ModuleCall("small", name, (x,), None, self._block.sources(x))
        self._block.events.append(event)
        sizes = {parameter.numel() for parameter in module.parameters()}
        event.wide = x.ndim == 3 and sizes == {x.shape[-1]} and not self._reads_residual(self._block, event)
        out = plain(*args, **kwargs)
        if event.wide:
            self._block.sources(out)
        return x * 1 if event.wide else out  # not the norm's output, which would mix all features

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **extra: Any,
    ) -> tuple[Tensor, None]:
        """The attention function of the copy, in the signature of `transformers`: ([1,T,H,D], None)."""
        name = self._names[id(module)]
        attention.check_call(module, attention_mask, extra)
        if dropout:
            self._trace.dropouts.append(DropoutSite(name, "attention", float(dropout), query.shape[1]))
        if attention_mask is None:
            raise Untraceable(f"{name} attends without the mask that its model asks for")
        if self._block is None:
            raise Untraceable("it attends outside of its layers")
        if extra.get("cu_seqlens") is not self.cu_seqlens:
            self._trace.forgetful.append((self._block.layer, name))
        mine = {id(parameter): leaf for leaf, parameter in module.named_parameters(recurse=False)}
        passed = tuple(f"{name}.{mine[id(tensor)]}" for tensor in extra.values() if id(tensor) in mine)
        drawn = self._drawn(*query.transpose(1, 2).shape[:3], value.shape[-1])
        out = self._record("attention", name, (query, key, value), drawn, passed)
        self._block.events[-1].mask = attention_mask
        return out, None

    def mask(self, *args: Any, mask_function: MaskFunction, **kwargs: Any) -> Mask:
        """The mask function of the copy. Raises `UserError` for a mask that `Mask` cannot express."""
        mask = attention.mask_asked_for(*args, **kwargs)
        try:
            attention.check_mask(mask, mask_function)
        except attention.NeedsTokens:
            if self.tokens >= attention.shown_in(mask):
                raise
            self.longest = max(self.longest, attention.shown_in(mask))
        return mask

    def _record(
        self, kind: Kind, name: str, inputs: tuple[Tensor, ...], values: Tensor, parameters: tuple[str, ...] = ()
    ) -> Tensor:
        if self._block is None:
            self._outside(name)
            return values + inputs[0].sum(-1, keepdim=True) if kind == "linear" else values  # each token's own
        sources = frozenset().union(*(self._block.sources(tensor) for tensor in inputs))
        leaf = values.requires_grad_()
        for kept in inputs if kind in ("linear", "attention") else ():
            self._save(kept, name)
            self._block.read.add(_memory(kept))
        leaf_name = f"{name} (attention)" if kind == "attention" else name
        self._block.add(leaf_name, leaf, inputs[0])
        self._block.events.append(ModuleCall(kind, name, inputs, leaf, sources, parameters=parameters))
        return self._given_out(name, leaf)

    def _given_out(self, name: str, leaf: Tensor) -> Tensor:
        """The output of a stand-in, or the input of a block: a copy of a leaf, as a model may change it in place."""
        out = leaf * 1
        block, memory = cast(BlockTrace, self._block), _memory(out)
        block.outputs[memory] = Kept(name, memory, out.untyped_storage().nbytes() / self.tokens, is_output=True)
        self._made_of[memory] = frozenset((memory,))
        self._alive.append(out.detach())
        return out

    def _reads_residual(self, block: BlockTrace, event: ModuleCall) -> bool:
        """True if its input is as wide as the residual stream for a reason: the stream, or a projection back to it."""
        back = {name for name in event.sources if name != RESIDUAL and block.leaves[name].shape[-1] == self.hidden}
        rows = {event.name for event in block.events if event.kind == "linear" and RESIDUAL not in event.sources}
        return RESIDUAL in event.sources or bool(back & rows)

    # ---- where blocks begin and end ----------------------------------------------------------------------------------

    def _enter_block(self, layer: str, args: Args, kwargs: Keywords) -> tuple[Args, Keywords]:
        where = _where(self._is_hidden, args, kwargs) or _where(self._is_in_streams, args, kwargs)
        if len(where) != 1:
            raise Untraceable(
                f"{layer} is given {len(where) or 'no'} tensors of hidden states (of each token its hidden size, "
                "in one stream or several), where one is expected"
            )
        if kwargs.get("cu_seqlens") is not self.cu_seqlens:
            raise Untraceable("it does not hand the bounds of packed documents on to its layers")
        old = args[where[0]] if isinstance(where[0], int) else kwargs[where[0]]
        others = [part for arg in (*args, *kwargs.values()) if arg is not old for part in _flat(arg)]
        beside = [part for part in others if isinstance(part, Tensor)]
        self._given = {_memory(part) for part in beside}
        trace = self._trace
        if not trace.blocks:
            trace.places += [part for part in beside if part.is_floating_point()]
        if self._stops_at_block:
            raise _Enough
        if any(part.requires_grad for part in beside):  # it comes from an embedding or another layer
            trace.carried = trace.carried or f"{layer} is given more of the tokens than hidden states"
        if old.ndim > 3:
            trace.streams = trace.streams or f"{layer} is given several streams of hidden states, {list(old.shape)}"
            trace.carried = trace.carried or trace.streams
        leaf = old.detach().clone().requires_grad_()
        convolution = next((name for name in self._convolutions if is_within(name, [layer])), None)
        self._block = BlockTrace(layer, tokens=self._every, convolution=convolution)
        self._block.add(RESIDUAL, leaf, leaf)
        trace.blocks.append(self._block)
        changed = self._given_out(layer, leaf)
        if isinstance(where[0], int):
            return tuple(changed if arg is old else arg for arg in args), kwargs
        return args, {**kwargs, where[0]: changed}

    def _leave_block(self, layer: str, output: Any) -> Any:
        cast(BlockTrace, self._block).sources(output if isinstance(output, Tensor) else output[0])
        self._block = None
        self._alive.clear()
        if isinstance(output, Tensor):
            return output.detach()
        self._trace.in_tuples.append(layer)
        if any(isinstance(tensor, Tensor) for tensor in output[1:]):
            self._trace.carried = self._trace.carried or f"{layer} gives more than hidden states"
        return tuple(tensor.detach() if isinstance(tensor, Tensor) else tensor for tensor in output)

    def _is_hidden(self, x: Tensor) -> bool:
        return tuple(x.shape) in ((1, self.tokens, self.hidden), (self.tokens, self.hidden))

    def _is_in_streams(self, x: Tensor) -> bool:
        """True if these are hidden states with one more dimension: several streams per token."""
        return x.ndim == 4 and x.shape[-1] == self.hidden and self.tokens in x.shape[:-1]


def _tokens(model: PreTrainedModel) -> int:
    """The smallest prime from 5 that is no other size in the model: a dimension of this size counts tokens."""
    taken = {value for value in model.config.get_text_config().to_dict().values() if isinstance(value, int)}
    taken |= {size for parameter in model.parameters() for size in parameter.shape}
    return next(number for number in count(5) if number not in taken and _is_prime(number))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, isqrt(number) + 1))


def _where(is_meant: Callable[[Tensor], bool], args: Args, kwargs: Keywords) -> list[int | str]:
    """The positions and keywords of the arguments that satisfy `is_meant`."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [where for where, x in named if isinstance(x, Tensor) and x.is_floating_point() and is_meant(x)]


def _gives_logits(given: Args, experts: int, index: Tensor) -> bool:
    """True if a router returns logits of all `experts`, not probabilities, and weights of its picks."""
    floats = [arg for arg in given if isinstance(arg, Tensor) and arg.is_floating_point()]
    if len(floats) < 2 or floats[0].shape[-1] != experts or floats[1].shape != index.shape:
        return False
    total = floats[0].detach().double().sum(-1)
    return not torch.allclose(total, torch.ones_like(total), atol=1e-3)


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for item in value.values() for part in _flat(item)]
    return [part for item in value for part in _flat(item)] if isinstance(value, tuple | list) else [value]


def _shape_given(plain: Any, args: Args, kwargs: Keywords, x: Tensor) -> tuple[int, ...]:
    """The output shape of a module with its weights on meta; that of `x` if it cannot be computed."""

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    try:
        with torch.no_grad():
            out = plain(*map(on_meta, args), **{key: on_meta(value) for key, value in kwargs.items()})
        return tuple(out.shape)
    except Exception:  # the model's own code, which may look at values
        return tuple(x.shape)


# ---- the active recorder ---------------------------------------------------------------------------------------------

_recorders: list[Recorder] = []


def register() -> None:
    """Offer the attention and the mask of the active recorder to `transformers` under `ATTENTION`."""
    hf_internals.register_attention(
        ATTENTION,
        lambda *args, **kwargs: _recorders[-1].attention(*args, **kwargs),
        lambda *args, **kwargs: _recorders[-1].mask(*args, **kwargs),
    )


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()
