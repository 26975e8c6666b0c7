"""Writing a checkpoint: every rank writes the slices it owns, beside; the first rank publishes them by one rename.

In order: collect the slices that this rank owns, write them, gather the descriptions, write the manifest, rename, and
only then delete what retention no longer keeps. Whoever is killed on the way leaves the published steps as they were
and a `.tmp-` folder that the next save clears away.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from fivefold.checkpoint import model_folder
from fivefold.checkpoint.load import is_whole, step_folder, steps
from fivefold.checkpoint.manifest import NAME, WEIGHT, Manifest, Slice, TensorRecord
from fivefold.config import RunConfig
from fivefold.errors import RunFailed, UserError
from fivefold.parallel.apply import spread_of
from fivefold.parallel.data import reshard
from fivefold.parallel.tensor import local

_PACKAGES = ("fivefold", "torch", "transformers", "safetensors")
_BESIDE = ".tmp-"
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class About:
    """What a checkpoint says beside its tensors. All of it is JSON or becomes a file; `None`: left out."""

    step: int
    state: Mapping[str, Any]
    agreement: Mapping[str, Any]
    config: RunConfig | None
    tokenizer_dir: Path | None


@dataclass(frozen=True)
class OwnedSlice:
    """A block of a tensor that this rank writes. `values` may be a view of the live tensor."""

    kind: str
    name: str
    offset: tuple[int, ...]
    values: Tensor

    @property
    def key(self) -> str:
        """Names the tensor and the range, so that a slice that lands elsewhere can be told."""
        ranges = ",".join(f"{start}:{start + size}" for start, size in zip(self.offset, self.values.shape, strict=True))
        return f"{self.kind}:{self.name}[{ranges}]"


@dataclass
class _Part:
    """What one rank wrote, as the first rank is told; `error` when it could not."""

    slices: list[tuple[str, str, str, Slice]] = field(default_factory=list)  # kind, name, dtype, slice
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    error: str | None = None


def save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    *,
    step: int,
    state: Mapping[str, Any],
    keep: int,
    agreement: Mapping[str, Any] | None = None,
    config: RunConfig | None = None,
    tokenizer_dir: Path | None = None,
) -> Path:
    """Save weights and optimizer state as `directory/step-NNNNNN`; every rank calls it and waits for its publication.

    `state` is JSON and comes back as `Checkpoint.state`, `agreement` likewise; the resolved `config` and the files of
    `tokenizer_dir` are kept with the weights. `keep`: how many of the newest checkpoints remain. Raises, on all
    ranks, `UserError` when the step is published already and `RunFailed` when it cannot be written.
    """
    about = About(step=step, state=state, agreement=agreement or {}, config=config, tokenizer_dir=tokenizer_dir)
    beside = directory / f"{_BESIDE}{step_folder(step)}"
    reshard(model)
    on_first_rank(lambda: _start(beside, directory / step_folder(step)))
    part = _write(beside, collect(model, optimizer), _scalars(model, optimizer))
    parts: list[_Part] = [part] * dist.get_world_size()
    dist.gather_object(part, parts if dist.get_rank() == 0 else None)
    return on_first_rank(lambda: _publish(model, parts, beside, directory / step_folder(step), about, keep))


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[OwnedSlice]:
    """The slices of weights and optimizer state that this rank owns: over all ranks, every element once."""
    spread = spread_of(model)
    for name, parameter in model.named_parameters():
        if not spread.is_owner(name):
            continue
        tensors = {WEIGHT: parameter.detach(), **_per_element(optimizer.state.get(parameter, {}))}
        for kind, tensor in tensors.items():
            for global_region, local_region in spread.regions(name):
                yield OwnedSlice(kind, name, tuple(s.start for s in global_region), local(tensor)[local_region])


def _per_element(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim > 0}


def _scalars(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, float]]:
    """Per parameter what the optimizer keeps once, such as its step count."""
    spread = spread_of(model)
    found = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        scalars = {key: float(value) for key, value in state.items() if key not in _per_element(state)}
        if scalars and spread.is_owner(name):
            found[name] = scalars
    return found


# ---- files -----------------------------------------------------------------------------------------------------------


def _start(beside: Path, published: Path) -> None:
    if is_whole(published):
        raise UserError(f"{published} is published already; a checkpoint is never rewritten")
    beside.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in beside.parent.glob(f"{_BESIDE}*"):
        shutil.rmtree(abandoned)
    beside.mkdir()


def _write(folder: Path, owned: Iterator[OwnedSlice], scalars: dict[str, dict[str, float]]) -> _Part:
    """Write this rank's slices, weights and optimizer state in a file each; nothing if it owns none."""
    part, rank = _Part(scalars=scalars), dist.get_rank()
    tensors: dict[str, dict[str, Tensor]] = {}
    for one in owned:
        file = f"{WEIGHT if one.kind == WEIGHT else 'optimizer'}-{rank:05d}.safetensors"
        tensors.setdefault(file, {})[one.key] = one.values.cpu().contiguous()
        described = Slice(one.offset, tuple(one.values.shape), file, one.key)
        part.slices.append((one.kind, one.name, str(one.values.dtype).removeprefix("torch."), described))
    try:
        for file, content in tensors.items():
            save_file(content, folder / file)
            _sync(folder / file)
            part.files[file] = (folder / file).stat().st_size
    except Exception as error:  # safetensors has its own kind for a full disk
        part.error = f"rank {rank}: {error}"
    return part


