"""Limits that a model sets to a layout. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.core.folder_config import LAYERS


@dataclass(frozen=True, kw_only=True)
class ModelLimits:
    """Limits that a model sets. A number that is None is not known, and nothing is refused for it.

    `query`, `kv`: attention heads. `attended`: the heads that the attention function sees, if different (multi-head
    latent attention makes a key/value head for every query head). `fused`: a parameter that makes all heads at once, so
    that tp ranks cannot share a key/value head. `experts`: of the layer with the fewest; 0 in a dense model.
    `expert_features`: of an expert's hidden layer. `refusals`: axis (`tp`, `sequence_parallel`, `pp`, `expert_tp`) ->
    why the structure of the model does not allow it."""

    name: str = "the model"
    query: int | None = None
    kv: int | None = None
    attended: tuple[int, int] | None = None
    fused: str | None = None
    layers: int | None = None
    experts: int | None = None
    expert_features: int | None = None
    refusals: Mapping[str, str] = field(default_factory=dict)

    def refusing(self, reasons: Mapping[str, str | None]) -> "ModelLimits":
        """The same limits, with those of the `reasons` that are not None."""
        return replace(self, refusals={**self.refusals, **{axis: why for axis, why in reasons.items() if why}})

    @staticmethod
    def of_config(values: Mapping[str, Any], name: str) -> "ModelLimits":
        """Read the limits from a config.json."""
        query, kv = (_count(values.get(key)) for key in ("num_attention_heads", "num_key_value_heads"))
        layers = next((_count(values[key]) for key in LAYERS if key in values), None)
        experts = None if any("experts" in key for key in values) else 0
        return ModelLimits(name=name, query=query, kv=kv or query, layers=layers, experts=experts)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


UNKNOWN = ModelLimits()
