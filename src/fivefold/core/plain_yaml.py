"""YAML as run files use it: mappings with words as keys, lists, texts, numbers, booleans and nulls. No code is run."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

KeyPath = tuple[str | int, ...]  # a place inside the tree: ("data", "train", 0, "path")
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0b[01]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?$|[-+]?\.(?:inf|Inf|INF)$|\.nan$")
_REPLACED = (f"{_TAG}int", f"{_TAG}float", f"{_TAG}timestamp", f"{_TAG}value", f"{_TAG}merge")
_ALWAYS = 10_000  # values of any text; a longer one may have one for each character. Aliases multiply them


class _Loader(yaml.SafeLoader):
    """Reads as texts what YAML 1.1 takes for a date (2026-01-31), or a number in base 60 (1:30:00) or 8 (0100)."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(f"{_TAG}float", _FLOAT, list("-+0123456789."))


class Repeated(ValueError):
    """A key that is set twice; `path` is its place in the tree, `line` in the text."""

    def __init__(self, path: KeyPath, line: int) -> None:
        super().__init__(f"{'.'.join(map(str, path))} is set twice")
        self.path, self.line = path, line


def read(text: str, at: Callable[[KeyPath, int], None] = lambda path, line: None) -> Any:
    """Parse YAML; None for an empty text. Calls `at(path, line)` for each key and list item.

    Raises `yaml.YAMLError`, and `Repeated` for a key that is set twice.
    """
    loader, left = _Loader(text), iter(range(max(_ALWAYS, len(text))))
    try:
        node = loader.get_single_node()
        return None if node is None else _built(node, (), loader, at, left)
    except RecursionError:  # an alias inside of what it names
        raise yaml.YAMLError("it never ends, or is nested too deep") from None


def _built(
    node: yaml.Node, path: KeyPath, loader: _Loader, at: Callable[[KeyPath, int], None], left: Iterator[int]
) -> Any:
    """`left` counts down the values that may still be built."""
    if next(left, None) is None:
        raise yaml.MarkedYAMLError(problem="its aliases stand for too many values", problem_mark=node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            at((*path, index), item.start_mark.line + 1)
        return [_built(item, (*path, index), loader, at, left) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        try:
            return loader.construct_object(node)
        except (ValueError, LookupError, AttributeError) as error:  # the last: !!timestamp x
            problem = f"{node.value[:60]!r} is no {node.tag.replace(_TAG, '')}: {error}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from error
    built: dict[str, Any] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(problem="a key is a word, and here it is a list", problem_mark=key.start_mark)
        inner, line = (*path, key.value), key.start_mark.line + 1
        if key.value in built:
            raise Repeated(inner, line)
        at(inner, line)
        built[key.value] = _built(value, inner, loader, at, left)
    return built


def quoted(text: object) -> str:
    """Quote any text as a YAML value."""
    return "'" + str(text).replace("'", "''") + "'"


def reads_back(text: str) -> bool:
    """True if YAML takes the text for itself, without quotes."""
    try:
        return bool(read(text) == text)
    except (yaml.YAMLError, Repeated):
        return False
