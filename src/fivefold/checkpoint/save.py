"""Writing a checkpoint: every rank writes the slices it owns to a temporary folder; the first rank renames it.

In order: copy the slices that this rank owns; then, in a thread, write them, read them back, gather the descriptions,
write the manifest, rename, and only then delete the checkpoints that retention drops and copy to remote storage, if
there is one. A kill on the way leaves the published steps unchanged, and a `.tmp-` folder that the next save removes.
All that is unfinished or put aside is in one folder, the `room` of the save. It may be taken away by a later round of
nodes (`launch/rounds.py`): then nothing is published, replaced or deleted any more.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fivefold.checkpoint import model_folder, shard
from fivefold.checkpoint.cut import WEIGHT, TensorCut, box, file_of, key_of, placed
from fivefold.checkpoint.find import Remote
from fivefold.checkpoint.load import SCALARS, is_valid, scalar_types
from fivefold.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from fivefold.checkpoint.records import DTYPES, FileRecord, RankRecord, TensorRecord, joined
from fivefold.checkpoint.staging import Staging
from fivefold.config import RunConfig
from fivefold.core import files
from fivefold.core.best import retained
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.files import cannot_write, is_users
from fivefold.core.optimizers import SCALE
from fivefold.core.run_folder import step_folder, steps, steps_of
from fivefold.core.text import say
from fivefold.parallel import plain
from fivefold.parallel.dtensor import local
from fivefold.parallel.fsdp.runtime import reshard
from fivefold.parallel.outer.runtime import OuterSteps
from fivefold.parallel.placement import Placement
from fivefold.parallel.sharding import by_block, numbers_each, regions_by_block
from fivefold.parallel.state import state_of

_PACKAGES = ("fivefold", "torch", "transformers", "safetensors")
_BESIDE = ".tmp-"
PATIENCE = timedelta(hours=12)  # for the slowest rank to finish writing
Result = TypeVar("Result")
Write = Callable[..., list[str]]  # like `write_together`


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """Contents of a checkpoint apart from its tensors: JSON values, or sources of files. `None` values are left out.

    `best`: the steps of the best validations so far, of which retention keeps the first `keep_best` that are there."""

    step: int
    state: Mapping[str, Any]
    agreement: Mapping[str, Any] = field(default_factory=dict)
    config: RunConfig | None = None
    tokenizer_dir: Path | None = None
    best: Sequence[int] = ()
    keep_best: int = 0


@dataclass(frozen=True)
class OwnedSlice:
    """A block of a tensor of `shape` that this rank writes. `values` may be a view of the live tensor. `cut`, `first`:
    the rule by which all ranks write this tensor, from rank `first` on."""

    kind: str
    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor
    cut: TensorCut | None = None
    first: int = 0

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offset, self.values.shape, strict=True))

    @property
    def key(self) -> str:
        return key_of(self.kind, self.name, box(self.region))

    @property
    def record(self) -> TensorRecord:
        dtype = str(self.values.dtype).removeprefix("torch.")
        return TensorRecord(shape=self.shape, dtype=dtype, cut=self.cut, rank=self.first)


@dataclass(frozen=True)
class Snapshot:
    """Everything that a save needs, and nothing that training changes."""

    about: Metadata
    layout: str
    names: Sequence[str]  # names of parameters and buffers, in the model's order
    slices: Sequence[OwnedSlice]
    scalars: dict[str, dict[str, float]]
    texts: Mapping[str, bytes]  # on the first rank: files next to the tensors, by path


class Saver:
    """Saves the checkpoints of one run, one at a time; `asynchronous`: in the background, while training continues.

    Every rank creates one (it opens its own gloo group for the writing thread) and calls the same methods in the same
    order. For a background save the data is first copied to the CPU; that memory is kept for the next save.
    """

    def __init__(
        self, directory: Path, *, keep: int, asynchronous: bool = False, remote: Remote | None = None,
        write: Write | None = None, room: Path | None = None,
    ) -> None:  # fmt: skip
        """Save into `directory/step-NNNNNN`, then copy that to `remote`; keep the newest `keep` in both, and the best.
        `write`: in place of `write_together`. `room`: where saves are prepared; None: in `directory`."""
        self._write, self._room = write or write_together, room or directory
        self._directory, self._keep, self._asynchronous, self._remote = directory, keep, asynchronous, remote
        self.group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="checkpoint")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[Path] | None = None
        self._staging = Staging()

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, about: Metadata) -> None:
        """Save weights and optimizer state as they are now. Asynchronous: return once they are copied.

        `wait` or `failure` reports the outcome. An earlier save is waited for first, and raises if it failed.
        """
        self.wait()
        reshard(model)
        snapshot = _snapshot(model, optimizer, about, self._staged)
        self._pending = self._thread.submit(self._write_and_publish, snapshot)
        if not self._asynchronous:
            futures.wait([self._pending])
            self._staging.free()

    def try_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer, more: int) -> None:
        """Allocate the memory that a save copies to; in the background it is kept, as by a save. `more`: bytes of
        future optimizer state, of which the slices of this rank take their share."""
        reshard(model)
        own = list(collect(model, optimizer))
        held = sum(local(parameter).nbytes for parameter in model.parameters())
        weights = [one.values for one in own if one.kind == WEIGHT]
        written = sum(tensor.nbytes for tensor in weights)
        if not weights or not (self._asynchronous or weights[0].is_cuda):
            return
        self._staging.take([one.values for one in own], more * written // max(held, 1))
        if not self._asynchronous:
            self._staging.free()

    def wait(self) -> None:
        """Wait for the pending save, if any.

        Raises, on all ranks, `UserError` if the step is published already and `RunFailed` if it cannot be written.
        """
        pending, self._pending = self._pending, None
        if pending:
            pending.result()

    @property
    def is_pending(self) -> bool:
        """True if a save is in flight, or has ended without its outcome being read."""
        return self._pending is not None

    def failure(self, *, wait: bool = False) -> UserError | None:
        """The error of the pending save if it has failed (`wait`: once it has ended), returned once."""
        if self._pending is None or not (wait or self._pending.done()):
            return None
        error = self._pending.exception()
        self._pending = None
        if error is not None and not isinstance(error, UserError):
            raise error
        return error

    def close(self) -> None:
        """Let the pending save end, ignoring its outcome."""
        self._thread.shutdown(wait=True)

    def _staged(self, slices: list[OwnedSlice]) -> list[OwnedSlice]:
        """The slices on the CPU; asynchronous: as copies that training does not touch."""
        on_gpu = any(one.values.is_cuda for one in slices)
        moved = [self._asynchronous or one.values.is_cuda for one in slices]  # offloaded state is on the CPU
        there = [one.values for one, is_moved in zip(slices, moved, strict=True) if is_moved]
        copies = iter(self._staging.copies(there) if there else ())
        if on_gpu:
            torch.cuda.synchronize()
        return [replace(one, values=next(copies)) if own else one for one, own in zip(slices, moved, strict=True)]

    def _write_and_publish(self, snapshot: Snapshot) -> Path:
        published = self._directory / step_folder(snapshot.about.step)
        written = self._write(snapshot, published, self.group, keep=self._keep, room=self._room)
        if self._remote:
            self._copy(published, self._remote, (*written, *snapshot.texts), snapshot.about)
        return published

    def _copy(self, published: Path, remote: Remote, written: Iterable[str], about: Metadata) -> None:
        """Copy to remote storage: every rank its own files, then the first rank the manifest."""
        step = published.name

        def withdraw() -> None:
            self._room.stat()  # raises an error if it is no longer ours
            remote.withdraw(step)

        on_first_rank(withdraw, self.group)
        mine = _copy_error(remote, published, written)
        errors = [told and UserError.from_json(told) for told in plain.everywhere(mine and mine.to_json(), self.group)]

        def publish() -> None:
            self._room.stat()
            error = next(filter(None, errors), None) or _copy_error(remote, published, [MANIFEST])
            if error:
                raise RunFailed(f"{published} is saved, but not copied: {error.what}", fix=error.fix)
            remote.retain(step, self._keep, about.best, about.keep_best)

        on_first_rank(publish, self.group)


def save(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path, about: Metadata, *,
    keep: int | None = None, overwrite: bool = False,
) -> None:  # fmt: skip
    """Save once, as the folder `folder`; every rank calls this, and it returns when the folder is published.

    `keep`: the folder is a step of a run, as in a `Saver`; None: its neighbours are left alone. Raises, on all ranks,
    `UserError` if it is published already (unless `overwrite`) and `RunFailed` if it cannot be written: the old
    contents then stay.
    """
    reshard(model)
    snapshot = _snapshot(model, optimizer, about, lambda slices: [replace(s, values=s.values.cpu()) for s in slices])
    group = dist.new_group(backend="gloo", timeout=PATIENCE, group_desc="save")
    write_together(snapshot, folder, group, keep=keep, overwrite=overwrite)
    dist.destroy_process_group(group)


def _snapshot(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, about: Metadata,
    staged: Callable[[list[OwnedSlice]], list[OwnedSlice]],
) -> Snapshot:  # fmt: skip
    state = state_of(model)
    types = types_of_all(plain.everywhere(optimizer and scalar_types(optimizer)))
    return Snapshot(
        about=replace(about, state={**about.state, **state.state(), **types}),
        layout=str(state.plan.layout),
        names=tuple(state.placement.stored_shapes),
        slices=staged(list(collect(model, optimizer))),
        scalars=scalars_of(model, optimizer) if optimizer else {},
        texts=_texts(model, about) if dist.get_rank() == 0 else {},
    )


def types_of_all(ranks: Iterable[Mapping[str, str] | None]) -> dict[str, dict[str, str]]:
    """The entry of a checkpoint's state for the types of scalars, from those of each rank; none if all are in fp32, as
    those of AdamW."""
    kinds = {key: kind for rank in ranks for key, kind in (rank or {}).items()}
    return {SCALARS: kinds} if {*kinds.values()} - {"float32"} else {}


def collect(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, *, gradients: bool = False,
    at: Placement | None = None, parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
) -> Iterator[OwnedSlice]:  # fmt: skip
    """The slices of weights and optimizer state that this rank owns: over all ranks, every element once. `gradients`:
    those of the weights' gradients instead. `at`: the placement of another rank that holds the same. `parameters`:
    those of the model, while others stand in their places.

    State in its parameter's shape is sharded like the parameter, and so are the scales of its blocks; state of another
    shape is the same on all ranks (only layouts of whole tensors have it). Raises `UserError` for state that
    checkpoints do not support.
    """
    placement, outer = at or state_of(model).placement, state_of(model).live(OuterSteps)
    stored = placement.stored_shapes
    for name, parameter in parameters or model.named_parameters():
        weight = parameter.grad if gradients else parameter
        if placement.is_owner(name) and name in stored and not gradients:
            yield from _in_common(outer, name)
        if weight is None or name not in stored or not placement.is_owner(name, within_copy=outer.is_on):
            continue
        for kind, tensor in {WEIGHT: weight, **_per_element(_state(optimizer, parameter))}.items():
            _check_type(kind, name, tensor)
            if length := numbers_each(tensor.shape, parameter.shape, is_scale=kind.endswith(SCALE)):
                shape = by_block(placement.shards[name].shape, length)
                cut, first = placed(placement, name, length=length)
                for whole, here in regions_by_block(placement.regions(name), length):
                    offset = tuple(one.start for one in whole)
                    yield OwnedSlice(outer.prefix + kind, name, shape, offset, local(tensor)[here], cut, first)
            elif _is_first(placement, name):
                yield _whole(placement, outer.prefix + kind, name, _same_on_all(tensor))
    if placement.is_first_of_stage and not gradients:
        kept = placement.buffers.keys() & stored.keys()
        yield from (_whole(placement, WEIGHT, name, buffer) for name, buffer in model.named_buffers() if name in kept)


def _is_first(placement: Placement, name: str) -> bool:
    """True on the first rank of a copy of a parameter."""
    index = placement.shard_index(name)
    return index.part == index.fsdp_rank == 0


def _same_on_all(tensor: Tensor) -> Tensor:
    """A tensor of an optimizer that is no part of a parameter: the trial has shown that all ranks have it."""
    is_here = isinstance(tensor, DTensor) and all(placement.is_replicate() for placement in tensor.placements)
    return local(tensor) if is_here or not isinstance(tensor, DTensor) else tensor.full_tensor()


def _in_common(outer: OuterSteps, name: str) -> Iterator[OwnedSlice]:
    """This rank's slices of what replicas that train apart have in common of a parameter."""
    placement = outer.plan.placement
    cut, first = placed(placement, name)
    for kind, tensor in outer.kept(name).items():
        for whole, here in placement.regions(name):
            offset = tuple(one.start for one in whole)
            yield OwnedSlice(kind, name, placement.shards[name].shape, offset, tensor[here], cut, first)


