"""The teacher's top-k tokens at every target of a run. They are computed once, before the student is built, under the
layout of the run, and cached by a key over all inputs. A step reads them together with the rows.

Example: 1,000 targets and `top_k` 64 are two arrays [1000, 64], int32 tokens and fp32 log-probabilities: 512 bytes a
target. They are ordered by row, and by target within a row.
"""

import fcntl
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

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
from fivefold.models.sources import open_weights
from fivefold.parallel import passes, plain
from fivefold.parallel.apply import parallelize
from fivefold.parallel.loss.tasks import TopLogProbs
from fivefold.parallel.state import state_of
from fivefold.training.inputs import evaluating, to_device

_VERSION = 2  # raise when the numbers change
_TOKENS, _LOG_PROBS, _LOCK = "tokens.npy", "log_probs.npy", "lock"
_MORE = "fivefold docs howto/distillation"


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
    place = root / "teacher" / key_of(_VERSION, *parts, given.top_k, vocabulary)
    read = partial(_read, root=root, shape=shape, dtype=dtype)
    made = partial(Teacher, rows, offsets, temperature=given.temperature, alpha=given.alpha)
    told = f"{given.teacher}: the {given.top_k} likeliest tokens of {many(shape[0], 'target')}"
    is_new = not all(plain.everywhere(_is_there(partial(read, place)) if world.local_rank == 0 else True))
    if is_new:
        if world.is_first:
            size = human_bytes(shape[0] * shape[1] * (4 + dtype.itemsize))
            print(f"asking the teacher, {told}: {size} in the cache ...", flush=True)
        with _scratch(root, shape, dtype, world) as (beside, tokens, log_probs):
            _ask(
                config, data, world, build_meta(hf_config, weights=folder), folder, vocabulary, made(tokens, log_probs)
            )
            _keep(beside, place, read, world)
    tokens, log_probs = read(place)
    held = _probability(log_probs)
    return made(
        tokens, log_probs, told=f"{told}, {held:.1%} of its probability, {'asked now' if is_new else 'from the cache'}"
    )


def _shared_vocabulary(folder: Path, data: PreparedData, size: int, top_k: int) -> int:
    """The number of tokens that both models share: those of the run's tokenizer. Raises `UserError` if the teacher's
    differ."""
    own = data.tokenizer.vocab_size
    if size < own:
        raise UserError(
            f"the tokenizer has {own} tokens, and objective.teacher {folder} a vocabulary of {size}",
            fix="name a teacher with the tokenizer of the model", more=_MORE,
        )  # fmt: skip
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
    dealt = partial(
        data.whole.sequential, data_ranks=layout.data_ranks, micro_batch_size=layout.micro_batch_size,
        row_multiple=layout.row_multiple, only=found.rows,
    )  # fmt: skip
    every_rank = [dealt(data_rank=rank) if world.local_rank == 0 else None for rank in range(layout.data_ranks)]
    device = next(model.parameters()).device
    for own in dealt(data_rank=placement.data_rank):
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


# ---- in the cache ----------------------------------------------------------------------------------------------------


@contextmanager
def _scratch(
    root: Path, shape: tuple[int, int], dtype: np.dtype[Any], world: World
) -> Iterator[tuple[Path | None, NDArray[np.int32], NDArray[np.floating]]]:
    """A folder with arrays to fill, on the first rank of each machine; on the others None, and empty arrays."""
    with ExitStack() as until_then:
        failed, beside = None, None
        arrays: Any = (np.zeros((0, shape[1]), np.int32), np.zeros((0, shape[1]), dtype))
        if not world.local_rank:
            try:
                beside = until_then.enter_context(_asking(root / "teacher"))
                arrays = _arrays(beside, root, shape, dtype)
            except OSError as error:
                failed = cannot_write(f"to the cache folder {root}", error, instead="move FIVEFOLD_CACHE").to_json()
            except UserError as error:
                failed = error.to_json()
        if told := next(filter(None, plain.everywhere(failed)), None):
            raise UserError.from_json(told)
        yield beside, *arrays


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


def _keep(beside: Path | None, place: Path, read: Any, world: World) -> None:
    """Move the arrays into the cache, on the first rank of each machine. Raises `UserError` on every rank."""
    failed = None
    if beside is not None:

        def write(folder: Path, _: str) -> None:
            sums = {name: file_checksum(beside / name) for name in (_TOKENS, _LOG_PROBS)}
            for name in sums:
                shutil.move(beside / name, folder / name)
            (folder / "meta.json").write_text(signed(sums), encoding="utf-8")

        try:
            entry(place, read=read, build=write)
        except UserError as error:
            failed = error.to_json()
    if told := next(filter(None, plain.everywhere(failed)), None):
        raise UserError.from_json(told)


def _is_there(read: Any) -> bool:
    try:
        read()
    except (OSError, ValueError, UserError):
        return False
    return True


def _read(
    folder: Path, root: Path, shape: tuple[int, int], dtype: np.dtype[Any]
) -> tuple[NDArray[np.int32], NDArray[np.floating]]:
    """Read a cache entry. Raises `OSError`, `ValueError` or `UserError` (damage) if it cannot be used."""
    sums = read_signed(folder / "meta.json")
    for name in (_TOKENS, _LOG_PROBS):
        check_file(folder / name, sums[name], root)
    tokens, log_probs = (np.load(folder / name, mmap_mode="r", allow_pickle=False) for name in (_TOKENS, _LOG_PROBS))
    if tokens.shape != shape or log_probs.shape != shape or tokens.dtype != np.int32 or log_probs.dtype != dtype:
        raise ValueError(f"{folder}: {tokens.dtype} {list(tokens.shape)}, {log_probs.dtype} {list(log_probs.shape)}")
    return tokens, log_probs


def _probability(log_probs: NDArray[np.floating]) -> float:
    """The share of the teacher's probability on these tokens: the mean over the first million targets."""
    some = log_probs[:1_000_000]
    return float(np.exp(some, dtype=np.float64).sum(-1).mean()) if len(some) else 0.0
