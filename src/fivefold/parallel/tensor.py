"""Tensor parallelism with sequence parallelism, for any model whose parameters have roles.

Megatron's column/row pairs (arXiv:1909.08053) and sequence parallelism (arXiv:2205.05198), placed from outside:
parameters are cut in place, and the modules around them get hooks. Between the pairs, activations are split along
the sequence (sequence parallel, T/tp tokens each) or replicated. Model code never learns of it.

    embedding      partial sums over vocabulary rows   -> leave  -> [B, T/tp, D]
    region input   [B, T/tp, D] -> enter -> [B, T, D]             (attention, MLP, head)
    row linear     partial sums over features          -> leave  -> [B, T/tp, D]

Legend: B rows, T tokens, D hidden size, V vocabulary, n tp ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold import heads
from fivefold.errors import UserError
from fivefold.models.anatomy import Anatomy, Role
from fivefold.parallel import ops
from fivefold.parallel.collectives import Collective, StepShape
from fivefold.parallel.sharding import Block, ShardSpec, split_even, whole

# ---- what every parameter becomes ----------------------------------------------------------------------------------


def shard_specs(model: nn.Module, anatomy: Anatomy, tp: int) -> dict[str, ShardSpec]:
    """The shard of every parameter under `tp` ranks, by the role that the anatomy gives it.

    Raises `UserError` when tensor parallelism is refused for this model or heads do not divide.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if tp == 1:
        return {name: whole(name, shape, 1) for name, shape in shapes.items()}
    if anatomy.tp_refusal:
        raise UserError(f"tp {tp} is refused: {anatomy.tp_refusal}", fix="use dp_shard instead (FSDP needs no roles)")
    counts = HeadCounts.of(model.config)
    heads.check_heads(counts.query, counts.kv, tp)
    return {name: _shard(name, shape, anatomy.roles[name], counts, tp) for name, shape in shapes.items()}


def _shard(name: str, shape: tuple[int, ...], role: Role, counts: "HeadCounts", tp: int) -> ShardSpec:
    if role.kind in ("column", "vocab_embedding", "vocab_head"):
        dim = 0
    elif role.kind == "row":
        dim = 1
    else:
        return whole(name, shape, tp)
    blocks = split_even(shape[dim], tp) if role.heads is None else counts.blocks(role.heads, tp)
    return ShardSpec(name, shape, dim, tuple((block,) for block in blocks))


