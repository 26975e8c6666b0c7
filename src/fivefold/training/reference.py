"""Other models that a run compares with: a reference, for pairs of answers, and a teacher. What they say of its rows is
computed once, under the layout of the run, and cached by a key over all inputs; a step reads it together with the rows.

Of the reference: the log-probabilities of all pairs. Of the teacher: the top-k tokens at every target, ordered by row,
and by target within a row. 1,000 targets and `top_k` 64 are two arrays [1000, 64], int32 tokens and fp32
log-probabilities, 512 bytes a target.
"""

import fcntl
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import PreTrainedModel

from fivefold.checkpoint.agreement import base_source
from fivefold.config import RunConfig
from fivefold.core.cache import cache_root, digest_of_contents, entry, key_of, locked
from fivefold.core.errors import UserError
from fivefold.core.files import cannot_write, take_space
from fivefold.core.integrity import check_file, file_checksum, read_signed, signed
from fivefold.core.units import human_bytes, many
from fivefold.data.batch import IGNORE, MicroBatch, TeacherTargets
from fivefold.data.prepare import PreparedData
from fivefold.data.rows import PackedRows
from fivefold.data.tokenizer import find_tokenizer, tokenizer_files
from fivefold.launch.model import check_positions
from fivefold.launch.world import World
from fivefold.models.build import build_meta, load_model_config, weights_folder
from fivefold.models.forwards import check_lengths
from fivefold.models.sources import TensorSource, open_weights
from fivefold.parallel import passes, plain
from fivefold.parallel.apply import parallelize
from fivefold.parallel.loss.own import TokenLoss
from fivefold.parallel.loss.tasks import TopLogProbs
from fivefold.parallel.plain import on_every_rank
from fivefold.parallel.state import fill, state_of
from fivefold.training.inputs import evaluating, share_of, to_device
from fivefold.training.preference import ObjectiveSpec, Table, table

Found = TypeVar("Found")
_OF_REFERENCE, _OF_TEACHER = 3, 2  # raise when the numbers change
_TOKENS, _LOG_PROBS, _LOCK = "tokens.npy", "log_probs.npy", "lock"
_MORE = "fivefold docs howto/distillation"


def _sign(folder: Path, *names: str) -> None:
    """Write the checksums of the arrays of a cache entry."""
    sums = {name: file_checksum(folder / name) for name in names}
    (folder / "meta.json").write_text(signed(sums), encoding="utf-8")


def _read(folder: Path, root: Path, arrays: Mapping[str, tuple[tuple[int, int], Any]]) -> list[NDArray[Any]]:
    """Map the arrays of a cache entry, which have these shapes and types. Raises `OSError`, `ValueError` or `UserError`
    (damage) if they cannot be used."""
    sums, found = read_signed(folder / "meta.json"), []
    for name, (shape, dtype) in arrays.items():
        check_file(folder / name, sums[name], root)
        array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(f"{folder / name}: {array.dtype} {list(array.shape)}, not {dtype} {list(shape)}")
        found.append(array)
    return found


def _found(read: Callable[[], Found]) -> Found | None:
    """Read a cache entry; None if it is missing or damaged."""
    with suppress(OSError, ValueError, UserError):
        return read()
    return None


