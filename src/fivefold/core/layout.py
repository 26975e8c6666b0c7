"""How a model is spread over devices and executed: the `Layout` noun, its text form and its arithmetic.

One identity for the planner, the runtime, the verifier and the checkpoint. No torch here.

Text form, used on the command line, in reports, file names and test ids::

    dp2.shard4.cp2.tp4.pp2.ep8+zero1+zbv+v2+ring+mb2+full+fp8

Degrees of 1 are left out (`single` when all are 1), and so are options at their defaults.
"""

import re
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from fivefold.core.errors import UserError

# Text name of each degree, in the order of the text form.
DEGREES = {"dp": "dp_replicate", "shard": "dp_shard", "cp": "cp", "tp": "tp", "pp": "pp", "ep": "ep"}

MOST_RANKS = 2**20  # of one degree: far above every machine, and small enough to count through

# Mesh order, outermost first: tp and cp stay inside a node when they fit. `ep` is folded inside, never a mesh axis.
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb", "zbv", "dualpipev")
CP_METHODS = ("auto", "ring", "allgather", "ulysses")
RECOMPUTE = ("none", "selective", "full")
COMPUTE = ("bf16", "fp32", "fp64")
FP8 = ("none", "tensorwise", "rowwise")

# Options that are one bare word in the text form: word -> (field, value).
_WORDS: dict[str, tuple[str, Any]] = {
    "nosp": ("sequence_parallel", False),
    "etp": ("expert_tp", True),
    "offload": ("offload_activations", True),
    "offload_optimizer": ("offload_optimizer", True),
    "fp8": ("fp8", "tensorwise"),
    "fp8_rowwise": ("fp8", "rowwise"),
    **{name: ("pp_schedule", name) for name in SCHEDULES},
    **{name: ("cp_method", name) for name in CP_METHODS[1:]},
    **{name: ("recompute", name) for name in RECOMPUTE[1:]},
    **{name: ("precision", name) for name in COMPUTE[1:]},
}
# Options that carry a number or a list: pattern -> (field, how it is read, how it is written).
_VALUED = (
    (re.compile(r"zero([123])"), "zero", int, "zero{}"),
    (re.compile(r"v([0-9]{1,9})"), "pp_virtual", int, "v{}"),
    (re.compile(r"mb([0-9]{1,9})"), "micro_batch_size", int, "mb{}"),
    (re.compile(r"split([0-9]{1,9}(?:-[0-9]{1,9})*)"), "pp_split", str, "split{}"),
    (re.compile(r"([0-9]{1,9}x[0-9]{1,9})"), "cp_method", str, "{}"),
)

