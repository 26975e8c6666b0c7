"""The mutation proof: `fivefold verify` over a program with one planted bug at a time.

A subject (model, documents, reference) is made once for every model that the catalogue needs; a fault is planted on the
ranks around everything that a proof does there. Without a fault the same proof has to pass: the control.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fivefold.config import OptimizerSection
from fivefold.layout import Layout
from fivefold.models import surfaces
from fivefold.verify.evidence import Evidence
from fivefold.verify.prepare import prepare
from fivefold.verify.proof import Proof
from fivefold.verify.report import first_wrong
from fivefold.verify.rows import Found, Row
from fivefold.verify.subject import LEARNING_RATE, WEIGHT_DECAY, Subject
from fivefold.verify.thin import fill
from tests.parity import Case, hf_config
from tests.pool import run_ranks
from tests.verify.faults import FAULTS, Fault, Model

ROW, SEED = 31, 1234
OTHER = "tp2"  # the layout whose checkpoint a fault of loading is tried on


def make_subject(model: Model, folder: Path, *, steps: int, prompts: int = 1, new_tokens: int = 2) -> Path:
    """The subject of `model` and its evidence in fp64, in `folder`; made once."""
    place = folder / f"{model}-{model.kv_heads}-{len(model.changes)}"
    if (place / "subject.json").exists():
        return place
    (place / "model").mkdir(parents=True)
    case = Case("single", model.family, tied=model.tied, kv_heads=model.kv_heads, overrides=model.changes)
    plain = surfaces.unmodified_model(hf_config(case), torch.float32)
    fill(plain, SEED)
    plain.save_pretrained(place / "model")
    subject = Subject(
        folder=place / "model", model_class=type(plain).__name__, vocabulary=plain.config.vocab_size, rows=8,
        row_length=ROW, steps=steps, seed=SEED, prompts=prompts, new_tokens=new_tokens, optimizer=OptimizerSection(
            name=model.optimizer, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.95), eps=1e-8
        ),
    )  # fmt: skip
    prepare(subject, "fp64", place / "evidence.safetensors", "cpu")
    subject.save(place / "subject.json")
    return place


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Inside, the program has the bug."""
    if name is None:
        yield
        return
    with FAULTS[name].plant():
        yield


def on_rank(place: str, layout: str, name: str | None) -> dict[str, Any]:
    """What a proof of `layout` finds with a fault planted, as JSON."""
    return _found(layout, lambda: _proof(place, layout).run(), name)


def load_on_rank(place: str, layout: str, name: str | None, folder: str, half: int) -> dict[str, Any]:
    """The same of loading what `save_on_rank` left after `half` steps, and of the losses from there on."""

    def load() -> Found:
        proof = _proof(place, layout)
        proof.forget()
        proof.reload({OTHER: Path(folder)})
        proof.found.losses = [proof._step(step).loss for step in range(half, proof.subject.steps)]
        return proof.found

    return _found(layout, load, name)


def save_on_rank(place: str, layout: str, name: str | None, folder: str, half: int) -> None:
    """Train for `half` of a proof's steps and save."""
    with planted(name):
        proof = _proof(place, layout)
        for step in range(half):
            proof._step(step)
        proof.save(Path(folder))


def _found(layout: str, look: Callable[[], Found], name: str | None) -> dict[str, Any]:
    try:
        with planted(name):
            return look().to_json()
    except Exception as error:  # on every rank alike, or the others would wait for this one
        return Found(layout, refused=f"{type(error).__name__}: {error}").to_json()


def _proof(place: str, layout: str) -> Proof:
    subject = Subject.load(Path(place) / "subject.json")
    return Proof(subject, Layout.parse(f"{layout}+fp64"), Evidence(Path(place) / "evidence.safetensors"), "cpu")


@dataclass(frozen=True)
class Outcome:
    """What verify said of a fault: all that was found, and the first comparison that failed (None: it survived)."""

    found: Found
    row: Row | None

    @property
    def is_killed(self) -> bool:
        return self.row is not None or bool(self.found.refused)


def prove(folder: Path, model: Model, layout: str, fault: Fault | None = None, *, steps: int) -> Outcome:
    """Run the proof of a layout, with a fault planted or without."""
    place = make_subject(model, folder, steps=steps)
    return _outcome(run_ranks(Layout.parse(layout).world, on_rank, str(place), layout, fault and fault.name))


def prove_loading(folder: Path, model: Model, layout: str, fault: Fault | None = None, *, steps: int) -> Outcome:
    """Load, in the middle of the steps, what another layout saved, with a fault planted on both ways or without."""
    place, name, half = make_subject(model, folder, steps=steps), fault and fault.name, steps // 2
    with tempfile.TemporaryDirectory() as saved:
        run_ranks(Layout.parse(OTHER).world, save_on_rank, str(place), OTHER, name, saved, half)
        return _outcome(run_ranks(Layout.parse(layout).world, load_on_rank, str(place), layout, name, saved, half))


def prove_fault(fault: Fault, folder: Path, *, steps: int) -> Outcome:
    """Run the proof of the fault's own layout and model with the fault planted."""
    return (prove_loading if fault.reload else prove)(folder, fault.model, fault.layout, fault, steps=steps)


def _outcome(per_rank: list[dict[str, Any]]) -> Outcome:
    found = Found.of(json.loads(json.dumps(per_rank[0])))
    return Outcome(found, first_wrong(found))


def reference_losses(folder: Path, fault: Fault, *, steps: int) -> list[float]:
    """What one process of plain transformers has for a loss, step by step."""
    place = make_subject(fault.model, folder, steps=steps)
    losses: list[float] = Evidence(place / "evidence.safetensors").whole("losses").tolist()
    return losses[steps // 2 :] if fault.reload else losses
