"""A token store made by us (a folder with tokens.bin), used directly as a source."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fivefold.data.source import Format, Source
from fivefold.data.store import is_store


@dataclass(frozen=True)
class StoreFormat(Format):
    """Its tokens must come from the run's tokenizer; that is checked where both are known."""

    def matches(self, path: Path) -> bool:
        return is_store(path)

    def files(self, path: Path, source: Source, root: Path) -> Sequence[Path] | None:
        return (path,) if is_store(path) else None


FORMAT = StoreFormat(name="tokens", holds_tokens=True)
