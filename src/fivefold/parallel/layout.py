"""Distribution of a model over devices, and its execution: the `Layout` noun, its text form and its arithmetic.

One identity for the planner, the runtime, the verifier and the checkpoint. No torch here.

Text form, used on the command line, in reports, file names and test ids::

    dp2.shard4.cp2.tp4.pp2.ep8+zero1+zbv+v2+ring+mb2+full+fp8

Degrees of 1 are left out (`single` when all are 1), and so are options at their defaults.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from math import lcm, prod
from typing import Any, Literal, get_args

from fivefold.core.errors import UserError
from fivefold.core.fp8 import RECIPES
from fivefold.core.recompute import BUDGET, MODES
from fivefold.core.schedule import SCHEDULES, Schedule, SchedulePlan
from fivefold.core.state_dtypes import StateDtype
from fivefold.core.units import many
from fivefold.core.violation import Violation, refuse

# Text name of each degree, in the order of the text form.
DEGREES = {"dp": "dp_replicate", "shard": "dp_shard", "cp": "cp", "tp": "tp", "pp": "pp", "ep": "ep"}

MOST_RANKS = 2**20  # of a layout: far above every machine, and few enough to enumerate
MOST_RING = 2**10  # ranks of cp: ring traffic is counted over all pairs of them

# Mesh order, outermost first: tp and cp stay inside a node when they fit. `ep` is folded inside, never a mesh axis.
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

Compute = Literal["bf16", "fp32", "fp64"]
FP8 = Literal["none", "tensorwise", "rowwise", "rowwise_gw_hp", "delayed", "blockwise", "mxfp8"]
CP_METHODS = ("auto", "ring", "allgather", "ulysses")
COMPUTE = get_args(Compute)


@dataclass(frozen=True, kw_only=True)
class LayoutKey:
    """Notation of a `Layout` field in the run file and in the text form. Everything else derives from this.

    `section`, `name`: its place in the run file. `file_default`: its default there, if different. `choices`: its values;
    none: any number, or a text that is checked elsewhere. `words`: options of the text form that are one bare word, and
    their values. `prefix`, `pattern`, `shown`: for an option with a value after its name, such as `zero1`; `shown` is
    that value in error messages. `is_last`: it comes at the end of the text.
    """

    help: str
    section: str
    name: str
    file_default: Any
    choices: tuple[Any, ...] = ()
    words: Mapping[str, Any] = field(default_factory=dict)
    prefix: str | None = None
    pattern: str = r"[0-9]{1,9}"
    shown: str = "N"
    is_last: bool = False


def key(default: Any, place: str, help: str, *, file_default: Any = None, **options: Any) -> Any:
    """A field of `Layout`, at `place` in the run file, such as `layout.tp`."""
    section, name = place.split(".")
    in_file = default if file_default is None else file_default
    declared = LayoutKey(help=help, section=section, name=name, file_default=in_file, **options)
    return field(default=default, metadata={"key": declared})


def bare(*values: str) -> dict[str, str]:
    """Words that are their own values."""
    return {value: value for value in values}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees and execution options of a parallel run.

    `dp_shard` may be -1, meaning "the devices the other degrees leave"; `resolve(world)` fills it in. FSDP shards
    over `dp_shard * cp`; `ep` takes ranks from `dp_shard, cp, tp` (with `expert_tp` from `dp_shard, cp`) and never
    multiplies the world.

    Raises `UserError` on construction when a value is out of its range.
    """

    dp_replicate: int = key(1, "layout.dp_replicate", "full copies of the shards, all-reduced once a step; devices")
    dp_shard: int = key(1, "layout.dp_shard", "FSDP shards; devices, -1 = the rest", file_default=-1)
    tp: int = key(1, "layout.tp", "tensor parallel; devices")
    cp: int = key(1, "layout.cp", "context parallel; devices")
    pp: int = key(1, "layout.pp", "pipeline stages; devices")
    ep: int = key(1, "layout.ep", "expert parallel; devices, taken from dp_shard, cp and tp")
    zero: int = key(
        3, "layout.zero", "ZeRO stage inside dp_shard x cp", choices=(1, 2, 3), prefix="zero", pattern="[123]"
    )
    sequence_parallel: bool = key(
        True, "layout.sequence_parallel", "split the sequence over tp between the matmuls",
        words={"nosp": False}, is_last=True,
    )  # fmt: skip
    expert_tp: bool = key(
        False, "layout.expert_tp", "split each expert over tp; ep then takes dp_shard and cp alone",
        words={"etp": True}, is_last=True,
    )  # fmt: skip
    pp_schedule: str = key(
        "1f1b", "layout.pp_schedule", "order of the micro batches in the pipeline",
        choices=tuple(SCHEDULES), words=bare(*SCHEDULES),
    )  # fmt: skip
    pp_virtual: int = key(1, "layout.pp_virtual", "stages per pipeline rank", prefix="v")
    pp_split: str = key(
        "auto", "layout.pp_split", "layers per stage, as 8-8-8-6",
        prefix="split", pattern=r"[0-9]{1,9}(?:-[0-9]{1,9})*", shown="A-B",
    )  # fmt: skip
    cp_method: str = key(
        "auto", "layout.cp_method", "auto, ring, allgather, ulysses or RxU",
        words=bare(*CP_METHODS[1:]), prefix="", pattern=r"[0-9]{1,9}x[0-9]{1,9}", shown="RxU",
    )  # fmt: skip
    micro_batch_size: int = key(1, "train.micro_batch_size", "rows per forward pass of one data rank", prefix="mb")
    recompute: str = key(
        "none", "memory.recompute", "activations computed twice: a mode, or what a rank may keep, as 12 GiB",
        words=bare("selective", "full"), prefix="keep", pattern=BUDGET, shown="NGiB",
    )  # fmt: skip
    offload_activations: bool = key(
        False, "memory.offload_activations", "keep saved activations in host memory", words={"offload": True}
    )
    offload_parameters: bool = key(
        False, "memory.offload_parameters", "keep parameters in host memory", words={"offload_parameters": True}
    )
    offload_optimizer: bool = key(
        False, "memory.offload_optimizer", "keep optimizer state in host memory", words={"offload_optimizer": True}
    )
    precision: str = key(
        "bf16", "precision.compute", "dtype of the forward and backward pass",
        choices=COMPUTE, words=bare("fp32", "fp64"),
    )  # fmt: skip
    fp8: str = key(
        "none", "precision.fp8", "scaling of fp8 matmuls",
        choices=get_args(FP8),
        words={"fp8": "tensorwise", "mxfp8": "mxfp8", **{f"fp8_{name}": name for name in get_args(FP8)[2:-1]}},
    )  # fmt: skip
    fp8_high_layers: int = key(
        0, "precision.fp8_high_layers", "layers at each end that stay in precision.compute", prefix="hp"
    )

    mlp_chunks: int = key(
        1, "memory.mlp_chunks", "pieces of the sequence that an MLP runs one after the other", prefix="mlp"
    )
    state_dtype: str = key(
        "fp32", "optimizer.state_dtype", "dtype in which the optimizer keeps its state",
        choices=get_args(StateDtype), words={"bf16_states": "bf16", "8bit_states": "8bit"},
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in DEGREES.values():
            degree = getattr(self, name)
            most = MOST_RING if name == "cp" else MOST_RANKS
            if not 1 <= degree <= most and not (name == "dp_shard" and degree == -1):
                rest = ", or -1 for the rest" if name == "dp_shard" else ""
                raise UserError(f"{name} {degree} is not a degree", fix=f"{name} is 1 to {most:,}{rest}")
        if prod(map(abs, self.shape)) > MOST_RANKS:
            raise UserError(f"{self.product} is more than {MOST_RANKS:,} ranks", fix="write smaller degrees")
        for name, key in KEYS.items():
            if key.choices and getattr(self, name) not in key.choices:
                choices = ", ".join(map(str, key.choices))
                raise UserError(f"{name} {getattr(self, name)!r} is not known", fix=f"choose one of {choices}")
        if self.cp_method not in CP_METHODS and not re.fullmatch(r"\d+x\d+", self.cp_method):
            raise UserError(f"cp_method {self.cp_method!r} is not known", fix=f"one of {', '.join(CP_METHODS)} or RxU")
        if min(self.micro_batch_size, self.pp_virtual, self.mlp_chunks) < 1:
            raise UserError("micro_batch_size, pp_virtual and mlp_chunks are 1 or more")
        if self.recompute not in MODES and not re.fullmatch(BUDGET, self.recompute):
            fix = f"choose one of {', '.join(MODES)}, or what a rank may keep: 12 GiB"
            raise UserError(f"recompute {self.recompute!r} is not known", fix=fix)
        object.__setattr__(self, "recompute", self.recompute.replace(" ", ""))
        if self.fp8_high_layers < 0:
            raise UserError("fp8_high_layers is 0 or more")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read the text form, such as `shard2.tp2+zero1`. Raises `UserError` naming the part that is not understood."""
        degrees_text, *options = text.strip().split("+")
        values: dict[str, Any] = {}
        for part in [] if degrees_text == "single" else degrees_text.split("."):
            match = re.fullmatch(r"([a-z]+)(-1|[0-9]{1,9})", part)
            if not match or match[1] not in DEGREES:
                raise UserError(f"layout {text!r}: {part!r} is not a degree", fix=_meant_degree(part, text))
            _set_once(values, DEGREES[match[1]], int(match[2]), text)
        for option in options:
            _set_once(values, *_read_option(option, text), text)
        return cls(**values)

    def __str__(self) -> str:
        degrees = [f"{short}{getattr(self, name)}" for short, name in DEGREES.items() if getattr(self, name) != 1]
        return "+".join([".".join(degrees) or "single", *self._options()])

    def _options(self) -> list[str]:
        values = [(name, getattr(self, name)) for name in _OPTIONS]
        return [_option_text(name, value) for name, value in values if value != _DEFAULTS[name]]

    @property
    def world(self) -> int:
        """Number of devices. Raises `UserError` while `dp_shard` is -1."""
        if self.dp_shard == -1:
            raise UserError("dp_shard is -1, so the world is not known yet", fix="call resolve(world) first")
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def rests_in_host(self) -> frozenset[str]:
        """State that is kept in host memory between steps, in words."""
        both = {"parameters": self.offload_parameters, "optimizer state": self.offload_optimizer}
        return frozenset(what for what, is_there in both.items() if is_there)

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in the compute dtype."""
        return {"bf16": 2, "fp32": 4, "fp64": 8}[self.precision]

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows: `dp_replicate * dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def etp(self) -> int:
        """Number of ranks that share the features of each expert: `tp` with `expert_tp`."""
        return self.tp if self.expert_tp else 1

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which FSDP shards an expert's parameters: `expert_ranks / ep`."""
        return self.expert_ranks // self.ep

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that experts are distributed to and sharded over."""
        return self.dp_shard * self.cp * self.tp // self.etp

    @property
    def shape(self) -> tuple[int, ...]:
        """Mesh shape in `MESH_AXES` order."""
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    @property
    def degrees(self) -> dict[str, int]:
        """The mesh axes of more than one rank, outermost first, and their sizes."""
        return {axis: size for axis, size in zip(MESH_AXES, self.shape, strict=True) if size != 1}

    @property
    def product(self) -> str:
        """The degrees as a product, such as `pp 2 x tp 4`; empty for one process."""
        return " x ".join(f"{axis} {size}" for axis, size in self.degrees.items())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinates of a global rank on every axis of more than one rank, innermost first."""
        found = {}
        for axis in reversed(MESH_AXES):
            rank, place = divmod(rank, getattr(self, axis))
            if getattr(self, axis) > 1:
                found[axis] = place
        return found

    @property
    def numerics(self) -> str:
        """The dtypes that a step computes in, such as `bf16` or `fp64 with fp8 rowwise`."""
        with_fp8 = self.precision if self.fp8 == "none" else f"{self.precision} with fp8 {self.fp8}"
        with_fp8 += f" but for {self.fp8_high_layers} layers at each end" if self.fp8_high_layers else ""
        return with_fp8 if self.state_dtype == "fp32" else f"{with_fp8}, {self.state_dtype} states"

    @property
    def row_multiple(self) -> int:
        """Multiple of tokens that rows are padded to: `2 * cp * tp`. If fp8 has a scale for each block of tokens, every
        rank's chunks of a row are whole blocks."""
        block = 1 if self.fp8 == "none" else RECIPES[self.fp8].block
        return 2 * self.cp * lcm(self.tp, block)

    def padded(self, tokens: int) -> int:
        """Length of a row of `tokens` tokens, padding included. Under cp2.tp2, 100 tokens take 104."""
        return -(-tokens // self.row_multiple) * self.row_multiple

    @property
    def schedule(self) -> Schedule:
        """Record of the pipeline's schedule. Without a pipeline, passes run in the order of 1F1B."""
        return SCHEDULES[self.pp_schedule if self.pp > 1 else "1f1b"]

    def schedule_plan(self, micro_batches: int) -> SchedulePlan:
        """The schedule over its ranks, for a layout that is legal for `micro_batches` (`legality.violations`)."""
        return SchedulePlan(self.schedule.name, self.pp, self.stages_per_rank, micro_batches)

    @property
    def stages_per_rank(self) -> int:
        """Stages of a pipeline rank: 2 if the schedule is a V, else `pp_virtual`."""
        return self.schedule.stages_per_rank(self.pp_virtual)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * self.stages_per_rank

    @property
    def split(self) -> tuple[int, ...] | None:
        """Layers of each stage in `pp_split`, such as 4-3-5; None if it is auto."""
        return None if self.pp_split == "auto" else tuple(map(int, self.pp_split.split("-")))

    def resolve(self, world: int) -> "Layout":
        """The same layout with `dp_shard: -1` replaced, for `world` devices.

        Raises `UserError` showing the arithmetic when the product is not `world`, or `ep` does not divide its ranks.
        """
        fixed = prod(size for axis, size in self.degrees.items() if axis != "dp_shard")
        if self.dp_shard == -1 and world % fixed == 0:
            return replace(self, dp_shard=world // fixed).resolve(world)
        refuse(self.against_world(world))
        return self

    def accumulation(self, global_batch_size: int) -> int:
        """Micro batches per optimizer step: `global_batch_size / (micro_batch_size * data ranks)`.

        Raises `UserError` with the nearest batch sizes that divide.
        """
        refuse(self.against_batch(global_batch_size))
        return global_batch_size // (self.micro_batch_size * self.data_ranks)

    def against_world(self, world: int, place: str | None = None) -> Iterator[Violation]:
        """Violations unless the degrees multiply to `world`, and `ep` divides its ranks. `place`: the cluster, if no
        workers are started."""
        fixed = prod(degree for axis, degree in self.degrees.items() if axis != "dp_shard")
        fits = (world // fixed,) if world % fixed == 0 else ()
        if self.dp_shard == -1 and fits:
            return
        if self.dp_shard != -1 and self.world == world:
            yield from self._against_expert_ranks()
            return
        product = f"{self.product or 'single'}{'' if self.dp_shard == -1 else f' = {self.world}'}"
        nearest = (
            f"dp_shard {fits[0]} fits" if fits else f"{fixed} does not divide {world}{self._nearest_degree(world)}"
        )
        has = f"{place} has {many(world, 'device')}" if place else f"{many(world, 'worker')} started"
        change = "the cluster" if place else "the number of workers: --nproc"
        fix = f"change the layout, or {change}; dp_shard -1 takes those that are left"
        if self.ep > 1 and not self.degrees:
            ep = max(each for each in range(1, self.ep + 1) if world % each == 0)
            fits_too = f"shard{world}{f'.ep{ep}' * (ep > 1)}"
            fix = f"ep deals experts to the ranks of dp_shard and cp, and adds none: {fits_too}"
        yield Violation("dp_shard", f"{product}, but {has}; {nearest}", fix, fits)

    def _nearest_degree(self, world: int) -> str:
        """The nearest values of the one degree besides `dp_shard` that divide `world`, in words; "" for several."""
        others = [(axis, degree) for axis, degree in self.degrees.items() if axis != "dp_shard"]
        if len(others) != 1:
            return ""
        (axis, degree), divisors = others[0], [each for each in range(1, world + 1) if world % each == 0]
        near = [*[each for each in divisors if each < degree][-1:], *[each for each in divisors if each > degree][:1]]
        return f", {axis} {' or '.join(map(str, near))} does"

    def _against_expert_ranks(self) -> Iterator[Violation]:
        """`ep` divides the ranks that experts are dealt to."""
        ep, ranks = self.ep, self.expert_ranks
        if ranks % ep:
            fits = tuple(n for n in range(1, ranks + 1) if ranks % n == 0)
            product = f"dp_shard {self.dp_shard} x cp {self.cp}{'' if self.expert_tp else f' x tp {self.tp}'}"
            where = f"the ranks that experts are dealt to{' with expert_tp' if self.expert_tp else ''}"
            what = f"ep {ep} does not divide {product} = {ranks}, {where}"
            yield Violation("ep", what, f"try ep {', '.join(map(str, fits))}", fits)

    def against_batch(self, batch: int) -> Iterator[Violation]:
        """Violation unless the rows of a step divide evenly over the data ranks, in whole micro batches."""
        per_pass = self.micro_batch_size * self.data_ranks
        if batch <= 0 or batch % per_pass:
            below = batch // per_pass * per_pass
            near = tuple(n for n in (below, below + per_pass) if n > 0)
            yield Violation(
                "global_batch_size",
                f"global_batch_size {batch} is not a multiple of micro_batch_size {self.micro_batch_size} "
                f"x dp_replicate {self.dp_replicate} x dp_shard {self.dp_shard} = {per_pass}",
                f"set train.global_batch_size to {' or '.join(map(str, near))}", near,
            )  # fmt: skip


# How each field is written, and its default.
KEYS: dict[str, LayoutKey] = {each.name: each.metadata["key"] for each in fields(Layout)}
_DEFAULTS = {each.name: each.default for each in fields(Layout)}
# Fields that are options of the text form, in its order.
_OPTIONS = sorted((name for name in KEYS if name not in DEGREES.values()), key=lambda name: KEYS[name].is_last)
# Options that are one bare word: word -> (field, value).
_WORDS = {word: (name, value) for name, key in KEYS.items() for word, value in key.words.items()}


def _option_text(name: str, value: Any) -> str:
    """Write an option in the text form."""
    words = [word for word, option in _WORDS.items() if option == (name, value)]
    return words[0] if words else f"{KEYS[name].prefix}{value}"


def _read_option(option: str, text: str) -> tuple[str, Any]:
    if option in _WORDS:
        return _WORDS[option]
    for name, key in _valued():
        if match := re.fullmatch(f"{key.prefix}({key.pattern})", option):
            return name, int(match[1]) if isinstance(_DEFAULTS[name], int) else match[1]
    known = [*(f"{key.prefix}{key.shown}" for _, key in _valued()), *_WORDS]
    near = get_close_matches(option, known, n=1) or get_close_matches(
        f"{option.rstrip('0123456789')}N", known, n=1, cutoff=0.75
    )
    fix = f"did you mean +{near[0]}?" if near else f"options are {', '.join(known)}"
    raise UserError(f"layout {text!r}: +{option} is not an option", fix=fix)


def _meant_degree(part: str, text: str) -> str:
    """Suggest what an unknown part of a layout means: an option, a degree, or how degrees are written."""
    alone = text.strip().removeprefix("+")
    with suppress(UserError):
        _read_option(part or alone.partition("+")[0], text)
        behind = f"single+{alone}" if alone.startswith(part) else f"+{part}"
        return f"an option stands behind degrees and a +: {behind}"
    known = {
        **dict(zip(DEGREES, DEGREES, strict=True)),
        **{long: short for short, long in DEGREES.items()},
        "fsdp": "shard",
    }
    match = re.fullmatch(r"([A-Za-z_]+)(-1|[0-9]{0,9})", part)
    near = get_close_matches(match[1].lower(), known, n=1) if match else []
    if match and near:
        return f"did you mean {known[near[0]]}{match[2] or 'N'}?"
    return f"write {', '.join(f'{degree}N' for degree in DEGREES)}"


def _valued() -> Iterator[tuple[str, LayoutKey]]:
    """Options that carry a number or a list."""
    return ((name, key) for name, key in KEYS.items() if key.prefix is not None)


def _set_once(values: dict[str, Any], name: str, value: Any, text: str) -> None:
    if name in values:
        raise UserError(f"layout {text!r} sets {name} twice")
    values[name] = value
