"""The folds together, one by one: every pair, triples and quadruples, against one process of plain `transformers`.

    python benchmarks/compositions.py                 all: writes benchmarks/results/compositions.json and the docs
    python benchmarks/compositions.py --only tp2.pp2  those whose layout begins so, on the screen alone

Each case (`tests/compositions.py`) trains a small model of its family for three steps in fp64 on CPU ranks: documents
of unequal, prime lengths, packed; biases, decay, a clip that bites. Compared are the losses, the gradient norms, every
gradient, the weights after the last step, and the collectives that ran with those that the layout declares. Exits with
1 when a case is off.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from tests.compositions import PAIRS, QUADRUPLES, TRIPLES, folds
from tests.parity import Case, differing, gradient_error, on_rank, outcome, reference
from tests.pool import run_ranks

from common import RESULTS, machine
from pages import put_between

DOCS = Path(__file__).parents[1] / "docs" / "evidence" / "compositions.md"
BEGIN, END = "<!-- table: python benchmarks/compositions.py -->", "<!-- end of table -->"
ALLOWED = 1e-10


@dataclass(frozen=True)
class Row:
    """What a case was off by, at worst: `gradient` relative, `loss` and `norm` relative over all steps, `weight`
    absolute after the last. `collectives`: whether what ran is what is declared."""

    layout: str
    folds: str
    family: str
    tied: bool
    ranks: int
    gradient: float
    loss: float
    norm: float
    weight: float
    collectives: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """False for NaN, too."""
        return self.collectives and all(e <= ALLOWED for e in (self.gradient, self.loss, self.norm, self.weight))


def measure(case: Case) -> Row:
    """Run a case and its reference."""
    started = time.perf_counter()
    expected = reference(case)
    per_rank: list[dict[str, Any]] = run_ranks(case.parsed.world, on_rank, case, timeout=900.0)
    found = outcome(case, per_rank, {name: gradient.shape for name, gradient in expected.gradients.items()})
    declared = not differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])
    return Row(
        case.layout, ".".join(folds(case)), case.family, case.tied, case.parsed.world,
        gradient_error(found, expected)[0], _relative(found.losses, expected.losses),
        _relative(found.norms, expected.norms),
        float(np.max([np.abs(found.weights[name] - weights).max() for name, weights in expected.weights.items()])),
        declared, time.perf_counter() - started,
    )  # fmt: skip


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest; NaN where one is, which Python's `max` may pass over."""
    return float(np.max([abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]))


def table(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """What the docs show."""
    good = sum(row.ok for row in rows)
    lines = [
        f"**{good} of {len(rows)} within {ALLOWED:g} in fp64, and each rank sent exactly what is declared.**", "",
        f"`python benchmarks/compositions.py`, on a CPU ({about['cpu']}, {about['cores']} cores), "
        f"torch {about['torch']}, transformers {about['transformers']}, {about['date'][:10]}.", "",
        "| folds | layout | family | ranks | gradients | losses | norms | weights | collectives |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in rows:
        family = f"{row.family}{', tied' * row.tied}"
        errors = " | ".join(f"{value:.0e}" for value in (row.gradient, row.loss, row.norm, row.weight))
        sent = "as declared" if row.collectives else "**other**"
        lines.append(f"| {row.folds} | `{row.layout}` | {family} | {row.ranks} | {errors} | {sent} |")
    return "\n".join(lines)


def main() -> int:
    """Run them, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], metavar="LAYOUT")
    only = tuple(parser.parse_args().only)
    rows = []
    for case in (*PAIRS, *TRIPLES, *QUADRUPLES):
        if only and not case.layout.startswith(only):
            continue
        row = measure(case)
        rows.append(row)
        says = "ok " if row.ok else "BAD"
        print(
            f"{says} {row.layout:<42} {row.family:<11} gradients {row.gradient:.1e}  {row.seconds:5.1f} s", flush=True
        )
    if not rows:
        parser.error(f"no layout begins with {' or '.join(only)}")
    if not only:
        about = machine()
        (RESULTS / "compositions.json").write_text(
            json.dumps({"machine": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
        put_between(BEGIN, END, table(rows, about), DOCS)
    return int(not all(row.ok for row in rows))


if __name__ == "__main__":
    sys.exit(main())
