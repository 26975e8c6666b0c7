"""C compiled on this machine: which compiler, and a shared library of sources. No torch here."""

import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from fivefold.core.errors import RunFailed

INSTALL = "install gcc (Debian, Ubuntu: apt install gcc)"
_COMPILERS = ("cc", "gcc", "clang")


def compiler() -> str | None:
    """A C compiler of this machine."""
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def compile_library(sources: Sequence[str], out: Path, options: Iterable[str] = ()) -> None:
    """Compile C sources to the shared library `out`. Raises `RunFailed` with the compiler's first error."""
    command = [compiler() or "cc", "-shared", "-fPIC", *sources, "-o", str(out), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise RunFailed(f"{command[0]} does not start: {error}", fix=INSTALL) from error
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise RunFailed(f"{Path(sources[0]).name} does not compile: {first}", fix="try another C compiler")
