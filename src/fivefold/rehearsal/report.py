"""Report of a rehearsal: tables for the screen, JSON, and sentences."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fivefold.core.units import GIB, human_bytes, many
from fivefold.hardware.cluster import Cluster
from fivefold.planner.estimate import Estimate
from fivefold.rehearsal.expected import ExpectedStep, TimeRow
from fivefold.rehearsal.request import Item, Phase, Seen
from fivefold.rehearsal.stand_in import Lack
from fivefold.report.figures import LANE, WIDTH, Box, Figure
from fivefold.report.findings import Facts, Findings, Notes, On, Plot, Section, to_text
from fivefold.report.table import Report

if TYPE_CHECKING:
    from rich.console import Console

BAR, LEFT, COLOURS = 20.0, 74.0, 6  # pixels of a bar, and of the names before it; colours of items
TIGHT = 0.95  # of a device's memory: NCCL needs some as well
SHOWN = 10  # rows of a table
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
class PhaseRow:
    """A phase of a rank. Memory in GiB; - if it was not seen."""

    rank: int
    phase: str
    allocated: str
    reserved: str
    launches: str
    syncs: str
    compiles: int
    seconds: str


@dataclass(frozen=True)
class ItemRow:
    """Equal tensors at the peak."""

    GiB: str
    count: int
    what: str
    where: str


@dataclass(frozen=True)
class SyncRow:
    """A line at which the host waits for the device."""

    count: int
    phase: str
    line: str


@dataclass(frozen=True)
class SentRow:
    """Equal collectives of a step."""

    axis: str
    kind: str
    count: int
    declared: int
    bytes: str
    exposed: str


@dataclass(frozen=True)
class CompileRow:
    """A recompiled function, or a graph break."""

    count: int
    what: str
    why: str


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
        """Limits of the figures, and differences from a real run."""
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
        """Sentences about the estimated step."""
        if self.unplanned:
            return (f"No estimate of MFU: {self.unplanned}.",)
        return self.expected.verdict if self.expected else ()

    # ---- tables ------------------------------------------------------------------------------------------------------

    def phases(self) -> Report[PhaseRow]:
        """The phases of every rank."""
        rows = tuple(
            PhaseRow(
                seen.rank, phase.name, gib(phase.allocated), gib(phase.reserved), _number(phase.launches),
                _number(phase.syncs), phase.compiles, f"{phase.seconds:.1f}",
            )
            for seen in self.seen for phase in seen.phases
        )  # fmt: skip
        return Report(title=f"{self.title} (GiB)", rows=rows, ok=self.ok)

    def items(self, seen: Seen) -> Report[ItemRow]:
        """The largest items at a rank's memory peak, or when it ran out."""
        name, found = largest(seen)
        rows = tuple(ItemRow(gib(item.bytes), item.count, item.what, item.where) for item in found[:SHOWN])
        return Report(title=f"largest at the peak of rank {seen.rank}, {name}", rows=rows, ok=True)

    def syncs(self, seen: Seen) -> Report[SyncRow]:
        """Lines at which the host waits for the device, in the last step, the evaluation and the save."""
        names = (f"step {self.steps}", "evaluation", "save")
        rows = tuple(SyncRow(sync.count, sync.phase, sync.where) for sync in seen.syncs if sync.phase in names)
        return Report(title=f"host syncs of rank {seen.rank}", rows=rows[:SHOWN], ok=True)

    def sent(self, seen: Seen) -> Report[SentRow]:
        """The collectives of the last step, issued and declared."""
        rows = tuple(
            SentRow(
                sent.axis, sent.kind, sent.count, sent.declared, human_bytes(sent.bytes),
                "-" if sent.exposed is None else str(sent.exposed),
            )
            for sent in seen.sent
        )  # fmt: skip
        return Report(title=f"collectives of rank {seen.rank}, step {self.steps}", rows=rows, ok=not seen.undeclared)

    def recompiles(self, seen: Seen) -> Report[CompileRow]:
        """Recompilations by Dynamo, and graph breaks."""
        rows = tuple(
            CompileRow(recompile.count, recompile.what, recompile.why) for recompile in seen.recompiles[:SHOWN]
        )
        return Report(title=f"compiled again, and graph breaks, on rank {seen.rank}", rows=rows, ok=True)

    def times(self) -> Report[TimeRow]:
        """The estimated step, item by item."""
        found = self.expected
        of_rank = f", counted on rank {found.seen.rank}" if found and found.counted else ""
        title = f"estimated time of a step, not measured{of_rank}"
        return Report(title=title, rows=tuple(found.rows()) if found else (), ok=True)

    def tables(self) -> Iterator[Report[Any]]:
        """All tables with a row, in order."""
        yield self.phases()
        for seen in self.seen:
            for table in (self.items(seen), self.syncs(seen), self.sent(seen), self.recompiles(seen)):
                if table.rows:
                    yield table
        if (times := self.times()).rows:
            yield times

    def findings(self) -> Findings:
        """The tables and the sentences; on the page also what was run, and memory by phase."""
        picture = memory(self)
        drawn = [Section([Plot(picture, picture.says)], picture.title, On.PAGE)] if picture else []
        return Findings(
            command="fivefold rehearse", headline=self.verdict, ok=self.ok,
            sections=[
                Section([Notes([RUN, *self.speed]), Facts(self.facts)], on=On.PAGE),
                *drawn,
                *(Section([titled.table], titled.title) for titled in self.tables()),
                Section([Notes([self.verdict, *self.speed, *self.notes])], on=On.TERMINAL),
                Section([Notes(self.notes, is_list=True)], "What is not in these figures", On.PAGE),
            ],
        )  # fmt: skip

    @property
    def facts(self) -> dict[str, str]:
        """Facts of the rehearsal, by name."""
        memory = gib(self.cluster.chip.memory_bytes)
        return {
            "model": self.model, "layout": self.layout,
            "cluster": f"{self.cluster.text}: {self.cluster.world:,} devices of {memory} GiB",
            "ranks rehearsed": ", ".join(str(rank.rank) for rank in self.seen), "steps": str(self.steps),
        }  # fmt: skip

    def show(self, console: "Console") -> None:
        """Print for people."""
        to_text(self.findings(), console)

    def to_json(self) -> str:
        """One JSON object: the phases as rows, and all results by rank."""
        details = {
            "model": self.model, "layout": self.layout, "cluster": self.cluster.text, "steps": self.steps,
            "memory_bytes": self.cluster.chip.memory_bytes, "verdict": self.verdict, "notes": list(self.notes),
            "lacks": [asdict(row) for row in self.lacks], "ranks": [row.to_json() for row in self.seen],
            "estimate": self.expected and self.expected.to_json(), "no_estimate": self.unplanned,
        }  # fmt: skip
        table = self.phases()
        return Report(title=table.title, rows=table.rows, ok=self.ok, details=details).to_json()


