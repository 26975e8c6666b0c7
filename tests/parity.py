"""What one process computes, and what a layout computes, on inputs that hide nothing.

The reference is that of `fivefold.verification`: the unmodified `transformers` model (its own attention, its own head,
every document its own sequence), a plain loss, torch's own clipping and AdamW. Documents have unequal, mostly prime
lengths; the vocabulary and the row length are prime; biases and norm weights are random; clipping bites; weights decay.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from fivefold.config import OptimizerSection
from fivefold.data.batch import IGNORE, MicroBatch, Piece, assemble
from fivefold.models import hf_internals
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.models.experts import router_buffers
from fivefold.models.sources import ModelTensors
from fivefold.parallel import passes
from fivefold.parallel.adapters import nf4
from fivefold.parallel.adapters.facts import targets_of
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.apply import parallelize
from fivefold.parallel.collectives import by_group, differing, total
from fivefold.parallel.dtensor import local
from fivefold.parallel.layout import Layout
from fivefold.parallel.mesh import Mesh, record
from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.optimizers import build_optimizer, rule_for
from fivefold.verification.by_hand import exactly
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.reference import ReferenceRun
from tests.families import TINY

VOCABULARY, ROW, PAD = 101, 23, 3
OPTIONS = OptimizerSection(learning_rate=3e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)

FAMILIES = dict(TINY)
UNLISTED = {"bos_token_id": None, "eos_token_id": None}  # family "none": a case says in its overrides what model it is


@dataclass(frozen=True)
class Case:
    """One run of a few steps. `layout` is a text; `family` a key of FAMILIES.

    The second of two steps sees the update of the first, and makes one from what the optimizer kept.
    """

    layout: str
    family: str = "llama"
    tied: bool = False
    kv_heads: int = 2
    packing: bool = True
    rows: int = 8
    steps: int = 2
    max_grad_norm: float = 0.5
    loss_chunks: int | None = None
    optimizer: str = "adamw"
    overrides: tuple[tuple[str, Any], ...] = field(default=())
    adapter: Lora | None = None
    neftune: float | None = None

    @property
    def parsed(self) -> Layout:
        return Layout.parse(self.layout)

    @property
    def options(self) -> OptimizerSection:
        """`OPTIONS` for its optimizer."""
        return OptimizerSection(**{**OPTIONS.model_dump(exclude_none=True), "name": self.optimizer})

    def with_layout(self, layout: str) -> "Case":
        return replace(self, layout=layout)


@dataclass
class Outcome:
    """Losses and norms of each step, the gradients of step 1 and the weights at the end, by parameter name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def proof(case: Case) -> AbstractContextManager[None]:
    """fp64 all the way, where that is what the case computes in."""
    return exactly(case.parsed.precision)


# ---- the same model and the same batches everywhere ----------------------------------------------------------------


def hf_config(case: Case) -> Any:
    values = {
        "hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": case.kv_heads, "vocab_size": VOCABULARY, "tie_word_embeddings": case.tied,
        "max_position_embeddings": 64, "pad_token_id": PAD,
        **deepcopy(FAMILIES.get(case.family, UNLISTED)), **dict(case.overrides),
    }  # fmt: skip
    return AutoConfig.for_model(**values)


