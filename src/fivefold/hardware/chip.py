"""Devices and nodes as data: the chips, links and node types of `hardware/`. No torch.

A file of `hardware/chips/` is one chip; to add a chip, add a file. `like` inherits missing fields from another chip.
`hardware/nodes.toml` has node types, `hardware/peaks.toml` devices of which only the peak is known.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from fivefold.core.errors import UserError
from fivefold.core.units import GIB

HARDWARE = Path(__file__).parent
DTYPES = ("bf16", "fp16", "fp32", "fp64", "fp8")  # keys of a table by dtype

# Fields that a file may leave out.
_DEFAULTS = {
    "aliases": [], "names": [], "efficiencies": "", "step_fraction": 1.0,
    # Attention: 447 TFLOP/s of H200's 794 (ml-engineering, FA3). Tiles: those of cuBLAS's large kernels.
    "doubt": 1.0, "slack": 0, "host_scale": 1.0, "attention_fraction": 0.5, "tile": [128, 256], "tile_fill": 64,
    "node": {
        "domain_devices": 0, "cores": 0, "chips": [],
        "inside": {"decay": 0, "rails": 0, "meet_us": 0, "one_per_node": 1.0},
        "between": {"decay": 0, "rails": 0, "meet_us": 0, "one_per_node": 1.0},
        # Llama 3 (arXiv 2407.21783): 2 TB/s sustained for its 2,048 nodes.
        "storage": {"gbs": 1.0, "shared_gbs": 2000.0},
        "failure": {
            "replace_seconds": 600,  # MegaScale (arXiv 2402.15627): most are detected and diagnosed within 10 minutes
            "start_seconds": 60,     # judgement: imports, device contexts, tracing; CPUs take 3 to 25 s
            "meet_ms": 3,            # MegaScale: 10,000 devices set up their communicators in 30 s
            "save_seconds": 1,       # judgement: all ranks meet, and standing checks read the state
        },
    },
}  # fmt: skip

# Range of the numbers in a user's file, but for those below: beyond it, seconds and bytes are no numbers.
LEAST, _MOST = 1e-6, 1e9
_MOST_DECAY = 1  # nodes together never carry less than one of them
_MOST_DOUBT = 10  # a factor of 5 on each side
_WORDS = ("aliases", "names", "chips")  # lists of strings; other lists hold integers and keep the table's length
_WHOLE = ("sms", "most_devices", "domain_devices", "cores", "rails", "tile_fill")
_MAY_BE_ZERO = (
    "slack",
    "domain_devices",
    "cores",
    "tile_fill",
    "latency_us",
    "meet_us",
    "decay",
    "rails",
    "launch_us",
    "context_gib",
    "communicator_gib",
    "replace_seconds",
    "start_seconds",
    "meet_ms",
    "save_seconds",
)

Table = dict[str, Any]


@dataclass(frozen=True)
class Link:
    """A link between devices.

    `gbs`: GB/s (1e9 bytes) per device and direction, from the data sheet. `fraction`: the part of it that a large ring
    collective reaches. `latency_us`: of one hop of a ring. `decay`: exponent p: a ring through nodes carries at most
    what links inside a node carry, times nodes^-p; 0 for a non-blocking fabric. `rails`: how many devices' links of a
    node one ring can use; 0 for all of them. `meet_us`: extra time of a collective until the last rank has arrived and
    all have woken up. `one_per_node`: between nodes, the bandwidth of each device in groups of one rank of each node,
    which all send at once, as a factor of the others': HSDP's replicas and pipelines are such groups.
    """

    kind: str
    gbs: float
    fraction: float
    latency_us: float
    decay: float
    rails: int = 0
    meet_us: float = 0.0
    one_per_node: float = 1.0

    @property
    def bytes_per_second(self) -> float:
        """Bytes a second that one device sends in a large collective: 450 GB/s at .82 are 3.69e11."""
        return self.gbs * 1e9 * self.fraction


@dataclass(frozen=True)
class Storage:
    """Storage of checkpoints. `gbs`: GB/s (1e9 bytes) that one node writes, or reads. `shared_gbs`: the most that all
    nodes together do."""

    gbs: float
    shared_gbs: float

    def bytes_per_second(self, nodes: int) -> float:
        """Bytes a second of so many nodes together."""
        return 1e9 * min(self.gbs * nodes, self.shared_gbs)


@dataclass(frozen=True)
class Failure:
    """Seconds that a failed device and a checkpoint cost, besides bytes. `replace_seconds`: until the failure is
    detected and a healthy node stands in. `start_seconds`: from the new processes to a model without values. `meet_ms`:
    milliseconds a rank to set up all communicators. `save_seconds`: of a checkpoint's stall, besides its copy."""

    replace_seconds: float
    start_seconds: float
    meet_ms: float
    save_seconds: float


