"""The plan of a layout: a value, made by `lower(facts, layout, rank)` before any device is touched. No torch.

It holds what several features need. The decisions of one feature are a class of its own (`FsdpPlan`), made from the
plan at first use. Calls, bytes and interventions are functions of a plan. `parallelize` realises a plan and decides
nothing itself. A plan costs the same for a world of 16,384 ranks as for one of two.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from fivefold.core.model_limits import CPMethod
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.facts import AttentionShape, Experts, Matmul, ModelFacts, Partition
from fivefold.parallel.collectives import StepShape, chunk_sizes
from fivefold.parallel.layout import Layout
from fivefold.parallel.placement import Placement
from fivefold.parallel.ranks import Blocks, tokens_by_rank
from fivefold.parallel.recompute.policy import Recompute

Decided = TypeVar("Decided")


@dataclass(frozen=True)
class MatmulLinear:
    """A linear of this precision: its weight's name, gathered size on this rank, and the axes that split dimensions."""

    name: str
    inputs: int
    outputs: int
    axes: Mapping[Literal["tokens", "inputs", "outputs"], str]


class MatmulPlan(Protocol):
    """Linears and experts of a plan that multiply in a precision of their own. `lower` names the class.

    `key`: the key of the section `precision` that sets it. `kept_by`: the one that keeps layers out of it. `why`: the
    reason for a forward of these linears. `is_used`: the layout asks for it. `linears`: of this rank's layers, without
    the experts. `inputs`: `linears` by the input that they share. `sent`: weights of the whole model that FSDP gathers
    in this precision, and the bytes of a number. `covers`: the layer of a module does. `multiplies`: a linear, or
    experts, of this rank's layers. `matmuls`: the weights of `layers`, without the experts, by name.
    """

    key: str
    kept_by: str
    why: str

    @property
    def is_used(self) -> bool: ...
    @property
    def linears(self) -> Sequence[MatmulLinear]: ...
    @property
    def inputs(self) -> Sequence[Sequence[MatmulLinear]]: ...
    @property
    def sent(self) -> Mapping[str, int]: ...

    def covers(self, module: str) -> bool: ...
    def multiplies(self, module: str) -> bool: ...
    def matmuls(self, layers: Sequence[str]) -> Iterator[tuple[str, Matmul]]: ...


