"""Prove tensor parallelism for a model class that no test of fivefold covers, before it is trusted.

A copy of the model computes a loss and every gradient twice in fp64. It is cut to a layer of each kind and a small
vocabulary, but has its full widths. One run is whole on each rank, as in `transformers`; `parallelize` lays out the
other over the same tensor parallel ranks. They must agree. (Norms that compute in fp32 leave a floor of about 1e-7.)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.data.batch import IGNORE
from fivefold.models import hf_internals
from fivefold.models.anatomy import is_within
from fivefold.models.build import build_meta
from fivefold.models.discover import anatomy_of
from fivefold.models.fewer_layers import fewer_layers
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import ModelTensors
from fivefold.parallel import passes, plain
from fivefold.parallel.dtensor import local
from fivefold.parallel.layout import Layout
from fivefold.parallel.loss.tasks import CrossEntropy
from fivefold.parallel.state import state_of

TOLERANCE = 1e-5
MOST = 2**29  # parameters of the cut model
TOKENS_PER_RANK = 5


Parallelize = Callable[..., Any]  # `parallelize` without this check


def check(model: Any, layout: Layout, device: torch.device, parallelize: Parallelize) -> None:
    """Raise `UserError`, on every rank, if `parallelize` changes what the model computes, or if that cannot be tested.

    Every rank of the world calls this. Ranks beyond those of tp hold copies of the small model.
    """
    name = type(model).__name__
    small = _small(model, layout.tp)
    try:
        found = _errors(small, _probed(layout), device, parallelize)
    except UserError:
        raise
    except Exception as error:  # the model's own code cannot handle parts of tensors
        raise UserError(
            f"tensor parallel of {name} is refused: its own code cannot do with the parts of tensors that "
            f"{layout.tp} ranks have",
            fix="use dp_shard instead (FSDP needs no roles)",
            more=f"tried before training: {type(error).__name__}: {error}",
        ) from error
    everyone = plain.everywhere(found)  # from here on no rank uses a group of the proof
    _end_groups(small)
    worst = {key: max(times.get(key, 0.0) for times in everyone) for key in found}
    wrong = [key for key, error in worst.items() if not error <= TOLERANCE]
    if wrong:
        raise UserError(
            f"tensor parallel of {name} is refused: split over {layout.tp} ranks it does not compute what it does "
            f"whole; {wrong[0]} differs by {worst[wrong[0]]:.1e}",
            fix="use dp_shard instead (FSDP needs no roles)",
            more="fivefold docs explain/models",
        )


def _first_experts(model: Any) -> int:
    """Number of layers up to the first with experts; 0 without."""
    names = [name for name, module in model.named_modules() if hf_internals.is_experts(module)]
    layers = anatomy_of(model).layers
    return next((at for at, layer in enumerate(layers, 1) if any(is_within(name, [layer]) for name in names)), 0)


def _small(model: Any, ranks: int) -> Any:
    """Build the model with a layer of each kind and a small vocabulary. It has two layers, or more up to the first with
    experts; one if two are too large. Raises `UserError` if that is too large as well."""
    experts = _first_experts(model)
    for least in (2, experts):
        small = build_meta(cut(model.config, ranks=ranks, least=least), model_class=type(model))
        size = sum(parameter.numel() for parameter in small.parameters())
        if size <= MOST and bool(_first_experts(small)) == bool(experts):
            return small
    raise UserError(
        f"tensor parallel of {type(model).__name__} is not proved, and its layers are too large to try it here",
        fix="use dp_shard instead (FSDP needs no roles)",
    )


def cut(config: Any, *, ranks: int, least: int) -> Any:
    """Copy a config with a layer of each kind, `least` at least, and a small vocabulary."""
    whole = fewer_layers(config, least)
    small = whole.get_text_config()
    small.vocab_size = 8 * ranks + 3
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(small, key, None) is not None:
            setattr(small, key, 0)
    return whole


def _probed(layout: Layout) -> Layout:
    """The same tensor parallelism over the whole world; example: `pp2.shard2.tp4` is proved as `dp4.tp4`."""
    return Layout(
        dp_replicate=layout.world // layout.tp, tp=layout.tp, sequence_parallel=layout.sequence_parallel,
        expert_tp=layout.expert_tp, precision="fp64",
    )  # fmt: skip


def _errors(model: Any, layout: Layout, device: torch.device, parallelize: Parallelize) -> dict[str, float]:
    """Relative errors of the loss and of this rank's part of every gradient, in the order of the model."""
    whole = hf_internals.reference_model(model, _values(model)).to(device).eval()
    vocabulary = model.config.get_text_config().vocab_size
    ids_BT = torch.arange(TOKENS_PER_RANK * layout.tp, device=device).unsqueeze(0) % vocabulary
    expected_loss = nn.functional.cross_entropy(whole(input_ids=ids_BT, use_cache=False).logits[0, :-1], ids_BT[0, 1:])
    expected_loss.backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    norm = torch.stack([grad.norm() for grad in expected.values() if grad is not None]).norm()
    parallelize(model, layout, device=device, source=ModelTensors(whole))
    loss = _gradients(model.eval(), ids_BT, layout.dp_replicate)  # dropout is proved elsewhere
    errors = {"the loss": float((abs(loss - expected_loss) / abs(expected_loss)).detach())}
    state = state_of(model)
    for name, parameter in model.named_parameters():
        right, found = expected[name], parameter.grad
        if right is None or found is None:
            errors[f"the gradient of {name}"] = float(right is not None or found is not None)
            continue
        here = [  # none if FSDP leaves this rank no rows, as for one expert's weights over two ranks
            float((local(found)[own] - right[region]).norm() / torch.maximum(right[region].norm(), 1e-6 * norm))
            for region, own in state.placement.regions(name)
        ]
        errors[f"the gradient of {name}"] = max(here, default=0.0)
    return errors


def _gradients(model: Any, ids_BT: Tensor, copies: int) -> Tensor:
    """Compute the mean loss, on every rank; gradients stay in `.grad`. All `copies` data ranks read the same row."""
    labels_BT = nn.functional.pad(ids_BT[:, 1:], (0, 1), value=IGNORE)
    positions_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device).unsqueeze(0)
    scale = torch.tensor(1 / (copies * (ids_BT.shape[1] - 1)), dtype=torch.float64, device=ids_BT.device)
    inputs = passes.Inputs(ids_BT, positions_BT, CrossEntropy(labels_BT, scale))
    return copies * passes.gradients(model, [inputs], rows=copies)


def _end_groups(model: Any) -> None:
    """Destroy the groups of the proof alone, in the same order on every rank."""
    for group in dict.fromkeys(state_of(model).mesh.groups.values()):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def _values(model: Any) -> dict[str, Tensor]:
    """Draw random values for every parameter, the same on every rank; buffers as the model computes them."""
    generator = torch.Generator().manual_seed(0)
    drawn: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator).double()
        drawn[name] = 1 + 0.2 * noise if parameter.ndim == 1 else noise * parameter.shape[-1] ** -0.5
    return drawn | {name: buffer.double() for name, buffer in buffer_values(model).items()}
