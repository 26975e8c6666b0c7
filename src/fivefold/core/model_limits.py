"""Limits that a model sets to a layout, and how ranks share its attention heads. No torch."""

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
        query, kv = (_count(values.get(key)) for key in ("num_attention_heads", "num_key_value_heads"))
        layers = next((_count(values[key]) for key in LAYERS if key in values), None)
        experts = None if any("experts" in key for key in values) else 0
        return ModelLimits(name=name, query=query, kv=kv or query, layers=layers, experts=experts)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None


UNKNOWN = ModelLimits()


def ranks_per_kv_head(kv: int, tp: int) -> int:
    """Number of tp ranks that share each of `kv` key/value heads: 2 heads over tp8 are shared by 4 ranks each."""
    return max(1, tp // kv)


def legal_degrees(query: int, kv: int) -> list[int]:
    """Tensor parallel degrees that split `query` and `kv` heads evenly: 1, 2, 4 and 8 for 8 and 2 heads."""
    return [n for n in range(1, query + 1) if query % n == 0 and (kv % n == 0 or n % kv == 0)]


@dataclass(frozen=True)
class CPMethod:
    """The attention method of `cp` = `ring` x `ulysses` ranks.

    `ulysses` neighbours exchange heads for tokens: each gets some heads of all their tokens. Between these groups, keys
    and values go round a ring of `ring` ranks; with `gathers` they are all-gathered instead. Example: `2x4` of cp8 is
    rings of 2 over groups of 4.
    """

    ring: int
    ulysses: int
    gathers: bool = False


def context_method(text: str, cp: int, query: int, kv: int) -> CPMethod:
    """Resolve `cp_method`. `query`, `kv`: heads of one tensor parallel rank.

    `auto` sends the least, counted in heads of a rank's tokens:

    - a ring of r ranks sends keys and values r - 1 times: 2 kv (r - 1);
    - Ulysses over u ranks sends queries, keys, values and results once: 2 (query + kv) (u - 1) / u.

    Few key/value heads favour the ring, many ranks favour Ulysses. Ties go to Ulysses, whose work is balanced whatever
    the documents. `auto` never gathers keys and values, because every rank would hold all of them. `legality` checks
    that the ranks and the heads fit the method.
    """
    if text == "auto":
        sizes = [u for u in range(1, cp + 1) if cp % u == 0 and query % u == 0 and kv % u == 0]
        u = min(sizes, key=lambda u: (kv * (cp // u - 1) + (query + kv) * (u - 1) / u, -u))
        return CPMethod(cp // u, u)
    named = {"ring": CPMethod(cp, 1), "allgather": CPMethod(cp, 1, gathers=True), "ulysses": CPMethod(1, cp)}
    return named[text] if text in named else CPMethod(*map(int, text.split("x")))  # type: ignore[arg-type]