@dataclass(frozen=True)
class NodeType:
    """A server and its links. `most_devices`: the most that one has. `chips`: those it is made with; empty for any.

    `domain_devices`: devices joined by the inside link if it goes beyond one server (72 in an NVL72 rack), else 0.
    `cores`: for a server whose devices are processes, how many run at full speed at once; 0 where each device computes
    on its own. `storage`, `failure`: read by `fivefold plan --mtbf` alone.
    """

    name: str
    most_devices: int
    domain_devices: int
    cores: int
    chips: tuple[str, ...]
    inside: Link
    between: Link
    storage: Storage
    failure: Failure


@dataclass(frozen=True)
class Chip:
    """A device, as CUDA or ROCm counts them: one die of an MI250X.

    `peak_tflops` by dtype: dense, from the data sheet, fp32 without TF32; missing dtypes are absent (bf16 of V100).
    `matmul_fraction` by dtype: the part of the peak that the best large matmul reaches. `step_fraction`: the part of
    that which matmuls keep in a long step, where power and heat limit the clocks. `doubt`: uncertainty of its seconds,
    relative to chips that were measured. `efficiencies`: the chip from which its measured fractions come, or
    `judgement`; empty if they are its own. `attention_fraction`: the part of the matmul rate that attention reaches.
    `tile`: rows and columns of the outputs that a matmul computes at once; `tile_fill`: inner dimension at which a
    tile reaches half its rate. `slack`: reserved over allocated memory, if a run has shown it; 0: the planner's.
    `host_scale`: how much longer Python and launches take than on the hosts where the trainers were measured.
    `memory_gib`: all that the driver shows. `memory_bandwidth_gbs` (1e9 bytes/s), and `memory_fraction` of it for large
    arrays. `sms`: streaming multiprocessors or compute units. `capability`: of CUDA, or ROCm's equivalent. `launch_us`:
    host time of one kernel. `context_gib`: context and libraries, outside the allocator; `communicator_gib`: each
    communicator in addition. `host_gbs`: to host memory, each way. `names`: regular expressions that match whole words
    of the device name in CUDA or ROCm.
    """

    name: str
    aliases: tuple[str, ...]
    names: tuple[str, ...]
    efficiencies: str
    capability: tuple[int, ...]
    sms: int
    peak_tflops: Mapping[str, float]
    matmul_fraction: Mapping[str, float]
    step_fraction: float
    doubt: float
    slack: float
    host_scale: float
    attention_fraction: float
    tile: tuple[int, int]
    tile_fill: int
    memory_gib: float
    memory_bandwidth_gbs: float
    memory_fraction: float
    launch_us: float
    context_gib: float
    communicator_gib: float
    host_gbs: float

    @property
    def is_host(self) -> bool:
        """True for a CPU, which computes in the calling process, one operation after the other."""
        return not any(self.capability)

    @property
    def is_guess(self) -> bool:
        """True if nothing about it was measured, not even its memory."""
        return self.is_host and self.doubt > 1

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def memory_bytes_per_second(self) -> float:
        """Bytes a second of large arrays."""
        return self.memory_bandwidth_gbs * 1e9 * self.memory_fraction

    def flops_per_second(self, dtype: str) -> float | None:
        """FLOP/s of the best large matmul; None if the chip lacks the dtype."""
        peak = self.peak_tflops.get(dtype)
        return None if peak is None else peak * 1e12 * self.matmul_fraction[dtype]

    def times(self, speed: float) -> "Chip":
        """The same chip with its arithmetic and memory bandwidth scaled by `speed`."""
        peaks = {dtype: peak * speed for dtype, peak in self.peak_tflops.items()}
        return replace(self, peak_tflops=peaks, memory_bandwidth_gbs=self.memory_bandwidth_gbs * speed)


@cache
def chip_names() -> tuple[str, ...]:
    """Names of the chips that have a file, without aliases."""
    return tuple(sorted(file.stem for file in (HARDWARE / "chips").glob("*.toml")))


def chip_table(said: str) -> tuple[str, Table]:
    """Look up a chip by name or alias, in any case: its name and whole table. Raises `UserError` if it is not known."""
    known = {word.lower(): name for name in chip_names() for word in (name, *_read_chip(name)["aliases"])}
    if said.lower() in known:
        return known[said.lower()], _read_chip(known[said.lower()])
    raise UserError(f"chip {said!r} is not known", fix=_choices(said, {*chip_names(), *known.values()}))


def node_table(said: str, chip: str, own: Table) -> Table:
    """Table of a node of `chip`: its own (`dgx`), or that with the changes of a node type. Raises `UserError`."""
    types = _read(HARDWARE / "nodes.toml")
    if said == "dgx":
        return own
    if said not in types:
        raise UserError(f"node type {said!r} is not known", fix=_choices(said, {"dgx", *types}))
    made_of = types[said].get("chips", [])
    if made_of and chip not in made_of:
        raise UserError(f"a node of type {said} has {' or '.join(made_of)}, not {chip}", fix=f"write @dgx for {chip}")
    return overridden(own, types[said], f"[{said}]")