# Options in the order of the text form.
_OPTION_ORDER = (
    "zero", "pp_schedule", "pp_virtual", "pp_split", "cp_method", "micro_batch_size", "recompute",
    "offload_activations", "offload_optimizer", "precision", "fp8", "sequence_parallel", "expert_tp",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees and execution options of a parallel run.

    `dp_shard` may be -1, meaning "the devices the other degrees leave"; `resolve(world)` fills it in. FSDP shards
    over `dp_shard * cp`; `ep` takes ranks from `dp_shard, cp, tp` (with `expert_tp` from `dp_shard, cp`) and never
    multiplies the world.

    Raises `UserError` on construction when a value is out of its range.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    zero: int = 3
    sequence_parallel: bool = True
    expert_tp: bool = False
    pp_schedule: str = "1f1b"
    pp_virtual: int = 1
    pp_split: str = "auto"
    cp_method: str = "auto"
    micro_batch_size: int = 1
    recompute: str = "none"
    offload_activations: bool = False
    offload_optimizer: bool = False
    precision: str = "bf16"
    fp8: str = "none"

    def __post_init__(self) -> None:
        for name in DEGREES.values():
            degree = getattr(self, name)
            if not 1 <= degree <= MOST_RANKS and not (name == "dp_shard" and degree == -1):
                raise UserError(
                    f"{name} {degree} is not a degree",
                    fix=f"degrees are 1 to {MOST_RANKS:,}; dp_shard may be -1",
                )
        for name, allowed in (
            ("zero", (1, 2, 3)),
            ("pp_schedule", SCHEDULES),
            ("recompute", RECOMPUTE),
            ("precision", COMPUTE),
            ("fp8", FP8),
        ):
            if getattr(self, name) not in allowed:
                choices = ", ".join(map(str, allowed))
                raise UserError(f"{name} {getattr(self, name)!r} is not known", fix=f"choose one of {choices}")
        if self.cp_method not in CP_METHODS and not re.fullmatch(r"\d+x\d+", self.cp_method):
            raise UserError(f"cp_method {self.cp_method!r} is not known", fix=f"one of {', '.join(CP_METHODS)} or RxU")
        if self.micro_batch_size < 1 or self.pp_virtual < 1:
            raise UserError("micro_batch_size and pp_virtual are 1 or more")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read the text form, such as `shard2.tp2+zero1`. Raises `UserError` naming the part that is not understood."""
        degrees_text, *options = text.strip().split("+")
        values: dict[str, Any] = {}
        for part in [] if degrees_text == "single" else degrees_text.split("."):
            match = re.fullmatch(r"([a-z]+)(-1|[0-9]{1,9})", part)
            if not match or match[1] not in DEGREES:
                raise UserError(
                    f"layout {text!r}: {part!r} is not a degree", fix=f"write {', '.join(f'{d}N' for d in DEGREES)}"
                )
            _set_once(values, DEGREES[match[1]], int(match[2]), text)
        for option in options:
            _set_once(values, *_read_option(option, text), text)
        return cls(**values)

    def __str__(self) -> str:
        degrees = [f"{short}{getattr(self, name)}" for short, name in DEGREES.items() if getattr(self, name) != 1]
        return "+".join([".".join(degrees) or "single", *self._options()])

    def _options(self) -> list[str]:
        default = {f.name: f.default for f in fields(self)}
        changed = [name for name in _OPTION_ORDER if getattr(self, name) != default[name]]
        return [_option_text(name, getattr(self, name)) for name in changed]

    @property
    def world(self) -> int:
        """Number of devices. Raises `UserError` while `dp_shard` is -1."""
        if self.dp_shard == -1:
            raise UserError("dp_shard is -1, so the world is not known yet", fix="call resolve(world) first")
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows: `dp_replicate * dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def etp(self) -> int:
        """How many ranks share the features of each expert: `tp` with `expert_tp`."""
        return self.tp if self.expert_tp else 1

    @property
    def expert_shards(self) -> int:
        """How many ranks FSDP shards an expert's parameters over: what `ep` leaves of those that it is taken from."""
        return self._expert_ranks // self.ep

    @property
    def _expert_ranks(self) -> int:
        """The ranks that experts are dealt to, and sharded over."""
        return self.dp_shard * self.cp * self.tp // self.etp

    @property
    def shape(self) -> tuple[int, ...]:
        """Mesh shape in `MESH_AXES` order."""
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank of the world on every axis of more than one rank, innermost first."""
        found = {}
        for axis in reversed(MESH_AXES):
            rank, place = divmod(rank, getattr(self, axis))
            if getattr(self, axis) > 1:
                found[axis] = place
        return found

    @property
    def row_multiple(self) -> int:
        """Rows are padded up to a multiple of this many tokens: `2 * cp * tp`."""
        return 2 * self.cp * self.tp

    def resolve(self, world: int) -> "Layout":
        """The same layout with `dp_shard: -1` replaced, checked against `world` devices.

        Raises `UserError` showing the arithmetic when the product is not `world`.
        """
        fixed = prod(getattr(self, axis) for axis in MESH_AXES if axis != "dp_shard")
        if self.dp_shard == -1 and world % fixed == 0:
            return replace(self, dp_shard=world // fixed).resolve(world)
        if self.dp_shard != -1 and self.world == world:
            self._check_experts()
            return self
        product = " x ".join(f"{axis} {getattr(self, axis)}" for axis in MESH_AXES if getattr(self, axis) != 1)
        total = "" if self.dp_shard == -1 else f" = {self.world}"
        fits = f"dp_shard {world // fixed} fits" if world % fixed == 0 else f"{fixed} does not divide {world}"
        only_ep = self.ep > 1 and self.world == 1
        raise UserError(
            f"{product or 'single'}{total}, but {world} workers started; {fits}",
            fix=f"ep deals experts to the ranks of dp_shard and cp, and adds none: shard{world}.ep{self.ep}"
            if only_ep
            else None,
        )

    def _check_experts(self) -> None:
        """Raise `UserError` with the arithmetic when `ep` does not divide the ranks that it is taken from."""
        ranks = self._expert_ranks
        if ranks % self.ep:
            fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
            over_tp = "" if self.expert_tp else f" x tp {self.tp}"
            raise UserError(
                f"ep {self.ep} does not divide dp_shard {self.dp_shard} x cp {self.cp}{over_tp} = {ranks}, the "
                f"ranks that experts are dealt to{' with expert_tp' if self.expert_tp else ''}",
                fix=f"try ep {', '.join(map(str, fits))}",
            )

    def accumulation(self, global_batch_size: int) -> int:
        """Micro batches per optimizer step: `global_batch_size / (micro_batch_size * data ranks)`.

        Raises `UserError` with the nearest batch sizes that divide.
        """
        per_pass = self.micro_batch_size * self.data_ranks
        if global_batch_size % per_pass == 0 and global_batch_size > 0:
            return global_batch_size // per_pass
        lower, upper = global_batch_size // per_pass * per_pass, -(-global_batch_size // per_pass) * per_pass
        near = " or ".join(str(n) for n in sorted({lower, upper}) if n > 0) or str(per_pass)
        raise UserError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {self.micro_batch_size} "
            f"x dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} = {per_pass}",
            fix=f"set train.global_batch_size to {near}",
        )


def _option_text(name: str, value: Any) -> str:
    """An option as the text form writes it."""
    words = [word for word, option in _WORDS.items() if option == (name, value)]
    return words[0] if words else next(form.format(value) for _, field, _, form in _VALUED if field == name)


def _read_option(option: str, text: str) -> tuple[str, Any]:
    if option in _WORDS:
        return _WORDS[option]
    for pattern, name, read, _ in _VALUED:
        if match := pattern.fullmatch(option):
            return name, read(match[1])
    known = ", ".join(["zeroN", "vN", "mbN", "splitA-B", "RxU", *_WORDS])
    raise UserError(f"layout {text!r}: +{option} is not an option", fix=f"options are {known}")


def _set_once(values: dict[str, Any], name: str, value: Any, text: str) -> None:
    if name in values:
        raise UserError(f"layout {text!r} sets {name} twice")
    values[name] = value
