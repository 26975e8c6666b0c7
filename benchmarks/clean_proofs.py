"""How often `fivefold verify` cries wolf: sound layouts proved over families, precisions and seeds.

    python benchmarks/clean_proofs.py                  all: writes benchmarks/results/clean_proofs.json
    python benchmarks/clean_proofs.py --only llama     a family, or some, on the screen alone

Each is a proof as `fivefold verify` makes it, of a small model of the family that hides nothing (biases, prime sizes,
key/value heads fewer than query heads), over several layouts with other options. A proof that fails is a false alarm.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from tests.parity import FAMILIES, Case, hf_config

from common import RESULTS, machine
from fivefold.api import verify
from fivefold.errors import UserError
from fivefold.layout import Layout
from fivefold.models.anatomy import Anatomy
from fivefold.models.build import build_meta
from fivefold.models.partition import derive
from fivefold.models.trace import trace
from fivefold.parallel.tensor import shard_specs
from fivefold.verify.report import first_sentence

LAYOUTS = ("shard2+zero1", "dp2+full", "tp2", "tp2+nosp", "shard2.tp2+zero2", "tp4")
PRECISIONS = ("fp64", "fp32", "bf16")


@dataclass(frozen=True)
class Clean:
    """One call: a family in a precision, with what was found of each layout (empty: proved) and the closest call, the
    largest error as a part of what is allowed."""

    family: str
    precision: str
    seed: int
    alarms: dict[str, str]
    closest: float
    comparisons: int


def layouts_of(family: str) -> list[str]:
    """Those of `LAYOUTS` that the family can have."""
    model = build_meta(hf_config(Case("single", family=family)))
    anatomy = Anatomy.of(model)
    partition = derive(model, anatomy, trace(model, anatomy))
    found = []
    for text in LAYOUTS:
        layout = Layout.parse(text)
        try:
            shard_specs(model, partition, layout.tp)
        except UserError:
            continue
        if layout.tp == 1 or not (layout.sequence_parallel and partition.sequence_parallel_refusal):
            found.append(text)
    return found


def prove(family: str, precision: str, seed: int) -> Clean:
    """Prove every layout of a family."""
    with tempfile.TemporaryDirectory() as folder:
        hf_config(Case("single", family=family, tied=bool(seed % 2))).save_pretrained(folder)
        model = {"model.name_or_path": folder, "model.init": "random", "data.seq_length": 61}
        report = verify(None, model, layouts=layouts_of(family), precision=precision, seed=seed, steps=5)
    judged = [row.error / row.tolerance for row in report.rows if row.tolerance and not row.what.startswith("control")]
    alarms = {each.layout: "" if each.ok else first_sentence(each) for each in report.found}
    return Clean(family, precision, seed, alarms, max(judged), len(report.rows))


def proofs(only: list[str]) -> Iterator[Clean]:
    """Every family in every precision, each with weights and documents of its own."""
    for number, family in enumerate(FAMILIES):
        for shift, precision in enumerate(PRECISIONS):
            if not only or family in only:
                yield prove(family, precision, seed=1000 + 3 * number + shift)


def main() -> None:
    """Run them, and say how many alarms there were."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[])
    only = parser.parse_args().only
    found = []
    for each in proofs(only):
        found.append(each)
        wrong = {layout: alarm for layout, alarm in each.alarms.items() if alarm}
        print(
            f"{each.family:<12} {each.precision}  {len(each.alarms)} proofs  closest {each.closest:.2f}  {wrong}",
            flush=True,
        )
    runs = sum(len(each.alarms) for each in found)
    alarms = sum(bool(alarm) for each in found for alarm in each.alarms.values())
    print(f"{alarms} false alarms in {runs} proofs")
    if not only:
        values = {"machine": machine(), "runs": runs, "alarms": alarms, "proofs": [asdict(each) for each in found]}
        (RESULTS / "clean_proofs.json").write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
