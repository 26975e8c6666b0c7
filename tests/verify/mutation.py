"""The mutation proof: `fivefold verify` over a program with one planted bug at a time.

A subject (model, documents, reference) is made once for every model that the catalogue needs; a fault is planted on the
ranks around everything that a proof does there. Without a fault the same proof has to pass: the control.
"""

import json
from collections.abc import Iterator
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


def on_rank(place: str, layout: str, name: str | None, saved: str | None) -> dict[str, Any]:
    """What a proof of `layout` finds with a fault planted, as JSON. `saved`: also load the checkpoints there."""
    try:
        with planted(name):
            found = _proof(place, layout).run()
    except Exception as error:  # on every rank alike, or the others would wait for this one
        found = Found(layout, refused=f"{type(error).__name__}: {error}")
    return found.to_json()


def save_on_rank(place: str, layout: str, folder: str) -> None:
    """A sound checkpoint after the steps of a proof."""
    proof = _proof(place, layout)
    proof.first_step()
    proof.trajectory()
    proof.save(Path(folder))


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
        return self.row is not None

    @property
    def steps(self) -> list[float]:
        """The losses."""
        return self.found.losses


def prove(
    folder: Path, model: Model, layout: str, fault: Fault | None = None, *, steps: int, reload: bool = False
) -> Outcome:
    """Run the proof of a layout, with a fault planted or without."""
    place = make_subject(model, folder, steps=steps)
    saved = _checkpoint(place) if reload else None
    ranks = run_ranks(Layout.parse(layout).world, on_rank, str(place), layout, fault and fault.name, saved)
    found = Found.of(json.loads(json.dumps(ranks[0])))
    return Outcome(found, first_wrong(found))


def prove_fault(fault: Fault, folder: Path, *, steps: int) -> Outcome:
    """Run the proof of the fault's own layout and model with the fault planted."""
    return prove(folder, fault.model, fault.layout, fault, steps=steps, reload=fault.reload)


def _checkpoint(place: Path) -> str:
    """A sound checkpoint of another layout; made once."""
    saved = place / "saved"
    if not (saved / "done").exists():
        saved.mkdir(exist_ok=True)
        run_ranks(2, save_on_rank, str(place), OTHER, str(saved))
    return str(saved)


def reference_losses(folder: Path, fault: Fault, *, steps: int) -> list[float]:
    """What one process of plain transformers has for a loss, step by step."""
    place = make_subject(fault.model, folder, steps=steps)
    losses: list[float] = Evidence(place / "evidence.safetensors").whole("losses").tolist()
    return losses
