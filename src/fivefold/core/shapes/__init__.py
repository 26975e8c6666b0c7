"""Built-in model shapes: a name for a `config.json`, without weights. No torch, no transformers here.

A shape is a folder of this package that holds a `config.json`; adding a folder adds a name.
"""

from pathlib import Path

_HERE = Path(__file__).parent


def shape_names() -> list[str]:
    """Names that `model.name_or_path` accepts besides folders and hub ids."""
    return sorted(folder.parent.name for folder in _HERE.glob("*/config.json"))


def shape_folder(name: str) -> Path | None:
    """The folder of a built-in shape, or None when no shape has that name."""
    return _HERE / name if name in shape_names() else None
