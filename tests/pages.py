"""The fenced blocks of README.md and of docs/*.md. One that no test runs has a line above it that says why:

<!-- not run: needs a GPU -->
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
_BLOCK = re.compile(r"^(?:<!-- not run: (.+) -->\n)?```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")


@dataclass(frozen=True)
class Block:
    """A fenced block; `language`: empty where it shows what is printed. `not_run`: why no test runs it."""

    page: str
    line: int
    language: str
    text: str
    not_run: str

    @property
    def file(self) -> str:
        """The name that its first line gives it, in a comment; empty for none."""
        found = _NAME.match(self.text)
        return found[1] if found else ""

    @property
    def commands(self) -> list[str]:
        """Its lines as a shell reads them: continued ones joined, comments and empty ones left out."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line.partition(" #")[0].strip() for line in lines if shlex.split(line, comments=True)]

    def write(self, folder: Path) -> None:
        """Write it under its name."""
        (folder / self.file).parent.mkdir(exist_ok=True)
        (folder / self.file).write_text(self.text, encoding="utf-8")

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """All of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start(2)) + 1
        yield Block(page.relative_to(ROOT).as_posix(), line, found[2], found[3], found[1] or "")
