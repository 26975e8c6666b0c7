"""`python-stdlib`: the sources of the running interpreter's standard library, about 8 MB that every machine has."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data.source import Format, Source

# Installed packages, tests, tables of data, applications, and what the interpreter's packagers may leave out.
_LEFT_OUT = frozenset(
    {"__phello__", "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idle_test", "idlelib"}
    | {"lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo"}
)


@dataclass(frozen=True)
class PythonStdlib(Format):
    """Each module is a document, sorted by path. A module that is not UTF-8 is left out (none is, as shipped)."""

    def matches(self, path: Path) -> bool:
        return str(path) == self.name

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        return _modules(Path(sysconfig.get_paths()["stdlib"])) if self.matches(path) else None

    def documents(self, path: Path, source: Source) -> Iterator[str]:
        yield path.read_text(encoding="utf-8")


def _modules(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT and not name.startswith("config-")]
        paths = [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")]
        found += [path for path in paths if path.stat().st_size and _is_utf8(path)]
    if not found:
        raise UserError(
            f"python-stdlib: no .py file under {root}",
            fix="this interpreter ships without sources: train on your own text",
        )
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


FORMAT = PythonStdlib(name="python-stdlib")
