"""`parallelize(model, layout)`: the one path by which every model is spread, whatever the layout.

In order: cut for tensor and context parallelism, recompute and compile per block, FSDP, then memory is allocated and
every rank fills its own part from a `TensorSource`. The model stays the `transformers` class with its own parameter
names.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from fivefold import heads
from fivefold.errors import UserError
from fivefold.launch.world import open_world
from fivefold.layout import Layout
from fivefold.models.anatomy import Anatomy
from fivefold.models.build import use_our_attention
from fivefold.models.experts import router_buffers
from fivefold.models.in_memory import ModelTensors
from fivefold.models.partition import Partition, derive
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import RandomInit, TensorSource
from fivefold.models.trace import Trace, Untraceable, hand_on_bounds, trace
from fivefold.parallel import balance as balancing
from fivefold.parallel import context, data, deferred, expert, loss, pipeline, tensor, trial
from fivefold.parallel.collectives import Collective, StepShape, total
from fivefold.parallel.mesh import Mesh, build_mesh
from fivefold.parallel.sharding import Cut, Region, ShardSpec, fsdp_rows, local_regions
from fivefold.parallel.stages import Staged, Stages, assign, install


@dataclass(frozen=True)
class Spread:
    """How a model lies over the current world: what `parallelize` leaves at `model.fivefold`."""

    layout: Layout
    mesh: Mesh
    anatomy: Anatomy
    partition: Partition | None  # None without tensor parallelism
    shards: dict[str, ShardSpec]
    units: tuple[data.Unit, ...]
    tensor: tensor.TensorParallel | None
    context: context.ContextParallel | None
    experts: expert.ExpertParallel | None  # None for a dense model
    pipeline: pipeline.Pipeline | None  # None without pipeline parallelism
    vocabulary: int  # rows of the vocabulary on this rank
    reduce_dtype: torch.dtype
    holders: Mapping[str, tuple[int, ...]]  # parameter -> the pipeline ranks that hold it
    buffers: Mapping[str, tuple[int, ...]]  # of routers, with shapes: trained without a gradient, whole on every rank
    balance: balancing.Balance | None  # of routers

    def regions(self, name: str, rank: int | None = None) -> list[tuple[Region, Region]]:
        """(global region, local region) pairs of the part of parameter `name` that `rank` holds; None: this rank."""
        if not self.holds(name, rank):
            return []
        cut = self.cut(name, rank)
        return local_regions(self.shards[name], cut.part, cut.row, cut.rows)

    def is_owner(self, name: str) -> bool:
        """True where this rank's values of `name` are counted once: in the gradient norm, in a checkpoint."""
        is_first_end = self.holders[name][0] == self.mesh.pp_rank
        return is_first_end and self.mesh.is_first_copy and self.shards[name].is_owner(self.cut(name).part)

    def holds(self, name: str, rank: int | None = None) -> bool:
        """Whether parameter `name` is on the pipeline rank of `rank`; None: this rank."""
        return self.mesh.place(dist.get_rank() if rank is None else rank).pp in self.holders[name]

    def gathered_shape(self, name: str) -> tuple[int, ...]:
        """Shape of parameter `name` on this rank when FSDP has gathered it."""
        return self.shards[name].local_shape(self.cut(name).part)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this rank's part of parameter `name` at rest."""
        shape, cut = self.gathered_shape(name), self.cut(name)
        first, last = fsdp_rows(shape[0], cut.row, cut.rows)
        return (last - first, *shape[1:])

    def cut(self, name: str, rank: int | None = None) -> Cut:
        """Which part of parameter `name` a rank has; None: this rank."""
        place = self.mesh.place(dist.get_rank() if rank is None else rank)
        return self.mesh.cut(place, self.shards[name].over)

    def by_rank(self, most: int = 64) -> dict[str, dict[str, Any]]:
        """Of every parameter its shape, and which regions of it each of the first `most` ranks holds: for a map."""
        ranks = range(min(self.layout.world, most))
        regions = {name: [[region for region, _ in self.regions(name, rank)] for rank in ranks] for name in self.shards}
        return {
            name: {
                "shape": list(self.shards[name].shape),
                "ranks": [[[[s.start, s.stop] for s in region] for region in own] for own in by_rank],
            }
            for name, by_rank in regions.items()
        }

    def declare(self, shape: StepShape) -> tuple[Collective, ...]:
        """Collectives of one optimizer step on this rank, as the folds declare them (the step adds its own)."""
        local_shapes = {name: self.gathered_shape(name) for name in self.shards}
        piped, first, last, layers = self.pipeline, True, True, self.anatomy.layers
        of_units = pipeline.traffic(piped, shape.micro_batches) if piped else data.traffic(self.units, shape)
        parts = data.declare(self.units, local_shapes, self.mesh, shape, of_units)
        partition = self.partition
        if piped:
            (first, last), layers = piped.staged.has_ends, piped.staged.layers
            partition = partition and partition.of_layers(layers)
            parts += pipeline.declare(piped, shape, self._held_bytes(piped.tied, shape))
        if self.tensor and partition:
            partial = self._partial_gradient_bytes(shape)
            parts += tensor.declare(self.tensor, partition, shape, partial, has_embedding=first, has_head=last)
            parts += loss.declare(shape) if last else []
        if self.context:
            parts += context.declare(self.context, shape, layers)
        if self.experts:
            parts += expert.declare(self.experts, shape, layers)
        if self.balance:
            parts += balancing.declare(self.balance, shape, layers)
        return total(parts)

    def _partial_gradient_bytes(self, shape: StepShape) -> dict[str, int]:
        volume = {"tp": 0, "tp_kv": 0}
        for name, axis in cast(tensor.TensorParallel, self.tensor).sums.items():
            volume[axis] += self._held_bytes(name, shape)
        return volume

    def _held_bytes(self, name: str | None, shape: StepShape) -> int:
        """Bytes of this rank's part of a parameter's gradient."""
        regions = [local_region for _, local_region in (self.regions(name) if name else ())]
        return sum(torch.Size([s.stop - s.start for s in region]).numel() for region in regions) * shape.master_bytes


