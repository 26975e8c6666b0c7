"""The checkpoints of a run, local and on remote storage, and the one to use for a run's name."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fivefold.checkpoint.cut import WEIGHT
from fivefold.checkpoint.load import Checkpoint
from fivefold.checkpoint.manifest import CorruptCheckpoint, Manifest, read_manifest
from fivefold.checkpoint.remote import Remote
from fivefold.core.best import Best
from fivefold.core.cache import cache_root, entry, key_of
from fivefold.core.errors import UserError
from fivefold.core.step_folders import step_folder, steps


@dataclass(frozen=True)
class CheckpointRef:
    """A step that a run could continue from: its folder in `directory`, or, with `remote`, a copy to fetch there."""

    step: int
    directory: Path
    remote: Remote | None = None

    @property
    def where(self) -> str:
        """Its address, for people."""
        return self.remote.where(self.step) if self.remote else str(self.directory / step_folder(self.step))

    def manifest(self) -> Manifest:
        """Its manifest; its tensors are not compared. Raises `CorruptCheckpoint`, or `UserError` for a later
        version."""
        return self.remote.manifest(self.step) if self.remote else read_manifest(Path(self.where))

    def folder(self) -> Path:
        """Its local folder, fetched if necessary."""
        return self.remote.fetch(self.step, self.directory) if self.remote else Path(self.where)


def candidates(directory: Path, remote: Remote | None = None) -> list[CheckpointRef]:
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