# ---- the teacher -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Teacher:
    """The teacher's top-k `tokens` and `log_probs` [targets, K] of `rows`, int64 [R] in ascending order. Row i of these
    has the entries from `offsets[i]` to `offsets[i + 1]`."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    tokens: NDArray[np.int32]
    log_probs: NDArray[np.floating]
    temperature: float
    alpha: float
    told: str = ""  # for the header

    def beside(self, batch: MicroBatch) -> MicroBatch:
        """The micro batch with the teacher's tokens and log-probabilities at its targets."""
        shape = (*batch.labels.shape, self.tokens.shape[1])
        tokens, log_probs = np.zeros(shape, np.int32), np.zeros(shape, self.log_probs.dtype)
        for (at, to), has_target, b in self._of(batch):
            tokens[b, has_target], log_probs[b, has_target] = self.tokens[at:to], self.log_probs[at:to]
        return replace(batch, teacher=TeacherTargets(tokens, log_probs, self.temperature, self.alpha))

    def note(self, batch: MicroBatch, tokens: NDArray[np.int64], log_probs: NDArray[np.float64]) -> None:
        """Store the teacher's output on a micro batch, [B, T, K] each."""
        for (at, to), has_target, b in self._of(batch):
            self.tokens[at:to], self.log_probs[at:to] = tokens[b, has_target], log_probs[b, has_target]

    def _of(self, batch: MicroBatch) -> Iterator[tuple[tuple[int, int], NDArray[np.bool_], int]]:
        """Yield for each row its range in the arrays, the mask of positions with a target, and its index in the batch.
        Raises `ValueError` for rows or targets that the teacher was not asked about."""
        assert batch.rows is not None
        for b, row in enumerate(batch.rows.tolist()):
            if row < 0:
                continue
            place, has_target = int(np.searchsorted(self.rows, row)), batch.labels[b] != IGNORE
            if place == len(self.rows) or self.rows[place] != row:
                raise ValueError(f"the teacher was not asked about row {row}")
            at, to = self.offsets[place : place + 2].tolist()
            if to - at != has_target.sum():
                raise ValueError(f"row {row} has {has_target.sum()} targets, and the teacher was asked about {to - at}")
            yield (at, to), has_target, b


def teacher_of(config: RunConfig, data: PreparedData, world: World, total_steps: int) -> Teacher | None:
    """Teacher outputs for the rows that a run reads; None if the objective has no teacher. Every rank calls this before
    the run's model takes memory. Raises `UserError`, the same on every rank of a machine."""
    if config.objective.name != "distill":
        return None
    given, root = config.objective, cache_root()
    folder = weights_folder(given.teacher)
    hf_config = load_model_config(folder)
    vocabulary = _shared_vocabulary(folder, data, hf_config.get_text_config().vocab_size, given.top_k)
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    check_positions(positions, config.data.seq_length, teacher=given.teacher)
    check_lengths(hf_config, config.data.seq_length)
    rows = _rows(data.whole, total_steps * config.train.global_batch_size)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(data.whole.row_targets[rows])])
    dtype = np.dtype(np.float64 if config.precision.compute == "fp64" else np.float32)
    shape = (int(offsets[-1]), given.top_k)
    precision = [*config.precision.model_dump(exclude={"reduce"}).values()]
    parts = [data.fingerprint, key_of(rows.tolist()), digest_of_contents(folder), hf_config.to_json_string(), precision]
    place = root / "teacher" / key_of(_OF_TEACHER, *parts, given.top_k, vocabulary)
    read = partial(_read, root=root, arrays={_TOKENS: (shape, np.int32), _LOG_PROBS: (shape, dtype)})
    made = partial(Teacher, rows, offsets, temperature=given.temperature, alpha=given.alpha)
    told = f"{given.teacher}: the {given.top_k} likeliest tokens of {many(shape[0], 'target')}"
    is_new = not all(plain.everywhere(world.local_rank > 0 or _found(partial(read, place)) is not None))
    if is_new:
        if world.is_first:
            size = human_bytes(shape[0] * shape[1] * (4 + dtype.itemsize))
            print(f"asking the teacher, {told}: {size} in the cache ...", flush=True)
        with _scratch(root, shape, dtype, world) as (beside, tokens, log_probs):
            _ask(
                config, data, world, build_meta(hf_config, weights=folder), folder, vocabulary, made(tokens, log_probs)
            )
            _keep(beside, place, read)
    tokens, log_probs = read(place)
    held = _probability(log_probs)
    return made(
        tokens, log_probs, told=f"{told}, {held:.1%} of its probability, {'asked now' if is_new else 'from the cache'}"
    )


