"""The mutation proof: `fivefold verify` over a program with one planted bug at a time.

A subject (model, documents, reference) is made once for every model that the catalogue needs; a fault is planted on the
ranks around everything that a proof does there. Without a fault the same proof has to pass: the control.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch

from fivefold.config import ObjectiveSection, OptimizerSection
from fivefold.core.errors import RunFailed
from fivefold.models import discover, hf_internals
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.layout import DEGREES, Layout
from fivefold.verification.proof import Proof
from fivefold.verification.proof_case import CHUNKS, LEARNING_RATE, WEIGHT_DECAY, ProofCase
from fivefold.verification.ranks import prepare
from fivefold.verification.reduced_model import fill
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import ComparisonRow, LayoutResult
from tests import pool
from tests.parity import Case, hf_config
from tests.training import bodies
from tests.verification.faults import FAULTS, Fault, Model

ROW, SEED = 31, 1234
OWN_LOSS = f"{Path(__file__).with_name('own_loss.py')}:focal_with_margin"
OWN_OPTIMIZER = f"{Path(__file__).with_name('own_optimizer.py')}:Lion"
DEFAULT = Layout()
EVIDENCE = "evidence.safetensors"
OTHER = "tp2"  # the layout whose checkpoint a fault of loading is tried on
COMPILED = {"fivefold.core.code_cache", "fivefold.ops.cpu.cpu_attention", "fivefold.ops.cpu.shared_memory"}
TIMEOUT = 900.0  # seconds of one proof: machines are shared


def make_subject(model: Model, folder: Path, *, steps: int, like: Layout = DEFAULT) -> Path:
    """The proof case of `model` and its reference in fp64, in `folder`; made once. `like`: in the types of a layout."""
    place = folder / f"{model}-{model.kv_heads}-{crc32(repr(model.changes).encode()):08x}-{like.numerics}"
    place = place if model.objective == "sft" else place.with_name(f"{place.name}-{model.objective}")
    place = place.with_name(f"{place.name}-lora-{model.quantize}-{model.dropout}") if model.adapter else place
    place = place.with_name(f"{place.name}-neftune") if model.neftune else place
    place = place.with_name(f"{place.name}-balanced") if model.balanced else place
    if (place / "subject.json").exists():
        return place
    (place / "model").mkdir(parents=True)
    changes = (("num_hidden_layers", 2), *model.changes)
    case = Case("single", model.family, tied=model.tied, kv_heads=model.kv_heads, overrides=changes)
    plain = hf_internals.unmodified_model(hf_config(case), torch.float32)
    fill(plain, SEED)
    plain.save_pretrained(place / "model")
    subject = ProofCase(
        folder=place / "model", model_class=type(plain).__name__, vocabulary=plain.config.vocab_size, rows=8,
        row_length=ROW + bool(like.matmul_words), steps=steps, seed=SEED, new_tokens=2,
        objective=ObjectiveSection(
            name=model.objective, beta=0.3, top_k=7, temperature=2.5, alpha=0.3,
            **({"path": OWN_LOSS, "columns": ["weight"]} if model.objective == "python" else {}),
            **({"teacher": "another"} if model.objective == "distill" else {}),
        ),
        adapter=_lora(model) if model.adapter else None, loss_chunks=CHUNKS if model.is_chunked else None,
        neftune_noise_alpha=model.neftune, balance_rows=model.balanced,
        prompts=int(not like.has_tensor_scales), whole_rows=bool(like.matmul_words), capacity_factor=model.capacity,
        optimizer=OptimizerSection(
            name=model.optimizer, learning_rate=LEARNING_RATE / 3, weight_decay=WEIGHT_DECAY,
            **({"path": OWN_OPTIMIZER, "options": {"betas": [0.9, 0.98]}} if model.optimizer == "python" else {}),
        ),
    )  # fmt: skip
    prepare(subject, replace(like, precision="fp64"), place / EVIDENCE, "cpu")
    subject.save(place / "subject.json")
    return place


def _lora(model: Model) -> Lora:
    experts = ("gate_up_proj", "down_proj") if model.of_experts else ()
    return Lora(rank=3, alpha=7.0, quantize=model.quantize, target_parameters=experts, dropout=model.dropout)


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Inside, the program has the bug; what is kept is neither read nor left: it could be the sound program's, or the
    other's. None: it has no bug, and what sound programs kept is its own."""
    if name is None:
        yield
        return
    _forget()
    try:
        with FAULTS[name].plant(), patch.object(discover, "_key", lambda model: None):
            yield
    finally:
        _forget()


def _forget() -> None:
    """Empty the caches of functions, but for those of what a compiler made."""
    for name, module in list(sys.modules.items()):
        if name.startswith("fivefold.") and name not in COMPILED:
            for each in list(vars(module).values()):
                if hasattr(each, "cache_clear"):
                    each.cache_clear()


@dataclass(frozen=True)
class Outcome:
    """What was found of a fault, and the first comparison that failed (None: it survived, or the program refused)."""

    found: LayoutResult
    row: ComparisonRow | None

    @property
    def is_killed(self) -> bool:
        return self.row is not None or bool(self.found.refused)


def prove_fault(fault: Fault, folder: Path, *, steps: int, whole: bool = True) -> Outcome:
    """Look for a fault in its own layout and model; not `whole`: until it is found."""
    return prove(fault.kind, fault.model, fault.layout, folder, fault.name, steps=steps, whole=whole)


