"""The parts of a Hugging Face model by name: its embedding, its head, and its decoder blocks. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model, as names from the root of the model."""

    model_class: str
    base: str
    embedding: str
    layers: tuple[str, ...]
    head: str
    tied: bool

    @property
    def embedding_weight(self) -> str:
        """The parameter of the embedding, [vocabulary, hidden size]. It is the head's as well if `tied`."""
        return f"{self.embedding}.weight"


def is_within(name: str, modules: Iterable[str]) -> bool:
    return name.startswith(tuple(f"{module}." for module in modules))
