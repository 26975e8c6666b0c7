"""Reading a checkpoint, under any layout: each rank reads only its own parts, tensor by tensor."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from fivefold.checkpoint import shard
from fivefold.checkpoint.cut import WEIGHT, Box, file_of, key_of
from fivefold.checkpoint.manifest import CorruptCheckpoint, Manifest, problem, read_description, read_manifest
from fivefold.checkpoint.model_folder import MODEL_FOLDER
from fivefold.checkpoint.records import Slice, TensorRecord
from fivefold.core.errors import UserError
from fivefold.core.optimizers import SCALE
from fivefold.core.text import listed
from fivefold.models.sources import TensorSource
from fivefold.parallel import plain
from fivefold.parallel.dtensor import local, zeros_by_block
from fivefold.parallel.fsdp.runtime import reshard
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.outer.runtime import MOMENTUM, OuterSteps
from fivefold.parallel.sharding import numbers_each, regions_by_block
from fivefold.parallel.state import fill, state_of

Region = tuple[slice, ...]
SCALARS = "optimizer.scalars"  # key of a checkpoint's state: the types of the optimizer's scalars


def is_valid(folder: Path) -> bool:
    """True for a checkpoint folder with exactly the saved bytes. All of it is read, in this process."""
    try:
        return next(Checkpoint.open(folder).damages(), None) is None
    except CorruptCheckpoint:
        return False


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: its manifest, and `.source(kind)` to read its tensors."""

    path: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: Path) -> "Checkpoint":
        """Read the manifest of the folder `path`. Raises `CorruptCheckpoint` (a `UserError`) unless it is intact."""
        return cls(path, read_manifest(path))

    @classmethod
    def described(cls, path: Path) -> "Checkpoint":
        """Read the manifest alone, on each of many ranks: they share the look at the other files (`verify`)."""
        return cls(path, read_description(path))

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def state(self) -> Mapping[str, Any]:
        return self.manifest.state

    @property
    def agreement(self) -> Mapping[str, Any]:
        """The values that must be unchanged to continue: see `check_agreement`."""
        return self.manifest.agreement

    @property
    def model_folder(self) -> Path:
        """Config, tokenizer and generation config: a Hugging Face folder without its weights."""
        return self.path / MODEL_FOLDER

    def model_files(self) -> dict[str, bytes]:
        """Contents of the files of the model folder that the manifest names, by their paths in it."""
        names = (
            Path(file).relative_to(MODEL_FOLDER) for file in self.manifest.files if file.startswith(f"{MODEL_FOLDER}/")
        )
        return {name.as_posix(): (self.model_folder / name).read_bytes() for name in sorted(names)}

    @property
    def kinds(self) -> tuple[str, ...]:
        """`weight`, and the optimizer's per-element states."""
        return tuple(self.manifest.tensors)

    def verify(self, kinds: Collection[str] | None = None, *, together: bool = False) -> None:
        """Read every byte of these kinds of tensors (None: of everything) and compare it with its checksum.

        `together`: every rank of the process group calls this, and they share the reading. Raises `CorruptCheckpoint`
        (then on every rank), naming the first file and tensor that differ from the saved ones.
        """
        rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
        everyone = [next(self.damages(rank, size, kinds), None)] * size
        if together:
            everyone = plain.everywhere(everyone[rank])
        if damage := next((text for text in everyone if text), None):
            raise CorruptCheckpoint(damage, fix=f"remove {self.path}, or put back the copy that was saved")

    def damages(self, rank: int = 0, size: int = 1, kinds: Collection[str] | None = None) -> Iterator[str]:
        """Problems with the bytes that `rank` of `size` has to read. The files one after the other are cut into equal
        ranges of bytes, and a slice is read by the rank in whose range it begins."""
        total = sum(record.bytes + 1 for record in self.manifest.files.values())  # 1: an empty file is one's, too
        first, last, at = total * rank // size, total * (rank + 1) // size, 0
        for file, record in sorted(self.manifest.files.items()):
            within = range(max(first - at, 0), min(last - at, record.bytes + 1))
            if within:
                yield from self._check_file(file, within, kinds)
            at += record.bytes + 1

    def _check_file(self, file: str, within: range, kinds: Collection[str] | None) -> Iterator[str]:
        """Problems with a file's header, or all of it if it contains no tensors, and with the tensors of these kinds
        that begin in the bytes `within`."""
        if wrong := problem(self.path, self.manifest, file):
            yield wrong
            return
        path, checksum = self.path / file, self.manifest.files[file].checksum
        held = self.manifest.held(file)
        if not held:
            try:
                is_same = 0 not in within or shard.checksum(path.read_bytes()) == checksum
            except OSError as error:
                yield f"{path} cannot be read: {error.strerror}"
                return
            if not is_same:
                yield f"{path} is not what was saved"
            return
        wanted = [key for key, (kind, _) in held.items() if kinds is None or kind in kinds]
        for key, wrong in shard.check(path, checksum, held, wanted, within, self.manifest.sums.get(file)):
            of_tensor = f"{' of '.join(held[key])}: {wrong}" if key else f"{wrong}{self.manifest.listing(file)}"
            yield f"{path}: {of_tensor}"

    def source(self, kind: str = WEIGHT) -> "CheckpointSource":
        return CheckpointSource(self.path, kind, self.manifest.tensors[kind])


