"""Texts of jobs: YAML with comments, which PyYAML does not write, of a tree in which a value may carry a note for its
reader; and scripts, from a template beside the module of their engine."""

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from fivefold.jobs.job import Job

WIDTH = 110  # of a line with a comment


@dataclass(frozen=True)
class Note:
    """A value, and what a comment above it says."""

    value: Any
    text: str


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read, `|`."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    if re.search("[\x85\u2028\u2029]", text):  # ends of lines to YAML: in a block they would become its own
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent)
# What PyYAML reads as text and Kubernetes, in Go, does not: it is quoted.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("[yYnN]$"), list("yYnN"))
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+$"), list("-+.0123456789")
)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:int", re.compile("[-+]?0o[0-7]+$"), list("-+0"))


def yaml_of(head: str, documents: Iterable[Any]) -> str:
    """YAML of all documents, each with its notes as comments, below `head`, which is a comment too."""
    return "\n".join(_comment(head, "")) + "\n" + "---\n".join(map(_document, documents))


def _document(tree: Any) -> str:
    notes: dict[tuple[str | int, ...], str] = {}
    text = yaml.dump(_plain(tree, (), notes), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
    lines = text.splitlines()  # of YAML's ends of lines `_represent` leaves no other
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    for mark, path in sorted(((_mark(root, path), path) for path in notes), reverse=True):
        lines[mark[0] : mark[0]] = _comment(notes[path], " " * mark[1])
    return "\n".join(lines) + "\n"


def _plain(tree: Any, path: tuple[str | int, ...], notes: dict[tuple[str | int, ...], str]) -> Any:
    if isinstance(tree, Note):
        notes[path] = tree.text
        return _plain(tree.value, path, notes)
    if isinstance(tree, dict):
        return {key: _plain(value, (*path, key), notes) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_plain(value, (*path, at), notes) for at, value in enumerate(tree)]
    return tree


def _mark(node: Any, path: tuple[str | int, ...]) -> tuple[int, int]:
    """(line, column) at which the key or the list item at `path` begins."""
    for part in path[:-1]:
        node = node.value[part] if isinstance(part, int) else next(v for k, v in node.value if k.value == part)
    last = path[-1]
    if isinstance(last, int):
        start = node.value[last].start_mark
        return start.line, start.column - len("- ")
    start = next(key for key, _ in node.value if key.value == last).start_mark
    return start.line, start.column


def _comment(text: str, indent: str) -> Iterator[str]:
    for line in text.splitlines():
        yield from textwrap.wrap(line, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ") or [
            f"{indent}#"
        ]


def script(file: Path, job: Job, **values: Any) -> str:
    """Return the template `file` with a job and other values. `quote` writes text for a shell, `python` for Python."""
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    environment.filters |= {"quote": quote, "python": partial(json.dumps, ensure_ascii=False)}  # text is that of JSON
    head = "# " + job.head.replace("\n", "\n# ")
    return environment.from_string(file.read_text(encoding="utf-8")).render(job=job, head=head, **values)
