"""The mutation proof of docs/evidence/faults.md: silent bugs are planted one at a time; `fivefold verify` finds each.

    python benchmarks/faults.py                    write benchmarks/results/faults.json and docs/evidence/faults.md
    python benchmarks/faults.py --only NAME ...    some faults, on the screen alone
    python benchmarks/faults.py --new              those that were not measured yet: adds them to both
    python benchmarks/faults.py --steps 3          shorter; 20 are what docs/evidence/faults.md is made with

Each fault is a patch of the running program (`tests/verification/faults/`), planted on CPU ranks around the proof of
the smallest layout in which it bites, in fp64, on a model of two layers; the proof ends with `steps` optimizer steps,
whose losses say whether a comparison of loss curves would have found the fault as well. Without a fault the same proof
has to pass: the controls. Exits with 1 when a fault survives or is named wrongly, or a control fails.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from tests.verification.faults import FAULTS, Fault
from tests.verification.mutation import prove, prove_fault, sound_losses

from common import RESULTS, machine
from fivefold.verification.results import ComparisonRow
from pages import put_between

DOCS = Path(__file__).parents[1] / "docs" / "evidence" / "faults.md"
BEGIN, END = "<!-- table: python benchmarks/faults.py -->", "<!-- end of table -->"
STEPS, CURVE = 20, 0.01  # a loss curve that is this far off at any step would be noticed


@dataclass(frozen=True)
class Row:
    """What became of a fault. `named`: the first comparison that failed is the right one; `curve`: the largest relative
    difference of a loss from the sound one's, None where there are no losses."""

    name: str
    bug: str
    known: str
    model: str
    layout: str
    kind: str
    killed: bool
    what: str
    where: str
    error: float
    tolerance: float
    named: bool
    curve: float | None

    @property
    def on_curve(self) -> bool:
        """Whether the loss curve shows it."""
        return self.curve is not None and self.curve > CURVE


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of faults", choices=FAULTS, metavar="NAME")
    parser.add_argument("--new", action="store_true", help="only those that results/faults.json does not have")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a proof (20)")
    args = parser.parse_args()
    before = json.loads((RESULTS / "faults.json").read_text()) if args.new else {"controls": {}, "rows": []}
    measured = {row["name"]: Row(**row) for row in before["rows"] if row["name"] in FAULTS}
    faults = [FAULTS[name] for name in args.only or FAULTS if name not in measured]
    with tempfile.TemporaryDirectory() as folder:
        controls = before["controls"] | control(faults, Path(folder), steps=args.steps)
        measured |= {fault.name: tried(fault, Path(folder), steps=args.steps) for fault in faults}
    rows = [measured[name] for name in args.only or FAULTS]
    print(totals(rows))
    failed = [each for each, is_ok in controls.items() if not is_ok]
    if failed:
        print(f"controls that failed: {', '.join(failed)}")
    if not args.only:
        result = {
            "machine": machine(),
            "steps": args.steps,
            "controls": controls,
            "rows": [asdict(row) for row in rows],
        }
        (RESULTS / "faults.json").write_text(json.dumps(result, indent=1) + "\n")
        write_docs(result, rows, DOCS)
    return 0 if not failed and all(row.killed and row.named for row in rows) else 1


def control(faults: Sequence[Fault], folder: Path, *, steps: int) -> dict[str, bool]:
    """Whether the proof passes without a fault, for every kind, model and layout that the faults need."""
    found = {}
    for kind, model, layout in sorted({(fault.kind, fault.model, fault.layout) for fault in faults}, key=str):
        outcome = prove(kind, model, layout, folder, steps=steps)
        name = f"{layout}, {model}" if kind != "run" else f"{layout}, a run"
        passes = bool(outcome.found.rows) and not outcome.is_killed
        found[name if kind == "step" else f"{name}, {kind}"] = passes
        why = outcome.row or outcome.found.refused or "nothing was compared"
        print(f"control {name:30} {'passes' if passes else why}")
    return found


def tried(fault: Fault, folder: Path, *, steps: int) -> Row:
    """Plant a fault and look."""
    outcome = prove_fault(fault, folder, steps=steps)
    refused = outcome.found.refused.splitlines()
    first = outcome.row or ComparisonRow("refused" if refused else "", 0.0, 0.0, True, "".join(refused[:1]))
    found = Row(
        name=fault.name, bug=fault.bug, known=fault.known, model=str(fault.model), layout=fault.layout,
        kind=fault.kind, killed=outcome.is_killed, what=first.what, where=first.where, error=first.error,
        tolerance=first.tolerance, named=fault.names(first),
        curve=difference(outcome.found.losses, sound_losses(fault, folder, steps=steps)),
    )  # fmt: skip
    verdict = ("killed" if found.named else "KILLED, NAMED OTHERWISE") if found.killed else "SURVIVED"
    curve = "" if found.curve is None else f"  curve {found.curve:.1e}"
    print(f"{fault.name:42} {verdict}  {found.what}: {found.where}{curve}", flush=True)
    return found


def difference(losses: Sequence[float], sound: Sequence[float]) -> float | None:
    """The largest relative difference of a loss from the sound one of the same step."""
    if not losses or len(losses) != len(sound):
        return None
    return max(abs(a - b) / abs(b) if a == a else float("inf") for a, b in zip(losses, sound, strict=True))


# ---- the page --------------------------------------------------------------------------------------------------------


def totals(rows: Sequence[Row]) -> str:
    """One line."""
    return (
        f"killed {sum(row.killed for row in rows)}/{len(rows)}, named rightly {sum(row.named for row in rows)}/"
        f"{len(rows)}, seen on a loss curve {sum(row.on_curve for row in rows)}/{len(rows)}"
    )


def write_docs(result: dict[str, Any], rows: Sequence[Row], docs: Path) -> None:
    """Put the totals and the table where the page has its place for them."""
    about = result["machine"]
    made = (
        f"`python benchmarks/faults.py`, {result['steps']} steps, on a CPU ({about['cpu']}, {about['cores']} cores), "
        f"torch {about['torch']}, transformers {about['transformers']}, {about['date'][:10]}."
    )
    controls = result["controls"].values()
    head = f"**{totals(rows).capitalize()}**; {sum(controls)} of {len(controls)} controls pass.\n\n{made}"
    put_between(BEGIN, END, f"{head}\n\n{table(rows)}", docs)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| fault | bug (known from) | layout | killed by | error / allowed | named rightly | on the curve |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        where = f"`{row.what}` of `{row.where}`" if row.where else f"`{row.what}`"
        killed = where if row.killed else "**survived**"
        model = "" if row.model == "llama" else f", {row.model}"
        curve = "" if row.curve is None else f"{'yes' if row.on_curve else 'no'}, {_percent(row.curve)}"
        lines.append(
            f"| {row.name.replace('_', ' ')} | {row.bug} ({row.known}) | `{row.layout}`{model} | {killed} | "
            f"{_number(row.error)} / {_number(row.tolerance)} | {'yes' if row.named else '**no**'} | {curve} |"
        )
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:.0e}" if 0 < value < 1 or value > 1e3 else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


if __name__ == "__main__":
    sys.exit(main())