class CheckpointSource(TensorSource):
    """Tensors of one kind, assembled from the slices that cover the requested region."""

    def __init__(self, folder: Path, kind: str, records: Mapping[str, TensorRecord]) -> None:
        self.kind, self._folder, self._records = kind, folder, records
        self.shapes = {name: record.shape for name, record in records.items()}

    def dtype(self, name: str) -> torch.dtype:
        return getattr(torch, self._records[name].dtype)  # type: ignore[no-any-return]

    def read(self, name: str, region: Region) -> Tensor:
        """The values of `region` (global coordinates) on the CPU; only these bytes are read. Raises
        `CorruptCheckpoint`."""
        record = self._records[name]
        wanted = tuple(s.indices(size)[:2] for s, size in zip(region, record.shape, strict=True))
        shape = tuple(max(0, stop - start) for start, stop in wanted)
        parts = [(one, _intersection(one.box, wanted)) for one in record.overlapping(wanted)]
        if len(parts) == 1:
            return self._read_slice(name, *parts[0])
        values = torch.empty(shape, dtype=self.dtype(name))
        for one, common in parts:
            target = tuple(slice(low - w[0], high - w[0]) for (low, high), w in zip(common, wanted, strict=True))
            values[target] = self._read_slice(name, one, common)
        return values

    def _read_slice(self, name: str, one: Slice, common: Box) -> Tensor:
        """The part `common` (global coordinates) of one stored slice: a view of the file, mapped while it lives."""
        path, key = self._folder / file_of(self.kind, one.rank), key_of(self.kind, name, one.box)
        shape, dtype = tuple(stop - start for start, stop in one.box), self._records[name].dtype
        try:
            with safe_open(path, framework="pt") as file:
                stored = file.get_slice(key)
                if tuple(stored.get_shape()) != shape:
                    raise ValueError(f"shape {stored.get_shape()} is not {list(shape)}")
                inner = tuple(slice(low - at, high - at) for (low, high), (at, _) in zip(common, one.box, strict=True))
                values: Tensor = stored[inner]
        except Exception as error:  # safetensors raises its own kind of error
            raise CorruptCheckpoint(f"{path}: {key} cannot be read: {error}") from error
        if str(values.dtype) != f"torch.{dtype}":
            raise CorruptCheckpoint(f"{path}: {key} is {values.dtype}, and the manifest says {dtype}")
        return values