def _shared_vocabulary(folder: Path, data: PreparedData, size: int, top_k: int) -> int:
    """The number of tokens of the run's tokenizer. Raises `UserError` if the teacher's differ."""
    own = data.tokenizer.vocab_size
    if size < own:
        raise UserError(
            f"the tokenizer has {own} tokens, and objective.teacher {folder} a vocabulary of {size}",
            fix="name a teacher with the tokenizer of the model",
            more=_MORE,
        )
    if top_k > own:
        raise UserError(f"objective.top_k is {top_k}, and there are {own} tokens", fix=f"set objective.top_k: {own}")
    if tokenizer_files(folder):
        theirs = find_tokenizer(str(folder), model="", corpus=(), root=cache_root())
        mine, other = (tokenizer.load().get_vocab(with_added_tokens=True) for tokenizer in (data.tokenizer, theirs))
        wrong = next((text for text in sorted(mine, key=mine.__getitem__) if other.get(text) != mine[text]), None)
        if wrong is not None:
            what = "does not have it" if wrong not in other else f"has it as {other[wrong]}"
            raise UserError(
                f"token {mine[wrong]} of the run is {wrong!r}, and the tokenizer of objective.teacher {folder} {what}",
                fix="name a teacher with the tokenizer of the model, or set tokenizer.name_or_path to the teacher's",
                more=_MORE,
            )
    return own


def _rows(rows: PackedRows, read: int) -> NDArray[np.int64]:
    """The indices of the rows that a run reads when it reads `read` rows, ascending."""
    if read >= rows.epoch_rows:
        return np.arange(len(rows))
    return np.unique(np.array(rows.in_order(range(read)), np.int64))


def _ask(
    config: RunConfig, data: PreparedData, world: World, model: Any, folder: Path, vocabulary: int, found: Teacher
) -> None:
    """Run the teacher over all rows and fill `found` on the first rank of each machine."""
    layout = config.layout.resolve(world.size)
    with _of_teacher(config.objective.teacher):
        parallelize(
            model, layout, device=world.device, source=open_weights(folder, model), seed=config.train.seed,
            loss_chunks=config.memory.chunks,
        )  # fmt: skip
    top_k, placement = found.tokens.shape[1], state_of(model).placement
    dealt = partial(data.whole.sequential, only=found.rows, **share_of(model))
    every_rank = [dealt(data_rank=rank) if world.local_rank == 0 else None for rank in range(layout.data_ranks)]
    device = next(model.parameters()).device
    for own in dealt():
        inputs = to_device(own, device, task=TopLogProbs(top_k, vocabulary))
        with evaluating(model):
            both = torch.stack([values.double() for values in passes.top_log_probs(model, inputs)])
        for data_rank, batches in enumerate(every_rank):
            said = both if placement.data_rank == data_rank else torch.empty_like(both)
            dist.broadcast(said, src=placement.grid.first_of_row(data_rank))
            if batches is not None:
                found.note(next(batches), said[0].cpu().numpy(), said[1].cpu().numpy())
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def _of_teacher(name: str) -> Iterator[None]:
    """Prefix errors raised inside with the name of the teacher."""
    try:
        yield
    except UserError as error:
        raise UserError(f"objective.teacher {name}: {error.what}", fix=error.fix, more=error.more) from error


@contextmanager
def _scratch(
    root: Path, shape: tuple[int, int], dtype: np.dtype[Any], world: World
) -> Iterator[tuple[Path | None, NDArray[np.int32], NDArray[np.floating]]]:
    """A folder with arrays to fill, on the first rank of each machine; on the others None, and empty arrays."""
    with ExitStack() as until_then:

        def begin() -> Any:
            if world.local_rank:
                return None, np.zeros((0, shape[1]), np.int32), np.zeros((0, shape[1]), dtype)
            try:
                beside = until_then.enter_context(_asking(root / "teacher"))
                return beside, *_arrays(beside, root, shape, dtype)
            except OSError as error:
                raise cannot_write(f"to the cache folder {root}", error, instead="move FIVEFOLD_CACHE") from error

        yield on_every_rank(begin)


