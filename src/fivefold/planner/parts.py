"""Priced parts of a model: layers, FSDP units and stages, each priced once and added up to pipeline ranks. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from fivefold.parallel.collectives import Call, StepShape
from fivefold.parallel.fsdp.spec import Sends
from fivefold.parallel.fsdp.unshards import WITHOUT_FSDP
from fivefold.parallel.loss.spec import waiting_bytes
from fivefold.parallel.pipeline.memory import edge_bytes
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.ranks import RankGrid

# Items of a slot's device time.
ITEMS = ("matmuls", "attention", "element-wise", "tp", "cp", "ep", "data")
Seconds = NDArray[np.float64]  # one number for each of ITEMS
Numbers = NDArray[np.float64]


Given = ParamSpec("Given")
Result = TypeVar("Result")


def cached_method(method: Callable[Concatenate[Any, Given], Result]) -> "cached_property[Callable[Given, Result]]":
    """Keep what a method returns, on each object by the arguments."""

    def of_object(own: Any) -> Any:
        return cache(partial(method, own))

    return cached_property(of_object)


def nothing() -> Seconds:
    return np.zeros(len(ITEMS))


@dataclass(frozen=True)
class UnitPrice:
    """One FSDP unit. `held`, `trained`: its numbers at rest on a rank; `gathered`: bytes, and `reduced`: numbers, with
    padding. `state`: bytes of one kind of the optimizer's state. `shards`: ranks that it is sharded over. `calls`: of
    one gather, and of each of the others.
    `gather_seconds`, `reduce_seconds`, `near_seconds`: of one each. `largest`: numbers of its largest parameter,
    gathered. `copied`: bytes of its secondary copy."""

    held: int
    trained: int
    gathered: int
    reduced: int
    calls: Mapping[Sends, tuple[Call, ...]]
    gather_seconds: float
    reduce_seconds: float
    largest: int = 0
    state: int = 0
    shards: int = 1
    near_seconds: float = 0.0
    copied: int = 0

    @property
    def is_sent(self) -> bool:
        """True if other ranks have shards of it."""
        return bool(self.calls["gather"])


NO_UNIT = UnitPrice(0, 0, 0, 0, {"gather": (), "near": (), "reduce": (), "replicas": ()}, 0.0, 0.0)


@dataclass(frozen=True)
class LayerPrice:
    """One layer of a kind, or one of the model's ends, in one micro batch.

    `forward`, `backward`: device seconds by item, without FSDP's collectives; `weights`: the part of the backward that
    computes weight gradients. `host`: seconds of Python to launch a forward and a backward. `kept`: bytes saved from
    forward to backward, fewer with recompute. `working`: additional bytes during its backward. `calls`: its
    collectives, without FSDP's.
    """

    forward: Seconds
    backward: Seconds
    weights: Seconds
    host: tuple[float, float] = (0.0, 0.0)
    kept: int = 0
    working: int = 0
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Prices:
    """Cost of one micro batch: all kinds of layers, the embedding, and the head.

    It depends on tp, cp, ep, the rows and recompute, and not on how parameters are sharded over data ranks. `logits`:
    bytes of one chunk of the loss, with its gradients.
    """

    plan: ParallelPlan
    shape: StepShape
    layers: tuple[LayerPrice, ...]
    embedding: LayerPrice
    head: LayerPrice
    logits: int

    @property
    def edges(self) -> tuple[int, int, int]:
        """Bytes of a stage's input and output that a pipeline holds, and of the head's gradients."""
        return (*edge_bytes(self.plan, self.shape), waiting_bytes(self.plan, self.shape))

    @property
    def parts(self) -> tuple[LayerPrice, ...]:
        """Kinds of layers, embedding, head: in the order of `Stages.layers`."""
        return (*self.layers, self.embedding, self.head)


@dataclass(frozen=True)
class Shard:
    """Parameters of a layer of a kind, or of the modules outside layers: `units`, and by axis the bytes of gradients
    that are summed over it once a step."""

    units: tuple[UnitPrice, ...] = ()
    sums: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Content:
    """A pipeline rank's part of the model: (kind, layers of it), and the ends. Equal for ranks alike."""

    kinds: tuple[tuple[int, int], ...]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, eq=False)
class RankShards:
    """The parameters of a rank: of each kind of layer, of the embedding's unit, and of the model's own unit for a
    pipeline rank with (embedding, head). Data ranks have equal shards. Depends on tp, ep and the shards alone.

    `tied`: bytes of a tied embedding on a rank.
    """

    shape: StepShape
    grid: RankGrid
    layers: tuple[Shard, ...]
    embedding: Shard
    rest: Callable[[tuple[bool, bool]], Shard]
    tied: int
    by_fsdp: bool = True

    def stage(self, zero: int) -> int:
        """The ZeRO stage that `zero` has in effect."""
        return zero if self.by_fsdp else WITHOUT_FSDP

    def of(self, content: Content) -> list[tuple[Shard, int]]:
        """Shards of a pipeline rank, with their counts; the model's own unit is the last."""
        found = [(self.layers[kind], count) for kind, count in content.kinds]
        found += [(self.embedding, 1)] * content.has_embedding
        return [*found, (self.rest((content.has_embedding, content.has_head)), 1)]


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a pipeline. `layers[stage, part]`: layers of each kind, then 1 for the embedding, 1 for the head.
    `ranks[rank, stage]`: 1 if the rank has the stage. `contents`, `first`: each rank's content and first stage."""

    layers: Numbers
    ranks: Numbers
    contents: tuple[Content, ...]
    first: NDArray[np.int64]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.layers[:, :-2].sum(axis=1).astype(int).tolist())

    @cached_property
    def own(self) -> NDArray[np.int64]:
        """[rank, number]: the stages of each rank."""
        return np.array([np.flatnonzero(rank) for rank in self.ranks])

    @cached_property
    def distinct(self) -> tuple[Content, ...]:
        return tuple(dict.fromkeys(self.contents))

    @cached_property
    def has(self) -> NDArray[np.bool_]:
        """[rank, part]: True if a rank has something of a part."""
        return self.ranks @ self.layers > 0
