"""How often `fivefold verify` cries wolf: sound layouts proved over families, precisions and seeds.

    python benchmarks/clean_proofs.py                  all: writes benchmarks/results/clean_proofs.json
    python benchmarks/clean_proofs.py --more           go on: what the results do not have of this commit yet
    python benchmarks/clean_proofs.py --only llama     a family, or some, on the screen alone

Each is the whole proof of `fivefold verify` over five steps, of a small model of the family that hides nothing (biases,
prime sizes, key/value heads fewer than query heads), saved and loaded again. Every model in every precision has weights
and documents of its own. A proof that fails is a false alarm; the exit code is then 1.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from tests.parity import FAMILIES, Case, hf_config
from tests.pool import run_ranks

from campaign import commit
from common import RESULTS, machine
from fivefold.config import OptimizerSection
from fivefold.models import hf_internals
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.parallel.features import limits_of
from fivefold.parallel.layout import Layout
from fivefold.parallel.legality import violations
from fivefold.verification.proof import Proof
from fivefold.verification.proof_case import LEARNING_RATE, WEIGHT_DECAY, ProofCase, rows_for
from fivefold.verification.ranks import prepare
from fivefold.verification.reduced_model import fill
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import LayoutResult

LAYOUTS = ("shard2+zero1", "dp2+full", "tp2", "tp2+nosp", "shard2.tp2+zero2", "tp4")
FOLDED = ("cp2+ring", "pp2+zero1", "cp2.tp2+allgather", "shard2.pp2+full", "cp2+ulysses+full", "tp2.pp2+gpipe")
DEALT = ("shard2.ep2", "shard4.ep2+zero1", "tp2.ep2", "tp2+etp+zero2+full")  # experts
ALL = (*LAYOUTS, *FOLDED, *DEALT)
PRECISIONS = {"fp64": 2, "fp32": 4, "bf16": 4}  # of a family's layouts, every so many is proved
STEPS = 5
FILE = RESULTS / "clean_proofs.json"
COMMIT = commit()  # of the program and its tests


@dataclass(frozen=True)
class Clean:
    """A proof of a sound layout. `alarm`: what it called wrong, if anything; `closest`: the largest error as a part of
    what is allowed, and of what."""

    family: str
    precision: str
    layout: str
    seed: int
    alarm: str
    comparisons: int
    closest: float
    of: str
    commit: str = ""


def layouts_of(family: str) -> list[str]:
    """Those of `ALL` that the family can have."""
    limits = limits_of(facts_of(build_meta(hf_config(Case("single", family=family)))))
    return [text for text in ALL if not violations(Layout.parse(text), limits)]


def make_subject(family: str, precision: str, layouts: list[str], seed: int, folder: Path) -> None:
    """The model, the documents and what one process computes, in `folder`. Embeddings are tied for every second."""
    torch.manual_seed(seed)
    model = hf_internals.unmodified_model(hf_config(Case("single", family=family, tied=bool(seed % 2))), torch.float32)
    fill(model, seed)
    model.save_pretrained(folder / "model")
    optimizer = "muon" if seed % 5 == 0 else "adamw"
    subject = ProofCase(
        folder=folder / "model", model_class=type(model).__name__, vocabulary=model.config.vocab_size,
        rows=rows_for([Layout.parse(text) for text in layouts]), row_length=61, steps=STEPS, seed=seed,
        optimizer=OptimizerSection(name=optimizer, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
    )  # fmt: skip
    prepare(subject, Layout(precision=precision), folder / "evidence.safetensors", "cpu")
    subject.save(folder / "subject.json")


def on_rank(folder: Path, layout: str, saved: Path) -> dict[str, Any]:
    """The whole proof, saved and loaded again."""
    proof = Proof(
        ProofCase.load(folder / "subject.json"),
        Layout.parse(layout),
        ReferenceTensors(folder / "evidence.safetensors"),
        "cpu",
    )
    proof.run()
    proof.save(saved)
    proof.forget()
    proof.reload({layout: saved})
    return proof.found.to_json()


def proofs(only: list[str], known: Collection[tuple[str, str, str]] = ()) -> Iterator[Clean]:
    """Every family in every precision under some of the layouts that it can have, each family under others; but for
    those that are `known`: family, precision, layout."""
    for number, family in enumerate(FAMILIES):
        for shift, precision in enumerate(PRECISIONS):
            if only and family not in only:
                continue
            chosen = layouts_of(family)[(number + shift) % PRECISIONS[precision] :: PRECISIONS[precision]]
            layouts = [text for text in chosen if (family, precision, text) not in known]
            if not layouts:
                continue
            seed = 1000 + 3 * number + shift
            with tempfile.TemporaryDirectory() as name:
                make_subject(family, precision, layouts, seed, Path(name))
                for text in layouts:
                    option = "" if precision == "bf16" else f"+{precision}"
                    yield _clean(family, precision, text, seed, Path(name), text + option)


def _clean(family: str, precision: str, layout: str, seed: int, folder: Path, text: str) -> Clean:
    ranks = run_ranks(Layout.parse(text).world, on_rank, folder, text, folder / f"saved-{layout}")
    found = LayoutResult.of(json.loads(json.dumps(ranks[0])))
    judged = [row for row in found.rows if row.tolerance and not row.what.startswith("control")]
    nearest = max(judged, key=lambda row: row.error / row.tolerance)
    alarm = "" if found.ok else found.why
    return Clean(
        family, precision, layout, seed, alarm, len(found.rows), nearest.error / nearest.tolerance,
        f"{nearest.what} {nearest.where}".strip(), COMMIT,
    )  # fmt: skip


def main() -> int:
    """Run them, and say how many alarms there were."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--more", action="store_true", help="only what results/clean_proofs.json lacks of this commit")
    parser.add_argument("--only", nargs="*", default=[], choices=list(FAMILIES), metavar="FAMILY")
    args = parser.parse_args()
    hf_internals.no_progress_bars()
    before = [Clean(**each) for each in json.loads(FILE.read_text())["proofs"]] if args.more else []
    # A proof of another commit says nothing of this program, and an alarm is looked into again.
    found = [each for each in before if each.commit == COMMIT and not each.alarm]
    known = {(each.family, each.precision, each.layout) for each in found}
    for each in proofs(args.only, known):
        found.append(each)
        says = each.alarm or f"closest {each.closest:.2f} of what is allowed, {each.of}"
        print(f"{each.family:<11} {each.precision}  {each.layout:<17} {says}", flush=True)
        if not args.only or args.more:
            write(found)
    alarms = sum(bool(each.alarm) for each in found)
    print(f"{alarms} false alarms in {len(found)} proofs, {sum(each.comparisons for each in found):,} comparisons")
    return int(alarms > 0)


def write(found: Sequence[Clean]) -> None:
    """After every proof: a campaign that is cut goes on with `--more`."""
    alarms = sum(bool(each.alarm) for each in found)
    values = {"machine": machine(), "runs": len(found), "alarms": alarms, "proofs": [asdict(each) for each in found]}
    FILE.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