def _whole(placement: Placement, kind: str, name: str, tensor: Tensor) -> OwnedSlice:
    return OwnedSlice(kind, name, tuple(tensor.shape), (0,) * tensor.ndim, tensor, TensorCut(), placement.rank)


def _state(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Mapping[str, Any]:
    return optimizer.state.get(parameter, {}) if optimizer else {}


def _per_element(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0}


def _check_type(kind: str, name: str, tensor: Tensor) -> None:
    if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
        raise UserError(
            f"the optimizer keeps {kind} of {name} in {tensor.dtype}, which no checkpoint holds",
            fix="save the model alone: ff.save(model, None, path)",
        )


def scalars_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, at: Placement | None = None,
    parameters: Iterable[tuple[str, nn.Parameter]] | None = None,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """The optimizer's scalars per parameter, such as its step count; those of a replica that trains apart are its
    own. `at`, `parameters`: as in `collect`."""
    placement, outer = at or state_of(model).placement, state_of(model).live(OuterSteps)
    found = dict[str, dict[str, Any]]()
    for name, parameter in parameters or model.named_parameters():
        state = optimizer.state.get(parameter, {})
        once = {key: value for key, value in state.items() if key not in _per_element(state) and value is not None}
        if wrong := [key for key, value in once.items() if not isinstance(value, Tensor | int | float)]:
            raise UserError(
                f"the optimizer keeps {wrong[0]} of {name} as a {type(once[wrong[0]]).__name__}, which no checkpoint "
                "holds",
                fix="save the model alone: ff.save(model, None, path)",
            )
        if once and placement.is_owner(name, within_copy=outer.is_on):
            found[name] = {outer.prefix + key: value for key, value in once.items()}
    numbers = iter(_floats([value for once in found.values() for value in once.values()]))  # of every rank: they meet
    read = {name: {key: next(numbers) for key in once} for name, once in found.items()}
    return {name: once for name, once in read.items() if _is_first(placement, name)}


def _floats(values: Sequence[Tensor | float]) -> list[float]:
    """Convert numbers and 0-d tensors to floats. Tensors of one device are read together, as each read waits for the
    device."""
    alike: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for at, value in enumerate(values):
        if isinstance(value, DTensor):  # a norm of a parameter: the same on all ranks, or of a whole tensor
            value = value.full_tensor()
        if isinstance(value, Tensor):
            alike.setdefault((value.device, value.dtype), {})[at] = value
    numbers: list[Any] = list(values)
    for tensors in alike.values():
        for at, number in zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True):
            numbers[at] = number
    return [float(number) for number in numbers]


