"""Text from a trained model, under any layout. No torch until it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fivefold.core.errors import UserError

# The defaults of the command and of the Python API. Small models repeat themselves when they always take the likeliest.
TEMPERATURE, TOP_K, SEED = 0.8, 50, 1234


def check_options(given: Mapping[str, Any], *, more: str) -> None:
    """Raise `UserError` for a number out of its range."""
    for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0)):
        if not given[name] >= least:
            raise UserError(f"{name} {given[name]} is less than {least}", fix=f"write {least} or more", more=more)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What to continue, with what, and how far. `model`: a run folder or the address of its
    copy, a Hugging Face folder or a hub id.

    `layout` is its text form; without a precision in it, the model computes in the type its weights are stored in.
    `step`: a run's checkpoint, None the newest. `temperature` 0: the likeliest token each time. `top_k` 0: all.
    Raises `UserError` for a number out of its range.
    """

    model: str
    prompt: str
    layout: str = "single"
    step: int | None = None
    max_new_tokens: int = 100
    temperature: float = TEMPERATURE
    top_k: int = TOP_K
    seed: int = SEED

    def __post_init__(self) -> None:
        check_options(vars(self), more="fivefold generate --help")
