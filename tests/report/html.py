"""Reads a page as a browser would: what it holds, and that it needs nothing else."""

import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html.parser import HTMLParser


class Reader(HTMLParser):
    """Tags with their attributes, and that they close in order."""

    VOID = ("meta", "br", "link", "img", "input")

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
    """Raise unless the page `text` is whole in itself: nothing fetched, references only within it, and no script but
    the one that its policy names by hash."""
    assert not re.search(r"https?://|@import|//cdn", text)
    tags = Reader(text).tags
    assert not {tag for tag, _ in tags} & {"link", "iframe", "object", "img"}
    assert not [key for _, each in tags for key in each if key.startswith("on")]
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == sum(tag == "script" for tag, _ in tags) <= 1
    hashes = [f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts]
    (policy,) = [str(each["content"]) for tag, each in tags if tag == "meta" and each.get("http-equiv")]
    assert policy.startswith("default-src 'none'") and re.findall(r"script-src ([^;]*)", policy) == hashes
    named = [value for _, each in tags for key, value in each.items() if key in ("href", "src") and value]
    assert all(value.startswith("#") for value in named)
    ids = [each["id"] for _, each in tags if "id" in each]
    assert len(ids) == len(set(ids)), "two plots share an id"
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | {value[1:] for value in named}
    assert used <= set(ids)