# ---- files -----------------------------------------------------------------------------------------------------------


def write_together(
    snapshot: Snapshot, published: Path, group: dist.ProcessGroup, *, keep: int | None, overwrite: bool = False,
    room: Path | None = None,
) -> list[str]:  # fmt: skip
    """Every rank writes its part, and the first one publishes. Returns the files that this rank wrote. `keep` None: the
    neighbours of the folder are not of its run, and are left alone. `room`: see `Saver`."""
    beside = (room or published.parent) / f"{_BESIDE}{published.name}"
    alone = None if keep else [beside, _damaged(beside)]
    on_first_rank(lambda: _start(beside, published, abandoned=alone, overwrite=overwrite), group)
    told = _told(beside, snapshot, dist.get_rank())
    everyone = plain.on_first(told, group) or ()
    on_first_rank(lambda: _publish(snapshot, everyone, beside, published, keep), group)
    return list(told["files"])


def _start(beside: Path, published: Path, *, abandoned: Sequence[Path] | None = None, overwrite: bool = False) -> None:
    """Create the folder `beside`, after removing interrupted saves: `abandoned`, or, for None, all with such names. If
    one had put the published folder aside without a replacement, it is moved back first."""
    if (stands := standing(published, beside)) != published:
        files.rename(stands, published)
    if not overwrite and is_valid(published):
        or_else = "" if abandoned is None else ", or replace it: overwrite=True"  # a run never rewrites its steps
        raise UserError(f"{published} is published already", fix=f"name a new folder{or_else}")
    is_ours = (published / MANIFEST).exists() or abandoned is None
    if published.exists() and not is_ours and (not published.is_dir() or any(published.iterdir())):
        raise UserError(f"{published} is no checkpoint, and not empty", fix="name a new folder")
    directory = published.parent
    directory.parent.mkdir(parents=True, exist_ok=True)
    files.make_folder(directory)
    files.remove(beside)
    left = [folder for place in {directory, beside.parent} for folder in place.glob(f"{_BESIDE}*")]
    for folder in left if abandoned is None else abandoned:
        _clear_away(folder)
    files.make_folder(beside)


