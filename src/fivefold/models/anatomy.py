"""Where a Hugging Face model keeps its parts. Nothing here knows a layout."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model, as names from the root of the model."""

    model_class: str
    base: str
    embedding: str
    layers: tuple[str, ...]
    head: str
    tied: bool

    @staticmethod
    def of(model: "PreTrainedModel") -> "Anatomy":
        """Describe `model`, which may be on the meta device. Raises `UserError` where a part cannot be found."""
        from fivefold.models.stacks import anatomy_of  # loads torch, which the value itself does without

        return anatomy_of(model)


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Whether what is called `name` lies in one of `modules`."""
    return name.startswith(tuple(f"{module}." for module in modules))
