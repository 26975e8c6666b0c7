"""The parts that a run keeps of the folder that its model came from, apart from weights, config and tokenizer.

It is read once, when a run starts: a checkpoint and its export need neither that folder nor the current one of the run.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from huggingface_hub import metadata_load
from huggingface_hub.constants import REPOCARD_NAME
from transformers.utils import AUDIO_TOKENIZER_NAME, PROCESSOR_NAME

from fivefold.core.errors import UserError
from fivefold.core.hub import is_hub_id, is_inside
from fivefold.models import hf_internals

# Terms that a model must travel with, as their files are called: patterns, in any case.
_TERMS = tuple(
    "".join(f"[{letter.upper()}{letter}]" for letter in word) + "*"
    for word in ("license", "licence", "notice", "copying", "use_policy")
)
# How their names end: LICENSE-2.0, LICENSE.txt, and no LICENSE.py.
_TEXT = re.compile(r"(\.(txt|md|pdf|rst|\d+))?", re.IGNORECASE)
_MOST_BYTES = 2**24
# Its files on the hub, as patterns, besides weights and JSON.
FILES = (REPOCARD_NAME, *_TERMS, "*.jinja")


@dataclass(frozen=True)
class Origin:
    """`hub`: its id on the hub, None for a local folder. `licence`: as its model card states it. `files`: those of its
    processors (of images, of sound) and its terms, by name."""

    hub: str | None = None
    licence: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, folder: Path, *, with_template: bool = True) -> "Origin":
        """The origin of a model called `name`, in `folder`. `with_template`: its chat template is the run's."""
        left_out = () if with_template else hf_internals.TEMPLATE_FILES
        files = {path.name: _read(path) for path in copied(folder) if path.name not in left_out}
        return cls(name if is_hub_id(name) else None, _licence(folder / REPOCARD_NAME), files)


def copied(folder: Path) -> list[Path]:
    """The files of a model's folder that travel with it unchanged: those of its processors, and its terms."""
    terms = {path for pattern in _TERMS for path in folder.glob(pattern) if _TEXT.fullmatch(path.suffix)}
    others = map(folder.joinpath, (*hf_internals.TEMPLATE_FILES, AUDIO_TOKENIZER_NAME, PROCESSOR_NAME))
    found = {*terms, *folder.glob("[!.]*processor_config.json"), *others}
    return sorted(path for path in found if path.is_file())


def _read(path: Path) -> bytes:
    """The contents of a small file of a folder. Raises `UserError` for a large one, and a link that leads out of it."""
    if not is_inside(path, path.parent):
        what = f"{path} is a link to {path.resolve()}, which is not inside the folder"
        raise UserError(what, fix="copy the file into the folder")
    if (size := path.stat().st_size) > _MOST_BYTES:
        raise UserError(
            f"{path} has {size:,} bytes, and at most {_MOST_BYTES:,} are kept with a model", fix="move it away"
        )
    return path.read_bytes()


def _licence(card: Path) -> str | None:
    try:
        front = metadata_load(card) if card.is_file() else None
    except (ValueError, yaml.YAMLError):  # not UTF-8, or no front matter of keys
        front = None
    stated = (front or {}).get("license")
    return stated if isinstance(stated, str) and stated else None
