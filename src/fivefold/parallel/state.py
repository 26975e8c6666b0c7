"""State of a live parallelized model: its plan, the groups of this rank, and the live part of each feature.

`parallelize` puts it at `model.fivefold`. The plan describes a layout; the state runs it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from fivefold.models.sources import TensorSource
from fivefold.parallel.collectives import StepShape
from fivefold.parallel.dtensor import local
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.placement import Placement
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.sharding import Region

_AT_ONCE = 2**26  # bytes read, or drawn, at a time
Builders = Mapping[type[Edit], Callable[[Any, Any], Any]]  # class of an edit -> what applies it to (module, edit)
METHODS = "run_stage", "stage_logits"  # that run a model, besides its forward


class LivePart:
    """A feature in one live model on this rank. Every model has each part; one whose feature is off, or whose
    dimension has one rank, does nothing. A part overrides the moments that it needs, and is then made by its builders;
    no moment depends on what other parts do at it.

    `whole_sequences`, `chunked_head`, `deterministic`: values of its attributes in these contexts of `ParallelState`.
    """

    whole_sequences: ClassVar[Mapping[str, bool]] = {}
    chunked_head: ClassVar[Mapping[str, bool]] = {}
    deterministic: ClassVar[Mapping[str, bool]] = {}

    @classmethod
    def make(cls, state: "ParallelState") -> Self:
        """Make the part of a model. No module is changed yet."""
        raise NotImplementedError

    def formats(self, state: "ParallelState") -> Mapping[str, Any]:
        """`WireFormat`s in which FSDP sends parameters, by name. Parameters are on the meta device."""
        return {}

    def end_allocation(self, state: "ParallelState", gathers: Mapping[str, Any]) -> None:
        """Parameters have memory. `gathers`: the `Gather`s outside of FSDP's own, by name."""

    def end_edits(self, state: "ParallelState") -> None:
        """All edits are made: the parameter objects are final from here on."""

    def begin_passes(self) -> None:
        """Passes begin; weights may have changed since the last ones. All ranks of the world call this together."""

    def begin_micro_batch(self, row_tokens: Tensor | None, *, again: bool) -> None:
        """A pass of a micro batch begins. `row_tokens`: real tokens of each row, int64 [B]. `again`: its backward,
        which may run the forward again."""

    def begin_rows(
        self, shape: Sequence[int], places: Sequence[int], cu_seqlens: Tensor | None, *, ends_step: bool
    ) -> None:
        """Whole rows of `shape` [B, T, ..], at these `places` of the global batch, enter the model. Without
        `cu_seqlens` each row is a document. `ends_step`: the next rows are of another step."""

    def in_gradients(self, state: "ParallelState", rows: int) -> AbstractContextManager[None]:
        """Context of the passes of a step, whose gradients are computed. `rows`: of the global batch."""
        return nullcontext()

    def shaped(self, shape: StepShape) -> StepShape:
        """The shape of a step, with what the plan does not know."""
        return shape

    def after_step(self, *, skipped: bool) -> None:
        """Gradients of a step are summed, and parameters are updated unless it is `skipped`."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from the state of any checkpoint."""


Live = TypeVar("Live", bound=LivePart)


