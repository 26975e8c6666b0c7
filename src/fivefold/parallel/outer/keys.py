"""Key of outer steps, and the layouts that they do not go with. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import Violation
from fivefold.core.keys import key
from fivefold.parallel.fsdp.keys import FsdpKeys
from fivefold.parallel.offload.keys import OffloadKeys

MORE = "fivefold docs explain/outer"
OUTER_NUMBERS = 2  # that are kept for each trained one: the outer weight and its momentum


@dataclass(frozen=True, kw_only=True)
class OuterKeys(OffloadKeys, FsdpKeys):
    """How often replicas meet that train apart."""

    outer_every: int = key(
        0, "outer.every", "optimizer steps that each of dp_replicate trains on its own between two outer steps "
        "(DiLoCo); 0 = every gradient is summed over all",
        least=0, most=2**31, prefix="outer", priced="",
    )  # fmt: skip

    @property
    def copies_apart(self) -> int:
        """Replicas that train apart: `dp_replicate` with outer steps, else 1."""
        return self.dp_replicate if self.outer_every else 1

    def violations(self) -> Iterator[Violation]:
        """Outer steps need replicas, whose parameters and optimizer state stay on the device."""
        if not self.outer_every:
            return
        if self.dp_replicate in (1, -1):
            what = (
                f"outer.every {self.outer_every}: replicas meet in outer steps, and dp_replicate is {self.dp_replicate}"
            )
            yield Violation("dp_replicate", what, "set layout.dp_replicate: 2, or leave outer.every out", more=MORE)
        if self.rests_in_host:
            what = f"outer.every {self.outer_every} with {' and '.join(sorted(self.rests_in_host))} in host memory"
            yield Violation("outer_every", what, "keep them on the device, or leave outer.every out", more=MORE)
