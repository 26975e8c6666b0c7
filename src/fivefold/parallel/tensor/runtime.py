"""Tensor parallelism with sequence parallelism, for any model whose parameters have roles.

Megatron's column/row pairs (arXiv:1909.08053) and sequence parallelism (arXiv:2205.05198), placed from outside:
parameters are cut in place, and the modules around them get hooks. Between the pairs, activations are split along
the sequence (sequence parallel, T/tp tokens each) or replicated. Model code never learns of it.

    embedding      partial sums over vocabulary rows   -> leave  -> [B, T/tp, D]
    region input   [B, T/tp, D] -> enter -> [B, T, D]             (attention, MLP, head)
    row linear     partial sums over features          -> leave  -> [B, T/tp, D]

Legend: B rows, T tokens, D hidden size, V vocabulary, n tp ranks.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.models.facts import TPBlock, TPInput
from fivefold.parallel.dtensor import local
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.plan import Edit
from fivefold.parallel.sharding import Block
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.parallel.tensor.mappings import (
    copy_to_tensor_parallel,
    feature_indices,
    gather_features,
    gather_from_sequence,
    gather_vocabulary,
    reduce_from_tensor_parallel,
    reduce_scatter_to_sequence,
)
from fivefold.parallel.tensor.spec import (
    AllFeatures,
    CountHeads,
    Cut,
    Enter,
    EnterHead,
    Lookup,
    Positions,
    WholeVocabulary,
)

# ---- tensor parallelism in a model ---------------------------------------------------------------------------------


@dataclass
class TensorParallel(LivePart):
    """Tensor parallelism of one model on this rank: its group, and whether activations are split by sequence.

    Every model has one. `group` is None if tp is 1: then everything passes as it is. `sequence_parallel` and
    `head_in_chunks` change during a run: generation works on single tokens, and the chunked loss gathers once and keeps
    logits split by `vocabulary`. `partial_gradients`: axis (tp, tp_kv) -> this rank's parameters whose gradients the
    ranks of that axis hold in part.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sequence_parallel: bool
    vocabulary: tuple[Block, ...]
    head_in_chunks: bool = False
    partial_gradients: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)
    whole_sequences: ClassVar = {"sequence_parallel": False}
    chunked_head: ClassVar = {"head_in_chunks": True}

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        plan = state.plan
        vocabulary = tuple(rows[0] for rows, *_ in plan.placement.shards[plan.head_weight].held)
        group = state.mesh.groups.get("tp")
        return cls(group, plan.placement.coords.tp, plan.layout.tp, plan.splits_sequence, vocabulary)

    def end_edits(self, state: ParallelState) -> None:
        own, sums = dict(state.model.named_parameters()), state.plan.gradient_sums
        self.partial_gradients = {
            axis: [parameter for name, parameter in own.items() if sums.get(name) == axis]
            for axis in sorted(set(sums.values()))
        }

    @contextmanager
    def in_gradients(self, state: ParallelState, rows: int) -> Iterator[None]:
        yield
        sum_partial_gradients(self.partial_gradients, state.mesh)

    @property
    def is_replicated(self) -> bool:
        """True if several ranks have the same activations."""
        return self.size > 1 and not self.sequence_parallel

    @property
    def row_groups(self) -> list[dist.ProcessGroup]:
        """Group of the ranks that have other tokens of the same rows, if there are any."""
        return [self.group] if self.group is not None and self.sequence_parallel else []

    def share(self, tokens: int) -> int:
        """Number of tokens with hidden states on this rank, for `tokens` of a row."""
        return tokens // self.size if self.sequence_parallel else tokens

    def enter(self, x_BTD: Tensor) -> Tensor:
        """Enter a column-parallel region: all tokens on every rank. Tokens [N, D] without rows are gathered in rank
        order, and `leave` returns each rank its own."""
        if self.group is None:
            return x_BTD
        if x_BTD.ndim == 2:
            return self.enter(x_BTD.unsqueeze(0)).squeeze(0)
        return (gather_from_sequence if self.sequence_parallel else copy_to_tensor_parallel)(x_BTD, self.group)

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Leave a row-parallel region: sum the partial results."""
        if self.group is None:
            return x_BTD
        if x_BTD.ndim == 2:
            return self.leave(x_BTD.unsqueeze(0)).squeeze(0)
        return (reduce_scatter_to_sequence if self.sequence_parallel else reduce_from_tensor_parallel)(
            x_BTD, self.group
        )

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce numbers that have no gradient over the ranks of tp, in place."""
        if self.group is not None:
            dist.all_reduce(x, op, group=self.group)

    def all_gather(self, x_NK: Tensor) -> Tensor:
        """Gather numbers without a gradient from every rank of tp, in rank order along the last dimension."""
        if self.group is None:
            return x_NK
        found = [torch.empty_like(x_NK) for _ in range(self.size)]
        dist.all_gather(found, x_NK.contiguous(), group=self.group)
        return torch.cat(found, -1)


