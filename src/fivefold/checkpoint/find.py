"""The checkpoint that someone means who names a run: its newest step or a certain one, here or on remote storage."""

import shutil
from pathlib import Path

from fivefold.checkpoint.load import Checkpoint, newest
from fivefold.checkpoint.manifest import WEIGHT, CorruptCheckpoint
from fivefold.checkpoint.remote import Remote
from fivefold.core.errors import UserError
from fivefold.core.step_folders import step_folder, steps
from fivefold.data.cache import cache_root, entry, key_of


def is_remote(run: str | Path) -> bool:
    """Whether this is the address of a run's copy, such as `s3://bucket/runs/demo`."""
    return "://" in str(run)


def find_checkpoint(run: str | Path, step: int | None = None) -> Checkpoint:
    """The checkpoint of `step` of the run `run`; None: the newest. Its weights are read and compared.

    Of a run on remote storage that step is fetched into the cache, once. Raises `UserError`, and `CorruptCheckpoint`
    naming what is wrong with it; another one is never taken in its place.
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
    try:
        return _opened(_fetched(remote, wanted) if remote else Path(run, "checkpoints"), wanted)
    except CorruptCheckpoint as damage:
        if remote:
            shutil.rmtree(_fetched(remote, wanted))  # the copy in the cache; once more
            return _opened(_fetched(remote, wanted), wanted)
        others = [str(each) for each in there if each != wanted]
        fix = f"choose another step: {', '.join(others)}" if others else "there is no other step"
        raise CorruptCheckpoint(damage.what, fix=fix) from damage


def _opened(directory: Path, step: int) -> Checkpoint:
    checkpoint = Checkpoint.open(directory / step_folder(step))
    checkpoint.verify([WEIGHT])
    return checkpoint


def _fetched(remote: Remote, step: int) -> Path:
    """A folder of the cache that holds this step; a copy that has changed since is fetched again."""

    def read(folder: Path) -> Path:
        if newest(folder) is None:
            raise ValueError(f"{folder} holds no whole checkpoint")
        return folder

    name = key_of(remote.url, remote.manifest(step).to_json())
    return entry(cache_root() / "checkpoints" / name, read=read, build=lambda folder, _: remote.fetch(step, folder))
