"""The checkpoints of a run, in its folder and on storage supported by `fsspec`, such as S3.

    s3://bucket/runs/demo/checkpoints/step-000250/    the files of the local folder, under the same names

Such storage has no rename: a step counts once its manifest is there, which is copied last and removed first. Every file
is read back and compared with the original, so that retention never leaves worse copies than it removes.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128

from fivefold.checkpoint.cut import WEIGHT
from fivefold.checkpoint.load import Checkpoint
from fivefold.checkpoint.manifest import MANIFEST, CorruptCheckpoint, Manifest, read_manifest
from fivefold.core import files
from fivefold.core.best import Best, retained
from fivefold.core.cache import cache_root, entry, key_of
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.run_folder import step_folder, steps, steps_of

AT_ONCE = 8 * 2**20  # bytes read and hashed at a time
_STORES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss"}
_FIX = "does the place exist, and may this account read, write and delete there?"


@dataclass(frozen=True)
class CheckpointRef:
    """A step that a run could continue from: its folder in `directory`, or, with `remote`, a copy to fetch there."""

    step: int
    directory: Path
    remote: "Remote | None" = None

    @property
    def where(self) -> str:
        return self.remote.where(self.step) if self.remote else str(self.directory / step_folder(self.step))

    def manifest(self) -> Manifest:
        """Its manifest; its tensors are not compared. Raises `CorruptCheckpoint`, or `UserError` for a later
        version."""
        return self.remote.manifest(self.step) if self.remote else read_manifest(Path(self.where))

    def folder(self) -> Path:
        """Its local folder, fetched if necessary."""
        return self.remote.fetch(self.step, self.directory) if self.remote else Path(self.where)


def candidates(directory: Path, remote: "Remote | None" = None) -> list[CheckpointRef]:
    """The steps in `directory` and their copies in `remote`, the newest first and a folder before its copy."""
    found = [CheckpointRef(step, directory) for step in steps(directory)]
    found += [CheckpointRef(step, directory, remote) for step in (remote.steps() if remote else ())]
    return sorted(found, key=lambda candidate: (-candidate.step, candidate.remote is not None))


def newest(directory: Path) -> Path | None:
    """The folder of the last step in `directory` with an intact manifest; None if there is none."""
    for candidate in candidates(directory):
        with suppress(CorruptCheckpoint):
            candidate.manifest()
            return candidate.folder()
    return None


def best_step(run: str | Path) -> int:
    """The step of the best validation of the run `run`, a folder or the address of its copy. Raises `UserError` if it
    has none, or if the checkpoint of that step is not there."""
    remote = Remote(str(run)) if is_remote(run) else None
    directory = Path(run, "checkpoints")
    there = [CheckpointRef(step, directory, remote) for step in (remote.steps() if remote else steps(directory))]
    best = None
    for candidate in reversed(there):
        with suppress(CorruptCheckpoint):
            best = Best.of_state(candidate.manifest().state)
            break
    if best is None or best.step is None:
        raise UserError(
            f"{run} has no validation with a finite value, so no step of it is the best",
            fix="set eval.every and data.validation before training; without --best, the newest step is taken",
        )
    stand = [step for step in best.steps if step in {candidate.step for candidate in there}]
    if best.step not in stand:
        second = f"of those that are there step {stand[0]} is the best: --step {stand[0]}; " if stand else ""
        raise UserError(
            f"the best validation of {run} was at {best}, and its checkpoint is not there",
            fix=f"{second}checkpoint.keep_best keeps the best ones of a run",
        )
    return best.step


def is_remote(run: str | Path) -> bool:
    """True for the address of a run's copy, such as `s3://bucket/runs/demo`."""
    return "://" in str(run)


def find_checkpoint(run: str | Path, step: int | None = None) -> Checkpoint:
    """The checkpoint of `step` of the run `run`; None: the newest. Its weights are read and compared.

    For a run on remote storage, that step is fetched into the cache once; a copy that has changed there is fetched
    again. Raises `UserError`, and `CorruptCheckpoint` naming the damage; no other step is ever used instead.
    """
    remote = Remote(str(run)) if is_remote(run) else None
    if remote is None and not Path(run).is_dir():
        raise UserError(f"{run} is not a run folder", fix="name a folder such as runs/demo")
    there = remote.steps() if remote else steps(Path(run, "checkpoints"))
    if not there:
        raise UserError(
            f"{run} holds no checkpoint yet", fix="train it first; checkpoint.every sets how often it is saved"
        )
    if step is not None and step not in there:
        raise UserError(f"{run} has no checkpoint of step {step}", fix=f"steps: {', '.join(map(str, there))}")
    wanted = there[-1] if step is None else step
    if remote:
        return entry(
            cache_root() / "checkpoints" / key_of(remote.url, remote.manifest(wanted).checksum),
            read=lambda folder: _opened(folder, wanted),
            build=lambda folder, _: remote.fetch(wanted, folder),
        )
    try:
        return _opened(Path(run, "checkpoints"), wanted)
    except CorruptCheckpoint as damage:
        others = [str(step) for step in there if step != wanted]
        fix = f"choose another step: {', '.join(others)}" if others else "there is no other step"
        raise CorruptCheckpoint(damage.what, fix=fix) from damage


