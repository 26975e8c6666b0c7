"""Sources of weights: a model, the recipe of its initialisation, or safetensors.

Only the requested region is drawn or read.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from fivefold.core import safetensors_header, strict_json
from fivefold.core.alike import WHOLE, sampled
from fivefold.core.cache import key_of
from fivefold.core.errors import UserError, first_line
from fivefold.core.folder_config import check_not_gguf
from fivefold.core.hub import is_inside
from fivefold.core.text import listed
from fivefold.models import hf_internals, merged
from fivefold.models.experts import router_buffers
from fivefold.models.random_stream import Region, whole
from fivefold.models.recipe import check_drawable, draw, read_recipe, stored_buffers

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_SAMPLE = 1024
_READERS = 16  # threads, since a disk is slow to answer and not to deliver
_COMPARED = 2**22  # values of a tensor that are read at once
# Buffers in old exports that every model computes itself.
_COMPUTED = re.compile(r".*\.rotary_emb\.inv_freq|.*\.attn\.(masked_)?bias")


class OtherWeights(UserError):
    """Raised for intact files whose tensors have other names or types than the model's."""


class TensorSource(ABC):
    """Tensors by name, read region by region on the CPU.

    `shapes`: the global shapes of the model's parameters (tied ones once) and persistent buffers. `folder`: a Hugging
    Face folder that they are read from, if it is one. `unread`: names of other tensors in it, which the model has no
    use for.
    """

    shapes: Mapping[str, tuple[int, ...]]
    folder: Path | None = None
    unread: Sequence[str] = ()

    def names(self) -> set[str]:
        return set(self.shapes)

    @property
    def ordered(self) -> tuple[str, ...]:
        """Names in the model's order."""
        return tuple(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    @abstractmethod
    def read(self, name: str, region: Region) -> Tensor:
        """The values of `region`, one slice of step 1 per dim; nothing else is drawn or read."""

    def whole(self, name: str) -> Tensor:
        return self.read(name, whole(self.shape(name)))


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors in a checkpoint of the model: parameters (tied ones under one name) and persistent buffers."""
    kept = model.state_dict(keep_vars=True)
    return {name: kept[name] for name, _ in (*model.named_parameters(), *model.named_buffers()) if name in kept}


class ModelTensors(TensorSource):
    """The parameters of `model` as they are now, and the buffers of its routers. The model may be sharded then."""

    def __init__(self, model: nn.Module) -> None:
        self._tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._tensors |= {name: model.get_buffer(name).clone() for name in router_buffers(model)}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, region: Region) -> Tensor:
        """See `TensorSource`; a view."""
        return self._tensors[name][region]


class RandomInit(TensorSource):
    """Weights drawn by the recipe of the model's own initialisation, in fp32.

    Every element depends on the seed, the parameter's name and its global index alone.
    """

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        """`model` is on the meta device and stays there. Raises `UserError` for unknown initialisers."""
        self._seed = seed
        self._recipe = read_recipe(model)
        stored = stored_tensors(model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        self._dtypes = {name: tensor.dtype for name, tensor in stored.items()}
        check_drawable(self._recipe, stored)

    def read(self, name: str, region: Region) -> Tensor:
        shape, dtype = self.shapes[name], self._dtypes[name]
        return draw(self._recipe[name], name, seed=self._seed, shape=shape, region=region, dtype=dtype)


class SafetensorsFolder(TensorSource):
    """The weights of a Hugging Face folder: `model.safetensors`, or the files that its index names.

    Tensors keep their type in the file. Their names there may be others that `transformers` maps to the model's (a base
    model's, an older class's). A file is open only while a region is read, so only the requested data stays in memory.
    """

    def __init__(self, path: str | Path, model: PreTrainedModel) -> None:
        """`model` (on meta is enough) defines the expected names and shapes.

        Raises `UserError` for a folder without safetensors, file names that lead out of it, damaged files, and names or
        shapes that are not those of the model.
        """
        self.folder = folder = Path(path)
        located = locate(folder)
        self._stored, self._merged = _names(model, located)
        self._files = {name: located[stored] for name, stored in self._stored.items()}
        in_files = _entries(located)
        entries = {name: in_files[stored] for name, stored in self._stored.items()}
        shapes = {name: entry.shape for name, entry in entries.items()}
        for name, pieces in self._merged.items():
            shape = merged.shape_of(pieces, shapes)
            if shape is not None:
                shapes[name], entries[name] = shape, entries[pieces[0].stored]
        inner = {piece.stored for pieces in self._merged.values() for piece in pieces}
        expected = stored_tensors(model)
        self.unread = _check_names(folder, (set(shapes) - inner), set(expected), model)
        _check_shapes(folder, shapes, {name: tuple(tensor.shape) for name, tensor in expected.items()})
        _check_types(folder, entries, expected)
        self.shapes = {name: shapes[name] for name in expected}
        self._check_buffers(model)
        if own := own_heads(folder, model):
            raise UserError(
                f"{folder}: {own[0]} is not the tensor that this model ties it to",
                fix="set tie_word_embeddings: false in its config.json",
            )

    def _check_buffers(self, model: PreTrainedModel) -> None:
        """Raise `UserError` for buffers that differ from the computed ones: checkpoints would lose them."""
        trained = router_buffers(model)
        for name, values in stored_buffers(model).items():
            if name not in trained and not torch.equal(found := self.whole(name), values.to(found.dtype)):
                raise UserError(f"{self.folder} holds other values of the buffer {name} than the model computes")

    def read(self, name: str, region: Region) -> Tensor:
        if name in self._merged:
            pieces = self._merged[name]
            with ExitStack() as stack:
                files = {path: stack.enter_context(_open(path)) for path in {self._files[p.stored] for p in pieces}}
                rows = self.shapes[name][1] // pieces[0].parts
                return merged.read(pieces, rows, region, lambda part, place: self._read(part, place, files))
        with _open(self._files[name]) as file:
            return self._read(name, region, {self._files[name]: file})

    def _read(self, name: str, region: Region, files: Mapping[Path, Any]) -> Tensor:
        path, stored = self._files[name], self._stored[name]
        values = files[path].get_slice(stored)[tuple(region)] if region else files[path].get_tensor(stored)
        return check_numbers(torch.as_tensor(values), stored, path)


def open_weights(path: str | Path, model: PreTrainedModel) -> TensorSource:
    """The weights of a Hugging Face folder, for `model`, read region by region. Quantised weights are dequantised by
    `transformers`, whole, on every rank. Raises `UserError` as `SafetensorsFolder` does, and if dequantising needs
    other packages."""
    try:
        return SafetensorsFolder(path, model)
    except OtherWeights as error:
        method = hf_internals.quantisation(Path(path))
        if method is None:
            raise
        return _dequantised(Path(path), model, method, error)


def _dequantised(folder: Path, model: PreTrainedModel, method: str, found: UserError) -> TensorSource:
    made, why = None, f"transformers needs other packages to make them plain ({found.what})"
    try:
        made = hf_internals.dequantised_model(folder, method)
    except Exception as error:  # a package that is missing, or damaged files
        why = f"transformers cannot make them plain: {first_line(error)}"
    source = made and ModelTensors(made)
    expected = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    if source is None or any(source.shapes.get(name) != shape for name, shape in expected.items()):
        raise UserError(
            f"{folder} holds weights that are quantised ({method}), and {why}",
            fix="name the folder that it was made of; or make it plain once, where its package is installed: "
            "model = AutoModelForCausalLM.from_pretrained(...); model.dequantize(); model.save_pretrained(...)",
        )
    source.folder = folder
    return source


def check_numbers(values: Tensor, name: str, path: Path) -> Tensor:
    """Return the values of a tensor of a file. Raises `UserError` if one is NaN."""
    if values.is_floating_point() and values.sum().isnan() and (bad := int(values.isnan().sum())):  # inf - inf is NaN
        raise UserError(
            f"{path}: {name} is not all numbers: {bad:,} of the {values.numel():,} values read are NaN",
            fix="download the file again, or ask who made it: whatever is computed with it is NaN",
        )
    return values


def _names(model: PreTrainedModel, located: Collection[str]) -> tuple[dict[str, str], merged.Pieces]:
    """{name in the model: name in the files}, and the merged tensors. A tied one has any of its names there."""
    renamed, pieces = hf_internals.names_in_model(model, located)
    stored = {renamed.get(name, name): name for name in located}
    for other, name in hf_internals.tied_parameters(model).items():
        if name not in stored and other in stored:
            stored[name] = stored.pop(other)
    return stored, pieces


def own_heads(folder: Path, model: PreTrainedModel) -> list[str]:
    """Tensors of a folder that `model` ties to another one, but whose values differ in the folder."""
    tied = hf_internals.tied_parameters(model)
    if not tied or not any(folder.glob("*.safetensors")):
        return []
    located = locate(folder)
    stored, _ = _names(model, located)
    places = {name: (located[file], file) for name, file in stored.items()}
    both = [(name, other) for name, other in tied.items() if name in places and other in places]
    return [stored[name] for name, other in both if not _are_equal(places[name], places[other])]


def _are_equal(*tensors: tuple[Path, str]) -> bool:
    with ExitStack() as stack:
        one, other = (stack.enter_context(_open(path)).get_slice(name) for path, name in tensors)
        if one.get_shape() != other.get_shape():
            return False
        rows, step = one.get_shape()[0], max(1, _COMPARED // prod(one.get_shape()[1:]))
        return all(torch.equal(one[at : at + step], other[at : at + step]) for at in range(0, rows, step))


def locate(folder: Path) -> dict[str, Path]:
    """{tensor name: its file}; a single file takes precedence over an index, as in `transformers`."""
    if (folder / _SINGLE).is_file():
        path = _inside(folder, _SINGLE)
        return dict.fromkeys(header(path), path)
    if (folder / _INDEX).is_file():
        weight_map = _read_index(folder / _INDEX)
        files = {file: _inside(folder, file) for file in set(weight_map.values())}
        return {name: files[file] for name, file in weight_map.items()}
    check_not_gguf(folder, is_alone=True)
    pickled = sorted(file.name for file in folder.glob("*.bin"))
    if pickled:
        raise UserError(
            f"{folder} holds its weights in {pickled[0]}, a pickle, which can run code when it is read",
            fix="convert it once where you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)",
        )
    raise UserError(
        f"{folder} holds neither {_SINGLE} nor {_INDEX}", fix="to start from random weights: model.init: random"
    )


def digest_of_samples(folder: Path) -> str:
    """A hash of the weights in a folder, independent of file names: the type and shape of each tensor and `_SAMPLE`
    bytes from its middle. Checkpoints hold it. Raises `UserError`."""
    located, found = locate(folder), list[tuple[str, str, list[int], str]]()
    for name, entry in _entries(located).items():
        with located[name].open("rb") as file:
            file.seek(max(entry.start, (entry.start + entry.stop - _SAMPLE) // 2))
            sample = file.read(min(_SAMPLE, entry.stop - entry.start))
        found.append((name, entry.dtype, list(entry.shape), sample.hex()))
    return key_of(sorted(found))


def folder_digests(folder: Path, file: str = "") -> dict[str, Any]:
    """A digest of each tensor in a folder, by file and by name: its type, its shape and samples of its bytes
    (`core/alike.py`); and as `WHOLE` one of all that does not depend on the files. `file`: only that one, of any name.
    Raises `UserError`."""
    located = dict.fromkeys(header(folder / file), folder / file) if file else locate(folder)
    entries, names = _entries(located), sorted(located, key=lambda name: (located[name].name, name))

    def digest(name: str) -> str:
        entry = entries[name]
        with located[name].open("rb", buffering=0) as opened:
            if hasattr(os, "posix_fadvise"):  # otherwise 128 KiB are read for each sample
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            return sampled(opened.fileno(), entry.start, entry.stop, f"{entry.dtype} {list(entry.shape)}")

    with ThreadPoolExecutor(_READERS) as pool:
        try:
            digests = dict(zip(names, pool.map(digest, names), strict=True))
        except OSError as error:
            raise UserError(f"{error.filename or folder} cannot be read: {error}", fix="download it again") from error
    by_file = groupby(names, key=lambda name: located[name].name)
    return {
        **{path: {name: digests[name] for name in of_file} for path, of_file in by_file},
        WHOLE: key_of(sorted(digests.items())),
    }


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = strict_json.read(path)["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        check_not_gguf(path)
        raise UserError(f"{path} is not an index of safetensors files: {error!r}") from error


def _inside(folder: Path, name: str) -> Path:
    """The file `name` of the folder. No name and no link may leave it (except to the blobs of the hub's cache)."""
    path = folder / name
    try:
        place, is_there = path.resolve(), path.is_file()
    except (ValueError, OSError) as error:  # a NUL, half of a surrogate pair, or too many characters
        what = f"{folder / _INDEX} names {name[:80]!r}, as no file can be called"
        raise UserError(what, fix="download the folder again") from error
    if ".." in Path(name).parts or Path(name).is_absolute() or not is_inside(path, folder):
        how = f"{path} is a link to {place}" if name == _SINGLE else f"{folder / _INDEX} names {name!r}"
        raise UserError(f"{how}, which is not inside the folder", fix="copy the file into the folder")
    if not is_there:
        raise UserError(f"{folder} lacks {name}, which its index names", fix="download the folder again")
    return path


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}", fix="download the file again") from error


