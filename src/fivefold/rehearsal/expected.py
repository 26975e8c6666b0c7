"""Expected time of a step: the planner's estimate of the rehearsed layout, with the counts of the rehearsed step.

An estimate, not a measurement. Seconds are the planner's (`fivefold plan --layout` lists them item by item). Numbers of
launched kernels and of host waits are counted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fivefold.core.errors import UserError
from fivefold.planner.doubt import Interval
from fivefold.planner.estimate import Estimate
from fivefold.rehearsal.request import Phase, Seen

IDLE = ("host", "bubble")  # the planner's items in which the device waits for Python, and for other stages


def or_why(planned: Callable[[], Estimate]) -> tuple[Estimate | None, str]:
    """The planner's estimate; or None, and the reason."""
    try:
        return planned(), ""
    except UserError as error:
        return None, error.what


@dataclass(frozen=True)
class ExpectedStep:
    """A step as planned and as counted. `counted`: the last step of the rank that launches most; None if kernels were
    not seen (on the CPU). Seconds are of the whole step, and all are estimates."""

    planned: Estimate
    seen: Seen
    counted: Phase | None

    @classmethod
    def of(cls, planned: Estimate, seen: tuple[Seen, ...], step: str) -> "ExpectedStep | None":
        """Combine the plan with the phase `step` of the ranks; None if one of them did not complete it."""
        steps = [(of_rank, phase) for of_rank in seen for phase in of_rank.phases if phase.name == step]
        if len(steps) < len(seen) or any(rank.failed or rank.out_of_memory for rank in seen):
            return None
        rank, most = max(steps, key=lambda one: one[1].launches or 0)
        return cls(planned, rank, None if most.launches is None else most)

    @property
    def device_seconds(self) -> float:
        """Seconds of the device's work, by roofline: the planner's items, without those in which it is idle."""
        return sum(amount for item, amount in self.planned.seconds.items() if item not in IDLE)

    def launching(self, count: int | None) -> float:
        """Host seconds of so many kernels, by the chip's constant: none starts before it is launched."""
        chip = self.planned.cluster.chip
        return (count or 0) * chip.launch_us * 1e-6 * chip.host_scale

    @property
    def launch_floor(self) -> float:
        """Minimum seconds of the host."""
        return self.launching(self.counted.launches) if self.counted else 0.0

    @property
    def step_seconds(self) -> float:
        """Seconds of the planned step, or the launch floor if that is longer; and after each host sync, those until the
        next launch."""
        waits = self.launching(self.counted.syncs) if self.counted else 0.0
        return max(self.planned.step_seconds, self.launch_floor) + waits

    @property
    def step_interval(self) -> Interval:
        """80 % interval of the seconds, by the planner's doubt of its own items."""
        low, high = (seconds / self.planned.step_seconds for seconds in self.planned.step_interval)
        return self.step_seconds * low, self.step_seconds * high

    @property
    def mfu(self) -> float:
        """Model FLOPs, with causal attention halved and no recompute, over the peak: 0.4 is 40 %."""
        return self._mfu(self.step_seconds)

    @property
    def mfu_interval(self) -> Interval:
        """80 % interval of the MFU."""
        low, high = self.step_interval
        return self._mfu(high), self._mfu(low)

    def _mfu(self, seconds: float) -> float:
        return self.planned.mfu * self.planned.step_seconds / seconds

    @property
    def longer(self) -> str:
        """The limit: `device` or `launches`."""
        return "launches" if self.launch_floor > self.device_seconds else "device"

    @property
    def verdict(self) -> tuple[str, ...]:
        """Sentences: the MFU, and the longer of the device's time and the launch floor."""
        low, high = (100 * share for share in self.mfu_interval)
        mfu = (
            f"estimated MFU, not measured: {100 * self.mfu:.0f} % ({low:.0f} to {high:.0f} % in 80 % of cases), "
            f"{ms(self.step_seconds)} ms a step"
        )
        if self.counted is None:
            return mfu, "Kernels were not seen: the planner's estimate alone, without the launch floor."
        words = {"device": "The device's time is longer", "launches": "The launches take longer than the device's work"}
        return (
            mfu,
            f"{words[self.longer]}: {ms(self.device_seconds)} ms against a launch floor of {ms(self.launch_floor)} ms. "
            f"This machine's CPU took {ms(self.counted.seconds)} ms for the step.",
        )

    def to_json(self) -> dict[str, Any]:
        """Seconds of a step; counts are of one rank's last step."""
        counted = self.counted
        return {
            "is_estimate": True,
            "rank": self.seen.rank,
            "mfu": self.mfu,
            "mfu_interval": self.mfu_interval,
            "step_seconds": self.step_seconds,
            "step_seconds_interval": self.step_interval,
            "planned_seconds": self.planned.seconds,
            "device_seconds": self.device_seconds,
            "launches": counted and counted.launches,
            "launch_floor_seconds": self.launch_floor if counted else None,
            "syncs": counted and counted.syncs,
            "longer": self.longer if counted else None,
        }


def ms(seconds: float) -> str:
    """Format milliseconds with three digits, whole above."""
    amount = 1e3 * seconds
    return f"{amount:,.0f}" if abs(amount) >= 99.95 else f"{amount:.3g}"
