"""Reading a run file: YAML with the line of every key, and `key=value` overrides on top.

The schema defines the meaning of keys. This module tracks where each one was written, so that an error can say
`run.yaml:7`, the key and the likely fix. It expands `layout: shard2.tp2+mb2` to keys, and `layout: auto` to
`layout.auto: true`.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from fivefold.config.key import Key
from fivefold.config.peers import answer
from fivefold.core import plain_yaml
from fivefold.core.errors import UserError
from fivefold.core.named_code import located
from fivefold.core.plain_yaml import KeyPath
from fivefold.core.run_folder import is_run, run_files, runs
from fivefold.core.text import shortened
from fivefold.parallel.layout import KEYS, Layout

COMMAND_LINE = "command line"
READ_MORE = "every key, its unit and its default: fivefold train --keys"

_MOST = 2**20  # characters of a run file

CODE = (("objective", "path"), ("optimizer", "path"), ("train", "parts"))  # keys that name code of the user's own
_SOURCES = (("data", "train"), ("data", "validation"))  # lists of sections; a mapping there replaces the list

# Terms of pydantic -> terms of run files.
_WORDS = {"a valid tuple": "a list: [a, b]", "a valid dictionary": "a section of keys", " after validation": ""}

# Alternatives to each other: an override of one drops the others that the file sets.
_RIVALS: tuple[KeyPath, ...] = (("train", "max_steps"), ("train", "max_tokens"), ("train", "max_epochs"))


@dataclass
class RunFile:
    """The tree of a run file as it is built, and the place where each of its keys was written."""

    name: str
    tree: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, str] = field(default_factory=dict)
    # Keys of other sections set by the layout's text.
    of_layout: set[tuple[str, str]] = field(default_factory=set)

    @classmethod
    def of_run(cls, folder: Path) -> "RunFile":
        """Read the run file in a run folder; `run.name` and `run.dir` follow a moved folder. Raises `UserError`."""
        if not is_run(folder):
            raise UserError(
                f"{_shown(folder)} is a folder without a run.yaml, so it is not a run",
                fix=runs(folder) or runs(folder.parent) or run_files(folder) or "name a run file, or a run folder",
                more=READ_MORE,
            )
        file = cls.read(folder / "run.yaml", most=16 * _MOST)  # as it is resolved, with every key of every source
        whole = folder if folder.name not in ("", "..") else folder.resolve()
        section = file.tree.get("run")
        file.tree["run"] = (section if isinstance(section, dict) else {}) | {
            "name": whole.name,
            "dir": str(whole.parent),
        }
        return file

    @classmethod
    def read(cls, path: Path, *, name: str | None = None, most: int = _MOST) -> "RunFile":
        """Read a run file of at most `most` characters. Raises `UserError` if it is missing, empty, longer, not YAML,
        not sections, or repeats a key."""
        file = cls(name or _shown(path))
        file.tree = file._parsed(path, most)
        if file.tree is None:
            raise UserError(
                f"{file.name} is empty",
                fix="leave it out to run the demo, or name a model and a text, as fivefold docs howto/run_file does",
                more=READ_MORE,
            )
        if not isinstance(file.tree, dict):
            raise UserError(
                f"{file.name}:1 is not a run file",
                fix="it is made of sections, such as model: {name_or_path: demo}",
            )
        file._spell_out_layout(file.place(("layout",)))
        return file

    def place(self, path: KeyPath) -> str:
        """The place where a key, or the nearest section around it, was written: `run.yaml:7`, `command line`."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return self.name

    def written(self, location: KeyPath, *, missing: bool = False) -> KeyPath:
        """The path of a schema location as written, without the parts that exist only in the schema."""
        path: KeyPath = ()
        at: Any = self.tree
        for part in location:
            if (isinstance(at, dict) and part in at) or (isinstance(at, list) and part in range(len(at))):
                path, at = (*path, part), at[part]  # type: ignore[index]
        return (*path, location[-1]) if missing else path

    def overridden(self, texts: Iterable[str]) -> "RunFile":
        """Apply every `key=value` in order, and return self. Raises `UserError`."""
        for text in texts:
            self.override(text)
        return self

    def override(self, text: str) -> None:
        """Apply one `key=value`; the value is read as YAML. Raises `UserError` if it does not have that form."""
        dotted, equals, written = text.partition("=")
        if not equals or not dotted.strip():
            raise UserError(
                f"{COMMAND_LINE}: {text!r} is not key=value",
                fix="write train.max_steps=100, for example",
                more=READ_MORE,
            )
        path = self._path(dotted.strip())
        try:
            value = plain_yaml.read(written)
        except yaml.YAMLError:
            raise UserError(
                f"{COMMAND_LINE}: the value of {dotted} is not YAML: {written[:200]}", fix="quote it: key='\"...\"'"
            ) from None
        except plain_yaml.Repeated as error:
            raise UserError(f"{COMMAND_LINE} {dotted}: {error}", fix="keep one of the two") from None
        if path in _RIVALS and value is not None:
            section = self.tree.get(str(path[0]))
            for rival in _RIVALS:
                if isinstance(section, dict) and rival != path and self.places.get(rival) != COMMAND_LINE:
                    section.pop(rival[1], None)
        if path == ("layout",) and isinstance(value, str):
            for section, key in self.of_layout:  # set by the text that is replaced
                self.tree[section].pop(key, None)
                self.places.pop((section, key), None)
            self.of_layout.clear()
            self.tree["layout"] = value
            self._spell_out_layout(COMMAND_LINE)
            return
        self._set(path, value)

    def locate_code(self, folder: Path) -> None:
        """Make the paths of named code absolute: they are relative to `folder`, that of the run file, or to the current
        folder where the command line names them."""
        for section, key in CODE:
            base = Path() if self.place((section, key)) == COMMAND_LINE else folder
            if code := self.code(section, key):
                found = [located(text, base) for text in code.values()]
                at = self.tree[section]
                at[key] = found if isinstance(at[key], list) else found[0]

    def code(self, section: str, key: str) -> dict[str, str]:
        """Code of the user's own that a key names, as it is written: see `code_named`."""
        at = self.tree.get(section)
        return code_named(section, key, at.get(key) if isinstance(at, dict) else None)

    def _path(self, dotted: str) -> KeyPath:
        """The path of a dotted key. The index of a data source may be omitted if there is only one.

        `data.train.text_key`, `data.train[0].text_key` and `data.train.0.text_key` are the same path.
        """
        path: KeyPath = tuple(re.sub(r"\[([0-9]+)\]", r".\1", dotted).split("."))
        if path[:2] not in _SOURCES or len(path) == 2:
            return path
        sources = self._listed_sources(str(path[1]))
        if sources is None:
            return path
        if not re.fullmatch(r"[0-9]{1,9}", str(path[2])):
            if len(sources) == 1:
                return (*path[:2], 0, *path[2:])
            rest = ".".join(map(str, path[2:]))
            raise UserError(
                f"{COMMAND_LINE} {dotted}: data.{path[1]} has {len(sources)} sources",
                fix=f"say which, from 0 on: data.{path[1]}.0.{rest}=...",
            )
        if int(path[2]) >= len(sources):
            raise UserError(
                f"{COMMAND_LINE} {dotted}: data.{path[1]} has {len(sources)} source{'s' * (len(sources) != 1)}",
                fix=f"they are counted from 0; the last is data.{path[1]}.{len(sources) - 1}",
            )
        return (*path[:2], int(path[2]), *path[3:])

    def _listed_sources(self, side: str) -> list[Any] | None:
        """Convert `data.train` or `data.validation` in the tree to a list of sections; None if it has no sources."""
        data = self.tree.setdefault("data", {})
        if data is None:
            data = self.tree["data"] = {}
        if not isinstance(data, dict):
            return None
        given = data.get(side) or ([{}] if side == "train" else None)
        if not given or not isinstance(given, str | dict | list):
            return None
        items = given if isinstance(given, list) else [given]
        if side == "validation" and isinstance(given, str) and given[:1].isdigit():
            return None  # a fraction
        data[side] = [{"path": item} if isinstance(item, str) else item for item in items]
        return data[side]  # type: ignore[no-any-return]

    def _set(self, path: KeyPath, value: Any) -> None:
        """Set a value at a path; a mapping is merged into the existing section."""
        if isinstance(value, dict) and value and path not in _SOURCES:
            for key, inner in value.items():
                self._set((*path, str(key)), inner)
            return
        at: Any = self.tree
        for depth, part in enumerate(path[:-1], start=1):
            if isinstance(at, dict):
                at.setdefault(part, {})
            if isinstance(at[part], list) and isinstance(path[depth], int):
                at = at[part]
                continue
            if not isinstance(at[part], dict) and at[part] is not None:
                name = ".".join(map(str, path[:depth]))
                raise UserError(
                    f"{COMMAND_LINE} {'.'.join(map(str, path))}: {name} is a {type(at[part]).__name__}, not a section",
                    fix=f"set it whole: {name}=...",
                )
            if not at[part]:
                at[part] = {}
                self.places[path[:depth]] = COMMAND_LINE
            at = at[part]
        at[path[-1]] = value
        self.of_layout = {place for place in self.of_layout if place[: len(path)] != path}
        for below in [place for place in self.places if place[: len(path)] == path]:
            del self.places[below]
        self.places[path] = COMMAND_LINE

    def _spell_out_layout(self, place: str) -> None:
        """Expand `layout: TEXT` to its keys."""
        text = self.tree.get("layout")
        if not isinstance(text, str):
            return
        self.tree["layout"] = {"auto": True} if text == "auto" else self._keys_of(text, place)
        self.places = {path: written for path, written in self.places.items() if path[:1] != ("layout",)}
        self.places[("layout",)] = place

    def _keys_of(self, text: str, place: str) -> dict[str, Any]:
        """The keys under `layout:` for a layout's text; options that belong to other sections are set there."""
        try:
            layout = Layout.parse(text)
        except UserError as error:
            raise UserError(
                f"{place} {error.what}", fix=error.fix, more=error.more or "fivefold docs explain/layouts"
            ) from None
        section: dict[str, Any] = {}
        for name, key in KEYS.items():
            value = getattr(layout, name)
            if key.section == "layout":
                section[key.name] = value
            elif value != key.file_default:
                self._set_elsewhere((key.section, key.name), value, place, text)
        return section

    def _set_elsewhere(self, path: tuple[str, str], value: Any, place: str, text: str) -> None:
        there = self.places.get(path)
        if there is not None and place != COMMAND_LINE and self.tree[path[0]][path[1]] != value:
            other = f"{there} says {self.tree[path[0]][path[1]]}"
            raise UserError(
                f"{place} layout {text} says {'.'.join(path)} is {value}, but {other}", fix="keep one of the two"
            )
        self._set(path, value)
        self.places[path] = place
        if there is None:
            self.of_layout.add(path)

    def _parsed(self, path: Path, most: int) -> Any:
        """Parse a YAML file and note the line of every key. Raises `UserError`."""
        name = self.name

        def note(at: KeyPath, line: int) -> None:
            self.places[at] = f"{name}:{line}"

        try:
            with path.open(encoding="utf-8") as stream:
                text = stream.read(most + 1)
            if len(text) > most:
                raise UserError(
                    f"{name}: a run file of more than {most // 2**20} MiB, each of which takes seconds to read",
                    fix="name many texts by a folder or a glob, and many prompts by sample.file",
                )
            return plain_yaml.read(text, note)
        except FileNotFoundError:
            there = run_files(path.parent)
            raise UserError(
                f"{name}: there is no such file",
                fix=there or "write one, or leave it out: without a file, fivefold train runs the demo",
                more=READ_MORE,
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name} cannot be read: {error}") from None
        except plain_yaml.Repeated as error:
            first = f"the first is at {self.places[error.path]}"
            raise UserError(f"{name}:{error.line} {error}", fix=first) from None
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{name}:{mark.line + 1}" if mark else name
            raise UserError(f"{place} is not YAML: {error.problem or error.context}", fix=_yaml_advice(error)) from None
        except yaml.YAMLError as error:
            raise UserError(f"{name} is not YAML: {error}") from None