def _publish(model: nn.Module, parts: Sequence[_Part], beside: Path, published: Path, about: About, keep: int) -> Path:
    try:
        if errors := [part.error for part in parts if part.error]:
            raise OSError(errors[0])
        manifest = _manifest(model, parts, _write_texts(model, beside, about), about)
        _write_text(beside / NAME, manifest.to_json().encode())
        _sync(beside)
    except (OSError, ValueError, TypeError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunFailed(f"checkpoint {published} could not be written: {error}", fix="is that disk full?") from error
    if published.exists():  # not whole, or `_start` would have refused
        shutil.rmtree(published)
    os.rename(beside, published)
    _sync(published.parent)
    _retain(published.parent, keep)
    return published


def _write_texts(model: nn.Module, folder: Path, about: About) -> dict[str, int]:
    """Write `run.yaml` and `model/`; their sizes by path."""
    texts = {"run.yaml": about.config.to_yaml().encode()} if about.config else {}
    origin = Path(about.config.model.name_or_path) if about.config else None
    model_files = model_folder.model_files(
        model.config,
        model_class=spread_of(model).anatomy.model_class,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        tokenizer=about.tokenizer_dir,
        origin=origin,
    )
    texts |= {f"{model_folder.FOLDER}/{name}": content for name, content in model_files.items()}
    (folder / model_folder.FOLDER).mkdir()
    for name, content in texts.items():
        _write_text(folder / name, content)
    _sync(folder / model_folder.FOLDER)
    return {name: len(content) for name, content in texts.items()}


def _manifest(model: nn.Module, parts: Sequence[_Part], texts: dict[str, int], about: About) -> Manifest:
    spread = spread_of(model)
    found: dict[str, dict[str, list[Slice]]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for kind, name, dtype, one in (described for part in parts for described in part.slices):
        found.setdefault(kind, {}).setdefault(name, []).append(one)
        dtypes[kind, name] = dtype
    scalars = {name: values for part in parts for name, values in part.scalars.items()}
    return Manifest(
        step=about.step,
        layout=str(spread.layout),
        versions={package: version(package) for package in _PACKAGES},
        agreement=about.agreement,
        state=about.state,
        files={file: size for part in parts for file, size in part.files.items()} | texts,
        scalars={name: scalars[name] for name in spread.shards if name in scalars},
        tensors={
            kind: {
                name: TensorRecord(spec.shape, dtypes[kind, name], tuple(slices[name]))
                for name, spec in spread.shards.items()
                if name in slices
            }
            for kind, slices in found.items()
        },
    )


def _retain(directory: Path, keep: int) -> None:
    """Delete all but the newest `keep`: renamed first, so that no half-deleted folder carries a step's name."""
    for step in steps(directory)[:-keep]:
        doomed = directory / f"{_BESIDE}old-{step_folder(step)}"
        os.rename(directory / step_folder(step), doomed)
        shutil.rmtree(doomed)


def _write_text(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _sync(path)


def _sync(path: Path) -> None:
    """Put a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def on_first_rank(action: Callable[[], Result]) -> Result:
    """Run `action` on rank 0; its result, or its error, on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except UserError as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = RunFailed(f"the run folder could not be read or written: {error}")
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]
