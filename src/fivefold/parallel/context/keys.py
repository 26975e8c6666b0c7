"""Keys of context parallelism, and the heads that it cannot deal out. No torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import UserError, Violation
from fivefold.core.keys import bare, key
from fivefold.core.model_limits import ModelLimits, context_method, legal_degrees
from fivefold.parallel.tensor.keys import TensorKeys

METHODS = ("auto", "ring", "allgather", "ulysses")
MOST_RING = 2**10  # ranks of cp: what one of them sends is counted for each other one
_MORE = "fivefold docs explain/context"


@dataclass(frozen=True, kw_only=True)
class ContextKeys(TensorKeys):
    """Ranks that share the tokens of a row."""

    cp: int = key(
        1, "layout.cp", "context parallel; devices", most=MOST_RING,
        peers="cp_size cp_degree context_parallel context_parallel_size context_parallel_degree "
        "sequence_parallel_size sequence_parallel_degree",
    )  # fmt: skip
    cp_method: str = key(
        "auto", "layout.cp_method", "auto, ring, allgather, ulysses or RxU", after="pp_split",
        words=bare(*METHODS[1:]), prefix="", pattern=r"[0-9]{1,9}x[0-9]{1,9}", shown="RxU",
    )  # fmt: skip

    def check(self) -> None:
        """Refuse an unknown method."""
        if self.cp_method not in METHODS and not re.fullmatch(r"\d+x\d+", self.cp_method):
            raise UserError(f"cp_method {self.cp_method!r} is not known", fix=f"one of {', '.join(METHODS)} or RxU")

    @property
    def row_chunks(self) -> int:
        """Number of chunks that a row is cut into: two for each rank, so that causal work is even."""
        return 2 * self.cp

    def violations(self) -> Iterator[Violation]:
        """A method RxU needs R x U = `cp` ranks."""
        cp, sizes = self.cp, re.fullmatch(r"(\d+)x(\d+)", self.cp_method)
        if sizes and int(sizes[1]) * int(sizes[2]) != cp:
            product = f"{sizes[1]} x {sizes[2]} = {int(sizes[1]) * int(sizes[2])}"
            fits = " or ".join(f"{cp // n}x{n}" for n in range(1, cp + 1) if cp % n == 0)
            what = f"cp_method {sizes[0]} is {product} ranks, but cp is {cp}"
            yield Violation("cp_method", what, f"use auto, or {fits}", more=_MORE)

    def model_violations(self, limits: ModelLimits, world: int | None = None) -> Iterator[Violation]:
        """Ulysses ranks need whole heads."""
        attended = limits.attended or (limits.query, limits.kv)
        if (
            attended[0] is None
            or attended[1] is None
            or not self._splits_heads(limits)
            or any(ContextKeys.violations(self))
        ):
            return
        query, kv = attended[0] // self.tp, max(1, attended[1] // self.tp)
        cp, u = self.cp, context_method(self.cp_method, self.cp, query, kv).ulysses
        if query % u or (kv % u and u % kv):
            fits = " or ".join(f"{cp // n}x{n}" for n in legal_degrees(query, kv) if cp % n == 0)
            what = f"cp_method {self.cp_method} deals {query} query and {kv} key/value heads of a rank out to {u}"
            rule = f"{u} must divide the first, and divide or be a multiple of the second"
            yield Violation("cp_method", f"{what}: {rule}", f"use auto, ring, or {fits}", more=_MORE)
