"""The best validations of a run, and how long none has improved. No torch.

The record is a value in the state of every checkpoint, the same on all ranks. So it survives a resume under any layout,
and `best_of` finds the best step without the run's other files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from fivefold.core.units import many

STATE = "best"  # key in the state of a checkpoint
MOST = 100  # validations remembered; more than checkpoint.keep_best, in case the save of a better one fails
# The metrics that can say which validation is the best, and the direction of each.
METRICS: Mapping[str, Literal["min", "max"]] = {
    "eval/loss": "min", "train/loss": "min", "eval/rewards/accuracies": "max", "eval/rewards/margins": "max"
}  # fmt: skip


@dataclass(frozen=True)
class Best:
    """The record of a run after its last validation.

    `ranking`: (step, value), the best first, of equal values the earlier one. `improved`: the value that the next one
    has to improve on; it follows improvements of more than `eval.stop.min_delta` only, so that small ones add up.
    `waited`: validations since then.
    """

    metric: str = "eval/loss"
    mode: Literal["min", "max"] = "min"
    ranking: tuple[tuple[int, float], ...] = ()
    improved: float | None = None
    waited: int = 0

    @classmethod
    def resumed(cls, state: Mapping[str, Any], metric: str, mode: Literal["min", "max"]) -> tuple["Best", str]:
        """The record with which a run goes on from a checkpoint with this state (empty: it begins), and a line about it
        for people. A record by another metric or direction says nothing of this one, and is dropped."""
        before = cls.of_state(state)
        if before is None or (before.metric, before.mode) == (metric, mode):
            return before or cls(metric, mode), str(before) if before and before.ranking else ""
        dropped = f"; by {before.metric} ({before.mode}) it was {before}" if before.ranking else ""
        return cls(metric, mode), f"counted from here on by {metric} ({mode}){dropped}" if dropped else ""

    def after(self, step: int, value: float | None, *, min_delta: float = 0.0) -> "Best":
        """The record after a validation at `step`. A value that is not finite, None, is never the best."""
        if value is None:
            return replace(self, waited=self.waited + 1)
        ranking = sorted((*self.ranking, (step, value)), key=lambda entry: (self._sign * entry[1], entry[0]))
        has_improved = self.improved is None or self._sign * (self.improved - value) > min_delta
        return replace(
            self,
            ranking=tuple(ranking[:MOST]),
            improved=value if has_improved else self.improved,
            waited=0 if has_improved else self.waited + 1,
        )

    @property
    def _sign(self) -> int:
        """1 for a metric whose smaller values are better, else -1."""
        return 1 if self.mode == "min" else -1

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(step for step, _ in self.ranking)

    @property
    def step(self) -> int | None:
        """The step of the best validation; None before the first one with a finite value."""
        return self.ranking[0][0] if self.ranking else None

    @property
    def value(self) -> float | None:
        return self.ranking[0][1] if self.ranking else None

    def is_over(self, patience: int) -> bool:
        """True if `patience` validations in a row have not improved; 0: never."""
        return 0 < patience <= self.waited

    def __str__(self) -> str:
        return f"step {self.step}: {self.metric} {self.value:.4f}" if self.ranking else "no validation yet"

    def why_over(self, step: int, min_delta: float) -> str:
        """The reason of an early stop after `step` steps."""
        by = f" by more than {min_delta:g}" if min_delta else ""
        return (
            f"stopped early after step {step}: {self.metric} has not improved{by} in {many(self.waited, 'validation')}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Best | None":
        """The record in the state of a checkpoint; None in that of an earlier version."""
        tree = state.get(STATE)
        return None if tree is None else cls(**{**tree, "ranking": tuple(map(tuple, tree["ranking"]))})


def retained(there: Sequence[int], *, keep: int, best: Sequence[int] = (), keep_best: int = 0) -> set[int]:
    """The steps among `there`, ascending, that retention keeps: the newest `keep`, and of the ranking `best` the first
    `keep_best` that are there."""
    return {*there[-keep:], *[step for step in best if step in there][:keep_best]}
