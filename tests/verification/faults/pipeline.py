"""Bugs of a pipeline: what travels between stages, which micro batch is whose, what both ends hold, what is put off."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import sqrt
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from fivefold.parallel import passes
from fivefold.parallel.dtensor import local
from fivefold.parallel.passes import Inputs
from fivefold.parallel.pipeline import runtime as pipeline
from fivefold.parallel.pipeline import stages
from fivefold.parallel.pipeline.stages import StageModules
from fivefold.parallel.placement import Placement
from fivefold.training import step
from fivefold.training.step import squared_norm
from tests.verification.faults.fault import Model, fault

TIED, FOUR = Model(tied=True), Model(changes=(("num_hidden_layers", 4),))


def _inputs(change: Callable[[Any, list[Inputs]], Sequence[Inputs]]) -> Any:
    """A step runs on `change(pipeline, micro batches)`."""
    plain = pipeline.run_pipeline

    def run(model: Any, piped: Any, inputs: Sequence[Inputs]) -> Tensor:
        return plain(model, piped, change(piped, list(inputs)))

    return patch.object(passes, "run_pipeline", run)


def _with_next(names: Sequence[str], inputs: list[Inputs]) -> list[Inputs]:
    """Micro batches with some fields of the one that follows."""
    found = []
    for own, following in zip(inputs, inputs[1:] + inputs[:1], strict=True):
        task = replace(own.task, labels=following.task.labels) if "labels" in names else own.task
        cu_seqlens = (following if "cu_seqlens" in names else own).cu_seqlens
        found.append(Inputs(own.input_ids, own.position_ids, task, cu_seqlens=cu_seqlens))
    return found


def _transfers(of: str, change: Callable[[Tensor, Any], Tensor]) -> Any:
    """What a stage is given of hidden states ("F") or their gradient ("B") is `change(tensor, model)`."""
    plain = pipeline._Step._take

    def take(self: Any, way: str, stage: int, at: int) -> Tensor:
        tensor = plain(self, way, stage, at)
        return change(tensor, self.model) if way == of else tensor

    return patch.object(pipeline._Step, "_take", take)


@fault(
    "gradients clipped by the norm of a stage's own parameters",
    known="torchtitan #596 and others: a clip that does not know of pp",
    layout="pp2",
    expects=[("gradient, clipped", r"pp rank|\(rank|lm_head|norm|layers")],
)
def clipped_by_the_norm_of_a_stage() -> Any:
    plain = step.clip_

    def clip(model: Any, norm: float, max_norm: float) -> None:
        plain(model, sqrt(float(squared_norm(model))), max_norm)

    return patch.object(step, "clip_", clip)


@fault(
    "the gradient of a tied embedding is not summed over the first and the last stage",
    known="Megatron-LM #844",
    layout="pp2",
    expects=[("gradient, reduced", r"embed_tokens")],
    model=TIED,
)
def tied_ends_not_summed() -> Any:
    return patch.object(pipeline, "_sum_ends", lambda *_: None)


@fault(
    "the gradient of a tied embedding is summed over the first and the last stage twice",
    known="a sum in the hook and in the step",
    layout="pp2",
    expects=[("gradient, reduced", r"embed_tokens.*: 2 times")],
    model=TIED,
)
def tied_ends_summed_twice() -> Any:
    plain = pipeline._sum_ends

    def twice(model: Any, piped: Any) -> None:
        plain(model, piped)
        plain(model, piped)

    return patch.object(pipeline, "_sum_ends", twice)


@fault(
    "only the first stage gets the sum of a tied embedding's gradients: the copies drift apart",
    known="a reduce in place of an all-reduce",
    layout="pp2",
    expects=[("gradient, reduced", r"embed_tokens.*pp rank 1|embed_tokens \(rank 1\)")],
    model=TIED,
)
def tied_copies_drift() -> Any:
    plain = pipeline._sum_ends

    def first_only(model: Any, piped: Any) -> None:
        gradient = local(dict(model.named_parameters())[piped.plan.tied].grad)
        own = gradient.clone()
        plain(model, piped)
        if piped.plan.placement.coords.pp:
            gradient.copy_(own)

    return patch.object(pipeline, "_sum_ends", first_only)


@fault(
    "a tied embedding counts in the gradient norm on both of its stages",
    known="a norm over all that ranks hold",
    layout="pp2",
    expects=[("gradient norm", r"")],
    model=TIED,
)
def tied_embedding_counted_twice() -> Any:
    def is_owner(self: Placement, name: str) -> bool:
        return self.is_first_copy and self.shards[name].is_owner(self.shard_index(name).part)

    return patch.object(Placement, "is_owner", is_owner)


@fault(
    "the last micro batch is not run",
    known="a schedule whose rounds leave a rest",
    layout="pp2",
    expects=[("micro batches", r"7 of 8")],
)
def last_micro_batch_not_scheduled() -> Any:
    return _inputs(lambda _, inputs: inputs[:-1])


@fault(
    "the last stage has the labels of the next micro batch",
    known="torch #153484 (targets split apart from inputs)",
    layout="pp2",
    expects=[("loss", r"")],
)
def labels_of_the_next_micro_batch() -> Any:
    return _inputs(lambda _, inputs: _with_next(["labels"], inputs))


@fault(
    "a later stage has the documents of the next micro batch",
    known="masks that are not sent along with the hidden states",
    layout="pp2",
    expects=[("output", r"layers\.1\.self_attn")],
)
def documents_of_the_next_micro_batch() -> Any:
    return _inputs(
        lambda piped, inputs: _with_next(["cu_seqlens"], inputs) if piped.plan.placement.coords.pp else inputs
    )


@fault(
    "gradients are divided by the number of micro batches once more",
    known="torch's scale_grads, which is on unless it is turned off",
    layout="pp2",
    expects=[("gradient, reduced", r"0\.125 times")],
)
def gradients_scaled_by_the_schedule() -> Any:
    plain = pipeline.run_pipeline

    def run(model: Any, piped: Any, inputs: Sequence[Inputs]) -> Tensor:
        found = plain(model, piped, inputs)
        for parameter in model.parameters():
            parameter.grad.div_(len(inputs))
        return found

    return patch.object(passes, "run_pipeline", run)


@fault(
    "what the first layer of the second stage computes is left out",
    known="bounds of stages that are off by one",
    layout="pp2",
    expects=[("output", r"layers\.2$|layers\.2 |layers\.3\.")],
    model=FOUR,
)
def layer_between_stages_skipped() -> Any:
    plain = stages._find_views

    def find_views(staged: StageModules) -> None:
        plain(staged)
        plan = staged.plan
        for stage, view in staged.views.items():
            if stage:
                skipped = view[plan.anatomy.layers[plan.placement.stages.splits[stage][0]]]
                skipped.register_forward_hook(lambda _, args, out: args[0] + 0 * out)

    return patch.object(stages, "_find_views", find_views)


@fault(
    "layers of other stages are removed: a layer reads the settings of another's place",
    known="torchtitan's stages of Gemma 3, which index layer_types",
    layout="pp2+split1-2",
    expects=[("output", r"layers\.1\.self_attn")],
    model=Model("gemma3", changes=(("num_hidden_layers", 3),)),
)
def layer_types_shifted() -> Any:
    plain = StageModules.running

    @contextmanager
    def running(self: Any, stage: int, hidden: Any) -> Iterator[Any]:
        config = self.model.config
        types, first = config.layer_types, self.plan.placement.stages.splits[stage][0]
        config.layer_types = [*types[:first], *types[: len(types) - first]]
        try:
            with plain(self, stage, hidden) as given:
                yield given
        finally:
            config.layer_types = types

    return patch.object(StageModules, "running", running)


@fault(
    "hidden states are detached between stages: the first stages learn nothing",
    known="a stage whose received input does not require a gradient",
    layout="pp2",
    expects=[("gradient of output", r"layers\.0")],
)
def hidden_states_detached() -> Any:
    return _transfers("B", lambda tensor, _: tensor * 0)


@fault(
    "the embedding's scale (Gemma) is applied on every stage",
    known="a stage that takes hidden states for embeddings",
    layout="pp2",
    expects=[("output", r"layers\.1\.")],
    model=Model("gemma2"),
)
def embedding_scaled_on_every_stage() -> Any:
    return _transfers("F", lambda tensor, model: tensor * model.config.hidden_size**0.5)


@fault(
    "the gradients that are put off are dropped for the last micro batch",
    known="a zero-bubble schedule that ends before its queue is empty",
    layout="pp2+zb",
    expects=[("gradient, raw", r"layers\.")],
)
def deferred_gradients_dropped() -> Any:
    plain = pipeline._Step.weights

    def weights(self: Any, slot: Any) -> None:
        if slot.micro_batch == len(self.inputs) - 1:
            self.pipeline.store._queues[slot.stage, slot.micro_batch].clear()
        plain(self, slot)

    return patch.object(pipeline._Step, "weights", weights)


@fault(
    "the second stage keeps the gradients of the step before: they are not zeroed there",
    known="zero_grad called on the first stage's optimizer only",
    layout="pp2",
    expects=[("gradients left after the step", r"")],
)
def gradients_of_a_stage_kept() -> Any:
    plain = step.train_step

    def train_step(model: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        if dist.get_rank() == 0:
            return plain(model, optimizer, *args, **options)
        with patch.object(type(optimizer), "zero_grad", lambda *_, **__: None):
            return plain(model, optimizer, *args, **options)

    return patch.object(step, "train_step", train_step)