def builders(state: ParallelState) -> Builders:
    model, fold = state.model, state.live(TensorParallel)
    places = cache(partial(parameter_places, model))  # as they are at the first cut: earlier edits add parameters
    entries = dict[TPInput, list[Tensor]]()

    def lookup(embedding: Any, edit: Lookup) -> None:
        embedding.forward = _vocabulary_lookup(embedding, edit.rows, fold)

    def enter_head(head: nn.Module, _: Edit) -> None:
        head.register_forward_pre_hook(
            lambda _, args: args if fold.head_in_chunks else (fold.enter(args[0]), *args[1:])
        )

    def whole_vocabulary(head: nn.Module, _: Edit) -> None:
        head.register_forward_hook(
            lambda _, args, logits: (
                logits if fold.head_in_chunks else gather_vocabulary(logits, fold.group, fold.vocabulary)
            )
        )

    def all_features(module: Any, edit: AllFeatures) -> None:
        module.forward = _over_all_features(module.forward, edit.blocks, fold)

    return {
        Cut: lambda _, edit: _cut(places()[edit.name], edit.shape),
        Lookup: lookup,
        EnterHead: enter_head,
        WholeVocabulary: whole_vocabulary,
        Positions: lambda base, _: base.register_forward_pre_hook(_with_positions(fold), with_kwargs=True),
        Enter: lambda module, edit: _place_entry(module, edit, fold.enter, entries),
        CountHeads: lambda _, edit: _count_own_heads(model, edit.block, fold.size),
        AllFeatures: all_features,
    }


Place = tuple[nn.Module, str]  # a module, and its name for a parameter


def parameter_places(model: nn.Module) -> dict[str, list[Place]]:
    """Name -> the modules that hold the parameter, and their names for it; several if it is tied."""
    found = dict[nn.Parameter, list[Place]]()
    for module in model.modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(parameter, []).append((module, leaf))
    return {name: found[parameter] for name, parameter in model.named_parameters()}


def _cut(places: Sequence[Place], shape: Sequence[int]) -> None:
    """Replace a parameter by an empty one of `shape`, on the same device, wherever it is held."""
    module, leaf = places[0]
    whole = module.get_parameter(leaf)
    own = nn.Parameter(whole.new_empty(shape), requires_grad=whole.requires_grad)
    for module, leaf in places:
        setattr(module, leaf, own)
        if hf_internals.linear_dims(module) is not None:
            hf_internals.set_linear_sizes(module)


def _again(enter: Callable[[Tensor], Tensor], x_BTD: Tensor) -> Tensor:
    """Run `enter`; in a graph it runs once more in backward, and its result is not saved."""
    return checkpoint(enter, x_BTD, use_reentrant=False)  # type: ignore[no-any-return]