@dataclass(frozen=True)
class HeadCounts:
    """Attention heads of a model and how tensor parallelism deals them out."""

    query: int
    kv: int
    dim: int

    @classmethod
    def of(cls, config: Any) -> "HeadCounts":
        query = config.num_attention_heads
        kv = getattr(config, "num_key_value_heads", None) or query
        return cls(query, kv, getattr(config, "head_dim", None) or config.hidden_size // query)

    def kv_copies(self, tp: int) -> int:
        """How many tp ranks share each key/value head."""
        return heads.kv_copies(self.kv, tp)

    def blocks(self, kind: str, tp: int) -> tuple[Block, ...]:
        """Features of each tp rank: whole heads; the kv heads that its query heads attend to."""
        if kind == "query":
            return tuple(self._features(rank, self.query // tp) for rank in range(tp))
        copies = self.kv_copies(tp)
        return tuple(self._features(rank // copies, max(1, self.kv // tp)) for rank in range(tp))

    def _features(self, index: int, count: int) -> Block:
        return index * count * self.dim, (index + 1) * count * self.dim


# ---- collectives with gradients: the f/g pairs -----------------------------------------------------------------------


class _GatherSequence(torch.autograd.Function):
    """[B, T/n, D] -> [B, T, D]; backward sums and scatters (each rank's gradient covers its own features only)."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return ops.gather(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ops.scatter_sum(grads[0], ctx.group), None


class _ScatterSumSequence(torch.autograd.Function):
    """Partial sums [B, T, D] -> [B, T/n, D]; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return ops.scatter_sum(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ops.gather(grads[0], ctx.group), None


class _CopyIn(torch.autograd.Function):
    """Identity; backward sums the gradients of the ranks' own features."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x_BTD.view_as(x_BTD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ops.sum_all(grads[0], ctx.group), None


class _SumOut(torch.autograd.Function):
    """Partial sums -> their sum on every rank; backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: dist.ProcessGroup) -> Tensor:
        return ops.sum_all(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherVocabulary(torch.autograd.Function):
    """[..., V_local] -> [..., V] over unequal shards; backward keeps this rank's columns."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup, blocks: tuple[Block, ...]) -> Tensor:
        ctx.block = blocks[dist.get_rank(group)]
        longest = max(stop - start for start, stop in blocks)
        padded = F.pad(logits, (0, longest - logits.shape[-1])).unsqueeze(1)
        parts = ops.gather(padded, group).unbind(1)
        return torch.cat([part[..., : stop - start] for part, (start, stop) in zip(parts, blocks, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][..., slice(*ctx.block)].contiguous(), None, None


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
        """Into a column-parallel region: all tokens on every rank."""
        return (_GatherSequence if self.sequence_parallel else _CopyIn).apply(x_BTD, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def leave(self, x_BTD: Tensor) -> Tensor:
        """Out of a row-parallel region: partial sums added up."""
        return (_ScatterSumSequence if self.sequence_parallel else _SumOut).apply(x_BTD, self.group)  # type: ignore[no-any-return,no-untyped-call]

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Logits over the whole vocabulary from every rank's share."""
        return _GatherVocabulary.apply(logits, self.group, self.vocabulary)  # type: ignore[no-any-return,no-untyped-call]

    @contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Generation: activations replicated, so that a single token can be processed."""
        before, self.sequence_parallel = self.sequence_parallel, False
        try:
            yield
        finally:
            self.sequence_parallel = before

    @contextmanager
    def chunked_head(self) -> Iterator[None]:
        """The chunked loss gathers once and keeps logits split by vocabulary."""
        self.head_in_chunks = True
        try:
            yield
        finally:
            self.head_in_chunks = False


def apply_tensor_parallel(
    model: nn.Module,
    anatomy: Anatomy,
    specs: dict[str, ShardSpec],
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool,
) -> TensorParallel:
    """Cut the parameters of `model` (in place) to this rank's slices and hook the modules around them."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    vocabulary = tuple(blocks[0] for blocks in specs[f"{anatomy.embedding}.weight"].blocks)
    fold = TensorParallel(group, rank, size, sequence_parallel, vocabulary)
    fold.sums = gradient_sums(anatomy, specs, sequence_parallel=sequence_parallel)
    _cut_parameters(model, specs, rank)
    embedding = cast(nn.Embedding, model.get_submodule(anatomy.embedding))
    _replace_forward(embedding, _vocabulary_lookup(embedding, fold))
    head = model.get_submodule(anatomy.head)
    head.register_forward_pre_hook(lambda _, args: args if fold.head_in_chunks else (fold.enter(args[0]), *args[1:]))
    head.register_forward_hook(lambda _, args, logits: logits if fold.head_in_chunks else fold.whole_logits(logits))
    model.get_submodule(anatomy.base).register_forward_pre_hook(_with_positions(fold), with_kwargs=True)
    for name in anatomy.regions:
        model.get_submodule(name).register_forward_pre_hook(_entering(fold), with_kwargs=True)
    for name in {path.rpartition(".")[0] for path, role in anatomy.roles.items() if role.kind == "row"}:
        linear = cast(nn.Linear, model.get_submodule(name))
        _replace_forward(linear, _row_linear(linear, fold))
    return fold


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    """On this instance only; hooks and names stay."""
    module.forward = forward


def gradient_sums(anatomy: Anatomy, specs: dict[str, ShardSpec], *, sequence_parallel: bool) -> dict[str, str]:
    """Parameters whose gradient on a rank covers only its tokens or heads -> the group that sums it.

    Losing one of these sums leaves logits and loss exact: only gradients and replicas show it.
    """
    sums = {}
    for name, spec in specs.items():
        kind = anatomy.roles[name].kind
        if spec.dim is not None and spec.replicas > 1:
            sums[name] = "tp_kv"
        elif kind == "local" or (sequence_parallel and kind in ("norm", "row_bias")):
            sums[name] = "tp"
    return sums


def _cut_parameters(model: nn.Module, specs: dict[str, ShardSpec], rank: int) -> None:
    """Replace each parameter by an empty one of its local shape, on the same device; ties stay ties."""
    cut: dict[nn.Parameter, nn.Parameter] = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in cut:
                shape = specs[names[parameter]].local_shape(rank)
                cut[parameter] = nn.Parameter(parameter.new_empty(shape), requires_grad=parameter.requires_grad)
            setattr(module, attribute, cut[parameter])
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape


def _entering(fold: TensorParallel) -> Callable[..., tuple[Any, Any]]:
    """Pre-hook of a region: gather the hidden states, whichever way they are passed."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": fold.enter(kwargs["hidden_states"])}
        return (fold.enter(args[0]), *args[1:]), kwargs

    return hook


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


def _row_linear(linear: nn.Linear, fold: TensorParallel) -> Callable[[Tensor], Tensor]:
    """A row-parallel linear: partial products summed first, the bias added once."""

    def forward(x_BTF: Tensor) -> Tensor:
        out = fold.leave(F.linear(x_BTF, linear.weight))
        return out if linear.bias is None else out + linear.bias

    return forward


def _vocabulary_lookup(embedding: nn.Embedding, fold: TensorParallel) -> Callable[[Tensor], Tensor]:
    """Each rank looks up the ids of its own rows; the others contribute zero."""
    start, stop = fold.vocabulary[fold.rank]
    padding = embedding.padding_idx
    local_padding = padding - start if padding is not None and start <= padding < stop else None

    def forward(ids_BT: Tensor) -> Tensor:
        mine = (ids_BT >= start) & (ids_BT < stop)
        rows = F.embedding(torch.where(mine, ids_BT - start, 0), embedding.weight, local_padding)
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


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, a DTensor or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def declare(
    fold: TensorParallel, anatomy: Anatomy, shape: StepShape, gradient_bytes: dict[str, int]
) -> list[Collective]:
    """Collectives of one optimizer step; the loss declares its own.

    `gradient_bytes`: axis ("tp", "tp_kv") -> bytes of the local gradients summed over it.
    """
    regions = len(anatomy.regions)
    rows = sum(role.kind == "row" for role in anatomy.roles.values())
    entered, left = regions + 1, rows + 1  # the head is entered, the embedding left
    again_entered, again_left = _recomputed(anatomy, regions, rows) if shape.recompute == "full" else (0, 0)
    size = shape.hidden_bytes
    if shape.sequence_parallel:
        per_pass = {"all_gather": entered + left + again_entered, "reduce_scatter": left + entered + again_left}
    else:
        per_pass = {"all_reduce": left + entered + again_left}
    passes = [
        Collective("tp", kind, count * shape.micro_batches, count * shape.micro_batches * size)
        for kind, count in per_pass.items()
    ]
    return passes + [Collective(axis, "all_reduce", 1, volume) for axis, volume in gradient_bytes.items() if volume]


def _recomputed(anatomy: Anatomy, regions: int, rows: int) -> tuple[int, int]:
    """What a second forward of every block issues: it stops at the last saved tensor, before the block's last sum."""
    return regions, rows - len(anatomy.layers)
