"""Formats without parsing: text files, the interpreter's standard library, and token stores of our own."""

import os
import sysconfig
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.core.errors import UserError
from fivefold.data.compression import opened
from fivefold.data.source import Format, Source, is_binary, no_documents, not_utf8
from fivefold.data.store import is_store

# Installed packages, tests, tables of data, applications, and parts that packagers of Python may leave out.
_LEFT_OUT = frozenset(
    {"__phello__", "__pycache__", "dist-packages", "distutils", "encodings", "ensurepip", "idle_test", "idlelib"}
    | {"lib-dynload", "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo"}
)


@dataclass(frozen=True)
class Txt(Format):
    """UTF-8 text, unchanged except for a byte order mark."""

    def documents(self, path: Path, source: Source) -> Iterator[str]:
        with opened(path, source.at(path)) as file:
            raw = file.read()
        if not raw:
            raise no_documents(f"{source.at(path)}:1")
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            is_wide = raw.startswith((BOM_UTF16_LE, BOM_UTF16_BE))
            kind, name = ("UTF-16", "utf-16") if is_wide else ("Latin-1", "latin1")
            convert = f"convert it, if it is {kind}: iconv -f {name} -t utf-8 {path.name} > fixed{path.suffix}"
            is_text = is_wide or not is_binary(raw)
            fix = convert if is_text else "it is not text: write its texts to a .txt or .jsonl file"
            raise not_utf8(f"{source.at(path)}:{line}", error, f"byte offset {error.start}", fix=fix) from error
        del raw  # as large as the text
        yield text.removeprefix("\ufeff")


@dataclass(frozen=True)
class PythonStdlib(Format):
    """Each module is a document, sorted by path. Modules that are not UTF-8 are left out (none is, as shipped)."""

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


@dataclass(frozen=True)
class StoreFormat(Format):
    """A token store. Its tokens must come from the run's tokenizer; `store_for` checks that."""

    def matches(self, path: Path) -> bool:
        return is_store(path)

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        return (path,) if is_store(path) else None


# In the order of error messages.
PYTHON_STDLIB = PythonStdlib(name="python-stdlib")
TOKENS = StoreFormat(name="tokens", holds_tokens=True)
TXT = Txt(name="txt", suffixes=(".txt", ".text", ".md", ".markdown"))
