"""Expected time of a step: the planner's estimate of the rehearsed layout, with the counts of the rehearsed step.

An estimate, not a measurement. Durations are the planner's roofline (`planner/estimate.py`), item by item. Numbers of
launched kernels, of host waits and of exposed collectives are counted.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from fivefold.core.errors import UserError
from fivefold.planner.doubt import Interval
from fivefold.planner.estimate import Estimate, Item
from fivefold.planner.timing import traffic_bytes
from fivefold.rehearsal.request import Phase, Seen

TRAFFIC = "element-wise"  # the planner's item that is memory traffic alone
IDLE = ("host", "bubble")  # its items in which the device waits for Python, and for other stages
SMALL = 5e-4  # of a step: smaller items would show as 0.0 %, and are left out on the screen


def or_why(planned: Callable[[], Estimate]) -> tuple[Estimate | None, str]:
    """The planner's estimate; or None, and the reason."""
    try:
        return planned(), ""
    except UserError as error:
        return None, error.what


@dataclass(frozen=True)
class TimeRow:
    """A part of the step's time in milliseconds; -: counted, with no time of its own. `of`: its composition."""

    item: str
    ms: str
    share: str
    of: str


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

    # ---- seconds -----------------------------------------------------------------------------------------------------

    @property
    def launch_seconds(self) -> float:
        """Host seconds of one kernel: the chip's constant, not a measurement."""
        chip = self.planned.cluster.chip
        return chip.launch_us * 1e-6 * chip.host_scale

    @property
    def device_seconds(self) -> float:
        """Seconds of the device's work, by roofline: the planner's items, without those in which it is idle."""
        return sum(amount for item, amount in self.planned.seconds.items() if item not in IDLE)

    @property
    def launch_floor(self) -> float:
        """Minimum seconds of the host: no kernel starts before it is launched."""
        return (self.counted.launches or 0) * self.launch_seconds if self.counted else 0.0

    @property
    def sync_seconds(self) -> float:
        """Minimum cost of host syncs: after each one, the device idles until the next launch."""
        return (self.counted.syncs or 0) * self.launch_seconds if self.counted else 0.0

    @property
    def floor_beyond(self) -> float:
        """Seconds by which the launch floor outlasts the planned step."""
        return max(0.0, self.launch_floor - self.planned.step_seconds)

    @property
    def step_seconds(self) -> float:
        """Seconds of the planned step, plus the costs counted beyond it."""
        return self.planned.step_seconds + self.floor_beyond + self.sync_seconds

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

    # ---- output ------------------------------------------------------------------------------------------------------

    def rows(self) -> Iterator[TimeRow]:
        """The planner's items, the longest first; then the counts."""
        for item in sorted(self._items(), key=lambda item: -item.amount):
            if abs(item.amount) >= SMALL * self.step_seconds:
                yield self._row(item.item, item.amount, self._made_of(item))
        if self.counted is None:
            return
        each = f"{self.launch_seconds * 1e6:.3g} us"
        floor = f"counted {self.counted.launches:,} x {each} = {ms(self.launch_floor)} ms"
        beyond = "what outlasts the above" if self.floor_beyond else "beside the above"
        yield self._row("launches", self.floor_beyond, f"{floor}, {beyond}")
        yield self._row("host syncs", self.sync_seconds, f"counted {self.counted.syncs:,} x {each}, at least")
        for axis, (exposed, issued) in self.exposed.items():
            yield TimeRow(f"{axis} collectives", "-", "-", f"counted {exposed:,} of {issued:,} exposed; timed above")

    def _items(self) -> list[Item]:
        return [row for row in self.planned.rows if row.part == "time"]

    def _row(self, item: str, seconds: float, of: str) -> TimeRow:
        return TimeRow(item, ms(seconds), f"{100 * seconds / self.step_seconds:.1f} %", of)

    def _made_of(self, item: Item) -> str:
        if item.item == "matmuls":
            return f"{item.why}; with attention {self.flops * 1e-12:,.3g} model TFLOPs"
        if item.item == TRAFFIC:
            rate = self.planned.cluster.chip.memory_bytes_per_second
            return f"{self.traffic * 1e-9:,.3g} GB of memory traffic at {rate * 1e-9:,.0f} GB/s"
        return item.why

    @property
    def traffic(self) -> float:
        """Bytes that element-wise work reads and writes on the device."""
        return traffic_bytes(self.planned.cluster.chip, self.planned.seconds.get(TRAFFIC, 0.0))

    @property
    def exposed(self) -> dict[str, tuple[int, int]]:
        """Exposed collectives, and all of them, by mesh axis. No kernel could hide an exposed one."""
        found: dict[str, tuple[int, int]] = {}
        for sent in self.seen.sent:
            exposed, issued = found.get(sent.axis, (0, 0))
            found[sent.axis] = exposed + (sent.exposed or 0), issued + sent.count
        return found

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
        """Seconds of a step, shares from 0 to 1; counts are of one rank's last step."""
        counted = self.counted
        return {
            "is_estimate": True, "rank": self.seen.rank, "mfu": self.mfu, "mfu_interval": self.mfu_interval,
            "step_seconds": self.step_seconds, "step_seconds_interval": self.step_interval,
            "planned_seconds": self.planned.seconds, "model_flops_per_device": self.flops,
            "element_wise_bytes": self.traffic, "device_seconds": self.device_seconds,
            "launches": counted and counted.launches, "launch_seconds": self.launch_seconds,
            "launch_floor_seconds": self.launch_floor if counted else None, "longer": self.longer if counted else None,
            "floor_beyond_seconds": self.floor_beyond, "syncs": counted and counted.syncs,
            "sync_seconds": self.sync_seconds, "cpu_seconds_here": counted and counted.seconds,
            "exposed": {axis: {"exposed": some, "issued": all_} for axis, (some, all_) in self.exposed.items()},
        }  # fmt: skip

    @property
    def flops(self) -> float:
        """Model FLOPs of a step on a device."""
        return self.planned.flops / self.planned.layout.world


def ms(seconds: float) -> str:
    """Format milliseconds with three digits, whole above."""
    amount = 1e3 * seconds
    return f"{amount:,.0f}" if abs(amount) >= 99.95 else f"{amount:.3g}"
