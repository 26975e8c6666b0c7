"""A job and an engine, as records. An engine turns a job into one file of text, and says which command submits it."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import join

from fivefold.core.errors import UserError
from fivefold.core.units import many

PORT = 29500  # where the ranks meet on the first node, under engines that give no port of their own
WRONG, SAVED = 2, 143  # exit codes: a request that would fail again, and a run that was saved because of SIGTERM


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster, in no engine's words.

    `run`: the run file, as it was given; `text`: its content. `name`: `run.name`; `runs`: `run.dir`, a folder that all
    nodes must see. `devices`: ranks of each node, GPUs unless `on_cpu`. `minutes`: the time it may take; None leaves it
    to the engine. `image`: the container's; empty for none, or for the engine's own. `overrides`: `key=value`. `code`:
    the keys of the run file that name code of the user's own.
    """

    run: Path
    text: str
    name: str
    runs: str
    nodes: int = 1
    devices: int = 8
    on_cpu: bool = False
    minutes: int | None = None
    image: str = ""
    overrides: tuple[str, ...] = ()
    code: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.devices

    @property
    def described(self) -> str:
        """The size of the job in words: `2 nodes, 8 GPUs each`."""
        on = many(self.devices, "rank" if self.on_cpu else "GPU") + (" each" if self.nodes > 1 else "")
        return f"{many(self.nodes, 'node')}, {on}"

    @property
    def head(self) -> str:
        """The first lines of a file, for a comment."""
        return f"{self.command}\n{self.described}. Written by fivefold launch; every line is yours to change."

    def check_image(self, engine: str) -> None:
        """Raise `UserError` for a job without an image."""
        if not self.image:
            raise UserError(
                f"--to {engine} needs an image that has fivefold in it, and none is published",
                fix="build one from the Dockerfile of fivefold, push it, and name it: --image REGISTRY/fivefold:TAG",
                more="docs/start/cluster.md",
            )

    @property
    def label(self) -> str:
        """The name as a DNS label, which Kubernetes and cloud services ask for: `notes-1` of `Notes_1`."""
        return re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40].rstrip("-") or "run"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `fivefold` that train the run: `train notes.yaml train.max_steps=5`."""
        return ("train", self.run.as_posix(), *self.overrides)

    @property
    def command(self) -> str:
        """The command of one rank, on one line for a comment."""
        return " ".join(join(("fivefold", *self.arguments)).split())


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A program that starts jobs on many machines.

    `name`: of `--to`, and of its module. `suffix`: of the file that it reads. `text(job)`: that file, with a comment
    for every decision that an administrator may want to change. Raises `UserError` for a job that it cannot run.
    `submit(file)`: the command that submits the file; `install`: how to get its program, or `package`, a Python package
    that it imports.
    """

    name: str
    title: str
    suffix: str
    text: Callable[[Job], str]
    submit: Callable[[Path], Sequence[str]]
    install: str
    package: str = ""
