"""Whole tensors of a live model, tensor by tensor, and its export as a Hugging Face folder.

Every rank calls these functions. Each element is sent by its owning rank only, as bits: an integer sum with zeros from
all other ranks is exact.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.checkpoint import model_folder
from fivefold.checkpoint.export import known_of, lacking, write_folder, write_peft
from fivefold.checkpoint.model_folder import export_dtype
from fivefold.checkpoint.save import OwnedSlice, collect, on_first_rank
from fivefold.core.hub import is_hub_id
from fivefold.core.text import say
from fivefold.models.build import build_meta
from fivefold.parallel.adapters.peft_folder import base_name
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.dtypes import master_dtype
from fivefold.parallel.fsdp.runtime import reshard
from fivefold.parallel.state import state_of

_BITS = {4: torch.int32, 8: torch.int64}


class LiveTensors:
    """The parameters of a parallelized model (or `gradients`), and the buffers of its routers, each whole.

    `to_all`: on every rank; else on the first one, and meaningless on the others.
    """

    def __init__(self, model: nn.Module, *, gradients: bool = False, to_all: bool = False) -> None:
        reshard(model)
        placement, self._to_all = state_of(model).placement, to_all
        stored = placement.stored_shapes
        with_gradient = {name: spec.shape for name, spec in placement.shards.items() if name in stored}
        self._shapes = with_gradient if gradients else stored
        self._owned: dict[str, list[OwnedSlice]] = {}
        for one in collect(model, None, gradients=gradients):
            self._owned.setdefault(one.name, []).append(one)
        self._dtype, self._device = master_dtype(placement.layout.precision), next(model.parameters()).device
        self._left = list(self._shapes)

    @property
    def ordered(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def whole(self, name: str) -> Tensor:
        """A whole tensor on the CPU. Every rank requests the same ones, in order."""
        assert self._left[0] == name, f"{name} was asked for, and {self._left[0]} is next"
        del self._left[0]
        whole = torch.zeros(self._shapes[name], dtype=self._dtype, device=self._device)
        for one in self._owned.get(name, ()):
            whole[one.region] = one.values
        bits = whole.view(_BITS[whole.itemsize])
        if self._to_all:
            dist.all_reduce(bits)
        elif dist.get_world_size() > 1:
            dist.reduce(bits, dst=0)
        return whole.cpu()

    def follow(self) -> None:
        """Take part in the remaining collectives."""
        for name in list(self._left):
            self.whole(name)


def gathered(model: nn.Module, *, gradients: bool = False) -> dict[str, Tensor]:
    """Every parameter by its Hugging Face name, whole, on the CPU of every rank; or its gradient, zeros without one."""
    source = LiveTensors(model, gradients=gradients, to_all=True)
    return {name: source.whole(name) for name in source.ordered}


def export_live(
    model: Any, out: Path, *, dtype: str | None, given: torch.dtype, adapter: Lora | None, force: bool = False,
    into: bool = False,
) -> None:  # fmt: skip
    """Write `model` as it is now as the Hugging Face folder `out`, or its adapter as one of `peft`; see `write_folder`,
    `write_peft`. The first rank writes.

    `dtype`: fp32, bf16, fp16 or fp64; None: `given`, the type of the original model, if it has 16 bits, and else the
    type it is trained in.
    """
    trained = master_dtype(state_of(model).plan.layout.precision)
    target = export_dtype(dtype, came_in=given if given.itemsize == 2 else None, trained=trained)
    source = LiveTensors(model)

    def write() -> None:
        try:
            if adapter is not None:
                plain = build_meta(deepcopy(model.config))
                name = getattr(model.config, "name_or_path", "")
                base = base_name(name, is_local=not is_hub_id(name))
                write_peft(source, out, adapter, plain, base=base, dtype=target, force=force, into=into)
                return
            known = known_of(deepcopy(model.config), target)
            files = model_folder.model_files(
                model.config, model_class=state_of(model).plan.anatomy.model_class, dtype="", tokenizer=None,
                generation=getattr(model, "generation_config", None),
            )  # fmt: skip
            write_folder(source, out, files, known, force=force, into=into)
            for line in lacking(known.lacks):
                say(line)
        finally:
            source.follow()

    if dist.get_rank():
        source.follow()
    on_first_rank(write)
