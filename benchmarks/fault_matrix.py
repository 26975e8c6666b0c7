"""Which proof case sees which planted fault, and the few cases that together see every fault that any case sees.

    python benchmarks/fault_matrix.py              every fault in every case, where not known yet (hours)
    python benchmarks/fault_matrix.py --minutes 20     ... for so long
    python benchmarks/fault_matrix.py --only "step tp2 llama" ... some cases
    python benchmarks/fault_matrix.py --again      ... and anew what another commit of the program and its tests found
    python benchmarks/fault_matrix.py --cover      plant nothing: choose the core from what is known

Writes benchmarks/results/fault_matrix.json after every case, with the tier of tests that kills each fault, and, once
every fault is seen, tests/verification/core.txt: the cases that every test run proves (`make test`). A row of the
JSON is a case, a letter of it a fault: `n` a comparison failed, and the first that did names the fault rightly; `k`
another one did; `l` the program refused, raised or hung; `.` nothing was seen; `-` not planted, since the case runs
nothing that the fault replaces; and a blank where it is not known. Each fault is first looked for in the cases that
are most like its own, until one sees it.

A fault is planted as `tests/verification/test_faults.py` plants it, in proofs of two steps, until the first comparison
fails. What a case runs is every function that is entered while its proof runs without a fault.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import torch
from tests.pool import RankError, run_ranks
from tests.verification import mutation
from tests.verification.cases import ProvedCase
from tests.verification.core import COMBINED, CORE, MATRIX, MOST_OF_FOUR, SEEN, all_cases, core, read_matrix
from tests.verification.faults import FAULTS, Fault
from tests.verification.test_faults import TIERED

from campaign import commit
from common import machine
from fivefold.core.errors import UserError
from fivefold.parallel.layout import Layout

STEPS = 2
PATIENCE = 20.0  # seconds of a proof that hangs: one takes a second, and the start of its workers five
NEAREST = 3  # combined cases that a fault is looked for in first
NAMED, KILLED, REFUSED, SURVIVED, NOT_REACHED, UNKNOWN = "nkl.- "


# ---- what a fault replaces, and what a case runs ---------------------------------------------------------------------


def replaced(fault: Fault) -> set[tuple[str, str, int]] | None:
    """Where the functions begin that the fault replaces; None where it replaces something else, or in another way."""
    found, enter = list[Any](), mock._patch.__enter__

    def entered(patch: Any) -> Any:
        found.append(patch.getter().__dict__.get(patch.attribute, getattr(patch.getter(), patch.attribute, None)))
        return enter(patch)

    with mock.patch.object(mock._patch, "__enter__", entered), fault.plant():
        pass
    places = {place(each) for each in found}
    return None if not places or None in places else {each for each in places if each is not None}


def place(thing: Any) -> tuple[str, str, int] | None:
    """Of a function, or of what is around one."""
    for name in ("__func__", "fget", "__wrapped__"):
        thing = getattr(thing, name, thing)
    return place_of(thing.__code__) if isinstance(getattr(thing, "__code__", None), CodeType) else None


def place_of(code: CodeType) -> tuple[str, str, int]:
    """File, name and line: a code object in another process is not the same one."""
    return code.co_filename, code.co_name, code.co_firstlineno


@contextmanager
def watched(found: set[tuple[str, str, int]]) -> Iterator[None]:
    """Inside, the place of every function that is entered is put into `found`."""
    codes = set[CodeType]()

    def note(frame: FrameType, event: str, _: Any) -> None:  # of calls alone: it gives nothing for the lines
        codes.add(frame.f_code)

    sys.settrace(note)
    try:
        yield
    finally:
        sys.settrace(None)
        found |= {place_of(code) for code in codes}


def sound_on_rank(path: str, layout: str) -> tuple[dict[str, Any], set[tuple[str, str, int]]]:
    """The proof without a fault, and all that ran."""
    ran = set[tuple[str, str, int]]()
    with watched(ran):
        found = mutation.step_on_rank(path, layout, None, True)
    return found, ran


# ---- in which order --------------------------------------------------------------------------------------------------


def tries(cases: list[ProvedCase], rows: dict[str, dict[str, str]]) -> Iterator[tuple[ProvedCase, set[str]]]:
    """Which faults to plant next in a case. First each in the combined cases that are most like the one that it was
    written down for, then in that one, until it is seen; then those that one case alone sees, which would be in the
    core for them, and then every fault, in every case: those first that see many."""
    combined = [case for case in cases if str(case) in COMBINED]
    nearest = {name: near(fault, combined) for name, fault in FAULTS.items()}
    for turn in range(NEAREST + 1):
        for case in cases:
            yield case, {name for name in FAULTS.keys() - seen_in(rows) if nearest[name][turn : turn + 1] == [case]}
    counts = {str(case): len(seen_in({"": rows.get(str(case), {})})) for case in cases}
    for is_all in (False, True):
        for case in sorted(cases, key=lambda case: -counts[str(case)]):
            seers = Counter(name for row in rows.values() for name in seen_in({"": row}))
            yield case, {name for name in FAULTS if is_all or seers[name] == 1}


def near(fault: Fault, cases: list[ProvedCase]) -> list[ProvedCase]:
    """The combined cases that share most words with the fault's own, then its own."""
    own = ProvedCase(fault.kind, fault.layout, fault.model)
    alike = [case for case in cases if case.kind == fault.kind]
    return [*sorted(alike, key=lambda case: (-len(words(case) & words(own)), case.ranks))[:NEAREST], own]


