"""What counts as a name on the Hugging Face hub. No torch, no network here."""

import re
from pathlib import Path


def is_hub_id(name: str) -> bool:
    """True for `org/name`, unless `org` is a folder here: a mistyped path must not become a network call."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None and not Path(name).parent.is_dir()