def _opened(directory: Path, step: int) -> Checkpoint:
    checkpoint = Checkpoint.open(directory / step_folder(step))
    checkpoint.verify([WEIGHT])
    return checkpoint


# ---- remote storage --------------------------------------------------------------------------------------------------


class Remote:
    """The copies of one run's checkpoints. Its methods raise `RunFailed` for any error of the storage."""

    def __init__(self, url: str) -> None:
        """`url` is the address of the run folder's copy, such as `s3://bucket/runs/demo`; nothing is contacted yet."""
        self.url = f"{url.rstrip('/')}/checkpoints"

    def steps(self) -> list[int]:
        """The steps with a copied manifest, ascending."""
        with self._answers():
            self._fs.invalidate_cache()
            return [step for step in self._begun() if self._fs.exists(self._path(step, MANIFEST))]

    def put(self, folder: Path, names: Iterable[str]) -> None:
        """Copy these files of a step's local folder and compare the copies with the originals."""
        with self._answers():
            for name in names:
                path = f"{self._root}/{folder.name}/{name}"
                if not self._is_store:
                    self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(folder / name), path)
                with self._fs.open(path, "rb") as copy, (folder / name).open("rb") as original:
                    if _digest(copy) != _digest(original):
                        raise OSError(f"{path} reads back otherwise than it was written")

    def withdraw(self, name: str) -> None:
        """Remove a step's manifest before its files are copied again, so that it no longer counts."""
        with self._answers():
            if self._fs.exists(f"{self._root}/{name}/{MANIFEST}"):
                self._fs.rm_file(f"{self._root}/{name}/{MANIFEST}")

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step's copy. Raises `CorruptCheckpoint`."""
        with self._answers():
            content = self._fs.cat_file(self._path(step, MANIFEST))
        return Manifest.from_json(content.decode(errors="replace"), where=self.where(step))

    def fetch(self, step: int, directory: Path) -> Path:
        """Copy a step into the local `directory`, replacing a damaged folder of that step. Returns the folder."""
        folder = directory / step_folder(step)
        beside = directory / f".tmp-{folder.name}"
        directory.parent.mkdir(parents=True, exist_ok=True)
        files.make_folder(directory)
        files.remove(beside)
        with self._answers():
            for name in (*self.manifest(step).files, MANIFEST):
                (beside / name).parent.mkdir(parents=True, exist_ok=True)
                self._fs.get_file(self._path(step, name), str(beside / name))
                with (beside / name).open("rb") as file:
                    os.fsync(file.fileno())
        if os.path.lexists(folder):
            files.rename(folder, folder.with_name(f".tmp-damaged-{folder.name}"))
        files.rename(beside, folder)
        return folder

    def retain(self, published: str, keep: int, best: Sequence[int] = (), keep_best: int = 0) -> None:
        """Remove all copies up to the step folder `published` but the newest `keep` and those that `retained` adds, and
        the remains of interrupted copies of older steps. Newer ones were passed over on resume, and stay."""
        newest = steps_of([published])[0]
        there = [step for step in self.steps() if step <= newest]
        kept = retained(there, keep=keep, best=best, keep_best=keep_best)
        with self._answers():
            doomed = [step for step in self._begun() if step <= newest and step not in kept]
        for step in doomed:
            self.withdraw(step_folder(step))
            with self._answers():
                self._fs.rm(self._path(step), recursive=True)

    def _begun(self) -> list[int]:
        """The steps with any copied file, ascending."""
        there = self._fs.ls(self._root, detail=False) if self._fs.isdir(self._root) else []
        return steps_of(str(path).rstrip("/").rpartition("/")[2] for path in there)

    def where(self, step: int) -> str:
        return f"{self.url}/{step_folder(step)}"

    @cached_property
    def _located(self) -> tuple[Any, str]:
        from fsspec.core import url_to_fs

        try:
            storage, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise UserError(
                f"checkpoint.remote: {self.url} cannot be reached: {error}",
                fix="S3: pip install 'fivefold[s3]'; for other storage, the fsspec package that error names",
                more="fivefold docs howto/checkpoints",
            ) from error
        return storage, str(root).rstrip("/")

    @property
    def _fs(self) -> Any:
        return self._located[0]

    @property
    def _is_store(self) -> bool:
        """True for object stores, which have no folders: creating one would create a bucket."""
        protocol = self._fs.protocol
        return not _STORES.isdisjoint([protocol] if isinstance(protocol, str) else protocol)

    @property
    def _root(self) -> str:
        return self._located[1]

    def _path(self, step: int, name: str = "") -> str:
        return f"{self._root}/{step_folder(step)}/{name}".rstrip("/")

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Convert errors of the storage to `RunFailed`."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            raise RunFailed(f"{self.url}: {type(error).__name__}: {error}", fix=_FIX) from error


def _digest(file: BinaryIO) -> bytes:
    hasher = xxh3_128()
    while part := file.read(AT_ONCE):
        hasher.update(part)
    return hasher.digest()
