"""A partition that no test of fivefold has held against the model is tried before it is trusted.

A copy of the model, cut to a layer of each kind and a few tokens of its vocabulary but of its full widths, computes a
loss and every gradient twice in fp64: as `transformers` has it, whole, on each rank; and split over the tensor parallel
ranks, experts with `expert_tp` as well. They must agree. (Norms that compute in fp32 leave a floor of about 1e-7.)
"""

import copy
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.build import build_meta
from fivefold.models.partition import derive
from fivefold.models.positions import count_behind_padding
from fivefold.models.recipe import buffer_values
from fivefold.models.trace import trace
from fivefold.parallel import expert, plain, tensor
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.sharding import ShardSpec, local_regions

TOLERANCE = 1e-5
MOST = 2**29  # parameters of the cut model
TOKENS_PER_RANK = 5


def check(model: Any, mesh: Mesh, device: torch.device) -> None:
    """Raise `UserError`, on every rank, unless the split model computes what the whole one does, or where it cannot be
    told. Every rank calls this."""
    name = type(model).__name__
    config = cut(model.config, ranks=mesh.layout.tp, least=_first_experts(model))
    small = build_meta(config, model_class=type(model))
    size = sum(parameter.numel() for parameter in small.parameters())
    if size > MOST:
        raise UserError(
            f"tensor parallel of {name} is not proved, and its layers are too large to try it here",
            fix="use dp_shard instead (FSDP needs no roles)",
        )
    try:
        found = _errors(small, mesh, device)
    except UserError:
        raise
    except Exception as error:  # the model's own code met parts of tensors that it cannot do with
        raise UserError(
            f"tensor parallel of {name} is refused: its own code cannot do with the parts of tensors that "
            f"{mesh.layout.tp} ranks have",
            fix="use dp_shard instead (FSDP needs no roles)",
            more=f"tried before training: {type(error).__name__}: {error}",
        ) from error
    everyone = plain.everywhere(found)
    worst = {key: max(each.get(key, 0.0) for each in everyone) for key in found}
    wrong = [key for key, error in worst.items() if not error <= TOLERANCE]
    if wrong:
        raise UserError(
            f"tensor parallel of {name} is refused: split over {mesh.layout.tp} ranks it does not compute what it does "
            f"whole; {wrong[0]} differs by {worst[wrong[0]]:.1e}",
            fix="use dp_shard instead (FSDP needs no roles)",
            more="docs/models.md",
        )


def _first_experts(model: Any) -> int:
    """How many layers there are up to the first with experts; 0 without."""
    names = [name for name, module in model.named_modules() if hf_internals.is_experts(module)]
    layers = Anatomy.of(model).layers
    return next((at for at, layer in enumerate(layers, 1) if any(is_within(name, [layer]) for name in names)), 0)


def cut(config: Any, *, ranks: int, least: int = 0) -> Any:
    """A copy of a config with a layer of each kind, `least` at least, and a small vocabulary."""
    whole = copy.deepcopy(config)
    small = whole.get_text_config()
    kinds = list(dict.fromkeys(getattr(small, "layer_types", None) or ["all", "all"]))
    layers = min(small.num_hidden_layers, max(len(kinds), least))
    if getattr(small, "layer_types", None):
        small.layer_types = [*kinds, *small.layer_types[len(kinds) :]][:layers]
    small.num_hidden_layers = layers
    small.vocab_size = 8 * ranks + 3
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(small, key, None) is not None:
            setattr(small, key, 0)
    return whole


def _errors(model: Any, mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Relative errors of the loss and of this rank's part of every gradient, in the order of the model."""
    anatomy = Anatomy.of(model)
    traced = trace(model, anatomy)
    partition = derive(model, anatomy, traced)
    layout = Layout(tp=mesh.layout.tp, expert_tp=mesh.layout.expert_tp)
    specs = tensor.shard_specs(model, partition, layout.tp) | expert.shard_specs(model, traced.experts, layout)
    parts = {name: mesh.tp_rank % spec.parts for name, spec in specs.items()}
    values = _values(model, device)
    ids = (
        torch.arange(TOKENS_PER_RANK * mesh.layout.tp, device=device).unsqueeze(0)
        % model.config.get_text_config().vocab_size
    )
    whole = hf_internals.reference_model(model, values).to(device)
    expected_loss = _loss(whole, ids)
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    fold = tensor.apply_tensor_parallel(
        model, anatomy, partition, specs, mesh.tp_group, sequence_parallel=mesh.layout.sequence_parallel
    )
    if traced.padding is not None:
        count_behind_padding(model.get_submodule(anatomy.base), traced.padding)
    cut = mesh.tp_rank % layout.etp
    expert.apply_expert_parallel(model, traced.experts, specs, fold, group=None, cut=cut, parts=layout.etp)
    if layout.etp == 1:  # as FSDP does
        fold.sums |= {name: "tp" for name, spec in specs.items() if spec.over == "ep"}
    _fill(model, values, specs, parts, device)
    errors = {"the loss": float(abs(_loss(model, ids) - expected_loss) / abs(expected_loss))}
    tensor.sum_partial_gradients(model, fold, mesh.kv_replicas)
    norm = torch.stack([grad.norm() for grad in expected.values() if grad is not None]).norm()
    for name, parameter in model.named_parameters():
        if expected[name] is None or parameter.grad is None:
            errors[f"the gradient of {name}"] = float(expected[name] is not None or parameter.grad is not None)
            continue
        error = 0.0
        for global_region, local_region in local_regions(specs[name], parts[name], 0, 1):
            right = expected[name][global_region]
            wrong = (parameter.grad[local_region] - right).norm() / torch.maximum(right.norm(), 1e-6 * norm)
            error = max(error, float(wrong))
        errors[f"the gradient of {name}"] = error
    return errors


def _values(model: Any, device: torch.device) -> dict[str, Tensor]:
    """Random values for every parameter, the same on every rank; buffers as the model computes them."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).double()
        drawn[name] = 1 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5
    return drawn | {name: buffer.double() for name, buffer in buffer_values(model).items()}


def _fill(
    model: Any, values: dict[str, Tensor], specs: dict[str, ShardSpec], parts: dict[str, int], device: torch.device
) -> None:
    model.to(torch.float64).to_empty(device=device)
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for global_region, local_region in local_regions(specs[name], parts[name], 0, 1):
                parameter[local_region] = values[name][global_region].to(device)
        for name, buffer in model.named_buffers():
            buffer.copy_(values[name])


def _loss(model: Any, ids: Tensor) -> Tensor:
    """A loss whose gradients reach everything; they stay in `.grad`."""
    logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