def prove(
    kind: str, model: Model, layout: str, folder: Path, name: str | None = None, *, steps: int, whole: bool = True
) -> Outcome:
    """Prove a layout with a fault planted, or (`name` None) without."""
    if kind == "run":
        return outcome_of(_run(layout, folder, name, steps=steps, whole=whole))
    parsed = Layout.parse(layout)
    place, world = str(make_subject(model, folder, steps=steps, like=parsed)), parsed.world
    if kind == "step":
        return outcome_of(_ranks(world, step_on_rank, place, layout, name, whole))
    with tempfile.TemporaryDirectory() as saved:
        _ranks(Layout.parse(OTHER).world, save_on_rank, place, OTHER, name, saved)
        return outcome_of(_ranks(world, load_on_rank, place, layout, name, saved))


def sound_losses(fault: Fault, folder: Path, *, steps: int) -> list[float]:
    """The losses of the same steps without the fault."""
    if fault.kind == "run":
        return prove("run", fault.model, fault.layout, folder, steps=steps).found.losses
    place = make_subject(fault.model, folder, steps=steps, like=Layout.parse(fault.layout))
    losses: list[float] = ReferenceTensors(place / EVIDENCE).whole("losses").tolist()
    return losses[steps // 2 :] if fault.kind == "load" else losses


def outcome_of(per_rank: list[dict[str, Any]]) -> Outcome:
    """What a rank that raised says, else the first. Ranks that raised may be out of step, each within another
    collective: they end."""
    raised = [each for each in per_rank if each["refused"]]
    if raised:
        pool.end(len(per_rank))
    found = LayoutResult.of(json.loads(json.dumps([*raised, *per_rank][0])))
    return Outcome(found, found.first_wrong)


def _ranks(world: int, *call: Any) -> list[Any]:
    return pool.run_ranks(world, *call, timeout=TIMEOUT)


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def step_on_rank(place: str, layout: str, name: str | None, whole: bool) -> dict[str, Any]:
    """The proof of a layout; not `whole`: until something is wrong."""

    def look() -> LayoutResult:
        proof = opened(place, layout)
        for stage in proof.stages:
            stage()
            if not whole and not all(row.ok for row in proof.found.rows):
                break
        return proof.found

    return _found(layout, look, name)


def load_on_rank(place: str, layout: str, name: str | None, folder: str) -> dict[str, Any]:
    """Load what `save_on_rank` left, and train on."""

    def look() -> LayoutResult:
        proof = opened(place, layout)
        proof.forget()
        proof.reload({OTHER: Path(folder)})
        rest = range(proof.case.steps // 2, proof.case.steps)
        proof.found.losses = [proof._step(step).loss for step in rest]
        return proof.found

    return _found(layout, look, name)


def save_on_rank(place: str, layout: str, name: str | None, folder: str) -> None:
    """Train for half of the steps and save."""
    with planted(name):
        proof = opened(place, layout)
        for step in range(proof.case.steps // 2):
            proof._step(step)
        proof.save(Path(folder))


def run_on_rank(tree: dict[str, Any], name: str | None, stop_at: int) -> bodies.Ran:
    """A run, or the rest of one."""
    with planted(name):
        return bodies.on_rank(tree, stop_at=stop_at)


def opened(place: str, layout: str) -> Proof:
    """The proof of a layout in fp64, in the subject that lies there."""
    subject = ProofCase.load(Path(place) / "subject.json")
    return Proof(subject, Layout.parse(f"{layout}+fp64"), ReferenceTensors(Path(place) / EVIDENCE), "cpu")


def _found(layout: str, look: Callable[[], LayoutResult], name: str | None) -> dict[str, Any]:
    try:
        with planted(name):
            return look().to_json()
    except Exception as error:  # on every rank alike, or the others would wait for this one
        return LayoutResult(layout, refused=f"{type(error).__name__}: {error}").to_json()


# ---- a run that goes on with a fault --------------------------------------------------------------------------------


def _run(layout: str, folder: Path, name: str | None, *, steps: int, whole: bool) -> list[dict[str, Any]]:
    """Half of a run, sound; then the rest with the fault: what its standing checks say. `whole`: then the rest once
    more without checks, for its losses."""
    place, half = folder / f"run-{layout}", max(2, steps // 2)
    parsed = Layout.parse(layout)
    degrees = {name: getattr(parsed, name) for name in DEGREES.values()}
    place.mkdir(parents=True, exist_ok=True)
    tree = bodies.run_file(
        place, train__max_steps=2 * half, train__check_every=1, checkpoint__every=half, train__micro_batch_size=2,
        outer__every=parsed.outer_every,
    ) | {"layout": degrees}  # fmt: skip
    world, first = parsed.world, place / "sound"
    if not first.exists():
        _ranks(world, run_on_rank, tree, None, half + 1)
        shutil.copytree(place / "run", first)
    found = LayoutResult(layout)
    for checked in (True, False) if whole else (True,):
        shutil.rmtree(place / "run")
        shutil.copytree(first, place / "run")
        tree["train"]["check_every"] = int(checked)
        ran: bodies.Ran = _ranks(world, run_on_rank, tree, name, 0)[0]
        if checked:
            found.rows.append(_standing(ran.error))
    found.losses = bodies.column(tree, "train/loss")[half:]
    return [found.to_json()]


def _standing(error: Exception | None) -> ComparisonRow:
    """What a run's standing checks say as a row."""
    if error is not None and not isinstance(error, RunFailed):
        raise error
    where = error.what.partition(": ")[2] if error else ""
    return ComparisonRow("standing check", float(bool(error)), 0.0, error is None, where)
