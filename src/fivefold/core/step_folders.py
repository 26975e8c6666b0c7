"""Folder names of a run's checkpoints: `step-000250`. No torch: the launcher uses them too."""

import re
from collections.abc import Iterable
from pathlib import Path

_STEP_FOLDER = re.compile(r"step-(\d{6,})")


def step_folder(step: int) -> str:
    """The folder name of a step: `step-000250`."""
    return f"step-{step:06d}"


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps among these folder names, ascending."""
    return sorted(int(match[1]) for match in map(_STEP_FOLDER.fullmatch, names) if match)


def steps(directory: Path) -> list[int]:
    """Steps with an entry in `directory` (`runs/NAME/checkpoints`), ascending, complete or not. An entry may be a link,
    even to a disk that is not mounted: reading its manifest then raises `UserError`."""
    return steps_of(path.name for path in directory.iterdir()) if directory.is_dir() else []
