"""YAML as a run file may use it: mappings, lists, texts, numbers, booleans and nulls, of a bounded size.

A run file may come from a stranger. PyYAML's safe loader runs no code, but aliases let 341 bytes stand for billions of
values, a list may hold itself, and tags and escapes give dates, bytes, sets and lone surrogates. All of these are
refused here, with the line, before anything else sees a value.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

import yaml

MOST_REPEATED = 10_000  # values that aliases stand for, in one file or override
MOST_DEPTH = 50
MOST_DIGITS = 19  # of a 64-bit integer

Path = tuple[str | int, ...]  # a place inside the tree: ("data", "train", 0, "path")
_STAND_INS = {0x85: 0xFDD0, 0x2028: 0xFDD1, 0x2029: 0xFDD2}  # noncharacters that replace them while parsing
_TAG = "tag:yaml.org,2002:"
_TEXTS = {f"{_TAG}str", f"{_TAG}timestamp", f"{_TAG}value"}  # `2026-01-31` is a name like any other
_SCALARS = {f"{_TAG}{kind}" for kind in ("null", "bool", "int", "float")}
_NUMBERS = {f"{_TAG}int", f"{_TAG}float"}
_NO_NUMBER = re.compile(r"[^:]*:.*|[-+]?0[0-9_]+")  # YAML 1.1 reads these in base 60 or 8: 1:30:00, 0100


class NotPlain(ValueError):
    """A value that a run file cannot hold; `node`: its place in the text."""

    def __init__(self, message: str, node: yaml.Node) -> None:
        super().__init__(message)
        self.node = node


def compose(text: str | TextIO) -> yaml.Node | None:
    """Parse YAML text to nodes; None for an empty text. Raises `yaml.YAMLError`."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise yaml.YAMLError(f"it is nested more than {MOST_DEPTH} deep") from None


@dataclass
class Builder:
    """Builder of plain values from nodes. Calls `at(path, node)` for each key and list item.

    Raises `NotPlain` for anything that a run file cannot hold.
    """

    at: Callable[[Path, yaml.Node], None] = lambda path, node: None
    _seen: set[int] = field(default_factory=set)  # ids of the nodes that were built
    _repeated: int = 0
    _open: list[int] = field(default_factory=list)  # ids of the collections around the current node

    def build(self, node: yaml.Node, path: Path = ()) -> Any:
        """Build the value of `node`, which stands at `path`."""
        self._repeated += id(node) in self._seen
        self._seen.add(id(node))
        if self._repeated > MOST_REPEATED:
            raise NotPlain(f"its aliases stand for more than {MOST_REPEATED} values", node)
        if isinstance(node, yaml.ScalarNode):
            return _scalar(node)
        if id(node) in self._open:
            raise NotPlain("an alias stands inside of what it names, so that it never ends", node)
        if len(self._open) >= MOST_DEPTH:
            raise NotPlain(f"it is nested more than {MOST_DEPTH} deep", node)
        if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
            raise NotPlain(_no_tag(node), node)
        self._open.append(id(node))
        built = self._list(node, path) if isinstance(node, yaml.SequenceNode) else self._mapping(node, path)
        self._open.pop()
        return built

    def _list(self, node: yaml.SequenceNode, path: Path) -> list[Any]:
        for index, item in enumerate(node.value):
            self.at((*path, index), item)
        return [self.build(item, (*path, index)) for index, item in enumerate(node.value)]

    def _mapping(self, node: yaml.Node, path: Path) -> dict[str, Any]:
        built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise NotPlain("a key is a word, and here it is a list or a section", key_node)
            key = _text(key_node)
            if key in built:
                raise Repeated((*path, key), key_node)
            self.at((*path, key), key_node)
            built[key] = self.build(value_node, (*path, key))
        return built


class Repeated(NotPlain):
    """A key that is set twice; `path` is its place."""

    def __init__(self, path: Path, node: yaml.Node) -> None:
        super().__init__(f"{'.'.join(map(str, path))} is set twice", node)
        self.path = path


def read(text: str) -> Any:
    """Parse one line of YAML, with U+0085, U+2028 and U+2029 as ordinary characters: YAML takes them for line breaks,
    and would make them spaces. Raises `yaml.YAMLError` and `NotPlain`."""
    node = compose(text.translate(_STAND_INS))
    return None if node is None else Builder().build(node)


def quoted(text: object) -> str:
    """Quote any text as a YAML value."""
    return "'" + str(text).replace("'", "''") + "'"


def written(text: str) -> str:
    """Return the text as a YAML value, quoted unless it is read back as it stands."""
    try:
        return text if read(text) == text else quoted(text)
    except (yaml.YAMLError, NotPlain):
        return quoted(text)


def _scalar(node: yaml.ScalarNode) -> Any:
    text = _text(node)
    if node.tag in _TEXTS or (node.tag in _NUMBERS and _NO_NUMBER.fullmatch(text)):
        return text
    if node.tag not in _SCALARS:
        raise NotPlain(_no_tag(node), node)
    if node.tag.endswith(":int") and sum(map(str.isdigit, text)) > 4 * MOST_DIGITS:
        raise NotPlain("the number is larger than 64 bits hold", node)
    try:
        value = yaml.SafeLoader("").construct_object(node)
    except (ValueError, KeyError, AttributeError, OverflowError) as error:
        raise NotPlain(f"{text!r} is no {node.tag.removeprefix(_TAG)}", node) from error
    if isinstance(value, float) and not math.isfinite(value):
        raise NotPlain(f"{text} is not a finite number", node)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise NotPlain(f"{text} is larger than 64 bits hold", node)
    return value


def _text(node: yaml.ScalarNode) -> str:
    text = str(node.value).translate({stand_in: character for character, stand_in in _STAND_INS.items()})
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise NotPlain("a text holds a NUL byte or half of a character (a lone surrogate)", node)
    return text


def _no_tag(node: yaml.Node) -> str:
    return f"the tag {node.tag.replace(_TAG, '!!')} has no meaning in a run file"