def _place_entry(
    module: nn.Module, edit: Enter, enter: Callable[[Tensor], Tensor], entries: dict[TPInput, list[Tensor]]
) -> None:
    """Gather the hidden states for a module of an entry, such as `q_proj`, `k_proj` and `v_proj`. The first one
    gathers; the others get the same tensor. `entries`: the tensors that are ready for the others.

    Each module gets its own hook. One hook that compared module names would make Dynamo guard on the name, and
    recompile every layer.
    """
    first, *others = edit.entry.modules
    shared = entries.setdefault(edit.entry, [])
    entering = partial(_again, enter) if edit.gathers_again else enter

    def gather(given: Tensor) -> Tensor:
        entered = entering(given)
        shared.clear()
        shared.extend([entered] * len(others))
        return entered

    def take(_: Tensor) -> Tensor:
        return shared.pop()

    hook = _replaces_argument(edit.entry.argument, gather if edit.path == first else take)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _replaces_argument(argument: int | str, replace: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Any, Any]]:
    """Make a pre-hook that passes one argument through `replace`. A named argument may also be the first one."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        where = argument if isinstance(argument, int) or argument in kwargs else 0
        if isinstance(where, str):
            return args, {**kwargs, where: replace(kwargs[where])}
        return (*args[:where], replace(args[where]), *args[where + 1 :]), kwargs

    return hook


def _count_own_heads(model: nn.Module, block: TPBlock, size: int) -> None:
    """Tell an attention module how many heads this rank has, if it shapes its tensors by numbers of heads."""
    module, row = model.get_submodule(block.owner), cast(nn.Linear, model.get_submodule(block.row))
    counts = dict(zip(("query", "kv"), block.heads or (), strict=True))
    own = {which: max(1, number // size) for which, number in counts.items()}
    features = row.weight.shape[(hf_internals.linear_dims(row) or (0, 1))[1]]
    config = copy.copy(module.config) if hasattr(module, "config") else None
    for name, which in hf_internals.HEAD_COUNTS.items():
        for holder in filter(None, (module, config)):
            if getattr(holder, name, None) == counts[which]:
                setattr(holder, name, own[which])
    for name in hf_internals.FEATURE_COUNTS:
        if getattr(module, name, None) == features * size:
            setattr(module, name, features)
    if config is not None:
        module.config = config


def _over_all_features(
    plain: Callable[[Tensor], Tensor], blocks: tuple[tuple[Block, ...], ...], fold: TensorParallel
) -> Callable[[Tensor], Tensor]:
    """Wrap a module that needs all features of a split projection (a norm): gather them, keep this rank's result."""
    mine = feature_indices(blocks[fold.rank])

    def forward(x_BTF: Tensor) -> Tensor:
        out = plain(gather_features(x_BTF, fold.group, blocks))
        return out[..., mine.to(out.device)]

    return forward


def _with_positions(fold: TensorParallel) -> Callable[..., tuple[Any, Any]]:
    """Make a pre-hook of the base that passes positions of the whole sequence: it would count its shard's."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if not fold.sequence_parallel or tokens is None:
            return args, kwargs
        rows, length = tokens.shape
        if length % fold.size:
            raise UserError(
                f"sequence parallel splits the tokens of a row: tp {fold.size} does not divide {length}",
                fix=f"pad the rows to {-(-length // fold.size) * fold.size} tokens, or use +nosp",
            )
        if kwargs.get("position_ids") is None:
            kwargs["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
        return args, kwargs

    return hook


def _vocabulary_lookup(embedding: nn.Embedding, own: Block, fold: TensorParallel) -> Callable[[Tensor], Tensor]:
    """Look up the ids of this rank's rows, as the module does it (some scale them); other ids give zero."""
    start, stop = own
    padding, plain = embedding.padding_idx, embedding.forward
    embedding.num_embeddings = stop - start
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None

    def forward(ids_BT: Tensor) -> Tensor:
        mine = (ids_BT >= start) & (ids_BT < stop)
        rows = plain(torch.where(mine, ids_BT - start, 0))
        return fold.leave(rows.masked_fill(~mine.unsqueeze(-1), 0.0))

    return forward


# ---- once a step ----------------------------------------------------------------------------------------------------


def sum_partial_gradients(parameters: Mapping[str, Sequence[nn.Parameter]], mesh: Mesh) -> None:
    """Sum the gradients that tp ranks hold in part, by axis: one flat all-reduce each, after FSDP's reduction."""
    for axis, own in parameters.items():
        gradients = [local(parameter.grad) for parameter in own if parameter.grad is not None]
        if not gradients:
            continue
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=mesh.groups[axis])
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))