def reference_model(case: Case, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The unmodified model with every parameter random, fp32 values held in `dtype`."""
    torch.manual_seed(7)
    config = hf_config(case)
    model = hf_internals.unmodified_model(config, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.08 * noise)
        for name in router_buffers(model):
            model.get_buffer(name).normal_(std=0.08)
    return model.to(dtype)


def documents(case: Case, step: int) -> list[list[np.ndarray]]:
    """Rows of a global batch; each a list of documents that fit in ROW tokens. One row is nearly empty."""
    rng = np.random.default_rng(100 + step)
    lengths = [[23], [13, 7, 2], [11, 11], [5, 17], [3, 1, 19], [2], [7, 16], [19]]
    rows = [row if case.packing else row[:1] for row in lengths]
    return [[rng.integers(0, VOCABULARY, n) for n in rows[i % len(rows)]] for i in range(case.rows)]


def piece(document: np.ndarray) -> Piece:
    """A whole document."""
    return Piece(document.astype(np.uint16), document[1:].astype(np.uint16))


def batch_of(rows: Sequence[Sequence[np.ndarray]], layout: Layout, data_rank: int) -> list[MicroBatch]:
    """This data rank's micro batches, dealt as `PackedRows.batch` deals them."""
    size = layout.micro_batch_size
    length = -(-ROW // layout.row_multiple) * layout.row_multiple
    parts = []
    for accumulated in range(layout.accumulation(len(rows))):
        first = (accumulated * layout.data_ranks + data_rank) * size
        pieces = [[piece(document) for document in row] for row in rows[first : first + size]]
        parts.append(assemble(pieces, row_length=length, pad_id=0))
    return parts


# ---- one process, nothing of ours -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Subject(ProofCase):
    """A case as `fivefold.verification` has it."""

    case: Case

    def documents(self, step: int) -> list[list[Piece]]:
        return [[piece(document) for document in row] for row in documents(self.case, step)]


Loss = Callable[[nn.Module, list[np.ndarray]], Tensor]  # of the documents of a global batch


class _WithLoss(ReferenceRun):
    """The reference with another loss."""

    of_batch: Loss

    def _gradients(self, step: int, inputs: list[str] | None) -> float:
        loss = self.of_batch(self.model, [d for row in documents(self.case.case, step) for d in row])
        loss.backward()
        if inputs is not None:
            self._keep("gradient", {name: p.grad for name, p in self.master.named_parameters()})
        return loss.item()


def reference(case: Case, *, loss: Loss | None = None) -> Outcome:
    """Run the case in one process, in fp64, by the reference of `fivefold.verification`. `loss`: another one than the
    mean cross entropy."""
    kind = ReferenceRun if loss is None else type("WithLoss", (_WithLoss,), {"of_batch": staticmethod(loss)})
    model = reference_model(case, torch.float32)
    found = kind(subject(case), "fp64", "cpu", model=model).run([]).tensors
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return Outcome(
        found["losses"].tolist(),
        found["norms"].tolist(),
        # zeros where there is none: a correction bias that is a parameter (ERNIE 4.5) has no gradient
        {n: found[f"gradient/{n}"].numpy() if f"gradient/{n}" in found else np.zeros(s) for n, s in shapes.items()},
        {name: found[f"last/{name}"].numpy() for name in shapes},
    )


def subject(case: Case) -> ProofCase:
    """What its reference is asked."""
    return _Subject(
        case=case, folder=Path(), model_class="", vocabulary=VOCABULARY, rows=case.rows, row_length=ROW,
        steps=case.steps, seed=0, optimizer=case.options, max_grad_norm=case.max_grad_norm,
        neftune_noise_alpha=case.neftune,
    )  # fmt: skip


def cross_entropy(model: nn.Module, docs: list[np.ndarray]) -> Tensor:
    """The mean over all targets of some documents."""
    summed, targets = torch.zeros((), dtype=torch.float64), 0
    for doc in docs:
        ids = torch.from_numpy(doc)[None]
        logits = model(input_ids=ids).logits[0, :-1]
        summed = summed + nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        targets += len(doc) - 1
    return summed / targets


# ---- under a layout --------------------------------------------------------------------------------------------------


def build(case: Case) -> Any:
    """The model of the case, spread over the current world, with the reference's values."""
    source = ModelTensors(reference_model(case, torch.float32))
    model, adapters = build_meta(hf_config(case)), adapters_of(case)
    source._tensors |= adapters
    source.shapes = {**source.shapes, **{name: tuple(values.shape) for name, values in adapters.items()}}
    step = case.parsed.padded(ROW), case.parsed.accumulation(case.rows)
    return parallelize(
        model, case.parsed, source=source, seed=0, loss_chunks=case.loss_chunks, step=step, adapter=case.adapter,
        neftune_noise_alpha=case.neftune,
    )  # fmt: skip


def adapters_of(case: Case) -> dict[str, Tensor]:
    """Random numbers for the adapters of a case, in fp32: no matrix is zero, or it would hide the other's gradient."""
    if case.adapter is None:
        return {}
    torch.manual_seed(11)
    facts = facts_of(build_meta(hf_config(case)))
    shapes = [each.shapes(case.adapter.rank) for each in targets_of(facts, case.adapter)]
    return {name: 0.2 * torch.randn(shape) for each in shapes for name, shape in each.items()}


def gradient(parameter: Tensor) -> Tensor:
    """Zeros where there is none."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def refusal(case: Case) -> str:
    """The error that building the case ends with."""
    try:
        build(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gradients(model: Any, batch: Sequence[MicroBatch], scale: Tensor) -> Tensor:
    """Forward and backward of this rank's micro batches; their summed loss times `scale`."""
    return passes.gradients(model, training_step.inputs_of_step(model, batch, scale))


def on_rank(case: Case) -> dict[str, Any]:
    """Run the case on this rank; pieces of gradients and weights come back with their global regions."""
    model = build(case)
    mesh: Mesh = state_of(model).mesh
    optimizer = build_optimizer(model, case.options)
    first = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    targets = sum(len(d) - 1 for row in documents(case, 0) for d in row)
    with proof(case):
        gradients(model, first, torch.tensor(1.0 / targets, dtype=torch.float64))
    reduced = pieces(model, {name: gradient(p) for name, p in model.named_parameters()})
    optimizer.zero_grad(set_to_none=True)
    results = []
    for step in range(case.steps):
        batch = batch_of(documents(case, step), case.parsed, state_of(model).placement.data_rank)
        with record(mesh) as found, proof(case):
            results.append(
                training_step.train_step(
                    model, optimizer, batch, learning_rate=OPTIONS.learning_rate, max_grad_norm=case.max_grad_norm
                )
            )
    shape = training_step.step_shape(model, *batch[0].input_ids.shape, len(batch), case.loss_chunks, batch=batch)
    return {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "gradients": reduced,
        "weights": pieces(model, dict(model.named_parameters())),
        "ran": total(found),
        "declared": by_group(training_step.declare(model, shape, optimizer=rule_for(case.options).facts), mesh.grid),
    }


def pieces(model: nn.Module, tensors: dict[str, Tensor]) -> list[tuple[str, Any, np.ndarray]]:
    """(name, global region as pairs, values) of everything this rank holds, copies included."""
    state = state_of(model)
    return [
        (
            name,
            tuple((s.start, s.stop) for s in global_region),
            values[local_region].numpy().copy(),
        )
        for name, tensor in tensors.items()
        for values in (_numbers(local(tensor).detach()),)
        for global_region, local_region in state.placement.regions(name)
    ]


def _numbers(values: Tensor) -> Tensor:
    """In fp64; of bytes, what they stand for."""
    return nf4.restored(values, torch.float64) if values.dtype == torch.uint8 else values.double()


def gathered(
    per_rank: list[list[tuple[str, Any, np.ndarray]]], shapes: dict[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Whole tensors from the pieces of every rank; copies must agree bit for bit and nothing may be missing."""
    whole = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    for rank, parts in enumerate(per_rank):
        for name, region, values in parts:
            place = whole[name][tuple(slice(*edges) for edges in region)]
            seen = ~np.isnan(place)
            assert np.array_equal(place[seen], values[seen]), f"rank {rank} holds another copy of {name}"
            place[...] = values
    for name, values in whole.items():
        assert not np.isnan(values).any(), f"parts of {name} are on no rank, or not a number"
    return whole


def outcome(case: Case, per_rank: list[dict[str, Any]], shapes: dict[str, tuple[int, ...]]) -> Outcome:
    """The ranks' results as one; every rank must report the same losses and norms."""
    assert all(r["losses"] == per_rank[0]["losses"] and r["norms"] == per_rank[0]["norms"] for r in per_rank)
    return Outcome(
        per_rank[0]["losses"],
        per_rank[0]["norms"],
        gathered([r["gradients"] for r in per_rank], shapes),
        gathered([r["weights"] for r in per_rank], shapes),
    )


def gradient_error(found: Outcome, expected: Outcome) -> tuple[float, str]:
    """Largest |g - ref| / max(|ref|, 1e-6 * global norm) over parameters, with its name."""
    floor = 1e-6 * expected.norms[0]
    errors = {
        name: np.nan_to_num(np.linalg.norm(found.gradients[name] - ref) / max(np.linalg.norm(ref), floor), nan=np.inf)
        for name, ref in expected.gradients.items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return float(errors[worst]), worst


def assert_proved(found: Outcome, expected: Outcome, per_rank: list[dict[str, Any]]) -> None:
    """In fp64: gradients, losses, norms and weights within 1e-10, and the collectives that ran are those declared."""
    error, worst = gradient_error(found, expected)
    assert error <= 1e-10, worst
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-10)
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-10)
    for name, weights in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=1e-10, err_msg=name)
    assert not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])


__all__ = ["IGNORE", "Case", "Outcome", "assert_proved", "gradient_error", "on_rank", "outcome", "reference"]
