"""The config of another trainer as written, the resulting run file, and the keys of trainers, data in `schemas/`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fivefold.config.schema import ExactDumper
from fivefold.core.errors import UserError

_FOLDER = Path(__file__).with_name("schemas")
NO_COUNTERPART, REFUSED, RULES = "no_counterpart", "refused", "rules"


@dataclass(frozen=True)
class Schema:
    """The keys of one trainer of another project.

    `names`: key -> its name in the rules. `defaults`: by the name in the rules. `becomes`: key -> (its treatment, why).
    `only`: keys of other trainers of the project that this one rejects.
    """

    version: str
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    becomes: Mapping[str, tuple[str, str]]
    only: frozenset[str] = frozenset()

    def name(self, key: str) -> str:
        """The name of `key` in the rules."""
        return self.names.get(key, key)


@cache
def schema(source: str, trainer: str = "") -> Schema:
    """The schema of a file in `schemas/`; `trainer`: one of the trainers that it describes."""
    tree = yaml.safe_load((_FOLDER / f"{source}.yaml").read_text(encoding="utf-8"))
    base = schema(tree["extends"]) if "extends" in tree else Schema("", {}, {}, {})
    names, defaults, becomes = dict(base.names) | tree["names"], dict(base.defaults), dict(base.becomes)
    groups = [(RULES, {"why": "", "keys": tree["rules"]})]
    groups += [(kind, group) for kind in (NO_COUNTERPART, REFUSED) for group in tree[kind]]
    for kind, group in groups:
        becomes |= {key: (kind, group["why"]) for key in group["keys"]}
        for key, default in group["keys"].items():
            if key not in names or default is not None:
                defaults[names.get(key, key)] = default
    trainers = tree.get("trainers", {})
    own = trainers.get(trainer, {"keys": (), "defaults": {}})
    others = {key for trainer in trainers.values() for key in trainer["keys"]}
    return Schema(tree["version"], names, defaults | own["defaults"], becomes, frozenset(others - set(own["keys"])))


_BREAKS = re.compile(r"[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")  # characters that would end a comment


@dataclass
class Converted:
    """`keys`: of the run file, by dotted name. `changed`: remarks on changed behaviour, by the same names. `left`: keys
    of the other file without a counterpart -> why. `notes`: further remarks."""

    trainer: str
    file: str
    keys: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The run file as text: keys left out are comments at its head, changes are comments next to their lines."""
        head = [f"from {self.file}, of {self.trainer}", *self.notes]
        if self.left:
            alike = {why: [name for name, said in self.left.items() if said == why] for why in self.left.values()}
            head += ["no counterpart here:", *(f"  {', '.join(names)}: {why}" for why, names in alike.items())]
        lines = [_comment(line) for line in head]
        for section, keys in self.tree.items():
            lines.append(f"{section}:")
            for key, value in keys.items():
                first, *others = _dumped({key: value}).splitlines()
                changed = self.changed.get(f"{section}.{key}")
                if changed and others and not others[0].startswith(("  ", "- ")):  # a multi-line text
                    lines.append(f"  {_comment(f'changed: {changed}')}")
                    changed = None
                lines.append(f"  {first}" + (f"  {_comment(f'changed: {changed}')}" if changed else ""))
                lines += [f"  {line}" for line in others]
        return "\n".join(lines) + "\n"

    @property
    def tree(self) -> dict[str, Any]:
        """The sections of the run file."""
        sections: dict[str, Any] = {}
        for name, value in self.keys.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        return sections


def _comment(text: str) -> str:
    return f"# {_BREAKS.sub(' ', text)}"


def _dumped(tree: Mapping[str, Any]) -> str:
    return str(yaml.dump(tree, Dumper=ExactDumper, sort_keys=False, allow_unicode=True, width=10**6))


class Given:
    """The other trainer's file, with its defaults for missing keys."""

    def __init__(self, tree: Mapping[str, Any], schema: Schema, folder: Path, devices: int, found: Converted) -> None:
        self.schema, self.folder, self.devices, self.found = schema, folder, devices, found
        self.trainer = found.trainer
        self._tree = tree
        self._values = {schema.name(key): value for key, value in tree.items()}
        self._read: set[str] = set()
        self._refused: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        """True if the file sets it."""
        return self._values.get(name) is not None

    def __call__(self, name: str) -> Any:
        """The value of a key, by the name that the rules use; missing keys have the trainer's default."""
        self._read.add(name)
        return self._values[name] if name in self._values else self.schema.defaults.get(name)

    def leave(self, name: str, why: str) -> None:
        """Record that a key has no counterpart."""
        self._read.add(name)
        self.found.left.update({key: why for key in self._tree if self.schema.name(key) == name})

    def refuse(self, name: str, why: str) -> None:
        """Record why the meaning of a key cannot be kept."""
        self._read.add(name)
        written = next((key for key in self._tree if self.schema.name(key) == name), name)
        self._refused.setdefault(written, why)

    def note(self, text: str) -> None:
        self.found.notes.append(text)

    def finish(self) -> None:
        """Classify the keys that no rule has read. Raises `UserError` for all refused keys together."""
        for key, value in self._tree.items():
            self._finish(key, value)
        if self._refused:
            said = "; ".join(f"{key}: {why}" for key, why in self._refused.items())
            raise UserError(
                f"{self.found.file} asks for what a run file does not do: {said}",
                fix="change these keys of it, or take them out",
                more="fivefold docs howto/convert",
            )

    def _finish(self, key: str, value: Any) -> None:
        schema, name = self.schema, self.schema.name(key)
        kind, why = schema.becomes.get(key, ("", f"it is no key of {schema.version}"))
        if key in schema.only:
            kind, why = "", "another objective of TRL has it"
        if kind in (REFUSED, "") and not _is_off(value, schema.defaults.get(name)):
            self.refuse(name, why)
        elif kind == RULES and name in self._read:
            return
        elif key not in self.found.left:
            self.found.left[key] = {RULES: "unused by the rest of the file", REFUSED: "off"}.get(kind, why)


def _is_off(value: Any, default: Any) -> bool:
    """True for a written value that is the default, or empty."""
    if value is None or value == default or (not value and not default):
        return True
    try:
        return not isinstance(value, bool) and float(value) == float(default)
    except (TypeError, ValueError):
        return False
