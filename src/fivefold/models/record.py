"""The record of a trace: calls in order, the leaves that each depends on, and the answers of autograd.

`recorder.py` fills it; the pairs, the partition and the costs of a model are read from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fivefold.models.attention import Mask
from fivefold.models.facts import Counted, DropoutSite, Experts

RESIDUAL = "the residual stream"
WATCHED = 2  # the token whose dependencies are checked
_NO_TOKEN = -1  # the token of a row that depends on no token

Kind = Literal["linear", "small", "attention", "experts", "opaque"]


class Untraceable(Exception):
    """The reason why a model cannot be traced, in words that follow its name; `fix`: the remedy, if there is one."""

    def __init__(self, why: str, *, fix: str | None = None) -> None:
        super().__init__(why)
        self.fix = fix


class MixesTokens(Untraceable):
    """Raised when tokens meet outside of attention: packed documents would see each other, and a token its future."""


@dataclass(eq=False)
class ModuleCall:
    """One call: the inputs and output of a module, and the names of the leaves that its input depends on.

    `small`: a module with few parameters of its own, such as a norm. `wide`: a small module that sees all features of a
    projection at once. `opaque`: any other module with many weights that is no linear. For an attention call, `inputs`
    are query [1,H,T,D], key and value [1,G,T,D]; `parameters` are those of the calling module that were passed along,
    one number per query head; `mask` says what its queries see. `experts`: a module with the weights of all experts of
    a layer. For its call, `inputs` are tokens [N,D] and their weights [N,K], K experts per token; `experts` is the
    number of all experts; `router` is the module that returned the picks, if any, and `has_logits` tells if it returned
    its logits as well.
    """

    kind: Kind
    name: str
    inputs: tuple[Tensor, ...]
    leaf: Tensor | None
    sources: frozenset[str]
    wide: bool = False
    parameters: tuple[str, ...] = ()
    mask: Mask = field(default_factory=Mask)
    experts: int = 0
    router: str | None = None
    has_logits: bool = False


@dataclass(frozen=True)
class Kept:
    """A tensor saved for backward: the module that saves it, its memory, its bytes per token. `is_output`: it is an
    output of the module."""

    module: str
    memory: int
    size: float
    is_output: bool = False


@dataclass
class BlockTrace:
    """The trace of one block, in order.

    `leaves`: the possible dependencies of a tensor of the block, by name. `rows`: leaf -> the dimension of its tokens,
    and the token of each row. `tokens`: the numbers of the tokens of the run. `convolution`: one of the block, if it
    has any. `hidden_arguments`: module -> the positions or keywords of its arguments that are hidden states. `saved`:
    each tensor saved for backward. `read`: memory of the inputs of linears and attention. `outputs`: by memory, the
    outputs of stand-ins and the block's input. `behind`: saved memory -> memory of the outputs from which the model's
    own code computed it.
    """

    layer: str
    leaves: dict[str, Tensor] = field(default_factory=dict)
    events: list[ModuleCall] = field(default_factory=list)
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
        """The tensors that fused kernels save: the inputs of linears and attention, and those of their outputs on which
        any other saved tensor depends. Kernels of the backward recompute everything else from these.

        Llama: from the residual stream, the two inputs of norms, or the tensors that these are made of; the norms'
        outputs; q, k, v and the result of attention; gate, up and their product.
        """
        plain = [tensor for tensor in self.saved if tensor.memory in self.read]
        needed = frozenset[int]().union(
            *(self.behind.get(tensor.memory, ()) for tensor in self.saved if tensor.memory not in self.read)
        )
        return [*plain, *(self.outputs[memory] for memory in self.outputs if memory in needed - self.read)]

    def linear(self, name: str) -> ModuleCall:
        return next(event for event in self.events if event.kind == "linear" and event.name == name)

    def add(self, name: str, leaf: Tensor, read: Tensor) -> None:
        """Add a leaf. If it has several rows per token, each belongs to the token of the same row of `read`."""
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
        how = f" ({self.convolution} is a convolution)" if self.convolution else ""
        return MixesTokens(f"{self.layer} lets tokens meet outside of the attention function{how}")

    def _behind(self, part: Tensor) -> tuple[frozenset[str], set[int]]:
        """The leaves that a part of a tensor depends on, and their tokens."""
        found, tokens = set(), set()
        for name, grad in zip(self.leaves, gradients(part, list(self.leaves.values())), strict=True):
            if grad is None or not bool(grad.any()):
                continue
            found.add(name)
            dim, rows = self.rows[name]
            tokens |= set(rows[grad.movedim(dim, 0).flatten(1).any(1)].tolist())
        return frozenset(found), tokens - {_NO_TOKEN}

    def _by_row(self, x: Tensor, dim: int) -> tuple[frozenset[str], Tensor]:
        """The leaves behind a tensor with several rows per token, in any order; and each row's token."""
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
        """The dimension that counts tokens, or several rows per token. Raises `Untraceable` if none or several do."""
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
    """The result of one run of the model.

    `before`, `after`: modules with parameters that ran before the first block and after the last.
    `forgetful`: (layer, attention module) of layers that get `cu_seqlens` and do not pass it on.
    `in_tuples`: layers that return their hidden states in a tuple.
    `carried`: the reason why layers pass more than hidden states to each other, or None.
    `streams`: the reason why hidden states have several streams (Gemma 3n), or None.
    `entered`: modules of the base that tokens reach.
    `looked_into`: embeddings whose weights the model reads directly.
    `draws`, `counts`: modules that draw random numbers, and that count the tokens of a row for themselves.
    `places`: the inputs that tell the first layer the positions of its tokens.
    `dropouts`: the sites that drop something, in order.

    Combined from several runs (`discover.py`):
    `counted`: the module that counts the tokens of a row for itself (`facts.Counted`), or None.
    `padding`: the padding token of a model that counts positions from it (`forwards.py`), else None.
    `to_logits`: modules with parameters between the last hidden states and the logits, in order.
    `in_bf16`: the blocks of a run in bf16, for their saved tensors; empty if that run fails.
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
    dropouts: list[DropoutSite] = field(default_factory=list)
    counted: Counted | None = None
    padding: int | None = None
    to_logits: tuple[str, ...] = ()
    in_bf16: list[BlockTrace] = field(default_factory=list)

    @property
    def read(self) -> list[Tensor]:
        """All inputs of stand-ins, in order."""
        return [x.detach() for block in self.blocks for event in block.events for x in event.inputs]

    @property
    def experts(self) -> list[Experts]:
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


def _router(block: BlockTrace, experts: ModuleCall) -> str:
    """The router of an experts module: the last small module or linear with the same parent that ran before it."""
    parent = experts.name.rpartition(".")[0] + "."
    before = block.events[: block.events.index(experts)]
    beside = [event.name for event in before if event.kind in ("small", "linear") and event.name.startswith(parent)]
    if not beside:
        raise Untraceable(f"nothing beside {experts.name} says where tokens go")
    return beside[-1]


def depends(output: Tensor, leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """For each leaf: a bool mask of the features (last dimension) that `output` depends on; None if there are none."""
    masks = [None if grad is None else (grad != 0).flatten(0, -2).any(0) for grad in gradients(output, leaves)]
    return [mask if mask is not None and bool(mask.any()) else None for mask in masks]


def gradients(output: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """For each leaf, the gradient of a random mixture of `output`; zero or None if `output` does not depend on it."""
    if not output.requires_grad:
        return [None] * len(leaves)
    weights = torch.rand(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    found: Sequence[Tensor | None] = torch.autograd.grad(output, leaves, weights, retain_graph=True, allow_unused=True)
    return found
