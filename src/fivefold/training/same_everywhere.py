"""Before step 0: every rank was asked for the same run, over the same rows, by the same versions."""

import hashlib
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.data.prepare import PreparedData
from fivefold.parallel import plain

_PACKAGES = ("fivefold", "torch", "transformers", "safetensors", "tokenizers")


def check_ranks_agree(config: RunConfig, data: PreparedData) -> None:
    """Raise `UserError`, the same on every rank, naming the first field that differs from rank 0's, and where."""
    mine = _fields(config, data)
    first = plain.of_first(mine)
    differing = next((name for name in {**first, **mine} if first.get(name) != mine.get(name)), None)
    found = plain.everywhere(differing and (differing, mine.get(differing)))
    apart = {rank: each for rank, each in enumerate(found) if each}
    if not apart:
        return
    name, value = next(iter(apart.values()))
    ranks = [str(rank) for rank, each in apart.items() if each[0] == name]
    listed = ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    raise UserError(
        f"{name} is {first.get(name)} on rank 0, and {value} on rank {listed}",
        fix="start every rank with the same run file, data and environment",
    )


def _fields(config: RunConfig, data: PreparedData) -> Mapping[str, Any]:
    """What must be the same, by name: the keys of the run file, the rows, the tokenizer, the versions."""
    tokenizer = data.tokenizer_dir / "tokenizer.json"
    return {
        **{
            f"{section}.{key}": value
            for section, values in config.model_dump(mode="json", by_alias=True).items()
            for key, value in values.items()
        },
        "the fingerprint of the rows": data.fingerprint,
        "the hash of the tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else "",
        "the version of python": platform.python_version(),
        **{f"the version of {package}": version(package) for package in _PACKAGES},
    }
