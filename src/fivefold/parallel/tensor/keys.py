"""Keys of tensor parallelism, and the models that it cannot split. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import Violation
from fivefold.core.keys import LayoutPart, key
from fivefold.core.model_limits import ModelLimits, legal_degrees


@dataclass(frozen=True, kw_only=True)
class TensorKeys(LayoutPart):
    """Ranks that split the matrices of a layer."""

    tp: int = key(
        1, "layout.tp", "tensor parallel; devices",
        peers="tp_size tp_degree tensor_parallel tensor_parallel_size tensor_parallel_degree "
        "tensor_model_parallel_size",
        priced="work shards",
    )  # fmt: skip
    sequence_parallel: bool = key(
        True, "layout.sequence_parallel", "split the sequence over tp between the matmuls",
        words={"nosp": False}, is_last=True, priced="work shards",
    )  # fmt: skip

    def chunk_multiple(self) -> int:
        """Every rank has as many tokens of a chunk."""
        return self.tp

    def _refusal(self, limits: ModelLimits, name: str) -> str | None:
        """Reason why the structure of the model excludes `name` on several ranks, if it does."""
        return limits.refusals.get(name) if self.tp > 1 else None

    def _splits_heads(self, limits: ModelLimits) -> bool:
        """True if every rank has the same number of whole heads, as far as the limits say."""
        if self._refusal(limits, "tp"):
            return False
        return limits.query is None or limits.kv is None or self.tp in legal_degrees(limits.query, limits.kv)

    def model_violations(self, limits: ModelLimits, world: int | None = None) -> Iterator[Violation]:
        """Every tp rank needs the same number of whole query heads, and the key/value heads that these attend to.
        `world`: devices, which tp divides."""
        tp, query, kv = self.tp, limits.query, limits.kv
        legal: tuple[int, ...] = ()
        if refusal := self._refusal(limits, "tp"):
            yield Violation("tp", f"tp {tp} is refused: {refusal}", "use dp_shard instead (FSDP needs no roles)", (1,))
            return
        if self.sequence_parallel and (refusal := self._refusal(limits, "sequence_parallel")):
            fix = "set layout.sequence_parallel: false, or write +nosp behind a layout that is a text"
            yield Violation("sequence_parallel", f"sequence parallel is refused: {refusal}", fix)
        if query is not None and kv is not None and tp not in (legal := tuple(legal_degrees(query, kv))):
            what = f"tp={tp} does not fit num_attention_heads={query}, num_key_value_heads={kv}"
            rule = "tp must divide the first, and divide or be a multiple of the second"
            legal = tuple(degree for degree in legal if not (world and world % degree))
            yield Violation("tp", f"{what}: {rule}", f"try tp {', '.join(map(str, legal))}", legal)
            return
        if limits.fused and kv is not None and tp > kv:
            what = f"tp={tp} is more than num_key_value_heads={kv} of {limits.name}, and {limits.fused} makes all heads"
            fits = tuple(degree for degree in legal if degree <= kv)
            yield Violation("tp", f"{what} at once", f"use tp {kv} or less", fits)
