"""Bugs of loading what another layout saved."""

from collections.abc import Callable
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.checkpoint import load
from fivefold.parallel.placement import Placement
from fivefold.verification import proof
from tests.verification.faults.fault import Expected, Model, fault
from tests.verification.faults.tensor import PHI3

MOMENTS = ("exp_avg", "exp_avg_sq")


def _named(pattern: str) -> list[Expected]:
    return [("saved under .*, loaded", pattern)]


def _loaded(change: Callable[[dict[str, Any]], None]) -> Any:
    """`change(state)` happens to the optimizer state of every parameter that was loaded."""
    plain = load.restore

    def restore(model: Any, optimizer: torch.optim.Optimizer, *rest: Any) -> None:
        plain(model, optimizer, *rest)
        for state in optimizer.state.values():
            change(state)

    return patch.object(proof, "restore", restore)


@fault(
    "moments are not loaded: the optimizer starts afresh",
    known="KempnerForge #115, NeMo Automodel #763",
    layout="shard2",
    kind="load",
    expects=_named(r"exp_avg"),
)
def moments_lost() -> Any:
    return _loaded(lambda state: state.clear())


@fault(
    "the router's correction bias is not loaded: it was moved, and starts again where the model has it",
    known="a state dict of parameters and optimizer state",
    layout="shard2.ep2",
    kind="load",
    model=Model("deepseek_v3"),
    expects=_named(r"e_score_correction_bias"),
)
def moved_bias_not_loaded() -> Any:
    plain = load.restore

    def restore(model: Any, *rest: Any) -> None:
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        plain(model, *rest)
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])

    return patch.object(proof, "restore", restore)


@fault(
    "moments are loaded as zeros",
    known="KempnerForge #115",
    layout="shard2",
    kind="load",
    expects=_named(r"exp_avg"),
)
def moments_zeroed() -> Any:
    def zero(state: dict[str, Any]) -> None:
        for kind in MOMENTS:
            state[kind].zero_()

    return _loaded(zero)


@fault(
    "first and second moment change places on load",
    known="state read back in another order",
    layout="shard2",
    kind="load",
    expects=_named(r"exp_avg"),
)
def moments_swapped() -> Any:
    return _loaded(lambda state: state.update(exp_avg=state["exp_avg_sq"], exp_avg_sq=state["exp_avg"]))


@fault(
    "moments pass through bf16 on their way in",
    known="state saved in the type of the weights",
    layout="shard2",
    kind="load",
    expects=_named(r"exp_avg"),
)
def moments_rounded_on_load() -> Any:
    def rounded(state: dict[str, Any]) -> None:
        for kind in MOMENTS:
            state[kind] = state[kind].bfloat16().double()

    return _loaded(rounded)


@fault(
    "the step count of the optimizer starts again at 0",
    known="NeMo Automodel #763",
    layout="shard2",
    kind="load",
    expects=_named(r"step/"),
)
def step_count_lost() -> Any:
    return _loaded(lambda state: state["step"].zero_())


@fault(
    "the moments of one projection are another's of the same shape",
    known="optimizer state matched by order in place of name",
    layout="shard2",
    kind="load",
    expects=_named(r"exp_avg/.*[kv]_proj\.weight"),
)
def moments_of_another_parameter() -> Any:
    plain = load.CheckpointSource.read

    def read(self: Any, name: str, region: Any) -> Tensor:
        is_moment = self.kind.startswith(MOMENTS)
        other = name.replace("k_proj.weight", "v_proj.weight") if is_moment else name
        return plain(self, other, region)

    return patch.object(load.CheckpointSource, "read", read)


@fault(
    "weights pass through bf16 on their way in",
    known="checkpoints of mixed precision without the fp32 weights",
    layout="shard2",
    kind="load",
    expects=_named(r"weight/"),
)
def weights_rounded_on_load() -> Any:
    plain = load.fill

    def fill(model: Any, source: Any, *rest: Any) -> None:
        read = source.read
        with patch.object(type(source), "read", lambda self, *args: read(*args).bfloat16().double()):
            plain(model, source, *rest)

    return patch.object(load, "fill", fill)


@fault(
    "a projection of several parts (Phi-3) is loaded as if a rank's part of it were contiguous",
    known="Megatron-LM #4841 (review)",
    layout="tp2",
    model=PHI3,
    kind="load",
    expects=_named(r"(gate_up|qkv)_proj"),
)
def dealt_parts_loaded_as_contiguous() -> Any:
    plain = load.restore

    def restore(*args: Any) -> None:
        with _contiguous():
            plain(*args)

    return patch.object(proof, "restore", restore)


@fault(
    "a projection of several parts (Phi-3) is saved as if a rank's part of it were contiguous",
    known="ColossalAI #817, NeMo Automodel #1053",
    layout="shard2",
    model=PHI3,
    kind="load",
    expects=_named(r"(gate_up|qkv)_proj"),
)
def dealt_parts_saved_as_contiguous() -> Any:
    save = import_module("fivefold.checkpoint.save")  # the package has a function of this name
    plain = save.collect

    def collect(*args: Any) -> Any:
        with _contiguous():
            return list(plain(*args))

    return patch.object(save, "collect", collect)


@contextmanager
def _contiguous() -> Any:
    """Parameters of several blocks lie as one."""
    plain = Placement.regions

    def regions(self: Placement, name: str, rank: int | None = None) -> Any:
        spec = self.shards[name]
        if [split.dim for split in spec.splits] != [0] or len(spec.held[0][0]) == 1:
            return plain(self, name, rank)
        size = spec.local_shape(self.coords.tp)[0]
        start = size * self.coords.tp
        rest = tuple(slice(0, each) for each in spec.shape[1:])
        return [((slice(start, start + size), *rest), (slice(0, size), *rest))]

    with patch.object(Placement, "regions", regions):
        yield


@fault(
    "the halves that two ranks saved change places on load",
    known="shards put together in the order of file names",
    layout="shard2",
    kind="load",
    expects=_named(r"k_proj\.weight"),
)
def slices_of_ranks_exchanged() -> Any:
    plain = load.CheckpointSource.read

    def read(self: Any, name: str, region: Any) -> Tensor:
        if not name.endswith("k_proj.weight"):
            return plain(self, name, region)
        whole = tuple(slice(0, size) for size in self.shape(name))
        return torch.cat(list(reversed(plain(self, name, whole).chunk(2))))[region]

    return patch.object(load.CheckpointSource, "read", read)
