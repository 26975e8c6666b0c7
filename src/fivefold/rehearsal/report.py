"""Report of a rehearsal: tables for the screen, JSON, and sentences."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fivefold.core.errors import UserError
from fivefold.core.units import GIB, human_bytes, many
from fivefold.hardware.cluster import Cluster
from fivefold.planner.estimate import Estimate
from fivefold.planner.timing import Interval
from fivefold.rehearsal.request import MemoryItem, Phase, Seen
from fivefold.rehearsal.stand_in import Lack
from fivefold.report.findings import TONES, Facts, Findings, Notes, On, Section, Table, to_text

# ---- the expected time of a step -------------------------------------------------------------------------------------
# An estimate, not a measurement. Seconds are the planner's (`fivefold plan --layout` lists them item by item). Numbers
# of launched kernels and of host waits are counted.

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


if TYPE_CHECKING:
    from rich.console import Console

# ---- the report ------------------------------------------------------------------------------------------------------

TIGHT = 0.95  # of a device's memory: NCCL needs some as well
SHOWN = 10  # rows of a table
PHASE = ("rank", "phase", "allocated", "reserved", "launches", "syncs", "compiles", "seconds")
CURES = (
    "Less is needed with memory.recompute: full, a smaller train.micro_batch_size, a shorter data.seq_length, or more "
    "shards."
)
RUN = (
    "The code that trains was run as these ranks of the cluster, on a machine without its devices: memory, kernels and "
    "collectives are those of the run; nothing was computed, and nothing was sent."
)
NOTES = (
    "No kernel ran: nothing is said of values, and no time was measured.",
    "Tokens go evenly to experts; a run's busiest expert has more, and its rank more memory.",
    "A block that several streams use is free at once here; a GPU gives it back when the streams are done.",
)


@dataclass(frozen=True)
class Rehearsal:
    """All results. `lacks`: missing requirements of a full rehearsal. `planned`: the planner's estimate of the same
    layout; if None, `unplanned` gives the reason."""

    model: str
    layout: str
    cluster: Cluster
    steps: int
    seen: tuple[Seen, ...]
    lacks: tuple[Lack, ...] = ()
    planned: Estimate | None = None
    unplanned: str = ""

    @property
    def ok(self) -> bool:
        """True if every rank finished within memory and sent what its plan declares."""
        return all(rank.ok for rank in self.seen)

    @property
    def peak(self) -> tuple[Seen, Phase] | None:
        """The rank and phase with the most reserved memory; None if memory was not seen."""
        phases = [(seen, phase) for seen in self.seen for phase in seen.phases if phase.reserved is not None]
        return max(phases, key=lambda one: one[1].reserved or 0, default=None)

    @cached_property
    def expected(self) -> ExpectedStep | None:
        """The estimated time of a step, and its MFU; None if a rank did not complete its last step."""
        return ExpectedStep.of(self.planned, self.seen, f"step {self.steps}") if self.planned else None

    @property
    def title(self) -> str:
        return f"fivefold rehearse: {self.model}, {self.layout} on {self.cluster.text}"

    @property
    def verdict(self) -> str:
        """A sentence: how well it fits; or what failed."""
        for seen in self.seen:
            if (lack := seen.out_of_memory) is not None:
                return (
                    f"out of memory: rank {seen.rank} in {lack.phase}: {human_bytes(lack.asked)} asked for at "
                    f"{lack.where}, {human_bytes(lack.allocated)} allocated, {human_bytes(lack.reserved)} reserved of "
                    f"{human_bytes(self.cluster.chip.memory_bytes)}"
                )
            if seen.failed:
                return f"rank {seen.rank} stopped: {seen.failed}"
            if seen.undeclared:
                names = ", ".join(f"{sent.axis}/{sent.kind}" for sent in seen.undeclared)
                return f"rank {seen.rank} sends otherwise than its plan declares: {names}"
        if self.peak is None:
            return "it runs; memory, kernels and waiting were not seen"
        seen, phase = self.peak
        most, memory = phase.reserved or 0, self.cluster.chip.memory_bytes
        how = "fits" if most + self.cluster.chip.context_gib * GIB <= TIGHT * memory else "tight"
        return (
            f"{how}: {human_bytes(most)} reserved at most (rank {seen.rank}, {phase.name}), "
            f"{100 * most / memory:.0f} % of {human_bytes(memory)}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        if self.lacks:
            missing = tuple(f"Not a full rehearsal: {lack.what}; {lack.fix}." for lack in self.lacks)
            return (
                *missing,
                "On the CPU, with a process group that sends nothing: memory, kernels, syncs are not seen.",
            )
        chip, communicators = self.cluster.chip, max((rank.communicators for rank in self.seen), default=0)
        beside = (
            f"The context of CUDA has {chip.context_gib:g} GiB of the memory besides. The buffers of "
            f"{many(communicators, 'communicator')} of NCCL come on top of that."
        )
        is_short = any(rank.out_of_memory for rank in self.seen)
        return (*((CURES,) if is_short else ()), beside, *NOTES)

    @property
    def speed(self) -> tuple[str, ...]:
        if self.unplanned:
            return (f"No estimate of MFU: {self.unplanned}.",)
        return self.expected.verdict if self.expected else ()

    def phases(self) -> list[tuple[object, ...]]:
        """A row of texts for each phase of every rank; `PHASE` names the columns."""
        return [
            (
                *(seen.rank, phase.name, gib(phase.allocated), gib(phase.reserved), _number(phase.launches)),
                *(_number(phase.syncs), phase.compiles, f"{phase.seconds:.1f}"),
            )
            for seen in self.seen
            for phase in seen.phases
        ]

    def tables(self) -> Iterator[tuple[str, Table]]:
        """All tables with a row, and their titles, in order."""
        yield f"{self.title} (GiB)", Table.of_texts(PHASE, self.phases(), TONES)
        for seen in self.seen:
            for title, names, rows in self._of_rank(seen):
                if rows:
                    yield title, Table.of_texts(names, rows, TONES)

    def _of_rank(self, seen: Seen) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[object]]]]:
        """Title, columns and rows: the largest items at the peak, or when memory ran out; lines at which the host waits
        for the device; the collectives of the last step, issued and declared; recompilations and graph breaks."""
        name, found = largest(seen)
        items = [(gib(item.bytes), item.count, item.what, item.where) for item in found[:SHOWN]]
        yield f"largest at the peak of rank {seen.rank}, {name}", ("GiB", "count", "what", "where"), items
        last = f"step {self.steps}"
        syncs = [each for each in seen.syncs if each.phase in (last, "evaluation", "save")]
        lines = [(sync.count, sync.phase, sync.where) for sync in syncs[:SHOWN]]
        yield f"host syncs of rank {seen.rank}", ("count", "phase", "line"), lines
        sent = [
            (call.axis, call.kind, call.count, call.declared, human_bytes(call.bytes), _number(call.exposed))
            for call in seen.sent
        ]
        names = ("axis", "kind", "count", "declared", "bytes", "exposed")
        yield f"collectives of rank {seen.rank}, {last}", names, sent
        again = [(each.count, each.what, each.why) for each in seen.recompiles[:SHOWN]]
        yield f"compiled again, and graph breaks, on rank {seen.rank}", ("count", "what", "why"), again

    def findings(self) -> Findings:
        """The tables and the sentences; on the page also what was run."""
        sections = [
            Section([Notes([RUN, *self.speed]), Facts(self.facts)], on=On.PAGE),
            *(Section([table], title) for title, table in self.tables()),
            Section([Notes([self.verdict, *self.speed, *self.notes])], on=On.TERMINAL),
            Section([Notes(self.notes, is_list=True)], "What is not in these figures", On.PAGE),
        ]
        return Findings(command="fivefold rehearse", headline=self.verdict, ok=self.ok, sections=sections)

    @property
    def facts(self) -> dict[str, str]:
        memory = gib(self.cluster.chip.memory_bytes)
        return {
            "model": self.model, "layout": self.layout,
            "cluster": f"{self.cluster.text}: {self.cluster.world:,} devices of {memory} GiB",
            "ranks rehearsed": ", ".join(str(rank.rank) for rank in self.seen), "steps": str(self.steps),
        }  # fmt: skip

    def show(self, console: "Console") -> None:
        to_text(self.findings(), console)

    def to_json(self) -> str:
        """One JSON object: the phases as rows, and all results by rank."""
        values = {
            "title": f"{self.title} (GiB)",
            "ok": self.ok,
            "rows": [dict(zip(PHASE, row, strict=True)) for row in self.phases()],
            "model": self.model,
            "layout": self.layout,
            "cluster": self.cluster.text,
            "steps": self.steps,
            "memory_bytes": self.cluster.chip.memory_bytes,
            "verdict": self.verdict,
            "notes": list(self.notes),
            "lacks": [asdict(lack) for lack in self.lacks],
            "ranks": [asdict(rank) for rank in self.seen],
            "estimate": self.expected and self.expected.to_json(),
            "no_estimate": self.unplanned,
        }
        return json.dumps(values, indent=2, ensure_ascii=False)


def largest(seen: Seen) -> tuple[str, Sequence[MemoryItem]]:
    """The phase of a rank's peak, or the one that ran out of memory, and its items."""
    if seen.out_of_memory is not None:
        return seen.out_of_memory.phase, seen.out_of_memory.items
    most = max(seen.phases, key=lambda phase: phase.allocated or 0, default=None)
    return (most.name, most.items) if most else ("", ())


def gib(size: int | None) -> str:
    """Format as GiB: 1.42; - if it was not seen."""
    return "-" if size is None else f"{size / GIB:.2f}"


def _number(count: int | None) -> str:
    return "-" if count is None else str(count)
