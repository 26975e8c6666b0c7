"""`hub:org/name?config=C&split=S&revision=R`: a dataset of the Hugging Face hub, streamed through `datasets`, an extra.

The commit identifies its contents and becomes the `revision` of the address. A commit that is not given is looked up
once and cached: every rank and every later run reads the same one. A dataset in the token cache needs no network. No
code of a dataset runs: `datasets` no longer supports scripts and pickles.
"""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fivefold.core.cache import entry, key_of, write_atomically
from fivefold.core.errors import UserError
from fivefold.core.hub import is_hub_id, reason
from fivefold.data.records import Records, given, parts_of
from fivefold.data.source import HUB, FilePart, Source

_MORE = "the form is hub:org/name?config=C&split=S&revision=R, all behind the name optional: fivefold docs howto/data"
_OFFLINE = "the network may be down: try again; what was tokenised once needs none"
_LOCAL = "try again: what was tokenised once needs no network"
_SIZE = 2**30  # bytes: the hub does not tell; the order of a medium dataset
_OPTIONS = ("config", "split", "revision")
_OLDEST = (5, 2)  # the oldest checked version: older ones can run a dataset's code


@dataclass(frozen=True)
class Address:
    """A dataset of the hub; `revision` is a branch, a tag or a commit."""

    name: str
    config: str | None = None
    split: str = "train"
    revision: str = "main"

    @classmethod
    def parse(cls, text: str, label: str) -> "Address":
        name, _, query = text.removeprefix(HUB).partition("?")
        options = dict(part.partition("=")[::2] for part in query.split("&") if part)
        if wrong := [key for key, value in options.items() if key not in _OPTIONS or not value]:
            raise UserError(
                f"{label}: {text}: {wrong[0]!r} is none of config=, split= and revision=",
                fix=f"{HUB}{name}?split=train",
                more=_MORE,
            )
        if not is_hub_id(name):
            raise _no_dataset(name, f"{label}: {text}")
        return cls(name, **{key: unquote(value) for key, value in options.items()})

    def __str__(self) -> str:
        options = {"config": self.config, "split": self.split, "revision": self.revision}
        return f"{HUB}{self.name}?" + "&".join(f"{key}={quote(value)}" for key, value in options.items() if value)


@dataclass(frozen=True)
class Hub(Records):
    """A row is a document, its text in the column `text_key`. Only the tokens are stored on this machine."""

    def matches(self, path: Path) -> bool:
        return str(path).startswith(HUB)

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        if not self.matches(path):
            return None
        address = Address.parse(source.path, source.label)
        return (Path(str(replace(address, revision=_commit(address, source, root)))),)

    def digest(self, path: Path, root: Path) -> str:
        return key_of(str(path))

    def size(self, path: Path) -> int:
        return _SIZE

    def records(
        self, path: Path, source: Source, part: FilePart | None = None
    ) -> Generator[tuple[str, Mapping[str, object]]]:
        address, row = Address.parse(str(path), source.label), 0
        where = f"{source.label}: {HUB}{address.name}"
        with _readable(where):
            rows = _stream(address, where)
            names = rows.column_names or ()
            parts = parts_of(names, source)
            if parts or source.text_key in names:
                rows = rows.select_columns(list(parts.keys if parts else [source.text_key]))
            for row, record in enumerate(rows, start=1):
                yield f"{where}:{row}", {**dict.fromkeys(names), **given(record)}
        if not row:
            raise UserError(
                f"{where}: the split {address.split!r} is empty", fix="name another: ?split=...", more=_MORE
            )


def _no_dataset(name: str, where: str) -> UserError:
    folder = Path(name).parent
    if name.count("/") == 1 and folder.is_dir():  # `datasets` would read the folder
        return UserError(
            f"{where}: a folder {str(folder)!r} is here", fix="start the run in another folder", more=_MORE
        )
    return UserError(f"{where}: no org/name of the hub", fix="such as hub:roneneldan/TinyStories", more=_MORE)


def _commit(address: Address, source: Source, root: Path) -> str:
    """The commit of the address: as given, as cached, or from the hub."""
    if re.fullmatch(r"[0-9a-f]{40}", address.revision):
        return address.revision
    return entry(
        root / "hub" / key_of(address.name, address.revision),
        read=lambda folder: (folder / "commit").read_text(),
        build=lambda folder, _: write_atomically(
            folder / "commit", _ask(address, f"{source.label}: {HUB}{address.name}")
        ),
    )


def _ask(address: Address, where: str) -> str:
    from huggingface_hub import HfApi

    try:
        commit = HfApi().dataset_info(address.name, revision=address.revision, timeout=30).sha
    except Exception as error:  # from the hub's client, or the network
        what, fix = reason(address.name, error, local=_LOCAL)
        raise UserError(f"{where}: {what}", fix=fix, more=_MORE) from error
    if not commit:
        raise UserError(f"{where}: the hub names no commit of it", fix="name it: ?revision=COMMIT", more=_MORE)
    return str(commit)


def _stream(address: Address, where: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{where}: reading from the hub needs the package datasets, which is not installed",
            fix="pip install 'fivefold[hub]'",
            more=_MORE,
        ) from error
    version = tuple(int(number) for number in re.findall(r"\d+", datasets.__version__)[:2])
    if version < _OLDEST:
        raise UserError(
            f"{where}: datasets {datasets.__version__} is too old", fix="pip install -U 'fivefold[hub]'", more=_MORE
        )
    datasets.disable_progress_bars()
    return datasets.load_dataset(
        address.name, address.config, split=address.split, revision=address.revision, streaming=True
    )


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Convert errors of `datasets` and its dependencies to `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # anything at all
        raise UserError(
            f"{where}: cannot be read: {_short(error)}",
            fix="config and split choose the part: hub:org/name?config=C&split=S",
            more=_OFFLINE if isinstance(error, OSError) else _MORE,
        ) from error


def _short(error: Exception) -> str:
    """The error in one line: text after its second line is advice for direct callers."""
    return " ".join(str(error).splitlines()[:2]) or type(error).__name__


FORMAT = Hub(name="hub", noun="column")