class Guard:
    """Calls of the model: `is_library` inside the library's passes; `is_called` during a user's call of all of it.
    `parameters`: those of the model by name, if other tensors replace them in a forward. `implementations`: what its
    modules compute with. `hooks`: the library's own inside of it."""

    def __init__(self) -> None:
        self._depth = 0
        self.is_called = False
        self.parameters: dict[str, nn.Parameter] = {}
        self.implementations: list[Any] = []
        self.hooks: Collection[int] = ()

    @property
    def is_library(self) -> bool:
        return self._depth > 0

    @contextmanager
    def library(self) -> Iterator[None]:
        """Mark the passes in this context as the library's own, which sum what has to be summed."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


@dataclass(eq=False)
class ParallelState:
    """One parallelized model on this rank.

    `dtype`: in which it computes. `reduce_dtype`: of sums of gradients. `seed`: of dropout.
    """

    model: nn.Module
    plan: ParallelPlan
    mesh: Mesh
    device: torch.device
    dtype: torch.dtype
    reduce_dtype: torch.dtype
    seed: int
    guard: Guard = field(default_factory=Guard)
    _parts: dict[type[LivePart], LivePart] = field(default_factory=dict)

    @property
    def placement(self) -> Placement:
        return self.plan.placement

    def live(self, kind: type[Live]) -> Live:
        """The part of a feature, made once: `state.live(Dropout).step`."""
        if kind not in self._parts:
            self._parts[kind] = kind.make(self)
        return cast(Live, self._parts[kind])

    def add(self, part: LivePart) -> None:
        """Add a part that is made of more than a plan."""
        self._parts[type(part)] = part

    @property
    def parts(self) -> Collection[LivePart]:
        """All parts that are made."""
        return self._parts.values()

    # ---- moments, at which every part is asked -----------------------------------------------------------------------

    def begin_passes(self) -> None:
        for part in self.parts:
            part.begin_passes()

    def begin_inputs(self, inputs: Any, *, again: bool = False) -> None:
        """Begin a pass of a micro batch (`passes.Inputs`); see `LivePart.begin_micro_batch`."""
        for part in self.parts:
            part.begin_micro_batch(inputs.row_tokens, again=again)
        self.begin_rows(inputs.input_ids.shape, inputs.places, inputs.cu_seqlens)

    def begin_rows(
        self, shape: Sequence[int], places: Sequence[int], cu_seqlens: Tensor | None = None, *, ends_step: bool = False
    ) -> None:
        for part in self.parts:
            part.begin_rows(shape, places, cu_seqlens, ends_step=ends_step)

    @contextmanager
    def in_gradients(self, rows: int) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.in_gradients(self, rows))
            yield

    def after_step(self, *, skipped: bool = False) -> None:
        """End a step. `skipped`: parameters are as before."""
        for part in self.parts:
            part.after_step(skipped=skipped)

    def state(self) -> dict[str, Any]:
        return {name: entry for part in self.parts for name, entry in part.state().items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for part in self.parts:
            part.load(state)

    def whole_sequences(self) -> AbstractContextManager[None]:
        """Give every rank whole rows in this context: generation takes single tokens, and its cache holds all."""
        return _temporarily([(vars(part), part.whole_sequences) for part in self.parts])

    def chunked_head(self) -> AbstractContextManager[None]:
        """Keep logits split by vocabulary, on the ranks of their tokens, in this context."""
        return _temporarily([(vars(part), part.chunked_head) for part in self.parts])

    def deterministic(self) -> AbstractContextManager[None]:
        """Drop nothing in this context."""
        return _temporarily([(vars(part), part.deterministic) for part in self.parts])


@contextmanager
def _temporarily(changes: Sequence[tuple[dict[str, Any], Mapping[str, bool]]]) -> Iterator[None]:
    """Set these values of attributes in this context, and restore them afterwards."""
    before = [{name: own[name] for name in values} for own, values in changes]
    for own, values in changes:
        own.update(values)
    try:
        yield
    finally:
        for (own, _), values in zip(changes, before, strict=True):
            own.update(values)


def state_of(model: nn.Module) -> ParallelState:
    return cast(ParallelState, model.fivefold)


def fill(model: nn.Module, source: TensorSource, names: Collection[str] | None = None) -> None:
    """Overwrite parameters (of `names`; None: all) and buffers of routers with this rank's part of `source`."""
    state = state_of(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if names is not None and name not in names:
                continue
            shard = local(parameter)
            is_packed = state.plan.facts.parameters[name].packing
            products: Any = is_packed and model.get_submodule(name.rpartition(".")[0]).own_products
            for global_region, local_region in state.placement.regions(name):
                for piece, own in _pieces(global_region, shard[local_region[:1] if is_packed else local_region]):
                    if is_packed:
                        products.put(own, local_region[1], source.read(name, piece).to(own.device))
                    else:
                        own.copy_(source.read(name, piece))
        for name, buffer in model.named_buffers():
            if name in state.placement.buffers and (names is None or name in names):
                buffer.copy_(source.read(name, tuple(slice(0, size) for size in buffer.shape)))


def _pieces(region: Region, own: Tensor) -> Iterator[tuple[Region, Tensor]]:
    """Yield a region of a parameter and this rank's part of it, in rows of at most `_AT_ONCE` bytes: what is read
    exists besides the shard, and an embedding may be larger than a layer. 1 GiB of 4 KiB rows: 16 times 16,384 rows."""
    if own.nbytes <= _AT_ONCE:
        yield region, own
        return
    start, rows = region[0].start or 0, max(1, _AT_ONCE * len(own) // own.nbytes)
    for first in range(0, len(own), rows):
        piece = own[first : first + rows]
        yield (slice(start + first, start + first + len(piece)), *region[1:]), piece