def words(case: ProvedCase) -> set[str]:
    return {*re.split(r"[ .+/-]", str(case))}


def seen_in(rows: dict[str, dict[str, str]]) -> set[str]:
    """The faults that some case sees."""
    return {name for row in rows.values() for name, cell in row.items() if cell in SEEN}


# ---- a case ----------------------------------------------------------------------------------------------------------


def prove_case(
    case: ProvedCase, folder: Path, row: dict[str, str], replaces: dict[str, Any], wanted: set[str], until: float
) -> str:
    """Fill what is blank in the row of a case for some faults, while there is time; says what became of the case
    without a fault."""
    if not row:
        row |= {fault.name: NOT_REACHED for fault in FAULTS.values() if fault.kind != case.kind}
        sound, ran = without_a_fault(case, folder)
        if sound.is_killed or not sound.found.rows:
            return f"is no case: {sound.row or sound.found.refused}"
        if ran is not None:
            row |= {name: NOT_REACHED for name, places in replaces.items() if places is not None and not places & ran}
    for name, fault in FAULTS.items():
        if row.get(name, UNKNOWN) == UNKNOWN and name in wanted and time.monotonic() < until:
            row[name] = verdict(case, fault, folder)
    return "sound"


def without_a_fault(case: ProvedCase, folder: Path) -> tuple[mutation.Outcome, set[tuple[str, str, int]] | None]:
    """The outcome, and what ran; None: it is not watched."""
    if case.kind != "step":
        return mutation.prove(case.kind, case.model, case.layout, folder, steps=STEPS, whole=False), None
    path = mutation.make_subject(case.model, folder, steps=STEPS, like=Layout.parse(case.layout))
    per_rank = run_ranks(case.ranks, sound_on_rank, str(path), case.layout, timeout=5 * PATIENCE)
    return mutation.outcome_of([found for found, _ in per_rank]), set().union(*(ran for _, ran in per_rank))


def verdict(case: ProvedCase, fault: Fault, folder: Path) -> str:
    """What becomes of a fault in a case."""
    with mock.patch.object(mutation, "TIMEOUT", PATIENCE):
        try:
            outcome = mutation.prove(case.kind, case.model, case.layout, folder, fault.name, steps=STEPS, whole=False)
        except (RankError, UserError):
            return REFUSED
    if outcome.row is None:
        return REFUSED if outcome.is_killed else SURVIVED
    return NAMED if fault.names(outcome.row) else KILLED


# ---- the core --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    case: ProvedCase
    faults: frozenset[str]  # that no case before it sees