@contextmanager
def _asking(parent: Path) -> Iterator[Path]:
    """A new folder, removed at the end. First removes the folders left by killed processes: their locks are free."""
    with locked(parent / "asking"):
        for left_behind in parent.glob(".asking.*"):
            _remove_unless_held(left_behind)
        beside = Path(tempfile.mkdtemp(prefix=".asking.", dir=parent))
        lock = (beside / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    with lock:
        try:
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _remove_unless_held(folder: Path) -> None:
    with suppress(OSError), (folder / _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _arrays(beside: Path, root: Path, shape: tuple[int, int], dtype: np.dtype[Any]) -> Any:
    """Arrays to fill, with their disk space reserved. Raises `OSError` or `UserError` if there is not enough."""
    needed = shape[0] * shape[1] * (4 + dtype.itemsize)
    if (free := shutil.disk_usage(root).free) < needed:
        raise UserError(
            f"what the teacher says takes {human_bytes(needed)}, and {human_bytes(free)} are free at {root}",
            fix="lower objective.top_k, free space, or move FIVEFOLD_CACHE",
            more=_MORE,
        )
    arrays = []
    for name, kind in ((_TOKENS, np.dtype(np.int32)), (_LOG_PROBS, dtype)):
        arrays.append(np.lib.format.open_memmap(beside / name, mode="w+", dtype=kind, shape=shape))
        with (beside / name).open("r+b") as file:
            take_space(file.fileno(), 0, os.fstat(file.fileno()).st_size)
    return arrays


def _keep(beside: Path | None, place: Path, read: Any) -> None:
    """Move the arrays into the cache, on the first rank of each machine. Raises `UserError` on every rank."""

    def write(folder: Path, _: str) -> None:
        for name in (_TOKENS, _LOG_PROBS):
            shutil.move(cast(Path, beside) / name, folder / name)
        _sign(folder, _TOKENS, _LOG_PROBS)

    on_every_rank(lambda: beside and entry(place, read=read, build=write))


def _probability(log_probs: NDArray[np.floating]) -> float:
    """The share of the teacher's probability on these tokens: the mean over the first million targets."""
    some = log_probs[:1_000_000]
    return float(np.exp(some, dtype=np.float64).sum(-1).mean()) if len(some) else 0.0


# ---- the reference ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectiveSpecs:
    """The objectives of the steps and evaluations of a run; None: the mean over targets. `told`: describes the
    reference, for the header. `loss`: one of the user's own, in place of cross entropy. `teacher`: of distillation."""

    train: ObjectiveSpec | None = None
    validation: ObjectiveSpec | None = None
    told: str = ""
    loss: TokenLoss | None = None
    teacher: Teacher | None = None


@dataclass(frozen=True)
class Reference:
    """The reference of a run. `source`: its weights; None: the run's first ones. `digest`: a hash of the weights."""

    source: TensorSource | None
    first: TensorSource  # weights of the run
    digest: str

    @classmethod
    def of(cls, config: RunConfig, model: PreTrainedModel) -> "Reference | None":
        """The reference for a model on the meta device, before it is parallelized; None if the objective needs none.
        Raises `UserError` if another model is named as the reference of an adapter."""
        if not config.objective.compares:
            return None
        first = base_source(config, model)
        other = config.objective.reference
        if other not in ("auto", "base") and config.adapter.lora is not None:
            raise UserError(
                f"objective.reference: {other}: an adapter is compared with the model that it is beside",
                fix="leave objective.reference out; or train the whole model, adapter.name: none",
            )
        if other not in ("auto", "base"):
            folder = weights_folder(other)
            return cls(open_weights(folder, model), first, digest_of_contents(folder))
        is_random = config.model.init == "random"
        start = (
            key_of("random", config.train.seed)
            if is_random
            else digest_of_contents(weights_folder(config.model.name_or_path))
        )
        lora = config.adapter.lora
        if lora is not None and lora.quantize != "none":  # the reference has the quantized weights
            start = key_of(start, lora.quantize, lora.targets)
        if config.adapter.path:
            start = key_of(start, config.adapter.model_dump(mode="json"), digest_of_contents(Path(config.adapter.path)))
        return cls(None, first, start)


def goals(config: RunConfig, data: PreparedData, model: Any, compared: Reference | None) -> ObjectiveSpecs:
    """ObjectiveSpecs of a run whose `model` has its first weights, which stay the same. Every rank calls this."""
    objective = config.objective
    if not objective.has_answers:
        return ObjectiveSpecs()
    sides = {"train": data.whole, "validation": data.validation}
    if compared is None:
        return ObjectiveSpecs(ObjectiveSpec(objective), ObjectiveSpec(objective))
    found, computed = dict[str, ObjectiveSpec | None](), 0
    for side, rows in sides.items():
        found[side] = None
        if rows is not None:
            numbers, is_new = _table(config, data, model, compared, side, rows)
            found[side], computed = ObjectiveSpec(objective, numbers), computed + is_new * len(numbers)
    pairs = sum(len(spec.reference) for spec in found.values() if spec and spec.reference is not None)
    how = "computed now" if computed == pairs else "from the cache" if not computed else "in part from the cache"
    name = "the first weights" if compared.source is None else config.objective.reference
    return ObjectiveSpecs(
        found["train"], found["validation"], f"with {name}: log-probabilities of {many(pairs, 'pair')}, {how}"
    )


def _table(
    config: RunConfig, data: PreparedData, model: Any, compared: Reference, side: str, rows: PackedRows
) -> tuple[Table, bool]:
    """Log-probabilities of a side, and whether they were computed now. The first rank reads and writes the cache."""
    root, pairs, device = cache_root(), len(rows.index.pieces), next(model.parameters()).device
    precision = [*config.precision.model_dump(exclude={"reduce"}).values()]
    parts = (data.fingerprint, side, pairs, compared.digest, model.config.to_json_string(), precision)
    folder = root / "reference" / key_of(_OF_REFERENCE, *parts)
    read = partial(_log_probs, root=root, pairs=pairs)
    known = _found(partial(read, folder)) if dist.get_rank() == 0 else None
    if plain.of_first(known is not None):
        shared = torch.zeros(pairs, 2, dtype=torch.float64, device=device)
        if known is not None:
            shared.copy_(torch.from_numpy(known))
        dist.broadcast(shared, 0)
        return shared.cpu().numpy(), False
    if dist.get_rank() == 0:
        with locked(folder):  # fails now, and not after the computation, if the cache cannot be written
            print(f"computing log-probabilities of {many(pairs, 'pair')} ({side}) ...", flush=True)
    with _as_reference(model, compared):
        numbers = table(model, rows.sequential(**share_of(model)), pairs)
    if dist.get_rank() == 0:
        entry(folder, read=read, build=lambda beside, _: _write(beside, numbers))
    dist.barrier()
    return numbers, True


@contextmanager
def _as_reference(model: Any, compared: Reference) -> Iterator[None]:
    """Give the model the weights of the reference inside the block."""
    if compared.source is None:
        yield
        return
    fill(model, compared.source)
    try:
        yield
    finally:
        fill(model, compared.first)


def _write(folder: Path, numbers: Table) -> None:
    np.save(folder / _LOG_PROBS, numbers, allow_pickle=False)
    _sign(folder, _LOG_PROBS)


def _log_probs(folder: Path, root: Path, pairs: int) -> Table:
    """Read a cache entry. Raises as `_read` does."""
    (numbers,) = _read(folder, root, {_LOG_PROBS: ((pairs, 2), np.float64)})
    if not np.isfinite(numbers).all():
        raise ValueError(f"{folder}: not all are finite")
    return np.array(numbers)