def largest(seen: Seen) -> tuple[str, Sequence[Item]]:
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


# ---- memory by phase -------------------------------------------------------------------------------------------------


def memory(rehearsal: Rehearsal) -> Figure | None:
    """Draw a bar for every phase, as wide as the device's memory: its largest items, the rest of what is allocated, and
    what is reserved beyond that. None if memory was not seen."""
    rows = [(seen.rank, phase) for seen in rehearsal.seen for phase in seen.phases if phase.allocated is not None]
    if not rows:
        return None
    scale = (WIDTH - LEFT) / max(rehearsal.cluster.chip.memory_bytes, *(phase.reserved or 0 for _, phase in rows))
    words = _words(rehearsal)
    boxes = [box for at, (_, phase) in enumerate(rows) for box in _bar(phase, at * LANE, scale, words)]
    names = [(at * LANE + BAR / 2 + 4, f"{rank}: {phase.name}") for at, (rank, phase) in enumerate(rows)]
    explained = [*((f"series-{colour}", what) for what, colour in words.items()), ("many", "everything else")]
    explained.append(("band", "free; to its left, reserved and not allocated"))
    says = f"A bar is {gib(rehearsal.cluster.chip.memory_bytes)} GiB wide. Hover over a part for its size."
    return Figure("Memory of each phase at its peak", says, LANE * len(rows), names, boxes, explained)


def _words(rehearsal: Rehearsal) -> dict[str, int]:
    """Items with a colour of their own: the largest of all ranks' peaks, and their colours."""
    found: dict[str, int] = {}
    for seen in rehearsal.seen:
        for item in largest(seen)[1]:
            found[item.what] = max(found.get(item.what, 0), item.bytes)
    largest_first = sorted(found, key=lambda what: -found[what])[:COLOURS]
    return {what: colour for colour, what in enumerate(largest_first)}


def _bar(phase: Phase, y: float, scale: float, words: dict[str, int]) -> Iterator[Box]:
    yield Box(LEFT - 56, y, WIDTH - LEFT, BAR, "band", "free")
    x, allocated = LEFT - 56, phase.allocated or 0
    reserved = scale * (phase.reserved or 0)
    yield Box(x, y, reserved, BAR, "grid", f"{phase.name}: {gib(phase.reserved)} GiB reserved")
    yield Box(x, y, scale * allocated, BAR, "many", f"{phase.name}: {gib(allocated)} GiB allocated")
    for item in phase.items:
        if item.what in words:
            width = scale * item.bytes
            title = f"{item.what}, {item.where}: {item.count} tensors, {gib(item.bytes)} GiB"
            yield Box(x, y, width, BAR, f"series-{words[item.what]}", title, f"{item.bytes / GIB:.1f}", 0.7)
            x += width
