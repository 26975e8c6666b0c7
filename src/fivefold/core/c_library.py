"""C compiled on this machine: which compiler, and shared libraries that are compiled once and kept. No torch here."""

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
LONGEST = 120.0  # seconds of one compiler: it takes 1 to 3, on a machine that others keep busy ten times that
_COMPILERS = ("cc", "gcc", "clang")
_CHECKSUM = "checksum"  # of a library, beside it
Loaded = TypeVar("Loaded")


class UnusableCompiler(RunFailed):
    """Other options would come to the same."""


def compiler() -> str | None:
    """A C compiler of this machine."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def compile_library(sources: Sequence[str], out: Path, options: Iterable[str] = ()) -> None:
    """Compile C sources to the shared library `out`, in whose folder the compiler's temporary files are.

    Raises `RunFailed` with the compiler's first error, `UnusableCompiler` where it does not start or end.
    """
    command = [compiler() or "cc", "-shared", "-fPIC", *sources, "-o", str(out), *options]
    try:
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors="replace", start_new_session=True, env=os.environ | {"TMPDIR": str(out.parent)},
        ) as started:  # fmt: skip
            try:
                _, said = started.communicate(timeout=LONGEST)
            except BaseException:  # with what it has started, which holds its output open
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
    """What `load(library)` gives, of the library `name` which `build(library)` compiles if there is none for the same
    compiler and `key` in the user's folder for code of a kind ("kernels"), or if it is damaged.

    Raises `UnusableCompiler` where there is no compiler, what `build` and `load` raise, and `UserError` where it cannot
    be kept.
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

    with sigterm_raises():  # the compiler would go on
        return entry(
            code_folder(kind) / key_of(compiler(), *key),
            read=lambda folder: load_whole(folder / name),
            build=lambda folder, _: build_and_seal(folder / name),
        )