class LossInputs:
    """One micro batch on this rank's device. Not a tensor container that FSDP knows, so it is passed on untouched.

    `input_ids`, `labels` (already shifted, -100 without a target), `position_ids`: int64 [B, T]. `bounds`: int32 on
    the CPU, cumulative document bounds over B*T tokens, or None when every row is one document. `scale`: fp32
    scalar that the summed loss is multiplied by. `row_tokens`: int64 [B], tokens of each row that are no padding (None:
    all).
    """

    __slots__ = ("bounds", "input_ids", "labels", "position_ids", "row_tokens", "scale")

    def __init__(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor,
        *,
        bounds: Tensor | None = None,
        scale: Tensor | None = None,
        row_tokens: Tensor | None = None,
    ) -> None:
        self.input_ids, self.labels, self.position_ids = input_ids, labels, position_ids
        self.bounds, self.scale = bounds, scale
        self.row_tokens = row_tokens if row_tokens is not None else torch.full((len(input_ids),), input_ids.shape[1])


def parallelize(
    model: Any,
    layout: Layout,
    *,
    device: torch.device | str | None = None,
    source: TensorSource | None = None,
    seed: int = 1234,
    reduce: str = "fp32",
    loss_chunks: int | None = None,
    compile_blocks: bool = False,
) -> Any:
    """Spread a Hugging Face causal language model over the current world; returns the same model, changed in place.

    Values come from `source`; without one, from the model itself, or, for a model on the meta device, from random
    initialisation by the model's own recipe with `seed`. Without a process group, the world in the environment is
    joined, or one of this process alone. Adds `model.loss_sum(LossInputs)`, the summed cross
    entropy, and the record `model.fivefold` (`Spread`).

    Raises `UserError` when the layout does not fit the world or the model.
    """
    open_world()
    layout = _checked(layout)
    device = torch.device(device or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    use_our_attention(model)
    anatomy = Anatomy.of(model)
    on_meta = next(model.parameters()).is_meta
    source = source or (RandomInit(model, seed) if on_meta else ModelTensors(model))
    buffers = buffer_values(model) if on_meta else dict(model.named_buffers())
    traced = _traced(model, anatomy)
    partition = derive(model, anatomy, traced) if layout.tp > 1 else None
    specs = tensor.shard_specs(model, partition, layout.tp) | expert.shard_specs(model, traced.experts, layout.ep)
    copies = heads.kv_copies(partition.kv, layout.tp) if partition else 1
    stages = assign(model, anatomy, traced, layout)
    holders = {name: stages.holders(name) for name in specs}
    tied = f"{anatomy.embedding}.weight" if anatomy.tied else None
    mesh = build_mesh(
        layout, device.type, kv_copies=copies, experts=bool(traced.experts), tied_ends=holders[tied] if tied else ()
    )
    if partition and not partition.is_proved:
        trial.check(model, mesh, device)
    model.to("meta")
    _tie(model, anatomy)
    fold = _tensor_parallel(model, anatomy, partition, specs, mesh)
    rows = context.apply_context_parallel(model, anatomy, traced, mesh)
    experts = expert.apply_expert_parallel(model, traced.experts, specs, mesh.ep_group, fold)
    balance = balancing.watch_routers(model, traced.experts, fold, rows)
    router_state = {name: tuple(model.get_buffer(name).shape) for name in router_buffers(model)}
    hand_on_bounds(model, traced.forgetful)
    staged = _staged(model, stages, mesh, anatomy, traced, fold, rows) if layout.pp > 1 else None
    own_layers = staged.layers if staged else anatomy.layers
    if staged and not compile_blocks:  # nothing is put off in compiled blocks
        deferred.put_off_weights(model, own_layers, staged)
    _wrap_blocks(model, own_layers, recompute=layout.recompute, compile_blocks=compile_blocks)
    reduce_dtype = torch.float64 if layout.precision == "fp64" else data.COMPUTE_DTYPES[reduce]
    model_units = data.units(model, anatomy, traced.experts)
    model.to(data.master_dtype(layout.precision))
    data.apply_data_parallel(model, model_units, mesh, reduce_dtype=reduce_dtype)
    vocabulary = specs[f"{anatomy.embedding}.weight"].local_shape(mesh.tp_rank)[0]
    piped = pipeline.Pipeline(layout, staged, model_units, mesh.pp_group, mesh.ends, tied, balance) if staged else None
    spread = Spread(
        layout, mesh, anatomy, partition, specs, model_units, fold, rows, experts, piped, vocabulary, reduce_dtype,
        holders, router_state, balance,
    )  # fmt: skip
    model.fivefold = spread
    _materialise(model, spread, device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    fill(model, source)
    model.loss_sum = MethodType(partial(_loss_sum, loss_chunks=loss_chunks), model)
    register_fsdp_forward_method(model, "loss_sum")
    if staged:
        model.run_stage = MethodType(partial(_run_stage, loss_chunks=loss_chunks), model)
        model.stage_logits = MethodType(_stage_logits, model)
        for method in ("run_stage", "stage_logits"):
            register_fsdp_forward_method(model, method)
        pipeline.prefetch_within_stages(model, staged)
    return model


def fill(model: nn.Module, source: TensorSource) -> None:
    """Overwrite every parameter with this rank's part of `source`, and what routers keep, reading nothing else."""
    spread = spread_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local = tensor.local(parameter)
            for global_region, local_region in spread.regions(name):
                local[local_region].copy_(source.read(name, global_region))
        for name, buffer in model.named_buffers():
            if name in spread.buffers:
                buffer.copy_(source.read(name, tuple(slice(0, size) for size in buffer.shape)))


def spread_of(model: nn.Module) -> Spread:
    """The record of a parallelized model."""
    return cast(Spread, model.fivefold)


def _checked(layout: Layout) -> Layout:
    """The layout with its -1 resolved for the current world."""
    layout = layout.resolve(dist.get_world_size())
    if layout.expert_tp:
        raise UserError(f"layout {layout}: expert_tp is not built yet", fix="set layout.expert_tp: false")
    return layout


def _traced(model: Any, anatomy: Anatomy) -> Trace:
    """What feeds what in the model.

    Raises `UserError` for a model in which tokens meet outside of attention: packed documents would see each other.
    """
    try:
        return trace(model, anatomy)
    except Untraceable as error:
        raise UserError(
            f"{type(model).__name__} cannot be trained here: {error}",
            fix="use a model whose layers mix tokens through the attention functions of transformers alone",
        ) from error


def _tensor_parallel(
    model: nn.Module, anatomy: Anatomy, partition: Partition | None, specs: dict[str, ShardSpec], mesh: Mesh
) -> tensor.TensorParallel | None:
    sequence_parallel = mesh.layout.sequence_parallel
    if partition is None:
        return None
    if sequence_parallel and partition.sequence_parallel_refusal:
        raise UserError(
            f"sequence parallel is refused: {partition.sequence_parallel_refusal}",
            fix="set layout.sequence_parallel: false",
        )
    return tensor.apply_tensor_parallel(
        model, anatomy, partition, specs, mesh.tp_group, sequence_parallel=sequence_parallel
    )


def _staged(
    model: Any, stages: Stages, mesh: Mesh, anatomy: Anatomy, traced: Trace, fold: tensor.TensorParallel | None,
    rows: context.ContextParallel | None,
) -> Staged:  # fmt: skip
    """The model with the stages of this rank."""

    def own_tokens(length: int) -> int:
        return length // rows.size if rows and rows.is_on else length

    def tokens(length: int) -> int:
        return length // fold.size if fold and fold.sequence_parallel else length

    return install(
        model, stages, mesh.pp_rank, anatomy, traced, dtype=data.COMPUTE_DTYPES[mesh.layout.precision],
        own_tokens=own_tokens, tokens=tokens, hidden_size=model.config.get_text_config().hidden_size,
    )  # fmt: skip


def _wrap_blocks(model: nn.Module, layers: Sequence[str], *, recompute: str, compile_blocks: bool) -> None:
    """Recompute and compile each block inside FSDP's hooks; names do not change."""
    for name in layers:
        block = model.get_submodule(name)
        forward = torch.compile(block.forward) if compile_blocks else block.forward
        if recompute == "full":
            forward = partial(checkpoint, forward, use_reentrant=False)
        block.forward = forward


def _materialise(model: nn.Module, spread: Spread, device: torch.device) -> None:
    """Allocate the sharded parameters and the buffers."""
    model.to_empty(device=device)
    _tie(model, spread.anatomy)


def _tie(model: nn.Module, anatomy: Anatomy) -> None:
    """Tie the head to the embedding again: moving between devices gives each module a parameter of its own."""
    head, embedding = (model.get_submodule(path) for path in (anatomy.head, anatomy.embedding))
    if anatomy.tied and "weight" in head._parameters:
        head.weight = embedding.weight


def _loss_sum(model: Any, inputs: LossInputs, *, loss_chunks: int | None) -> Tensor:
    """The summed cross entropy of this rank's tokens of a micro batch, times `inputs.scale`. Equal on all tp ranks."""
    return _loss_of(model, _last_hidden(model, inputs), inputs, loss_chunks)


def _run_stage(model: Any, inputs: LossInputs, stage: int, hidden: Tensor | None, *, loss_chunks: int | None) -> Tensor:
    """A stage on a micro batch: hidden states [B, T, D] in and out; of the last stage, what `_loss_sum` gives."""
    staged = cast(pipeline.Pipeline, spread_of(model).pipeline).staged
    with staged.running(stage, hidden) as given_out:
        out = _last_hidden(model, inputs)
        return _loss_of(model, out, inputs, loss_chunks) if staged.is_last(stage) else given_out()


def _stage_logits(model: Any, stage: int, hidden: Tensor | None, *, logits_to_keep: int, **inputs: Any) -> Tensor:
    """A stage on `inputs` of the model's forward: hidden states in and out; of the last stage, the logits."""
    spread = spread_of(model)
    staged = cast(pipeline.Pipeline, spread.pipeline).staged
    with staged.running(stage, hidden) as given_out:
        if staged.is_last(stage):
            return cast(Tensor, type(model).forward(model, **inputs, logits_to_keep=logits_to_keep).logits)
        model.get_submodule(spread.anatomy.base)(**inputs)
        return given_out()


def _last_hidden(model: Any, inputs: LossInputs) -> Tensor:
    """What the base model gives for a micro batch."""
    spread = spread_of(model)
    if spread.balance:
        spread.balance.begin_micro_batch(inputs.row_tokens)
    base = model.get_submodule(spread.anatomy.base)
    out = base(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, bounds=inputs.bounds)
    return cast(Tensor, out.last_hidden_state)


def _loss_of(model: Any, hidden: Tensor, inputs: LossInputs, loss_chunks: int | None) -> Tensor:
    """From the last hidden states to the loss."""
    spread = spread_of(model)
    fold = spread.tensor
    labels = spread.context.cut(inputs.labels) if spread.context else inputs.labels
    if fold:
        hidden = fold.enter(hidden)
    sizes = loss.chunk_sizes(labels.numel(), spread.vocabulary, hidden.shape[-1], loss_chunks)
    head_parameters = loss.parameters_after_base(model, spread.anatomy)
    with ExitStack() as stack:
        for each in (fold, spread.context):
            stack.enter_context(each.chunked_head() if each else nullcontext())
        logits_of = stack.enter_context(loss.head_only(model, spread.anatomy))
        return loss.chunked_loss(logits_of, hidden, labels, head_parameters, sizes, fold, inputs.scale)
