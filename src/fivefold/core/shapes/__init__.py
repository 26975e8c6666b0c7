"""Built-in model shapes: a name for a `config.json`, without weights. No torch, no transformers here.

A shape is a folder of this package that holds a `config.json`; adding a folder adds a name.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fivefold.core.errors import UserError
from fivefold.core.files import expanded
from fivefold.core.folder_config import read_folder_config
from fivefold.core.hub import config_file, is_hub_id

_HERE = Path(__file__).parent


def shape_names() -> list[str]:
    """Names that `model.name_or_path` accepts besides folders and hub ids."""
    return sorted(folder.parent.name for folder in _HERE.glob("*/config.json"))


def shape_folder(name: str) -> Path | None:
    """The folder of a built-in shape, or None when no shape has that name."""
    return _HERE / name if name in shape_names() else None


def read_model_config(name: str | Path) -> dict[str, Any]:
    """The config.json of a model's folder, of a file, a built-in shape or a hub id. Raises `UserError`."""
    path = shape_folder(str(name)) or expanded(str(name))
    if not path.exists():
        if not is_hub_id(str(name)):
            raise no_model(str(name))
        path = config_file(str(name))
    return read_folder_config(path)


def no_model(name: str, *, key: str = "", more: str | None = None) -> UserError:
    """Error for a name that is no folder, no shape and no hub id. `key`: the run file's key for it, if it has one."""
    near = get_close_matches(name.lower(), shape_names(), n=3)
    places = (
        f"paths are relative to {Path.cwd()}, those of a run to the folder that it was started in: give the command "
        "there; or name a run or model folder, a hub id (org/name), or a built-in shape: "
        f"{', '.join(shape_names())}"
    )
    fix = f"did you mean {' or '.join(near)}?" if near else places
    return UserError(f"{f'{key} ' * bool(key)}{name} is neither a folder nor a hub id", fix=fix, more=more)