def code_named(section: str, key: str, value: Any) -> dict[str, str]:
    """The texts `PATH.py:NAME` of a key in `CODE`, by their names: `objective.path`, `train.parts[0]`. What is no text
    is left to the schema."""
    if isinstance(value, str):
        return {f"{section}.{key}": value} if value else {}
    texts = value if isinstance(value, list | tuple) and all(isinstance(text, str) for text in value) else ()
    return {f"{section}.{key}[{at}]": text for at, text in enumerate(texts)}


def _yaml_advice(error: yaml.MarkedYAMLError) -> str:
    if "\\t" in str(error.problem):
        return "indent with spaces, not tabs"
    return "look at the line above too: a missing colon, quote or bracket, or uneven indentation"


def _shown(path: Path) -> str:
    """The path relative to the current folder, if it is inside; else as it is."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


# ---- error messages --------------------------------------------------------------------------------------------------


def explained(error: ValidationError, file: RunFile, keys: Sequence[Key]) -> UserError:
    """Convert the first problem found by the schema to a `UserError`; unknown keys come first."""
    first = min(error.errors(), key=lambda error: error["type"] != "extra_forbidden")
    path = file.written(first["loc"], missing=first["type"] == "missing")
    name = ".".join(str(part) for part in path)
    at = f"{file.place(path)} {name}".strip()
    if first["type"] == "extra_forbidden":
        return UserError(f"{at} is not a key", fix=answer(name) or did_you_mean(name, keys), more=READ_MORE)
    if first["type"] == "missing":
        return UserError(f"{at} is missing", fix=_help_of(name, keys), more=READ_MORE)
    if first["type"] == "value_error":
        return UserError(f"{at}: {first['ctx']['error']}", fix=_help_of(name, keys), more=READ_MORE)
    if first["type"] == "model_type":
        what = f"{at} is {_short(first['input'])}; it should be a section of keys"
        return UserError(what, fix=answer(name), more=READ_MORE)
    problem = re.sub(r"^(Input|Value|Tuple) should", "it should", first["msg"]).split(", unable")[0]
    for theirs, ours in _WORDS.items():
        problem = problem.replace(theirs, ours)
    return UserError(f"{at} is {_short(first['input'])}; {problem}", fix=_help_of(name, keys), more=READ_MORE)


def did_you_mean(name: str, keys: Iterable[Key]) -> str | None:
    """Suggest the nearest known key: the same word in another section, else the nearest spelling; None if none is."""
    name = re.sub(r"\.\d+\.", "[].", name)
    known = {key.name: key for key in keys}
    sections = list(dict.fromkeys(key.section for key in known.values()))
    last = name.split(".")[-1]
    near = [key.name for key in known.values() if key.last == last]
    near = near or (get_close_matches(name, sections, n=1) if "." not in name else [])
    near = near or get_close_matches(name, known, n=1, cutoff=0.75)
    if not near:
        words = get_close_matches(last, [key.last for key in known.values()], n=1, cutoff=0.75)
        near = [key.name for key in known.values() if key.last in words]
    return f"did you mean {near[0]}?" if near else None


def _help_of(name: str, keys: Iterable[Key]) -> str | None:
    """The text `key: description`; an item of a list has the list's description."""
    name = re.sub(r"\.\d+\.", "[].", name)
    found = next((key for key in keys if key.name in (name, ".".join(name.split(".")[:2]))), None)
    return f"{found.name}: {found.help}" if found else None


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    return "empty" if value is None else shortened(repr(value), 60)
