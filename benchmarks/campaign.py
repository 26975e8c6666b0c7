"""All that is not in every test run, one part after the other; what has ended well on this commit is not done again.

    python benchmarks/campaign.py             from where the last one ended; `make campaign`
    python benchmarks/campaign.py --list      the parts, and what became of them
    python benchmarks/campaign.py --only compositions faults

The parts: the tests marked `campaign`, a file at a time; every composition of folds; every planted fault; clean proofs;
the oldest and the newest torch; and `reliability`: kills and signals, frozen processes, damage, hostile folders and
files, and the page of them (docs/evidence/reliability.md). Most write their own results and tables.
What became of each part, when and in how many seconds, is in benchmarks/results/campaign.json, and `--list` prints it.
Exits with 1 when a part failed.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "benchmarks" / "results" / "campaign.json"
SCRIPTS = {
    "compositions": ("compositions.py",),
    "faults": ("faults.py",),
    "fault matrix": ("fault_matrix.py", "--again", "--minutes", "240"),
    "clean proofs": ("clean_proofs.py", "--more"),
    "reliability: damage": ("reliability/damage.py",),
    "reliability: hostile": ("reliability/hostile.py",),
    "reliability: frozen": ("reliability/frozen.py",),
    "reliability: kills": ("reliability/kills.py",),
    "reliability: page": ("reliability/page.py",),
}
# What a script proves as well, of the same cases: no time is spent twice. `faults.py` plants every fault for 20 steps
# and asks the same of it as the tests, which plant it for 2. `compositions.py` compares what the tests compare.
PROVED_BY_SCRIPTS = (
    "tests/verification/test_faults.py::test_without_a_fault_nothing_is_wrong",
    "tests/verification/test_faults.py::test_a_planted_fault_is_found_and_named",
    "tests/parallel/test_composition.py::test_folds_compose",
)
NO_TESTS = 5  # of pytest: a file that only speaks of campaigns, or whose cases are all proved by a script


@dataclass(frozen=True)
class Ended:
    """What became of a part: its last line, when it ended, after how many seconds."""

    part: str
    ok: bool
    says: str
    ended: str
    seconds: float

    @property
    def line(self) -> str:
        return f"{'well' if self.ok else 'FAILED'} {self.ended} UTC, {self.seconds:.0f} s: {self.says.strip('= ')}"


def parts() -> Iterator[tuple[str, list[str]]]:
    """Name and command of each part."""
    marked = re.compile(r"\bcampaign\b|tests\.tiers import")
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        if marked.search(file.read_text(encoding="utf-8")):
            name = str(file.relative_to(ROOT))
            left_out = [f"--deselect={each}" for each in PROVED_BY_SCRIPTS if each.startswith(f"{name}::")]
            yield name, [sys.executable, "-m", "pytest", "-q", "-m", "campaign", name, *left_out]
    for name, (script, *options) in SCRIPTS.items():
        yield name, [sys.executable, str(ROOT / "benchmarks" / script), *options]
    yield "versions", ["make", "versions"]


def run(name: str, command: Sequence[str]) -> Ended:
    """Run a part; its screen is this one's."""
    print(f"--- {name}", flush=True)
    started, last = time.monotonic(), ""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            last = line.strip() or last
    ended_well = process.returncode == 0 or (process.returncode == NO_TESTS and "pytest" in command)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M")
    return Ended(name, ended_well, last, now, round(time.monotonic() - started, 1))


def commit() -> str:
    """The last commit of the program and its tests: results, docs and the list that the fault matrix writes do not
    change what is tried. `+`: and what is not committed."""
    places = ["--", "src", "tests", ":!tests/verification/core.txt"]
    head = subprocess.run(["git", "log", "-1", "--format=%h", *places], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(["git", "status", "--porcelain", *places], cwd=ROOT, capture_output=True, text=True)
    return head.stdout.strip() + "+" * bool(changed.stdout.strip())


def known(of: str) -> dict[str, Ended]:
    """What became of the parts on this commit."""
    kept = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"commit": "", "parts": []}
    return {each["part"]: Ended(**each) for each in kept["parts"]} if kept["commit"] == of and "+" not in of else {}


def write(of: str, found: dict[str, Ended]) -> None:
    """The results."""
    values = {"commit": of, "parts": [asdict(each) for each in found.values()]}
    FILE.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="the parts, and what became of them")
    parser.add_argument("--only", nargs="+", default=[], help="parts whose name contains one of these")
    asked = parser.parse_args()
    of = commit()
    found = known(of)
    for name, command in parts():
        if asked.list:
            print(f"{name:<50} {found[name].line if name in found else 'not run on this commit'}")
        elif (name not in found or not found[name].ok) and any(each in name for each in asked.only or [""]):
            found[name] = run(name, command)
            write(of, found)
    return int(not all(each.ok for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