@dataclass(frozen=True)
class ParallelPlan:
    """Distribution of a model over the ranks of a layout and the work of a step, seen from one rank.

    `placement`: the place of each part of every parameter. `partition`: what tensor parallelism splits.
    `gradient_sums`: parameters whose gradients tp ranks hold in part -> the axis over which they are summed.
    `matmul_plan`: the class of the feature that may give matmuls a precision of their own.
    """

    placement: Placement
    partition: Partition
    gradient_sums: Mapping[str, str]
    cp_method: CPMethod
    recompute: Recompute
    matmul_plan: Callable[["ParallelPlan"], MatmulPlan]
    in_copies: bool = False  # see `computes_in_copies`
    compiled: bool = False  # layers are compiled
    _features: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def feature(self, kind: Callable[["ParallelPlan"], Decided]) -> Decided:
        """Decisions of a feature for this plan, made once: `plan.feature(FsdpPlan).units`."""
        if kind not in self._features:
            self._features[kind] = kind(self)
        found: Decided = self._features[kind]
        return found

    @property
    def matmuls(self) -> MatmulPlan:
        return self.feature(self.matmul_plan)

    @property
    def facts(self) -> ModelFacts:
        return self.placement.facts

    @property
    def layout(self) -> Layout:
        return self.placement.layout

    # ---- the model ---------------------------------------------------------------------------------------------------

    @property
    def anatomy(self) -> Anatomy:
        return self.facts.anatomy

    @property
    def tied(self) -> str | None:
        """Parameter that is both embedding and head, if they are tied."""
        return self.anatomy.embedding_weight if self.anatomy.tied else None

    @property
    def head_weight(self) -> str:
        """Parameter that makes logits: the embedding, if the two are tied."""
        own = f"{self.anatomy.head}.weight"
        return own if own in self.placement.shards else self.anatomy.embedding_weight

    @property
    def vocabulary(self) -> int:
        """Logits per token on this rank. (An embedding may have more rows: Mllama's has 8 for tokens of images.)"""
        return self.placement.gathered_shape(self.head_weight)[0]

    @property
    def whole_vocabulary(self) -> int:
        """Logits per token on all ranks of tp together."""
        return self.placement.shards[self.head_weight].shape[0]

    @cached_property
    def experts(self) -> tuple[Experts, ...]:
        return tuple(block for block in self.facts.experts if is_within(block.name, self.placement.layers))

    @property
    def watches_routers(self) -> bool:
        """True if all routers return the logits that losses and counts need."""
        return bool(self.facts.experts) and all(block.has_logits for block in self.facts.experts)

    @cached_property
    def fp32_routers(self) -> tuple[str, ...]:
        """Routers that compute in fp32 in a model of 16 bits: those with a matrix, perhaps in a module inside (Gemma
        4), that has a row for each of the experts."""
        shapes = [
            (name, parameter.shape) for name, parameter in self.facts.parameters.items() if len(parameter.shape) == 2
        ]
        return tuple(
            block.router
            for block in (self.facts.experts if self.layout.compute_bytes == 2 else ())
            if any(is_within(name, [block.router]) and shape[0] == block.experts for name, shape in shapes)
        )

    @property
    def splits_sequence(self) -> bool:
        """True if activations between the pairs of linears are split by tokens over tp."""
        return self.layout.tp > 1 and self.layout.sequence_parallel

    @property
    def sequence_ranks(self) -> int:
        """Number of tp ranks that share the tokens of activations between the pairs of linears."""
        return self.layout.tp if self.splits_sequence else 1

    @property
    def reduces_rows(self) -> bool:
        """True if the last linear of a pair ends with a collective over tp."""
        return self.layout.tp > 1

    @cached_property
    def attends(self) -> Mapping[str, AttentionShape]:
        """Attention modules of this rank's layers -> the heads of a tp rank."""
        own = {name: shape for name, shape in self.facts.attends.items() if is_within(name, self.placement.layers)}
        return {name: on_tp_rank(shape, self.layout.tp) for name, shape in own.items()}

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def summed_bytes(self, itemsize: int, names: Iterable[str]) -> dict[str, int]:
        """Axis -> bytes of this rank's trained gradients of `names` that are summed over it once a step."""
        sums = {"tp": 0, "tp_kv": 0}
        for name in names:
            if name in self.gradient_sums and self.facts.parameters[name].is_trained:
                sums[self.gradient_sums[name]] += self.placement.held_bytes(name, itemsize)
        return sums

    # ---- the passes --------------------------------------------------------------------------------------------------

    def rings(self, tokens: int) -> tuple[Blocks, ...]:
        """Token blocks of each rank of this rank's ring; a rank of cp has `tokens` tokens of a row.

        The u neighbours of a Ulysses group together hold the tokens of one rank of a ring of cp / u.
        """
        return tokens_by_rank(tokens * self.layout.cp, self.layout.cp // self.cp_method.ulysses)

    def step_shape(
        self,
        rows: int,
        tokens: int,
        micro_batches: int,
        *,
        loss_chunks: int | None = None,
        reduce_bytes: int | None = None,
        whole_logits: bool = False,
    ) -> StepShape:
        """Shape of a step of [rows, tokens] micro batches, from which its calls and bytes are computed."""
        layout, own_tokens = self.layout, tokens // self.layout.cp
        vocabulary = self.whole_vocabulary if whole_logits else self.vocabulary
        compute = layout.compute_bytes
        return StepShape(
            rows=rows,
            tokens=own_tokens,
            hidden=self.facts.hidden_size,
            micro_batches=micro_batches,
            loss_chunks=chunk_sizes(rows * own_tokens, vocabulary, self.facts.hidden_size, loss_chunks),
            compute_bytes=compute,
            master_bytes=max(compute, 4),
            reduce_bytes=reduce_bytes or max(compute, 4),
            recompute=self.recompute,
            compiled=self.compiled,
            gathers_again=not layout.schedule.splits_backward,
            whole_logits=whole_logits,
        )


def on_tp_rank(shape: AttentionShape, tp: int) -> AttentionShape:
    return replace(shape, query=shape.query // tp, kv=max(1, shape.kv // tp))


# ---- edits of modules ------------------------------------------------------------------------------------------------

Kind = Literal["cut", "pre-hook", "hook", "forward", "attribute", "stub", "branch", "shard", "rest"]


@dataclass(frozen=True)
class Edit:
    """One edit of the module at `path` ("" is the model). Each edit of a feature is a class of its own in its
    `spec.py`; `builders` in its `runtime.py` apply it.

    `kind`: its parameters are `cut`; a hook runs before or after it; its `forward` is replaced; it gets an `attribute`;
    a `stub` replaces it; it gets a `branch`, whose output is added to its own; FSDP takes its parameters as one unit
    (`shard`); its parameters are stored in another form (`rest`). `by`: the dimension of parallelism, or the feature,
    that asks for it. `needs_memory`: it applies to allocated parameters, the others to the meta device.
    """

    kind: ClassVar[Kind]
    needs_memory: ClassVar[bool] = False
    path: str
    by: str
    why: str
