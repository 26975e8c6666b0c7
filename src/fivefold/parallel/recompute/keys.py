"""Key of recompute. No torch."""

import re
from dataclasses import dataclass

from fivefold.core.errors import UserError
from fivefold.core.keys import LayoutPart, bare, key
from fivefold.parallel.recompute.policy import BUDGET, MODES


@dataclass(frozen=True, kw_only=True)
class RecomputeKeys(LayoutPart):
    """Keys of what a layer keeps for its backward pass."""

    recompute: str = key(
        "none", "memory.recompute", "activations computed twice: a mode, or what a rank may keep, as 12 GiB",
        words=bare(*MODES[1:]), prefix="keep", pattern=BUDGET, shown="NGiB", text="a size such as 12GiB", priced="",
        answers={
            "gradient_checkpointing activation_checkpointing activation_checkpoint recompute_granularity":
            "set memory.recompute: full",
        },
    )  # fmt: skip

    def check(self) -> None:
        """Refuse an unknown mode, and write a budget without spaces."""
        if self.recompute not in MODES and not re.fullmatch(BUDGET, self.recompute):
            fix = f"choose one of {', '.join(MODES)}, or what a rank may keep: 12 GiB"
            raise UserError(f"recompute {self.recompute!r} is not known", fix=fix)
        object.__setattr__(self, "recompute", self.recompute.replace(" ", ""))
