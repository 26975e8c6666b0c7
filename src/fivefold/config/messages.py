"""What is wrong with a run file, in the error voice: the place, the key, the likely fix."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from fivefold.config.key import Key
from fivefold.config.peers import answer
from fivefold.config.runfile import READ_MORE, RunFile
from fivefold.core.errors import UserError
from fivefold.core.text import shortened


def explained(error: ValidationError, file: RunFile, keys: Sequence[Key]) -> UserError:
    """The first problem that the schema found, as a `UserError`."""
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
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
    problem = first["msg"].replace("Input should be", "it should be").split(", unable")[0]
    return UserError(f"{at} is {_short(first['input'])}; {problem}", fix=_help_of(name, keys), more=READ_MORE)


def did_you_mean(name: str, keys: Iterable[Key]) -> str | None:
    """The nearest known key: the same word in another section, then the nearest spelling; None when nothing is near."""
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
    """`key: description`; the item of a list is described by the list."""
    name = re.sub(r"\.\d+\.", "[].", name)
    found = next((key for key in keys if key.name in (name, ".".join(name.split(".")[:2]))), None)
    return f"{found.name}: {found.help}" if found else None


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "a section"
    return "empty" if value is None else shortened(repr(value), 60)