def header(path: Path) -> Mapping[str, safetensors_header.Entry]:
    """The tensors of a file, after checking that it is a safetensors file. Raises `UserError`."""
    try:
        with path.open("rb") as file:
            return safetensors_header.read(file)
    except (ValueError, OSError) as error:
        check_not_gguf(path)
        raise UserError(f"{path} cannot be read: {error}", fix="download the file again") from error


def _entries(files: Mapping[str, Path]) -> dict[str, safetensors_header.Entry]:
    found = {}
    for path in sorted(set(files.values())):
        named = {name for name, where in files.items() if where == path}
        entries = header(path)
        absent = named - entries.keys()
        if absent:
            raise UserError(f"{path} lacks {listed(sorted(absent), 6)}, which the index places there")
        found.update({name: entries[name] for name in named})
    return found


def _check_names(folder: Path, found: set[str], expected: set[str], model: PreTrainedModel) -> list[str]:
    """The names that the model allows to leave unread. Raises `OtherWeights` for others, and for missing ones."""
    tied = set(hf_internals.tied_parameters(model))
    others = {name for name in found - expected - tied if not _COMPUTED.search(name)}
    ignored = [re.compile(pattern) for pattern in hf_internals.unexpected_keys_to_ignore(model)]
    unused = {name for name in others if not any(pattern.search(name) for pattern in ignored)}
    missing = expected - found
    if not missing and not unused:
        return sorted(others)
    prefix = f"{hf_internals.base_prefix(model)}."
    base_only = not unused and not any(name.startswith(prefix) for name in missing)
    differences = [
        f"{what} {listed(sorted(names), 6)}" for what, names in (("missing", missing), ("not used", unused)) if names
    ]
    raise OtherWeights(
        f"{folder} does not hold the weights of {type(model).__name__}: {'; '.join(differences)}",
        fix="it holds the base model without its head; save the causal language model" if base_only else None,
    )


def _check_shapes(folder: Path, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    wrong = [f"{name} is {found[name]} there, {shape} here" for name, shape in expected.items() if found[name] != shape]
    if wrong:
        raise UserError(
            f"{folder} has other shapes than the model: {'; '.join(wrong[:4])}"
            + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""),
            fix="does model.overrides change a size that the weights were trained with?",
        )


def _check_types(folder: Path, found: Mapping[str, safetensors_header.Entry], expected: Mapping[str, Tensor]) -> None:
    floats = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    wrong = [name for name in floats if found[name].dtype not in ("F64", "F32", "F16", "BF16")]
    if wrong:
        raise OtherWeights(
            f"{folder} holds {listed(sorted(wrong), 6)} as {found[wrong[0]].dtype}, which are no weights to train",
            fix="a quantised model is trained from the folder that it was made of",
        )