def cover(rows: dict[str, dict[str, str]]) -> list[Chosen]:
    """The cases that see all faults that any case sees: next comes the one that sees the most new ones for a rank."""
    sees = {line: {name for name, cell in row.items() if cell in SEEN} for line, row in rows.items()}
    missing, found, of_four = set[str]().union(*sees.values()), list[Chosen](), 0
    cases = {line: ProvedCase.parse(line) for line in rows}
    while missing:
        fit = [line for line in rows if cases[line].ranks <= 2 or of_four < MOST_OF_FOUR] or [*rows]
        best = max(fit, key=lambda line: (len(sees[line] & missing) / cases[line].ranks, -cases[line].ranks))
        new = sees[best] & missing
        if not new:  # what is left needs more cases of four ranks than there may be
            break
        found.append(Chosen(cases[best], frozenset(new)))
        missing -= new
        of_four += cases[best].ranks > 2
    kept = list[Chosen]()  # one whose faults the later ones see as well is not needed
    for at, each in enumerate(found):
        others = set[str]().union(*(sees[str(other.case)] for other in [*kept, *found[at + 1 :]]))
        if not sees[str(each.case)] <= others:
            kept.append(each)
    return kept


def tiers(rows: dict[str, dict[str, str]], of_test: list[str]) -> dict[str, dict[str, str]]:
    """fault -> the first tier that kills it and the case there that sees it; and a case in which the first comparison
    that fails names it. `of_test`: the core."""
    planted = {each.name for each in TIERED if isinstance(each, Fault)}  # `make test-all` plants it in its own case
    found = {}
    for name, fault in FAULTS.items():
        own = str(ProvedCase(fault.kind, fault.layout, fault.model))
        killers = [line for line in of_test if rows.get(line, {}).get(name) in SEEN]
        namers = [line for line in [*of_test, own, *rows] if rows.get(line, {}).get(name) == NAMED]
        tier = "make test" if killers else "make test-all" if name in planted else "campaign"
        found[name] = {"tier": tier, "case": (killers or [own])[0], "named in": (namers or [""])[0]}
    return found


# ---- the command -----------------------------------------------------------------------------------------------------


def write(rows: dict[str, dict[str, str]], commits: dict[str, str]) -> None:
    """Keep it, a line for each case, and the commit that each line was begun on."""
    values = {
        "machine": machine(),
        "letters": {
            NAMED: "a comparison failed, and names the fault", KILLED: "another comparison failed",
            REFUSED: "refused, raised or hung", SURVIVED: "nothing was seen",
            NOT_REACHED: "runs nothing that the fault replaces", UNKNOWN: "not known",
        },
        "faults": [*FAULTS],
        "rows": {line: "".join(row.get(name, UNKNOWN) for name in FAULTS) for line, row in rows.items()},
        "commits": {line: commits[line] for line in rows},
        "tiers": tiers(rows, [str(case) for case in core()]),
    }  # fmt: skip
    MATRIX.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--only", nargs="+", help="lines of cases")
    parser.add_argument("--again", action="store_true", help="forget what other commits found")
    parser.add_argument("--cover", action="store_true", help="plant nothing")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # the models are small, and threads that wait for each other take a hundred times as long
    until = time.monotonic() + 60 * asked.minutes
    rows, commits = read_matrix()
    now = commit()
    if asked.again:
        rows = {line: row for line, row in rows.items() if commits[line] == now and "+" not in now}
    replaces = {name: replaced(fault) for name, fault in FAULTS.items()}
    cases = [case for case in all_cases() if not asked.only or str(case) in asked.only]
    with tempfile.TemporaryDirectory() as folder:
        for case, wanted in [] if asked.cover else tries(cases, rows):
            row, started = rows.get(str(case), {}), time.monotonic()
            blank = {name for name in wanted if row.get(name, UNKNOWN) == UNKNOWN}
            if started > until or not blank:
                continue
            says = prove_case(case, Path(folder), row, replaces, blank, until)
            if says == "sound":
                commits |= {} if str(case) in rows else {str(case): now}
                rows[str(case)] = row
            counts = " ".join(f"{letter!r} {[*row.values()].count(letter)}" for letter in "nkl.-")
            print(f"{case!s:45} {says:6} {counts}  {time.monotonic() - started:.0f} s", flush=True)
            write(rows, commits)
    chosen = cover(rows)
    for each in chosen:
        print(f"{each.case!s:45} {len(each.faults):4} new")
    seen = set[str]().union(*(each.faults for each in chosen))
    print(f"{len(chosen)} cases see {len(seen)} of {len(FAULTS)} faults")
    print(f"not seen: {', '.join(sorted(FAULTS.keys() - seen)[:12])}" if seen != FAULTS.keys() else "all are seen")
    if seen == FAULTS.keys():
        CORE.write_text("".join(f"{each.case}\n" for each in chosen), encoding="utf-8")
    write(rows, commits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
