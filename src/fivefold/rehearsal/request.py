"""Requests and results of a rehearsal, as plain data between the command and the process of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RehearsalRequest:
    """One rank to rehearse. `config`: the resolved run file as YAML. `folder`: where the run writes. `local_size`:
    devices of a node. `synthetic`: random documents in place of `data.train`. `is_full`: with the stand-in for the
    driver; else on the CPU, with a process group that sends nothing."""

    config: str
    folder: str
    rank: int
    world: int
    local_size: int
    steps: int
    synthetic: bool = False
    is_full: bool = True


@dataclass(frozen=True)
class MemoryItem:
    """Memory at a peak: `count` equal tensors, `bytes` in all. `what`: their origin. `where`: the module, numbers of
    layers as *."""

    what: str
    where: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A part of the run. Bytes are the caching allocator's: the most inside, and those at the end. `seconds`: of this
    machine's CPU."""

    name: str
    allocated: int | None
    reserved: int | None
    after: int | None
    launches: int | None
    syncs: int | None
    compiles: int
    seconds: float
    items: tuple[MemoryItem, ...] = ()


@dataclass(frozen=True)
class Sync:
    """The host waited for the device `count` times in a phase, at a line of Python."""

    phase: str
    where: str
    count: int


@dataclass(frozen=True)
class SentOverAxis:
    """Collectives of the last step by axis and kind. `exposed`: those that no kernel hides; None: not known."""

    axis: str
    kind: str
    count: int
    bytes: int
    declared: int
    declared_bytes: int
    exposed: int | None = None


@dataclass(frozen=True)
class Recompile:
    """A function that Dynamo compiled again, or a graph break, and the reason."""

    what: str
    why: str
    count: int


@dataclass(frozen=True)
class OutOfMemory:
    phase: str
    asked: int
    where: str
    allocated: int
    reserved: int
    items: tuple[MemoryItem, ...]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Results of one rank. `failed`: the error that stopped it, other than memory."""

    rank: int
    coordinates: Mapping[str, int] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    syncs: tuple[Sync, ...] = ()
    sent: tuple[SentOverAxis, ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    communicators: int = 0
    out_of_memory: OutOfMemory | None = None
    failed: str = ""

    @property
    def ok(self) -> bool:
        return not self.failed and self.out_of_memory is None and not self.undeclared

    @property
    def undeclared(self) -> tuple[SentOverAxis, ...]:
        """Collectives that differ from the plan. The bytes of all-to-alls are not compared: they depend on routing."""
        return tuple(
            sent
            for sent in self.sent
            if sent.count != sent.declared or (sent.bytes != sent.declared_bytes and sent.kind != "all_to_all")
        )
