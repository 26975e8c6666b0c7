"""What a trace has seen of a model: calls in order, the leaves behind each, and what autograd says of them.

`recorder.py` fills it; the pairs, the partition and the costs of a model are read from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fivefold.models.facts import Counted, Experts

RESIDUAL = "the residual stream"
WATCHED = 2  # the token whose dependencies are looked at
_NO_TOKEN = -1  # of a row that is the same whatever the tokens are

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
    at once. `opaque`: any other that holds many weights and is no linear. Of an attention call `inputs` are query
    [1,H,T,D], key and value [1,G,T,D]; `parameters` are those of the calling module that were passed along, one number
    per query head. `experts`: a module that holds the weights of all experts of a layer. Of its call `inputs` are
    tokens [N,D] and their weights [N,K], K experts of each; `experts` is the number of all; `router` is the module that
    gave the picks, if one did, and `has_logits` says whether it gave its logits as well.
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


@dataclass(frozen=True)
class Kept:
    """A tensor that is kept for backward: the module that keeps it, its memory, its bytes of one token. `is_output`:
    the module gave it."""

    module: str
    memory: int
    size: float
    is_output: bool = False


@dataclass
class BlockTrace:
    """What happened in one block, in order.

    `leaves`: what a tensor of the block can depend on, by name. `rows`: leaf -> the dimension of its tokens, and the
    token of each row. `tokens`: the numbers of those that were run. `convolution`: one of the block, if it has any.
    `hidden_arguments`: module -> the positions or keywords of the arguments in which it was given hidden states.
    `saved`: each tensor kept for backward. `read`: memory of what linears and attention were given. `outputs`: by
    memory, what stand-ins gave, and what the block was given. `behind`: saved memory -> that of the outputs that it was
    made of by the model's own code.
    """

    layer: str
    leaves: dict[str, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    tokens: Tensor = field(default_factory=lambda: torch.arange(0))
    convolution: str | None = None
    rows: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    hidden_arguments: dict[str, list[int | str]] = field(default_factory=dict)
    saved: list[Kept] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    outputs: dict[int, Kept] = field(default_factory=dict)
    behind: dict[int, frozenset[int]] = field(default_factory=dict)

    @property
    def fused(self) -> list[Kept]:
        """What fused kernels keep: what linears and attention read, and of their outputs those of which anything else
        that is saved was made. All else is computed again from these, inside of a kernel of the backward.

        Llama: of the residual stream its two inputs of norms, or what these are made of; the norms' outputs; q, k, v
        and what attention gives; gate, up and their product.
        """
        plain = [each for each in self.saved if each.memory in self.read]
        needed = frozenset[int]().union(*(
            self.behind.get(each.memory, ()) for each in self.saved if each.memory not in self.read
        ))  # fmt: skip
        return [*plain, *(self.outputs[memory] for memory in self.outputs if memory in needed - self.read)]

    def linear(self, name: str) -> Event:
        """The call of a linear."""
        return next(event for event in self.events if event.kind == "linear" and event.name == name)

    def add(self, name: str, leaf: Tensor, read: Tensor) -> None:
        """A new leaf. Where it has several rows per token, each is of the token of that row of `read`."""
        dim = self._token_dim(leaf)
        is_one_row_each = leaf.shape[dim] == len(self.tokens)
        self.rows[name] = dim, self.tokens if is_one_row_each else self._by_row(read, self._token_dim(read))[1]
        self.leaves[name] = leaf

    def sources(self, x: Tensor) -> frozenset[str]:
        """The leaves that `x` depends on. Raises `Untraceable` when one of its tokens depends on another."""
        dim = self._token_dim(x)
        if x.shape[dim] != len(self.tokens):
            return self._by_row(x, dim)[0]
        found, tokens = self._behind(x.select(dim, WATCHED))
        if tokens - {WATCHED}:
            raise self.tokens_meet()
        return found

    def tokens_meet(self) -> MixesTokens:
        """What is wrong with the block."""
        how = f" ({self.convolution} is a convolution)" if self.convolution else ""
        return MixesTokens(f"{self.layer} lets tokens meet outside of the attention function{how}")

    def _behind(self, part: Tensor) -> tuple[frozenset[str], set[int]]:
        """The leaves that a part of a tensor depends on, and which of their tokens."""
        found, tokens = set(), set()
        for name, grad in zip(self.leaves, gradients(part, list(self.leaves.values())), strict=True):
            if grad is None or not bool(grad.any()):
                continue
            found.add(name)
            dim, rows = self.rows[name]
            tokens |= set(rows[grad.movedim(dim, 0).flatten(1).any(1)].tolist())
        return frozenset(found), tokens - {_NO_TOKEN}

    def _by_row(self, x: Tensor, dim: int) -> tuple[frozenset[str], Tensor]:
        """Of a tensor with several rows per token, in whatever order: the leaves behind it, and each row's token."""
        found: frozenset[str] = frozenset()
        rows = []
        for row in range(x.shape[dim]):
            names, tokens = self._behind(x.select(dim, row))
            if len(tokens) > 1:
                raise self.tokens_meet()
            found |= names
            rows.append(next(iter(tokens), _NO_TOKEN))
        return found, torch.tensor(rows)

    def _token_dim(self, tensor: Tensor) -> int:
        """Which dimension counts the tokens, or several rows of each. Raises `Untraceable` where none or several do."""
        number = len(self.tokens)
        found = [dim for dim, size in enumerate(tensor.shape) if size == number]
        found = found or [dim for dim, size in enumerate(tensor.shape[:-1]) if size and size % number == 0][:1]
        if len(found) != 1:
            shape = list(tensor.shape)
            raise Untraceable(
                f"{self.layer} computes with a tensor of shape {shape}, of which no dimension counts tokens"
            )
        return found[0]


@dataclass
class Trace:
    """What one run of the model showed.

    `before`, `after`: modules with parameters that ran before the first block and after the last.
    `forgetful`: (layer, attention module) where the layer is given `cu_seqlens` and does not pass them on.
    `in_tuples`: layers that return their hidden states in a tuple.
    `carried`: the reason why layers pass more than hidden states to each other, or None.
    `streams`: the reason why hidden states have several streams (Gemma 3n), or None.
    `entered`: modules of the base that tokens reach.
    `looked_into`: embeddings whose weights the model reads directly.
    `draws`, `counts`: modules that draw random numbers, and that count the tokens of a row for themselves.
    `places`: what tells the first layer where its tokens stand.

    What several runs show together (`trace.py`):
    `counted`: the module that counts the tokens of a row for itself (`facts.Counted`), or None.
    `padding`: the padding token of a model that counts positions from it (`forwards.py`), else None.
    `to_logits`: modules with parameters between the last hidden states and the logits, in order.
    `in_bf16`: the blocks of a run in bf16, as far as what they keep; none where that fails.
    """

    blocks: list[BlockTrace] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    forgetful: list[tuple[str, str]] = field(default_factory=list)
    in_tuples: list[str] = field(default_factory=list)
    carried: str | None = None
    streams: str | None = None
    entered: set[str] = field(default_factory=set)
    looked_into: set[str] = field(default_factory=set)
    draws: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)
    places: list[Tensor] = field(default_factory=list)
    counted: Counted | None = None
    padding: int | None = None
    to_logits: tuple[str, ...] = ()
    in_bf16: list[BlockTrace] = field(default_factory=list)

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
                router=event.router or _router(block, event),
                experts=event.experts,
                top_k=event.inputs[1].shape[-1],  # of the weights [N, K] of its tokens
                is_last=event is block.events[-1],
                has_logits=event.has_logits,
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
