"""Code of the user's own that a run file names by path: `my_loss.py:fn`. That file runs, and nothing else does."""

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fivefold.core.errors import UserError, first_line


@dataclass(frozen=True)
class NamedCode:
    """The object `name` in the file `path`, as it was when it was read."""

    path: Path
    name: str
    source: bytes

    @staticmethod
    def read(text: str, key: str) -> "NamedCode":
        """Read the file of `PATH.py:NAME`, the value of a key, without running it. Raises `UserError`."""
        path, _, name = text.rpartition(":")
        if not (path.endswith(".py") and name.isidentifier()):
            raise UserError(
                f"{key}: {text!r} names no object in a file", fix=f"write FILE.py:NAME: {key}: my_code.py:name"
            )
        try:
            return NamedCode(Path(path), name, Path(path).read_bytes())
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            raise UserError(
                f"{key}: {path} cannot be read: {first_line(error)}",
                fix="the path is relative to the run file, or on the command line to the current folder",
            ) from error

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.source).hexdigest()[:16]

    def load(self) -> Callable[..., Any]:
        """Run the file, once in a process, and return its object. Raises `UserError` with the line of an error.

        Every process gives the module the same name, which its classes and pickles have. Its folder is not on Python's
        path, so it imports installed packages alone.
        """
        known = f"fivefold_named.{self.path.stem}_{self.digest}"
        if known not in sys.modules:
            module = ModuleType(known)
            module.__file__ = str(self.path)
            sys.modules[known] = module
            try:
                exec(compile(self.source, str(self.path), "exec"), vars(module))
            except (Exception, SystemExit) as error:  # any error of the user's code; sys.exit(0) would end the run
                del sys.modules[known]
                raise self.error(error) from error
        found = vars(sys.modules[known]).get(self.name)
        if not callable(found):
            what = "has no" if found is None else f"has a {type(found).__name__} called"
            raise UserError(f"{self.path} {what} {self.name}", fix=f"define {self.name} in that file")
        return found  # type: ignore[no-any-return]

    def error(self, error: BaseException, more: str | None = None) -> UserError:
        """An error of the code, with the line of the file at which it arose."""
        line = _line(error, str(self.path))
        return UserError(f"{line}: {type(error).__name__}: {first_line(error)}", more=more)


def _line(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == path:
        return f"{path}:{error.lineno}"
    trace, line = error.__traceback__, 0
    while trace is not None:
        line = trace.tb_lineno if trace.tb_frame.f_code.co_filename == path else line
        trace = trace.tb_next
    return f"{path}:{line}" if line else path


def located(text: str, base: Path) -> str:
    """Make the path of `PATH.py:NAME` absolute; it is relative to the folder `base`."""
    path, colon, name = text.rpartition(":")
    return f"{(base / Path(path).expanduser()).resolve()}{colon}{name}" if path else text
