"""Distribution of a model over devices, and its execution: the `Layout` noun, its text form and its arithmetic.

One identity for the planner, the runtime, the verifier and the checkpoint. No torch here.

Text form, used on the command line, in reports, file names and test ids::

    dp2.shard4.cp2.tp4.pp2.ep8+zero1+zbv+v2+ring+mb2+full+fp8

Degrees of 1 are left out (`single` when all are 1), and so are options at their defaults.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import chain
from math import lcm, prod
from typing import Any, Literal, get_args

from fivefold.core.errors import UserError, Violation, refuse
from fivefold.core.keys import LayoutKey, LayoutPart, bare, key, moved
from fivefold.core.model_limits import ModelLimits
from fivefold.core.optimizers import StateDtype
from fivefold.core.units import many
from fivefold.parallel.context.keys import ContextKeys
from fivefold.parallel.experts.keys import ExpertKeys
from fivefold.parallel.fp8.keys import Fp8Keys
from fivefold.parallel.fsdp.keys import FsdpKeys
from fivefold.parallel.nodes.keys import NodeKeys
from fivefold.parallel.offload.keys import OffloadKeys
from fivefold.parallel.outer.keys import OuterKeys
from fivefold.parallel.pipeline.keys import PipelineKeys
from fivefold.parallel.recompute.keys import RecomputeKeys
from fivefold.parallel.tensor.keys import TensorKeys

# Text name of each degree, in the order of the text form.
DEGREES = {"dp": "dp_replicate", "shard": "dp_shard", "cp": "cp", "tp": "tp", "pp": "pp", "ep": "ep"}

RESTS = ("dp_shard", "dp_replicate")  # degrees of which one may be -1: the devices that the others leave
MOST_RANKS = 2**20  # of a layout: far above every machine, and few enough to enumerate

# Mesh order, outermost first: tp and cp stay inside a node when they fit. `ep` is folded inside, never a mesh axis.
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

# Methods that a part may define; those of `Layout` collect them.
OF_PARTS = (
    "check", "violations", "rank_violations", "step_violations", "model_violations", "chunk_multiple", "dtype_words",
)  # fmt: skip

Compute = Literal["bf16", "fp32", "fp64"]
COMPUTE = get_args(Compute)


# From the last feature to the first: fields and rules come in the order from the last base to the first.
@dataclass(frozen=True, kw_only=True)
class Layout(
    OuterKeys,
    Fp8Keys,
    OffloadKeys,
    RecomputeKeys,
    NodeKeys,
    ExpertKeys,
    PipelineKeys,
    ContextKeys,
    TensorKeys,
    FsdpKeys,
):
    """Degrees and execution options of a parallel run.

    `dp_shard`, or `dp_replicate`, may be -1: "the devices the other degrees leave"; `resolve(world)` fills it in.
    FSDP shards over `dp_shard * cp`; `ep` takes ranks from `dp_shard, cp, tp` (with `expert_tp` from `dp_shard, cp`)
    and never multiplies the world.

    Raises `UserError` on construction when a value is out of its range.
    """

    micro_batch_size: int = key(
        1, "train.micro_batch_size", "rows per forward pass of one data rank",
        least=1, most=2**31, prefix="mb", after="cp_method", priced="",
    )  # fmt: skip
    precision: str = key(
        "bf16", "precision.compute", "dtype of the forward and backward pass",
        choices=COMPUTE, words=bare("fp32", "fp64"), after="offload_optimizer", priced="work shards",
    )  # fmt: skip
    state_dtype: str = key(
        "fp32", "optimizer.state_dtype", "dtype in which the optimizer keeps its state",
        choices=get_args(StateDtype), words={"bf16_states": "bf16", "8bit_states": "8bit"},
        priced="shards",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in DEGREES.values():
            degree, most = getattr(self, name), KEYS[name].most or MOST_RANKS
            if not 1 <= degree <= most and not (name in RESTS and degree == -1):
                rest = ", or -1 for the rest" if name in RESTS else ""
                raise UserError(f"{name} {degree} is not a degree", fix=f"{name} is 1 to {most:,}{rest}")
        if self.dp_shard == self.dp_replicate == -1:
            raise UserError("dp_shard and dp_replicate are both -1", fix="write a number for one: layout.dp_shard: 1")
        if prod(map(abs, self.shape)) > MOST_RANKS:
            raise UserError(f"{self.product} is more than {MOST_RANKS:,} ranks", fix="write smaller degrees")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                fix = f"choose one of {', '.join(map(str, choices))}"
                raise UserError(f"{name} {getattr(self, name)!r} is not known", fix=fix)
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise UserError(f"{name} is {least} or more")
        self.check()

    def __repr__(self) -> str:  # in the order of the run file, not of the bases
        return f"Layout({', '.join(f'{name}={getattr(self, name)!r}' for name in KEYS)})"

    # ---- what each feature adds ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise `UserError` if a value of a feature is out of its range."""
        self._of_parts("check")

    def violations(self) -> Iterator[Violation]:
        """Rules on the layout by itself."""
        return chain.from_iterable(self._of_parts("violations"))

    def rank_violations(self) -> Iterator[Violation]:
        """Rules on the ranks, once all degrees are known."""
        return chain.from_iterable(self._of_parts("rank_violations"))

    def step_violations(self, micro_batches: int) -> Iterator[Violation]:
        """Rules on the micro batches of a step."""
        return chain.from_iterable(self._of_parts("step_violations", micro_batches))

    def model_violations(self, limits: ModelLimits, world: int | None = None) -> Iterator[Violation]:
        """Rules on the layout and a model. `world`: devices."""
        return chain.from_iterable(self._of_parts("model_violations", limits, world))

    def chunk_multiple(self) -> int:
        """Number of tokens that divides each of the `2 * cp` chunks of a row."""
        return lcm(*self._of_parts("chunk_multiple"))

    def dtype_words(self) -> str:
        """Words of the features behind the compute dtype in `numerics`."""
        return "".join(self._of_parts("dtype_words"))

    def _of_parts(self, method: str, *given: Any) -> list[Any]:
        return [of_part(self, *given) for of_part in _METHODS[method]]

    # ---- text form -----------------------------------------------------------------------------------------------

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
    def rest(self) -> str:
        """The degree of -1, `dp_shard` or `dp_replicate`; "" if there is none."""
        return next((name for name in RESTS if getattr(self, name) == -1), "")

    @property
    def world(self) -> int:
        """Number of devices. Raises `UserError` while a degree is -1."""
        if self.rest:
            raise UserError(f"{self.rest} is -1, so the world is not known yet", fix="call resolve(world) first")
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def compute_bytes(self) -> int:
        """Bytes per number in the compute dtype."""
        return {"bf16": 2, "fp32": 4, "fp64": 8}[self.precision]

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
        states = "" if self.state_dtype == "fp32" else f", {self.state_dtype} states"
        return f"{self.precision}{self.dtype_words()}{states}"

    @property
    def row_multiple(self) -> int:
        """Multiple of tokens that rows are padded to: `2 * cp * tp`. Where a block of tokens shares a scale, every
        rank's chunks of a row are whole blocks."""
        return self.row_chunks * self.chunk_multiple()

    def padded(self, tokens: int) -> int:
        """Length of a row of `tokens` tokens, padding included. Under cp2.tp2, 100 tokens take 104."""
        return -(-tokens // self.row_multiple) * self.row_multiple

    def resolve(self, world: int) -> "Layout":
        """The same layout with the degree of -1 replaced, for `world` devices.

        Raises `UserError` showing the arithmetic when the product is not `world`, or `ep` does not divide its ranks.
        """
        fixed = prod(size for axis, size in self.degrees.items() if axis != self.rest)
        if self.rest and world % fixed == 0:
            filled: dict[str, Any] = {self.rest: world // fixed}
            return replace(self, **filled).resolve(world)
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
        free = self.rest or "dp_shard"
        fixed = prod(degree for axis, degree in self.degrees.items() if axis != free)
        fits = (world // fixed,) if world % fixed == 0 else ()
        if self.rest and fits:
            return
        if not self.rest and self.world == world:
            yield from self.rank_violations()
            return
        product = f"{self.product or 'single'}{'' if self.rest else f' = {self.world}'}"
        nearest = (
            f"{free} {fits[0]} fits" if fits else f"{fixed} does not divide {world}{self._nearest_degree(world, free)}"
        )
        has = f"{place} has {many(world, 'device')}" if place else f"{many(world, 'worker')} started"
        change = "the cluster" if place else "the number of workers: --nproc"
        fix = f"change the layout, or {change}; {free} -1 takes those that are left"
        if self.ep > 1 and not self.degrees:
            ep = max(divisor for divisor in range(1, self.ep + 1) if world % divisor == 0)
            fits_too = f"shard{world}{f'.ep{ep}' * (ep > 1)}"
            fix = f"ep deals experts to the ranks of dp_shard and cp, and adds none: {fits_too}"
        yield Violation(free, f"{product}, but {has}; {nearest}", fix, fits)

    def _nearest_degree(self, world: int, free: str) -> str:
        """The nearest values of the one degree besides `free` that divide `world`, in words; "" for several."""
        others = [(axis, degree) for axis, degree in self.degrees.items() if axis != free]
        if len(others) != 1:
            return ""
        (axis, degree), divisors = others[0], [divisor for divisor in range(1, world + 1) if world % divisor == 0]
        near = [
            *[divisor for divisor in divisors if divisor < degree][-1:],
            *[divisor for divisor in divisors if divisor > degree][:1],
        ]
        return f", {axis} {' or '.join(map(str, near))} does"

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
                f"set train.global_batch_size to {' or '.join(map(str, near))}",
                near,
            )


PARTS: tuple[type[LayoutPart], ...] = Layout.__bases__[::-1]
_METHODS: dict[str, list[Callable[..., Any]]] = {
    name: [vars(part)[name] for part in PARTS if name in vars(part)] for name in OF_PARTS
}


def _ordered(keys: dict[str, LayoutKey]) -> dict[str, LayoutKey]:
    """Put degrees before options, and each key with an `after` behind it."""
    names = sorted(keys, key=lambda name: name not in DEGREES.values())
    return {name: keys[name] for name in moved(names, lambda name: keys[name].after)}


# How each field is written, and its default.
KEYS = _ordered({field.name: field.metadata["key"] for field in fields(Layout)})
_DEFAULTS = {field.name: field.default for field in fields(Layout)}
_CHOICES = {name: declared.choices for name, declared in KEYS.items() if declared.choices}
_LEAST = {name: declared.least for name, declared in KEYS.items() if declared.least is not None}
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
    for name, declared in _valued():
        if match := re.fullmatch(f"{declared.prefix}({declared.pattern})", option):
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
