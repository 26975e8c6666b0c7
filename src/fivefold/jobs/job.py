"""A job and an engine, as records. An engine turns a job into one file of text, and says which command submits it."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from hashlib import sha256
from pathlib import Path
from shlex import join

from fivefold.core.errors import UserError
from fivefold.core.files import expanded
from fivefold.core.plain_yaml import quoted, reads_back
from fivefold.core.units import many

PORT = 29500  # where the ranks meet on the first node, under engines that give no port of their own
WRONG, SAVED = 2, 143  # exit codes: a request that would fail again, and a run that was saved because of SIGTERM
LEFT = "runs"  # the folder that engines leave behind, of those that copy the current folder: its files are large
_LABEL = 40  # characters of a label: engines add to it, and Kubernetes ends at 63
_DIGEST = 6  # of a label that does not tell the whole name


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on a cluster, in no engine's words.

    `run`: the run file, as it was given; `text`: its content. `name`: `run.name`; `runs`: `run.dir`, a folder that all
    nodes must see. `devices`: ranks of each node, GPUs unless `on_cpu`. `minutes`: the time it may take; None leaves it
    to the engine. `image`: the container's; empty for none, or for the engine's own. `overrides`: `key=value`. `code`:
    the files with code of the user's own, by the key that names them, as it names them. `files`: all files and folders
    by their keys, code too, as the current folder names them; of what has no path here, such as a hub id, its name.
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
    code: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
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
        if not self.image:
            raise UserError(
                f"--to {engine} needs an image that has fivefold in it, and none is published",
                fix="build one from the Dockerfile of fivefold, push it, and name it: --image REGISTRY/fivefold:TAG",
                more="fivefold docs start/cluster",
            )

    def check_travels(self, engine: str, *, left: str = "", shares_disks: bool = False) -> None:
        """Raise `UserError` for a file that a node has not to which `engine` copies the current folder, without its
        folder `left`. `shares_disks`: a whole path may be one that the nodes see as this machine does."""
        run = str(self.run)
        for key, name in {"the run file": run, **self.files}.items():
            path = self.run if name == run else expanded(name)
            top = Path(os.path.normpath(path)).parts[:1]
            if path.is_absolute():  # one that is not here may be there
                stays = name == run or (not shares_disks and bool(glob(str(path))))
            else:
                stays = top == ("..",) or (top == (left,) and bool(glob(name)))
            if stays:
                raise UserError(
                    f"{key}: {name} does not travel: {engine} copies the current folder to the nodes"
                    + (f", without {left}" if left else ""),
                    fix="cd to the folder of the run file, and name it from there"
                    if name == run
                    else "copy it below the current folder, and name it from there",
                    more="fivefold docs start/cluster",
                )

    @property
    def label(self) -> str:
        """The name as a DNS label that begins with a letter, which Kubernetes and cloud services ask for: `notes-1` of
        `Notes_1`. Names that are longer, or of other letters, end with a digest: two of them are two labels."""
        label = re.sub("[^a-z0-9]+", "-", self.name.lower()).strip("-")
        label = label if label[:1].isalpha() else f"run-{label}".rstrip("-")
        if len(label) <= _LABEL and self.name.isascii():
            return label
        digest = sha256(self.name.encode()).hexdigest()[:_DIGEST]
        return f"{label[: _LABEL - _DIGEST - 1].rstrip('-')}-{digest}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `fivefold` that train the run: `train notes.yaml train.max_steps=5`."""
        return ("train", no_option(self.run), *self.overrides)

    @property
    def command(self) -> str:
        """The command of one rank, on one line for a comment. YAML has no place for control characters in comments."""
        line = " ".join(join(("fivefold", *self.arguments)).split())
        return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in line)


def override(key: str, text: str) -> str:
    """`key=value` of a text, whose value is read as YAML."""
    return f"{key}={text if reads_back(text) else quoted(text)}"


def no_option(file: Path) -> str:
    """The file in a command: one whose name begins with `-` would be read as an option."""
    return f"./{file.as_posix()}" if file.as_posix().startswith("-") else file.as_posix()


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