def _intersection(one: Box, other: Box) -> Box:
    """The box of the elements that two boxes share, in global coordinates."""
    return tuple((max(start, at), min(stop, end)) for (start, stop), (at, end) in zip(one, other, strict=True))


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, checkpoint: Checkpoint, *,
    types: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Overwrite the weights and the optimizer state of a parallelized model, from a checkpoint of any layout.

    `types`: the types of the optimizer's scalars per parameter (`scalar_types`), for a checkpoint that does not say
    them; by default, tensors in fp32. Raises, before anything changes, `UserError` if names, shapes or types differ
    from the model's, and `CorruptCheckpoint` if a byte differs from the saved one.
    """
    weights = checkpoint.source()
    check_fits(model, weights, where=str(checkpoint.path))
    kinds = _own_kinds(model, checkpoint) if optimizer else {}
    checkpoint.verify(together=True)
    reshard(model)
    fill(model, weights, state_of(model).placement.stored_shapes)
    state_of(model).load(checkpoint.state)
    if optimizer is None:
        return
    _load_apart(model, checkpoint, kinds)
    outer = state_of(model).live(OuterSteps)
    sources = [(kind, checkpoint.source(there)) for kind, there in kinds.items() if kind != WEIGHT]
    devices, types = _scalar_devices(optimizer), checkpoint.state.get(SCALARS) or types or {}
    for name, parameter in model.named_parameters():
        if parameter not in devices:
            continue
        state: dict[str, Any] = {
            key: number_of_type(value, types.get(key, "float32"), devices[parameter])
            for key, value in outer.own(checkpoint.manifest.scalars.get(name, {})).items()
        }
        for kind, source in sources:
            if name in source.names():
                state[kind] = _moment(model, name, parameter, source, is_scale=kind.endswith(SCALE))
        optimizer.state[parameter] = state
        state_of(model).live(Offload).states.keep(optimizer, parameter)


def _own_kinds(model: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """Kinds of tensors -> those in the checkpoint: of replicas that train apart, this one's. Raises `UserError` if it
    has none."""
    outer = state_of(model).live(OuterSteps)
    kinds = {kind.removeprefix(outer.prefix): kind for kind in checkpoint.kinds if kind.startswith(outer.prefix)}
    if any(map(outer.is_of_replica, checkpoint.kinds)) != outer.is_on or WEIGHT not in kinds:
        raise UserError(
            f"{checkpoint.path} and this model are not of the same replicas that train apart between outer steps",
            fix="keep outer.every and layout.dp_replicate, or load the model alone",
            more="fivefold docs explain/outer",
        )
    return kinds


def _load_apart(model: nn.Module, checkpoint: Checkpoint, kinds: Mapping[str, str]) -> None:
    """Load the weights of this replica, and what replicas that train apart have in common."""
    outer = state_of(model).live(OuterSteps)
    for kind in {WEIGHT, MOMENTUM}.intersection(checkpoint.kinds) if outer.is_on else ():
        source = checkpoint.source(kind)
        for name in outer.weights:
            for region, here in outer.plan.placement.regions(name):
                outer.put(name, kind, here, source.read(name, region))
    if outer.is_on:
        fill(model, checkpoint.source(kinds[WEIGHT]), state_of(model).placement.stored_shapes)


def scalar_types(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The optimizer's scalars per parameter: key -> the name of its type (`float32` of a tensor, `int`...)."""
    found: dict[str, str] = {}
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                kind = _BOOLS if value.dtype == torch.bool else str(value.dtype).removeprefix("torch.")
                found |= {key: kind} if value.ndim == 0 else {}
            elif kinds := [kind for kind, number in _NUMBERS.items() if isinstance(value, number)]:
                found[key] = kinds[0]
    return found


_NUMBERS: Mapping[str, type] = {"bool": bool, "int": int, "float": float}  # in this order: True is an int, too
_BOOLS = "torch.bool"  # of a tensor: `bool` is Python's


def number_of_type(value: float, kind: str, device: torch.device) -> Any:
    """A number of the type that `scalar_types` names: a 0-d tensor, or a number of Python."""
    if kind in _NUMBERS:
        return _NUMBERS[kind](value)
    return torch.tensor(value, dtype=getattr(torch, kind.removeprefix("torch.")), device=device)


def check_fits(model: nn.Module, source: "CheckpointSource", *, where: str) -> None:
    """Raise `UserError` unless `source` has exactly the parameters of `model`, in its shapes and its type."""
    shapes = state_of(model).placement.stored_shapes
    dtype = next(parameter for name, parameter in model.named_parameters() if name in shapes).dtype
    if missing := sorted(shapes.keys() - source.names()):
        raise UserError(f"{where} does not hold {listed(missing, 3)}", fix="was it written by another model?")
    if unknown := sorted(source.names() - shapes.keys()):
        raise UserError(f"{where} holds {listed(unknown, 3)}, which this model does not have")
    for name, shape in shapes.items():
        if source.shape(name) != shape:
            raise UserError(f"{where}: {name} is {list(source.shape(name))}, and this model has {list(shape)}")
        if source.dtype(name) != dtype:
            kept, now = (str(kind).removeprefix("torch.") for kind in (source.dtype(name), dtype))
            raise UserError(
                f"{where} keeps {name} in {kept}, and this run in {now}",
                fix=f"set precision.compute: {'fp64' if kept == 'float64' else 'fp32 or bf16'}",
            )


def _moment(model: nn.Module, name: str, like: Tensor, source: "CheckpointSource", *, is_scale: bool) -> Tensor:
    """A tensor sharded like the parameter `like`, with this rank's part of `source`; one of another shape is whole.
    `is_scale`: it contains the scales of blocks."""
    whole = state_of(model).placement.shards[name].shape
    length = numbers_each(source.shape(name), whole, is_scale=is_scale)
    if not length:
        values = source.whole(name).to(like.device)
        if not isinstance(like, DTensor):
            return values
        mesh = like.device_mesh
        return DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    moment = zeros_by_block(like, length, source.dtype(name))
    for global_region, local_region in regions_by_block(state_of(model).placement.regions(name), length):
        local(moment)[local_region].copy_(source.read(name, global_region))
    return moment


def _scalar_devices(optimizer: torch.optim.Optimizer) -> dict[Tensor, torch.device]:
    """The device of the optimizer's scalars: that of the parameter only if fused or capturable."""
    return {
        parameter: parameter.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
