"""Reads a page as a browser would: what it holds, and that it needs nothing else."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser


class Reader(HTMLParser):
    """Tags with their attributes, and that they close in order."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:  # type: ignore[override]
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:  # type: ignore[override]
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def asks_for_nothing(text: str) -> None:
    """Raise unless the page `text` is whole in itself: no script, nothing fetched, references only within it."""
    assert not re.search(r"https?://|@import|//cdn", text)
    tags = Reader(text).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "iframe", "object", "img"}
    named = [value for _, each in tags for key, value in each.items() if key in ("href", "src") and value]
    assert named and all(value.startswith("#") for value in named)
    ids = [each["id"] for _, each in tags if "id" in each]
    assert len(ids) == len(set(ids)), "two plots share an id"
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {value[1:] for value in named}
    assert used <= set(ids)
