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
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core import heads
from fivefold.core.errors import UserError
from fivefold.core.recompute import Site
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy
from fivefold.models.feature_groups import FeatureGroups
from fivefold.models.partition import Partition, TPInput
from fivefold.ops.linear import PLAIN, Linears, Multiply, Role
from fivefold.parallel.collectives import Collective, StepShape
from fivefold.parallel.dtensor import local
from fivefold.parallel.mappings import (
    CopyToTensorParallel,
    GatherFeatures,
    GatherFromSequence,
    GatherVocabulary,
    ReduceFromTensorParallel,
    ReduceScatterToSequence,
    places,
    width,
)
from fivefold.parallel.sharding import Block, ShardSpec, split_even, whole
from fivefold.parallel.temporarily import temporarily

# ---- what every parameter becomes ----------------------------------------------------------------------------------


def shard_specs(model: nn.Module, partition: Partition | None, tp: int) -> dict[str, ShardSpec]:
    """The shard of every parameter under `tp` ranks, by its role in the partition (which one rank needs not have)."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if tp == 1 or partition is None:
        return {name: whole(name, shape, 1) for name, shape in shapes.items()}
    return {name: _shard(name, shape, partition, tp) for name, shape in shapes.items()}


def kv_copies(model: nn.Module, partition: Partition | None, tp: int) -> int:
    """How many tp ranks share each key/value head. Raises `UserError` where layers differ in that."""
    copies = {heads.kv_copies(kv, tp) for _, kv in partition.heads} if partition else set()
    if partition and len(copies) > 1:
        fewest = min(kv for _, kv in partition.heads)
        raise UserError(
            f"tp={tp} is more than the {fewest} key/value heads that some layers of {type(model).__name__} have, and "
            "others have more",
            fix=f"use tp {fewest} or less",
        )
    return next(iter(copies), 1)


def _shard(name: str, shape: tuple[int, ...], partition: Partition, tp: int) -> ShardSpec:
    role = partition.roles[name]
    if role.dim is None:
        return whole(name, shape, tp)
    if role.deal is None:
        return ShardSpec.along(name, shape, role.dim, [(block,) for block in split_even(shape[role.dim], tp)])
    return ShardSpec.along(name, shape, role.dim, dealt(role.deal, tp))


def _counted(deal: FeatureGroups) -> tuple[int, int]:
    """The query and key/value heads whose features are dealt."""
    query, kv = (max((part.index + 1 for part in deal if part.owner == owner), default=0) for owner in ("query", "kv"))
    return query, kv


def dealt(deal: FeatureGroups, tp: int) -> tuple[tuple[Block, ...], ...]:
    """The blocks of features that each tp rank holds, in their global order, neighbours joined.

    A rank has an equal number of whole query heads and the key/value heads that these attend to.
    """
    return tuple(tuple(_joined(_blocks(deal, rank, tp))) for rank in range(tp))


def _blocks(deal: FeatureGroups, rank: int, tp: int) -> Iterator[Block]:
    query, kv = _counted(deal)
    copies = heads.kv_copies(kv, tp) if kv else 1
    mine = {
        "query": range(rank * query // tp, (rank + 1) * query // tp),
        "kv": range(rank // copies * kv * copies // tp, (rank // copies + 1) * kv * copies // tp),
    }
    for part in deal:
        if part.owner == "even":
            start, stop = split_even((part.stop - part.start) // part.unit, tp)[rank]
            yield part.start + start * part.unit, part.start + stop * part.unit
        elif part.index in mine[part.owner]:
            yield part.start, part.stop


def _joined(blocks: Iterable[Block]) -> list[Block]:
    joined: list[Block] = []
    for start, stop in blocks:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop or not joined:
            joined.append((start, stop))
    return joined


# ---- placing them in a model ---------------------------------------------------------------------------------------


@dataclass
class TensorParallel:
    """The tensor parallel fold of one model on this rank: its group, and whether activations are split by sequence.

    `sequence_parallel` is the one thing that changes during a run: generation works on single tokens.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    sequence_parallel: bool
    vocabulary: tuple[Block, ...]
    head_in_chunks: bool = False
    sums: dict[str, str] = field(default_factory=dict)  # parameter name -> axis its gradient is summed over

    def enter(self, x_BTD: Tensor) -> Tensor:
        """Into a column-parallel region: all tokens on every rank. (Of tokens [N, D], those of a rank after another's:
        `leave` gives each its own again.)"""
        if x_BTD.ndim == 2:
            return self.enter(x_BTD.unsqueeze(0)).squeeze(0)
        copy = GatherFromSequence if self.sequence_parallel else CopyToTensorParallel
        return copy.apply(x_BTD, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Out of a row-parallel region: partial sums added up."""
        if x_BTD.ndim == 2:
            return self.leave(x_BTD.unsqueeze(0)).squeeze(0)
        reduce = ReduceScatterToSequence if self.sequence_parallel else ReduceFromTensorParallel
        return reduce.apply(x_BTD, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary from every rank's share."""
        return GatherVocabulary.apply(logits, self.group, self.vocabulary)  # type: ignore[no-any-return,no-untyped-call]

    def whole_sequences(self) -> AbstractContextManager[None]:
        """Generation: activations replicated, so that a single token can be processed."""
        return temporarily(self, sequence_parallel=False)

    def chunked_head(self) -> AbstractContextManager[None]:
        """The chunked loss gathers once and keeps logits split by vocabulary."""
        return temporarily(self, head_in_chunks=True)


def apply_tensor_parallel(
    model: nn.Module,
    anatomy: Anatomy,
    partition: Partition,
    specs: dict[str, ShardSpec],
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
    linears: Linears = PLAIN,
) -> TensorParallel:
    """Cut the parameters of `model` (in place) to this rank's slices and hook the modules around them. `linears`: how
    rows multiply."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    vocabulary = tuple(rows[0] for rows, _ in specs[f"{anatomy.embedding}.weight"].held)
    fold = TensorParallel(group, rank, size, sequence_parallel, vocabulary)
    fold.sums = gradient_sums(partition, specs, sequence_parallel=sequence_parallel)
    _cut_parameters(model, specs, rank)
    embedding = cast(nn.Embedding, model.get_submodule(anatomy.embedding))
    _replace_forward(embedding, _vocabulary_lookup(embedding, fold))
    head = model.get_submodule(anatomy.head)
    first = model.get_submodule(partition.to_logits)  # the head, or what changes hidden states for it
    first.register_forward_pre_hook(lambda _, args: args if fold.head_in_chunks else (fold.enter(args[0]), *args[1:]))
    head.register_forward_hook(lambda _, args, logits: logits if fold.head_in_chunks else fold.whole_logits(logits))
    model.get_submodule(anatomy.base).register_forward_pre_hook(_with_positions(fold), with_kwargs=True)
    for region in partition.regions:
        for entry in region.entries:
            _place_entry(model, entry, fold)
        row = model.get_submodule(region.row)
        place(row, "row", linears, reduce=fold.leave)
        if region.heads:
            _count_own_heads(model.get_submodule(region.owner), row, region.heads, size)
    for name, deal in partition.across.items():
        module = model.get_submodule(name)
        _replace_forward(module, _over_all_features(module.forward, dealt(deal, size), fold))
    return fold


def place(linear: nn.Module, role: Role, linears: Linears, *, reduce: Multiply | None = None) -> None:
    """Let a linear of any registered class multiply as `linears` say. `reduce`: sums up the partial products of a
    row."""
    is_transposed, is_plain = hf_internals.linear_dims(linear) == (1, 0), hf_internals.is_plain_linear(linear)
    linears.place(linear, role, is_transposed=is_transposed, is_plain=is_plain, reduce=reduce)


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """On this instance only; hooks and names stay."""
    module.forward = forward


def gradient_sums(partition: Partition, specs: dict[str, ShardSpec], *, sequence_parallel: bool) -> dict[str, str]:
    """Parameters whose gradient on a rank covers only its tokens or heads -> the group that sums it.

    Losing one of these sums leaves logits and loss exact: only gradients and replicas show it.
    """
    sums = {}
    for name, spec in specs.items():
        kind = partition.roles[name].kind
        if spec.splits and spec.replicas > 1:
            sums[name] = "tp_kv"
        elif kind in ("local", "latent", "across") or (sequence_parallel and kind in ("norm", "row_bias", "router")):
            sums[name] = "tp"
    return sums


def _cut_parameters(model: nn.Module, specs: dict[str, ShardSpec], rank: int) -> None:
    """Replace each parameter by an empty one of its local shape, on the same device; ties stay ties."""
    cut: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if specs[names[parameter]].over != "tp":  # another fold's
                continue
            if parameter not in cut:
                shape = specs[names[parameter]].local_shape(rank)
                cut[parameter] = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
            setattr(module, attribute, cut[parameter])
        if hf_internals.linear_dims(module) is not None:
            hf_internals.set_linear_sizes(module)


def _place_entry(model: nn.Module, entry: TPInput, fold: TensorParallel) -> None:
    """Gather the hidden states for the modules of an entry: the first gathers, the others are given the same tensor.

    Which of them a module is, is settled here: Dynamo would guard on a name that a hook compares, and a name of one
    layer would have every layer compiled anew.
    """
    shared: list[Tensor] = []
    others = len(entry.modules) - 1

    def first(given: Tensor) -> Tensor:
        entered = fold.enter(given)
        shared.clear()
        shared.extend([entered] * others)
        return entered

    def other(_: Tensor) -> Tensor:
        return shared.pop()

    for at, name in enumerate(entry.modules):
        hook = _replaces_argument(entry.argument, other if at else first)
        model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)


def _replaces_argument(argument: int | str, replace: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Any, Any]]:
    """A pre-hook that gives `replace` the argument of that place or name, which may also come as the first one."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        where = argument if isinstance(argument, int) or argument in kwargs else 0
        if isinstance(where, str):
            return args, {**kwargs, where: replace(kwargs[where])}
        return (*args[:where], replace(args[where]), *args[where + 1 :]), kwargs

    return hook


def _count_own_heads(module: nn.Module, row: Any, of_layer: tuple[int, int], size: int) -> None:
    """Tell an attention module that shapes its tensors by numbers of heads how many this rank has."""
    counts = dict(zip(("query", "kv"), of_layer, strict=True))
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
    """A module that must see all features of a split projection: they are gathered, and its own are kept."""
    mine = places(blocks[fold.rank])

    def forward(x_BTF: Tensor) -> Tensor:
        out = plain(GatherFeatures.apply(x_BTF, fold.group, blocks))  # type: ignore[no-untyped-call]
        return out[..., mine.to(out.device)]

    return forward


def _with_positions(fold: TensorParallel) -> Callable[..., tuple[Any, Any]]:
    """Pre-hook of the base: positions of the whole sequence, which a model would count off its share of the tokens."""

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


def _vocabulary_lookup(embedding: nn.Embedding, fold: TensorParallel) -> Callable[[Tensor], Tensor]:
    """Each rank looks up the ids of its own rows, as the module does it (some scale them); the others give zero."""
    start, stop = fold.vocabulary[fold.rank]
    padding, plain = embedding.padding_idx, embedding.forward
    embedding.num_embeddings = stop - start
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None

    def forward(ids_BT: Tensor) -> Tensor:
        mine = (ids_BT >= start) & (ids_BT < stop)
        rows = plain(torch.where(mine, ids_BT - start, 0))
        return fold.leave(rows.masked_fill(~mine.unsqueeze(-1), 0.0))

    return forward


# ---- once a step ----------------------------------------------------------------------------------------------------


def sum_partial_gradients(model: nn.Module, fold: TensorParallel, kv_replicas: dist.ProcessGroup | None) -> None:
    """Add up the gradients that tp ranks hold in part, one flat all-reduce per group, after FSDP's reduction."""
    for axis, group in (("tp", fold.group), ("tp_kv", kv_replicas)):
        gradients = [
            local(p.grad) for name, p in model.named_parameters() if fold.sums.get(name) == axis and p.grad is not None
        ]
        if not gradients:
            continue
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def declare(
    fold: TensorParallel, partition: Partition, shape: StepShape, gradient_bytes: dict[str, int], *,
    has_embedding: bool = True, has_head: bool = True,
) -> list[Collective]:  # fmt: skip
    """Collectives of one optimizer step; the loss declares its own.

    `partition`: of this rank's layers. `gradient_bytes`: axis ("tp", "tp_kv") -> bytes of the local gradients summed
    over it.
    """
    entries, rows = len(partition.entries), len(partition.regions)
    entered, left = entries + has_head, rows + has_embedding  # the head is entered, the embedding left
    forwards = shape.recompute.forwards
    again_entered = sum(forwards(Site(entry.modules[0])) - 1 for entry in partition.entries)
    again_left = sum(forwards(Site(region.row, region.is_last)) - 1 for region in partition.regions)
    size = shape.hidden_bytes
    if shape.sequence_parallel:
        per_pass = {"all_gather": entered + left + again_entered, "reduce_scatter": left + entered + again_left}
    else:
        per_pass = {"all_reduce": left + entered + again_left}
    passes = [
        Collective("tp", kind, count * shape.micro_batches, count * shape.micro_batches * size)
        for kind, count in per_pass.items()
    ]
    for name, deal in partition.across.items():
        passes += _across(deal, fold.size, shape, forwards=forwards(Site(name)))
    return passes + [Collective(axis, "all_reduce", 1, volume) for axis, volume in gradient_bytes.items() if volume]


def _across(deal: FeatureGroups, size: int, shape: StepShape, *, forwards: int) -> list[Collective]:
    """A module that sees all features: gathered, padded to the widest rank, forward; summed backward."""
    blocks = dealt(deal, size)
    feature = (
        shape.rows * shape.tokens * shape.compute_bytes * shape.micro_batches
    )  # bytes of one feature of all tokens
    widest, features = max(map(width, blocks)), max(part.stop for part in deal)
    return [
        Collective("tp", "all_gather", forwards * shape.micro_batches, forwards * size * widest * feature),
        Collective("tp", "all_reduce", shape.micro_batches, features * feature),
    ]
