"""MLPs that run in pieces of the sequence (`memory.mlp_chunks`). No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fivefold.core.violation import Violation
from fivefold.models.anatomy import is_within
from fivefold.models.facts import Matmul, ModelFacts, TPBlock
from fivefold.parallel.collectives import Call
from fivefold.parallel.edits import Edit
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.step import LayerNumbers, LayerStep, Step

_OF_LINEARS = ("column", "row", "row_bias")  # roles of the parameters of an MLP


class ChunkPlan:
    """MLPs of a rank that run in pieces, and the lengths of the pieces."""

    def __init__(self, plan: ParallelPlan) -> None:
        self._plan = plan

    @cached_property
    def mlps(self) -> tuple[str, ...]:
        """MLPs of this rank's layers that run in pieces: those of linears alone, given hidden states alone.
        Experts are excluded, and so is everything beside them."""
        return _dense_mlps(self._plan.facts, self._plan.placement.layers) if self._plan.layout.mlp_chunks > 1 else ()

    @cached_property
    def linears(self) -> frozenset[str]:
        """Linears of these MLPs, by their names within a layer."""
        mlps = set(self.mlps)
        blocks = [block for block in self._plan.facts.partition.tp_blocks if block.owner in mlps]
        names = {name for block in blocks for name in (*block.columns, block.row)}
        return frozenset(
            next(name[len(layer) + 1 :] for layer in self._plan.placement.layers if is_within(name, [layer]))
            for name in names
        )

    def has(self, matmul: Matmul) -> bool:
        """True if a matmul of a layer belongs to such an MLP."""
        return matmul.name.removesuffix(".weight") in self.linears

    def pieces(self, tokens: int) -> tuple[int, ...]:
        """Tokens in each piece of a chunked MLP, for `tokens` of a row on this rank."""
        size = -(-tokens // self._plan.layout.mlp_chunks)
        return tuple(min(size, tokens - start) for start in range(0, tokens, size))


def _dense_mlps(facts: ModelFacts, layers: Sequence[str]) -> tuple[str, ...]:
    """MLPs of layers that compute token by token: pairs of linears alone, given hidden states alone."""
    found, outer = facts.partition.of_layers(layers), [block.name.rpartition(".")[0] for block in facts.experts]
    return tuple(
        block.owner for block in found.tp_blocks
        if block.heads is None and block.entries[0].modules == (block.owner,) and not is_within(block.owner, outer)
        and all(found.roles[name].kind in _OF_LINEARS for name in found.roles if is_within(name, [block.owner]))
    )  # fmt: skip


def violations(plan: ParallelPlan) -> Iterator[Violation]:
    """`mlp_chunks` needs a dense MLP."""
    if plan.layout.mlp_chunks > 1 and not _dense_mlps(plan.facts, plan.anatomy.layers):
        what = f"mlp_chunks {plan.layout.mlp_chunks}: {plan.facts.model_class} has no dense MLP that is known to be one"
        yield Violation("mlp_chunks", what, "set memory.mlp_chunks: 1", (1,), more="docs/explain/memory.md")


def calls(step: Step, block: TPBlock) -> Iterator[Call]:
    """Calls into an MLP in pieces, and out of it. Each piece enters once more in backward, and stops before its sum. In
    a recomputed layer all pieces run again as well, except the last one of an MLP that ends the layer."""
    plan, shape, layer = step.plan, step.shape, step.layer_of(block.row)
    split = plan.sequence_ranks
    pieces, again = plan.feature(ChunkPlan).pieces(shape.tokens // split), shape.recompute.wraps(layer)
    there, back = ("all_gather", "reduce_scatter") if plan.splits_sequence else ("all_reduce", "all_reduce")
    for at, tokens in enumerate(pieces):
        size = shape.hidden_bytes // shape.tokens * tokens * split
        recomputed = int(again and not (block.is_last and at == len(pieces) - 1))
        if plan.splits_sequence:
            yield step.call("tp", there, size, "forward", layer)
            yield step.call("tp", there, size, "backward", layer, times=recomputed + 1)
            yield step.call("tp", there, size, "backward", layer)  # of the gradients of the output
        yield step.call("tp", back, size, "forward", layer)
        if recomputed:
            yield step.call("tp", back, size, "backward", layer)
        yield step.call("tp", back, size, "backward", layer)  # of the gradients of the input


@dataclass(frozen=True)
class InPieces(Edit):
    """Run an MLP on `pieces` of the sequence in turn."""

    kind = "forward"
    pieces: int


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """Run MLPs in pieces."""
    for mlp in plan.feature(ChunkPlan).mlps:
        pieces = plan.layout.mlp_chunks
        yield InPieces(mlp, "chunks", f"runs {pieces} pieces of the sequence in turn", pieces)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Replace what an MLP saves by the input of its pieces. Backward has what a piece recomputes, and its gradients.

    Without pieces the MLP saves the outputs of its first linears and the activation's results from them; compiled, the
    latter only as the input of its last linear.
    """
    plan, hidden = step.plan, step.shape.hidden
    matmuls = [matmul for matmul in step.cost.matmuls if plan.feature(ChunkPlan).has(matmul)]
    if not matmuls:
        return numbers
    *columns, row = matmuls
    outputs = sum(matmul.outputs for matmul in columns)
    inside = outputs + row.inputs if step.shape.compiled else 2 * outputs
    widest = max(max(matmul.inputs, matmul.outputs) for matmul in matmuls)
    piece = (2 * outputs + 2 * widest) / plan.layout.tp / plan.layout.mlp_chunks
    saved = numbers.saved - (inside / plan.layout.tp + hidden * (1 - 1 / plan.sequence_ranks))
    return replace(numbers, saved=saved, piece=piece + 3 * hidden)
