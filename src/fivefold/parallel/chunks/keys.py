"""Key of chunked MLPs. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.keys import key
from fivefold.core.violation import Violation
from fivefold.parallel.recompute.keys import RecomputeKeys

_MORE = "docs/explain/memory.md"


@dataclass(frozen=True, kw_only=True)
class ChunkKeys(RecomputeKeys):
    """MLPs that run in pieces of the sequence."""

    mlp_chunks: int = key(
        1, "memory.mlp_chunks", "pieces of the sequence that an MLP runs one after the other",
        least=1, prefix="mlp", file_after="recompute",
    )  # fmt: skip

    def violations(self) -> Iterator[Violation]:
        """`mlp_chunks` excludes fp8 (scales over all tokens) and recompute policies that save parts of an MLP."""
        if self.mlp_chunks == 1:
            return
        if self.matmul_words:
            what = f"mlp_chunks {self.mlp_chunks}: {self.matmul_words} has scales that span the tokens of a linear"
            yield Violation("mlp_chunks", what, "set memory.mlp_chunks: 1", (1,), more=_MORE)
        if self.recompute not in ("none", "full"):
            what = f"mlp_chunks {self.mlp_chunks}: recompute {self.recompute} says what of an MLP is kept"
            yield Violation("mlp_chunks", what, "set memory.recompute: full, or none", (1,), more=_MORE)
