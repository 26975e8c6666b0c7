"""Cached facts: one file per key, in the cache. No torch.

A file has a checksum and states its own name, so that damaged or renamed files are ignored. Nothing in it is ever run.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

from fivefold.core.cache import cache_root, key_of, locked, write_atomically
from fivefold.core.errors import UserError
from fivefold.core.folder_config import read_folder_config
from fivefold.core.integrity import read_signed, signed
from fivefold.models.facts import ModelFacts

SHIPPED = "facts.json"  # next to the config.json of a built-in shape


def shipped_facts(shape: Path) -> ModelFacts | None:
    """The facts stored next to a built-in shape (`ship_facts`). None if they were traced from another config or with
    another version of torch or `transformers`: these decide which tensors a layer saves."""
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        tree = json.loads((shape / SHIPPED).read_text(encoding="utf-8"))
        if tree["of"] == _about_shape(shape):
            short = ModelFacts.from_json(tree)
            name = short.anatomy.layers[0].removesuffix("0")
            return short.with_layers([f"{name}{layer}" for layer in range(len(tree["like"]))], tree["like"])
    return None


def ship_facts(shape: Path, short: ModelFacts, like: list[int]) -> None:
    """Write the facts of the model with a few layers; `like`: the short layer of each full layer."""
    tree = {"of": _about_shape(shape), "like": like, **short.to_json()}
    (shape / SHIPPED).write_text(json.dumps(tree, separators=(",", ":")) + "\n", encoding="utf-8")


def _about_shape(shape: Path) -> list[str]:
    """Versions and config of a shape, without the tracing code: a test holds that it finds the shipped facts."""
    return [*_versions(), key_of(read_folder_config(shape))]


def kept(key: str, find: Callable[[], ModelFacts]) -> ModelFacts:
    """The facts under this key: read, or found and written by one process while others wait."""
    try:
        file = cache_root() / "facts" / f"{key}.json"
    except UserError:  # there is no place for a cache
        return find()
    if (known := read_facts(file)) is not None:
        return known
    with ExitStack() as stack:
        with suppress(UserError):  # a filesystem without locks: each process finds them for itself
            stack.enter_context(locked(file))
        if (known := read_facts(file)) is not None:
            return known
        facts = find()
        write_facts(file, facts)
    return facts


def read_facts(file: Path) -> ModelFacts | None:
    """The facts in a file, if it is intact; else None."""
    with suppress(ValueError, TypeError, LookupError, AttributeError):  # a `DamagedError`, or facts of other code
        tree = read_signed(file)
        if tree["name"] == file.name:
            return ModelFacts.from_json(tree)
    return None


def write_facts(file: Path, facts: ModelFacts) -> None:
    """Cache the facts. A read-only or full cache is ignored: nothing depends on it."""
    with suppress(UserError):
        write_atomically(file, signed({"name": file.name, **facts.to_json()}, indent=None))


def about_code() -> list[str]:
    return [*_versions(), _code()]


def _versions() -> list[str]:
    """Versions such as `torch 2.13.0`, without the suffix of the build (`+cpu`)."""
    return [f"{name} {version(name).partition('+')[0]}" for name in ("torch", "transformers")]


@cache
def _code() -> str:
    """The hash of the files that find facts."""
    folder = Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), folder.parent / "torch_internals.py"]
    return key_of([file.read_text(encoding="utf-8") for file in files])
