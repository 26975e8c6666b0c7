"""Compile C on this machine: find a compiler, build shared libraries once and cache them. No torch here."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from fivefold.core.cache import entry, key_of
from fivefold.core.code_cache import code_folder
from fivefold.core.errors import RunFailed
from fivefold.core.integrity import file_checksum
from fivefold.core.interrupts import sigterm_raises

INSTALL = "install gcc (Debian, Ubuntu: apt install gcc)"
LONGEST = 120.0  # seconds of one compilation: usually 1 to 3, ten times that on a busy machine
_COMPILERS = ("cc", "gcc", "clang")
_CHECKSUM = "checksum"  # file next to a library
Loaded = TypeVar("Loaded")


class UnusableCompiler(RunFailed):
    """The compiler itself fails: other compiler options would not help."""


def compiler() -> str | None:
    """Path of a C compiler on this machine; None if there is none."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def compile_library(sources: Sequence[str], out: Path, options: Iterable[str] = ()) -> None:
    """Compile C sources to the shared library `out`; the compiler's temporary files go to its folder.

    Raises `RunFailed` with the compiler's first error, `UnusableCompiler` if it does not start or finish.
    """
    command = [compiler() or "cc", "-shared", "-fPIC", *sources, "-o", str(out), *options]
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True, env=os.environ | {"TMPDIR": str(out.parent)},
        ) as started:  # fmt: skip
            try:
                _, said = started.communicate(timeout=LONGEST)
            except BaseException:  # the whole group: its children hold the output open
                os.killpg(started.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        raise UnusableCompiler(
            f"{command[0]} has not compiled {Path(sources[0]).name} in {LONGEST:.0f} s", fix="try another C compiler"
        ) from None
    except OSError as error:
        raise UnusableCompiler(f"{command[0]} does not start: {error}", fix=INSTALL) from error
    if started.returncode:
        first = next((line for line in said.splitlines() if "error" in line), said.strip())
        first = first or f"{command[0]} ended with {started.returncode} and no word"
        raise RunFailed(f"{Path(sources[0]).name} does not compile: {first}", fix="try another C compiler")


def kept_library(
    kind: str, name: str, key: Sequence[object], *, build: Callable[[Path], object], load: Callable[[Path], Loaded]
) -> Loaded:
    """Load the library `name` with `load(library)` from the user's folder for code of a kind ("kernels").

    `build(library)` compiles it first if there is none for this compiler and `key`, or if it is damaged. Raises
    `UnusableCompiler` if there is no compiler, `UserError` if it cannot be kept, and what `build` and `load` raise.
    """
    if compiler() is None:
        raise UnusableCompiler("there is no C compiler", fix=INSTALL)

    def build_and_seal(library: Path) -> None:
        build(library)
        library.with_name(_CHECKSUM).write_text(file_checksum(library), encoding="ascii")

    def load_whole(library: Path) -> Loaded:
        if library.with_name(_CHECKSUM).read_text(encoding="ascii") != file_checksum(library):
            raise ValueError(f"{library} is damaged")
        return load(library)

    with sigterm_raises():  # otherwise the compiler would go on
        return entry(
            code_folder(kind) / key_of(compiler(), *key),
            read=lambda folder: load_whole(folder / name),
            build=lambda folder, _: build_and_seal(folder / name),
        )
