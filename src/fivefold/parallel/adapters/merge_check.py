"""Check that a merged model gives the logits of the model with its separate adapter, in plain `transformers`."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import RunFailed
from fivefold.core.units import GIB
from fivefold.models.build import build_meta
from fivefold.models.recipe import buffer_values
from fivefold.models.sources import TensorSource
from fivefold.parallel.adapters.by_hand import put_adapter
from fivefold.parallel.adapters.settings import Lora

# Relative to the norm of the logits, in fp32: W x + s B (A x) sums in another order than (W + s B A) x.
TOLERANCE = 1e-4
Stored = Callable[[str, Tensor], Tensor]  # a tensor by its name in the model -> as it is written
_TOKENS = 32
_ROOM = 1.25  # times the weights in fp32: includes activations and a tensor being read


@dataclass(frozen=True)
class MergeCheck:
    """Relative difference in norm between logits of the merged model and of the model with its adapter: in fp32
    (`merged`), and with weights as `written`. `missing`: why they were not compared."""

    merged: float = 0.0
    written: float = 0.0
    missing: str = ""


def check_merged(
    config: Any, base: TensorSource, adapter: TensorSource, merged: TensorSource, lora: Lora, stored: Stored,
    room: int | None,
) -> MergeCheck:  # fmt: skip
    """Compare the logits of `merged` with those of `base` plus `adapter`. `stored`: merged weights as they are
    written. `room`: free bytes of memory. Raises `RunFailed` if the logits in fp32 differ."""
    needed = _ROOM * 4 * sum(map(prod, base.shapes.values()))
    if room is not None and needed > room:
        return MergeCheck(missing=f"that takes {needed / GIB:.1f} GiB of memory, and {room / GIB:.1f} are free")
    ids = torch.randint(
        0, config.get_text_config().vocab_size, (1, _TOKENS), generator=torch.Generator().manual_seed(1)
    )
    wanted = _logits(config, base, ids, adapter=adapter, lora=lora)
    found = _apart(_logits(config, merged, ids), wanted)
    if not found <= TOLERANCE:  # NaN must fail
        raise RunFailed(f"logits of the merged model are {found:.1e} from those of its adapter beside the model")
    return MergeCheck(found, _apart(_logits(config, merged, ids, stored=stored), wanted))


def _apart(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def _logits(
    config: Any, source: TensorSource, ids: Tensor, *, adapter: TensorSource | None = None, lora: Lora | None = None,
    stored: Stored = lambda _, values: values,
) -> Tensor:  # fmt: skip
    """The logits of the unmodified model, computed in fp32."""
    ours = build_meta(deepcopy(config))
    buffers = buffer_values(ours)
    with torch.device("meta"):
        model: Any = type(ours)(deepcopy(config)).float()
    model.to_empty(device="cpu").tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(stored(name, source.whole(name)))
        for name, buffer in model.named_buffers():
            buffer.copy_(source.whole(name) if name in source.shapes else buffers[name])
        if adapter is not None and lora is not None:
            values = {name: adapter.whole(name).float() for name in adapter.shapes}
            put_adapter(model, replace(lora, quantize="none"), values, torch.float32)
        return model.eval()(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]
