"""Write docs/evidence/reliability.md from the results of the commands that kill, freeze, damage and feed."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS
from pages import put_between

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "reliability.md"
Result = Mapping[str, Any]


def main() -> int:
    """The command."""
    parts = {"kills": kills, "frozen": frozen, "damage": damage, "hostile": hostile}
    for name, table in parts.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            result = json.loads(file.read_text(encoding="utf-8"))
            put_between(f"<!-- {name} -->", f"<!-- end of {name} -->", f"{measured(result)}\n\n{table(result)}", PAGE)
    return 0


def measured(result: Result) -> str:
    """On what, at which commit and when."""
    on = result["machine"]
    return f"{on['date'][:10]}, commit {on['commit']}, {on['cores']} cores of {on['cpu']}, torch {on['torch']}:"


def rows(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def kills(result: Result) -> str:
    """Blows and chains by layout and kind."""
    chains = result["chains"]
    keys = sorted({(each["chain"].split("-")[0], each["chain"].split("-")[1], each["kind"]) for each in chains})
    body = []
    for layout, saves, kind in keys:
        these = [each for each in chains if each["chain"].startswith(f"{layout}-{saves}-{kind}")]
        blows = sum((Counter(each["blows"]) for each in these), Counter[str]())
        by = ", ".join(f"{number} {what}" for what, number in sorted(blows.items()))
        equal = f"{sum(each['equal'] for each in these)} of {len(these)}"
        body.append([layout, saves, kind, blows.total(), by, equal])
    seconds = result["seconds_to_next_step"]
    said = f"From a blow to the next step: median {seconds['median']:.1f} s, at most {seconds['most']:.1f} s."
    return f"{rows(['layout', 'saves', 'blows', 'n', 'which', 'chains equal'], body)}\n\n{said}"


def frozen(result: Result) -> str:
    """By process: phases, outcome, seconds."""
    body = []
    for process in dict.fromkeys(each["process"] for each in result["cases"]):
        these = [each for each in result["cases"] if each["process"] == process]
        phases = ", ".join(dict.fromkeys(each["phase"] for each in these))
        most = max(each["seconds"] for each in these)
        body.append([process, phases, f"{sum(each['good'] for each in these)} of {len(these)}", f"{most:.1f} s"])
    return rows(["stopped", "while the run was in", "named, or went on", "at most"], body)


def damage(result: Result) -> str:
    """By kind: done, refused or mended, named."""
    kinds = [(kind, each) for kind, each in result.items() if isinstance(each, dict) and "done" in each]
    body = [
        [kind, each["done"], each["refused"], f"{each['tensor named']} of {each['in tensors']}"] for kind, each in kinds
    ]
    return rows(["damage", "n", "refused or made again", "tensor named, where in one"], body)


def hostile(result: Result) -> str:
    """By kind: n, well ended, and the dearest beside a sound one."""
    body = []
    for kind, sound in result["sound"].items():
        these = [each for each in result["cases"] if each["kind"] == kind]
        dear, large = max(these, key=lambda each: each["seconds"]), max(these, key=lambda each: each["mib"])
        body.append([
            kind, f"{sum(each['good'] for each in these)} of {len(these)}", f"{sound['seconds']} s, {sound['mib']} MiB",
            f"{dear['seconds']} s ({dear['name']})", f"{large['mib']} MiB ({large['name']})",
        ])  # fmt: skip
    return rows(["folder or file", "ended in a sentence", "a sound one", "slowest", "largest"], body)


if __name__ == "__main__":
    sys.exit(main())