def _damaged(beside: Path) -> Path:
    """The temporary name of a folder that the save `beside` replaces, before its removal."""
    return beside.with_name(f"{_BESIDE}damaged-{beside.name.removeprefix(_BESIDE)}")


def standing(published: Path, beside: Path | None = None) -> Path:
    """The current path of the checkpoint `published`: a save that replaces it, prepared in `beside` (None: its
    neighbour), first puts it aside, where an interrupted save leaves it."""
    if os.path.lexists(published):
        return published
    aside = _damaged(beside or published)
    return aside if (aside / MANIFEST).exists() else published


def _told(folder: Path, snapshot: Snapshot, rank: int) -> dict[str, Any]:
    """The report of `write_part` to the first rank: the tree of the contents, or the error."""
    try:
        return write_part(folder, snapshot, rank).tree()
    except Exception as error:
        return {"error": f"rank {rank}: {error}"}


def write_part(folder: Path, snapshot: Snapshot, rank: int) -> RankRecord:
    """Write this rank's slices, weights and optimizer state in a file each, and read them back."""
    by_file: dict[str, dict[str, OwnedSlice]] = {}
    for one in snapshot.slices:
        by_file.setdefault(file_of(one.kind, rank), {})[one.key] = one
    records: dict[str, FileRecord] = {}
    for file, owned in by_file.items():
        records[file] = shard.write(folder / file, {key: one.values for key, one in owned.items()})
        for key, wrong in shard.check(folder / file, records[file].checksum, owned, owned):
            raise OSError(f"{folder / file}: {key}{': ' * bool(key)}{wrong}")
    numbers: dict[str, int] = {}
    for one in snapshot.slices:
        numbers[one.kind] = numbers.get(one.kind, 0) + one.values.numel()
    return RankRecord(
        files=records, scalars=snapshot.scalars, tensors=_described(snapshot.slices, rank), numbers=numbers
    )