def chip_of_table(name: str, table: Table) -> Chip:
    """Build a `Chip` from a table of `chip_table`, possibly changed."""
    fields: Table = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    fields.pop("node", None)
    return Chip(name=name, **fields)


def node_of_table(name: str, table: Table) -> NodeType:
    """Build a `NodeType` from a table of `node_table`, possibly changed."""
    links = {side: Link(**table[side]) for side in ("inside", "between")}
    own = {"storage": Storage(**table["storage"]), "failure": Failure(**table["failure"])}
    return NodeType(**{**table, "name": name, "chips": tuple(table["chips"]), **links, **own})


def overridden(base: Table, given: Table, place: str) -> Table:
    """Return `base` with the values of `given` in place of its own. Raises `UserError` for an unknown key or a value
    that does not fit."""
    merged = dict(base)
    for key, value in given.items():
        old = base.get(key, 1.0 if _is_dtype_of(place, key) else None)
        if old is None:
            raise UserError(f"{place} {key} is not a field", fix=_choices(key, base))
        if not _fits(f"{place} {key}", value, old):
            raise UserError(f"{place} {key} cannot be {value!r}", fix=f"write a value like {old!r}")
        merged[key] = overridden(old, value, f"{place}.{key}") if isinstance(old, dict) else value
    return merged


def chip_of_device(device: str, *, fix: str) -> Chip:
    """Look up the chip that CUDA or ROCm calls by this name. Raises `UserError` if no file describes it; `fix`: what
    the user can do then."""
    found = _found(device)
    if not isinstance(found, str):
        raise UserError(f"the planner does not know {device}", fix=fix, more="fivefold docs howto/plan")
    return chip_of_table(found, _read_chip(found))


def bf16_peak(device: str) -> float | None:
    """The dense bf16 peak in TFLOP/s of a device of this name, or None if it is not known."""
    found = _found(device)
    return _read_chip(found)["peak_tflops"].get("bf16") if isinstance(found, str) else found


def _found(device: str) -> str | float | None:
    """Chip or peak with the longest match in a device name. A slice (MIG) is no chip."""
    if re.search(r"\bMIG\b", device):
        return None
    return max(
        ((len(words), found) for words, found in _words() if re.search(rf"\b{words}\b", device)),
        key=lambda match: match[0], default=(0, None),
    )[1]  # fmt: skip


def _words() -> Iterator[tuple[str, str | float]]:
    for name in chip_names():
        yield from ((words, name) for words in _read_chip(name)["names"])
    yield from ((words, float(peak)) for words, peak in _read(HARDWARE / "peaks.toml").items())


@cache
def _read_chip(name: str) -> Table:
    table = _read(HARDWARE / "chips" / f"{name}.toml")
    like = table.pop("like", None)
    return _joined(_read_chip(like) if like else _DEFAULTS, table)


@cache
def _read(file: Path) -> Table:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _joined(base: Table, table: Table) -> Table:
    """Merge `table` over `base`, inner tables too."""
    inner = {key: _joined(base.get(key, {}), value) for key, value in table.items() if isinstance(value, dict)}
    return {**base, **table, **inner}


def _is_dtype_of(place: str, key: str) -> bool:
    return place.endswith(("peak_tflops", "matmul_fraction")) and key in DTYPES


def _fits(place: str, value: Any, old: Any) -> bool:
    """True if `value` may replace `old`."""
    if isinstance(old, list):
        return isinstance(value, list) and _fits_list(place, value, old)
    if not isinstance(old, int | float):
        return type(value) is type(old)
    if isinstance(value, bool) or not isinstance(value, int if place.endswith(_WHOLE) else int | float):
        return False
    own = {"decay": _MOST_DECAY, "doubt": _MOST_DOUBT}
    most = 1 if "fraction" in place else own.get(place.split()[-1], _MOST)
    return LEAST <= value <= most or (value == 0 and place.endswith(_MAY_BE_ZERO))


def _fits_list(place: str, value: list[Any], old: list[Any]) -> bool:
    if place.endswith(_WORDS):
        return all(isinstance(item, str) for item in value)
    least = 1 if place.endswith("tile") else 0
    return len(value) == len(old) and all(type(item) is int and least <= item <= _MOST for item in value)


def _choices(said: str, known: Any) -> str:
    """`did you mean H100 or H100-PCIe?`, or all that is known."""
    near = get_close_matches(said.lower(), [name.lower() for name in known], n=3, cutoff=0.5)
    names = sorted(name for name in known if name.lower() in near)
    return f"did you mean {' or '.join(names)}?" if names else f"known are {', '.join(sorted(known))}"
