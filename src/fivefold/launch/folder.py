"""The run folder: its name, its contents before the first step, and the lock of its one writer."""

import errno
import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from shlex import quote

from fivefold.config import RunConfig, load_config
from fivefold.core import json_lines
from fivefold.core.errors import UserError
from fivefold.core.files import cannot_write, check_place, replace, writing
from fivefold.core.run_folder import steps
from fivefold.parallel.layout import Layout

LOCK = ".lock"
_PATIENCE = 70.0  # seconds: NFS remembers for up to 60 that a file was not there
INSTEAD = "set run.dir to a folder you can write to"


def claim_fresh(config: RunConfig) -> RunConfig:
    """The same config under an unused run name (`demo`, `demo-2`, ...); its folder is created to claim the name."""
    base = config.run.name
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        folder = Path(config.run.dir) / name
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise cannot_write(folder, error, instead=INSTEAD) from error
        return named(config, name)
    raise AssertionError("count() never ends")


def named(config: RunConfig, name: str) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def open_folder(config: RunConfig, *, is_shared: bool = False) -> Path:
    """Make the run folder and return its `logs/`. Raises `UserError` when another run writes to it. `is_shared`: with
    the other nodes of this run.

    A new folder gets the resolved `run.yaml`. An existing `run.yaml` is replaced only after the resume checks have
    passed, in the workers.
    """
    logs = config.run_dir / "logs"
    with writing(config.run_dir, instead=INSTEAD):
        logs.mkdir(parents=True, exist_ok=True)
        FolderLock(
            config.run_dir, is_shared=is_shared
        ).release()  # refuse a folder in use before touching anything in it
        check_place(config.run_dir / "checkpoints" / "step-*", instead=INSTEAD)  # perhaps on another disk
        if not (config.run_dir / "run.yaml").exists():
            replace(config.run_dir / "run.yaml", config.to_yaml().encode())
    return logs


def holder_of(folder: Path) -> str:
    """The note of `open_folder` in the lock of a run folder: its process and host, "" on a disk without locks."""
    return (folder / LOCK).read_text(encoding="utf-8")


def check_shared(folder: Path, holder: str, patience: float = _PATIENCE) -> None:
    """Raise `UserError` on a node whose run folder is not the one that the first rank has opened, and where `holder_of`
    said `holder`. Its checkpoints could not be written."""
    end = time.monotonic() + patience
    while True:
        with suppress(OSError):
            if holder_of(folder) == holder:
                return
        if time.monotonic() > end:
            raise UserError(
                f"{folder} of {socket.gethostname()} is not the folder that rank 0 has opened: it is on another disk",
                fix="set run.dir to a folder that all nodes see",
                more="fivefold docs start/cluster",
            )
        time.sleep(0.5)


def began_with(config: RunConfig, world: int) -> Layout | None:
    """The layout of the existing run in the folder of `config`, if `config` asks for the same model and rows and sets
    nothing else of the layout; None otherwise, or if it does not fit `world` ranks."""
    if not (config.run_dir / "run.yaml").is_file():
        return None
    try:
        before = load_config(config.run_dir)
        layout = before.layout.resolve(world)
    except UserError:
        return None
    keeps = all(value in (getattr(layout, name), -1) for name, value in config.given.items())
    asks_the_same = (before.model, before.data, before.train.global_batch_size) == (
        config.model, config.data, config.train.global_batch_size,
    )  # fmt: skip
    return layout if keeps and asks_the_same and layout.precision == config.precision.compute else None


def last_logged_step(config: RunConfig) -> int:
    """The step of the last whole line of `metrics.jsonl`; 0 if there is none."""
    path = config.run_dir / "metrics.jsonl"
    found = re.findall(rb'^{"step": (\d+),.*}$', path.read_bytes()[-100_000:], re.MULTILINE) if path.is_file() else []
    return int(found[-1]) if found else 0


def last_saved_step(config: RunConfig) -> int:
    """The step of the newest published checkpoint; 0 if there is none."""
    return max(steps(config.run_dir / "checkpoints"), default=0)


def best_kept_step(config: RunConfig) -> int | None:
    """The step of the best validation by the rows of `metrics.jsonl`; None if its checkpoint is not there."""
    try:
        rows = json_lines.read(config.run_dir / "metrics.jsonl").rows
    except OSError:
        return None
    best = next((row["eval/best_step"] for row in reversed(rows) if row.get("eval/best_step") is not None), None)
    return best if best in steps(config.run_dir / "checkpoints") else None


def next_commands(
    config: RunConfig, *, step: int, total_steps: int, best: int | None = None, stopped_early: bool = False,
    by_own_part: bool = False, converses: bool = False,
) -> list[str]:  # fmt: skip
    """The commands to suggest after a run, or after it was stopped: each line can be pasted into a shell. `best`: the
    step of the best validation, if its checkpoint is kept. `stopped_early`: no validation improved, or
    `by_own_part` of the user's. `converses`: it was trained on conversations."""
    run = quote(str(config.run_dir))
    asked = [
        str(turn.get("content")) for turns in config.sample.messages for turn in turns if turn.get("role") == "user"
    ]
    texts, otherwise = (asked, "Hello") if converses else (config.sample.prompts, "The")
    prompt = next((text for text in texts if text.isprintable()), otherwise)
    hf = config.run_dir / "hf"
    is_best_older = best is not None and best != step
    longer = f"fivefold train {run}" + (f" train.max_steps={2 * total_steps}" if step >= total_steps else "")
    longer += (" 'train.parts=[]'" if by_own_part else " eval.stop.patience=0") if stopped_early else ""
    at_best, chosen = (f" --step {best}", " --best") if is_best_older else ("", "")
    uses = [
        f"fivefold report {run}",
        f"fivefold generate {run}{at_best}{' --chat' * converses} --prompt {quote(prompt)}",
    ]
    uses += [] if hf.exists() else [f"fivefold export {run} {quote(str(hf))}{chosen}"]
    goes_on = f"{longer}   # {'makes it longer' if step >= total_steps else 'goes on'}"
    return [*uses, goes_on] if step >= total_steps or stopped_early else [goes_on, *uses]


@contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """Inside, this process keeps other runs out of the folder, with the other nodes of its run. Raises `UserError`."""
    lock = FolderLock(run_dir, is_shared=True)
    try:
        yield
    finally:
        lock.release()


class FolderLock:
    """The lock of the one process that writes to a run folder; the system drops it when the process ends."""

    def __init__(self, run_dir: Path, *, instead: str = "take another run.name", is_shared: bool = False) -> None:
        """Take the lock of `run_dir`, which exists. Raises `UserError` naming the process that holds it. `instead`: the
        advice if that process is not to end. `is_shared`: with the other nodes of the same run.

        On a filesystem without locks there is nothing to take.
        """
        self._descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                return
            owner = os.read(self._descriptor, 1000).decode(errors="replace").strip()
            self.release()
            raise UserError(
                f"another run writes to {run_dir}: {owner or 'its owner is not known'}",
                fix=f"wait for it, end it, or {instead}",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())

    def is_at(self, path: Path) -> bool:
        """True if the locked file is still the one at `path`."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except OSError:
            return False

    def release(self) -> None:
        os.close(self._descriptor)