def _described(slices: Sequence[OwnedSlice], rank: int) -> dict[str, dict[str, TensorRecord]]:
    """The tensors that this rank tells of: as the first one that has slices, or as one with others than the rule
    says."""
    owned: dict[tuple[str, str], list[OwnedSlice]] = {}
    for one in slices:
        owned.setdefault((one.kind, one.name), []).append(one)
    found: dict[str, dict[str, TensorRecord]] = {}
    for (kind, name), own in owned.items():
        record, boxes = own[0].record, tuple(sorted(box(one.region) for one in own))
        if boxes != tuple(sorted(record.of_rank(rank))):
            record = replace(record, instead={rank: boxes})
        if record.instead or record.first == rank:
            found.setdefault(kind, {})[name] = record
    return found


def _publish(
    snapshot: Snapshot, told: Sequence[Mapping[str, Any]], beside: Path, published: Path, keep: int | None
) -> None:
    try:
        for part in told:
            if "error" in part:
                raise OSError(part["error"])
        parts = [RankRecord.from_tree(part) for part in told]
        manifest = manifest_of(snapshot, parts, _write_texts(beside, snapshot.texts))
        files.write(beside / MANIFEST, [manifest.to_json().encode()])
        files.sync_folder(beside)
        read_manifest(beside)
    except (OSError, ValueError, TypeError) as error:
        files.remove(beside)
        fix = "is that disk full?" if published.parent.is_dir() else f"{published.parent} was removed meanwhile"
        raise RunFailed(f"checkpoint {published} could not be written: {error}", fix=fix) from error
    if os.path.lexists(published):  # invalid, or to be overwritten: see `_start`
        files.rename(published, _damaged(beside))
    files.rename(beside, published)
    if keep is None:
        _clear_away(_damaged(beside))
    else:
        _retain(published, keep, snapshot.about, room=beside.parent)


def _copy_error(remote: Remote, published: Path, names: Iterable[str]) -> UserError | None:
    try:
        remote.put(published, names)
    except UserError as error:
        return error
    return None


def _texts(model: nn.Module, about: Metadata) -> dict[str, bytes]:
    texts = {"run.yaml": about.config.to_yaml().encode()} if about.config else {}
    model_files = model_folder.model_files(
        model.config,
        model_class=state_of(model).plan.anatomy.model_class,
        dtype=str(dtype_name(next(model.parameters()).dtype)),
        tokenizer=about.tokenizer_dir,
        generation=getattr(model, "generation_config", None),
        came_in=dtype_name(getattr(model.config, "dtype", None)),
        origin=getattr(model, "origin", None),
    )
    return texts | {f"{model_folder.MODEL_FOLDER}/{name}": content for name, content in model_files.items()}


def dtype_name(dtype: torch.dtype | str | None) -> str | None:
    """The dtype's name in config.json: `bfloat16`."""
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _write_texts(folder: Path, texts: Mapping[str, bytes]) -> dict[str, FileRecord]:
    records, folders = {}, sorted({(folder / name).parent for name in texts} - {folder})
    for made in folders:
        files.make_folder(made)
    for name, content in texts.items():
        records[name] = FileRecord(files.write(folder / name, [content]), shard.checksum(content))
    for made in reversed(folders):
        files.sync_folder(made)
    return records


def manifest_of(snapshot: Snapshot, parts: Sequence[RankRecord], texts: dict[str, FileRecord]) -> Manifest:
    scalars: dict[str, dict[str, float]] = {}
    for name, values in (item for part in parts for item in part.scalars.items()):
        scalars.setdefault(name, {}).update(values)
    return Manifest(
        step=snapshot.about.step,
        layout=snapshot.layout,
        versions={package: version(package) for package in _PACKAGES},
        agreement=snapshot.about.agreement,
        state=snapshot.about.state,
        files={file: record for part in parts for file, record in part.files.items()} | texts,
        scalars={name: scalars[name] for name in snapshot.names if name in scalars},
        tensors={
            kind: {name: records[name] for name in snapshot.names if name in records}
            for kind, records in joined(parts).items()
        },
    )


def _retain(published: Path, keep: int, about: Metadata, *, room: Path) -> None:
    """Delete all up to the published one but the newest `keep` and the best; newer ones were passed over on resume, and
    stay.

    They are renamed first, so that no half-deleted folder has a step's name.
    """
    directory = published.parent
    newest = steps_of([published.name])[0]
    there = [step for step in steps(directory) if step <= newest]
    kept = retained(there, keep=keep, best=about.best, keep_best=about.keep_best)
    for step in [step for step in there if step not in kept]:
        doomed = room / f"{_BESIDE}old-{step_folder(step)}"
        _clear_away(directory / step_folder(step), doomed)
    for damaged in room.glob(f"{_BESIDE}damaged-*"):
        _clear_away(damaged)


def _clear_away(old: Path, doomed: Path | None = None) -> None:
    """Remove an earlier save, after renaming it to `doomed`. If that fails, the user is told; the new save goes on."""
    try:
        if doomed:
            files.rename(old, doomed)
        files.remove(doomed or old)
    except OSError as error:
        say(f"WARNING: {old} cannot be removed: {error.strerror}; remove it yourself", stream=sys.stderr)


def on_first_rank(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """Run `action` on rank 0. Its result, which is plain data (`parallel/plain.py`), or its error, is that of every
    rank."""
    result: Any = None
    error: UserError | None = None
    if dist.get_rank() == 0:
        try:
            result = action()
        except UserError as raised:
            error = raised
        except OSError as raised:
            fix = cannot_write("", raised).fix if is_users(raised) else None
            error = RunFailed(f"the run folder could not be read or written: {raised}", fix=fix)
    told = plain.of_first({"result": result, "error": error and error.to_json()}, group)
    if told["error"] is not None:
        raise error or UserError.from_json(told["error"])
    return told["result"]  # type: ignore[no-any-return]
