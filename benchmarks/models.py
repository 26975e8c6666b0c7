"""Every causal language model of `transformers`, tried: right, refused and why, WRONG or a CRASH.

The tables go to docs/evidence/models.md.

    python benchmarks/models.py                            all classes in one process
    python benchmarks/models.py --layouts tp2,pp2,cp2,shard2.ep2  those that are right, over two processes as well
    python benchmarks/models.py --switches                 and every boolean of their configs the other way, once
    python benchmarks/models.py --classes LlamaForCausalLM,OPTForCausalLM --again

Of each class a tiny config is made from its own defaults (`tiny_configs.py`), in fp64, nothing in it zero; its losses
over two steps of AdamW and every gradient are held against plain `transformers` (`held_against.py`). Results go into
benchmarks/results/models.json case by case, and a run goes on where the last one ended. Exit code 1: something was
wrong or crashed.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from tests.pool import RankError, run_ranks

from common import RESULTS, machine
from held_against import Tried, Verdict, judged, on_rank, tiny_on_rank
from pages import put_between
from tiny_configs import causal_classes, switches

DOCS = Path(__file__).parents[1] / "docs" / "evidence" / "models.md"
BEGIN, END = "<!-- tables: python benchmarks/models.py --write-docs -->", "<!-- end of tables -->"
MOST_WORDS = 220  # letters of a reason in a table
SINGLE, SPREAD = "single", ("tp2", "pp2", "cp2", "shard2.ep2")
NOT_IN_WORDS = re.compile(
    r"NoneType|has no attribute|object is not|takes \d+|unexpected keyword|didn't match|not implemented for|KeyError"
)
Results = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--classes", type=_listed, help="these alone, by class or model type, with commas between")
    parser.add_argument("--layouts", type=_listed, default=[SINGLE], help="with commas between; default: single")
    parser.add_argument("--switches", action="store_true", help="every switch of each config, in one process")
    parser.add_argument("--again", action="store_true", help="what was tried before, too")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds a case may take before it is a crash")
    parser.add_argument("--results", type=Path, default=RESULTS / "models.json")
    parser.add_argument(
        "--write-docs", action="store_true", help="write the tables of docs/evidence/models.md from the results"
    )
    args = parser.parse_args(arguments)
    results = _read(args.results)
    for model_class, model_type in causal_classes().items():
        if args.classes and not {model_class, model_type} & set(args.classes):
            continue
        row = results["classes"].setdefault(model_class, {"model_type": model_type, "layouts": {}, "switches": {}})
        for place, name, verdict in _tried(model_class, model_type, row, args):
            row[place][name] = vars(verdict)
            _show(model_class, name, verdict)
            _write(results, args.results)
    if args.write_docs:
        write_docs(results, DOCS)
    return _summary(results)


def _listed(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def _read(path: Path) -> Results:
    done = json.loads(path.read_text()) if path.exists() else {}
    return {"machine": machine(), "transformers": version("transformers"), "classes": done.get("classes", {})}


def _write(results: Results, path: Path) -> None:
    """As a whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    temporary.replace(path)


# Trying ---------------------------------------------------------------------------------------------------------------


def _tried(model_class: str, model_type: str, row: Results, args: Any) -> Iterator[tuple[str, str, Verdict]]:
    """(place in the row, name, verdict) of what is asked for and not known yet."""
    wanted = [each for each in (SINGLE, *args.layouts) if args.again or each not in row["layouts"]]
    wanted = list(dict.fromkeys(wanted))
    if not wanted and not args.switches:
        return
    values, why = _asked(1, tiny_on_rank, model_type, timeout=args.timeout)[0]
    for layout in wanted:
        if layout != SINGLE and row["layouts"][SINGLE]["kind"] != "right":
            continue
        tried = Tried(model_class, model_type, values, layout)
        yield "layouts", layout, _verdict(tried, args.timeout) if values is not None else Verdict(**why)
    if not args.switches or values is None:
        return
    for switch, changed in switches(values, model_type):
        if args.again or switch not in row["switches"]:
            tried = Tried(model_class, model_type, changed, SINGLE, steps=0)
            yield "switches", switch, _verdict(tried, args.timeout)


def _verdict(tried: Tried, timeout: float) -> Verdict:
    found = judged(_asked(tried.parsed.world, on_rank, tried, timeout=timeout))
    if found.kind == "refused" and "sequence parallel" in found.reason and "nosp" not in tried.layout:
        plain = Tried(tried.model_class, tried.model_type, tried.values, f"{tried.layout}+nosp", tried.steps)
        again = judged(_asked(plain.parsed.world, on_rank, plain, timeout=timeout))
        return Verdict(again.kind, again.error, found.reason if again.kind == "right" else again.reason)
    return found


def _asked(world: int, function: Any, *args: Any, timeout: float) -> list[Any]:
    """What the ranks answer; a rank that dies or hangs has crashed."""
    try:
        return run_ranks(world, function, *args, timeout=timeout)
    except RankError as error:
        crash = {"crash": str(error).strip().splitlines()[0]}
        return [(None, {"kind": "CRASH", "reason": crash["crash"]})] if function is tiny_on_rank else [crash]


# Showing --------------------------------------------------------------------------------------------------------------


def _show(model_class: str, name: str, verdict: Verdict) -> None:
    error = f"{verdict.error:.1e}" if verdict.error is not None else ""
    unclear = " NOT IN WORDS" if verdict.kind == "refused" and is_unclear(model_class, verdict.reason) else ""
    print(f"{model_class:36} {name:40} {verdict.kind:8} {error:8} {verdict.reason[:200]}{unclear}", flush=True)


def is_unclear(model_class: str, reason: str) -> bool:
    """Whether a refusal does not name the model, or speaks of the code rather than of the model."""
    words = re.sub(r"(cannot be followed without weights) \(.*", r"\1", reason)  # what follows is for its maker
    return model_class not in reason or bool(NOT_IN_WORDS.search(words))


def _verdicts(results: Results, place: str) -> Iterator[tuple[str, str, Results]]:
    for model_class, row in sorted(results["classes"].items()):
        for name, verdict in row[place].items():
            yield model_class, name, verdict


def _summary(results: Results) -> int:
    names = sorted({name for _, name, _ in _verdicts(results, "layouts")}, key=lambda name: [*SPREAD, name].index(name))
    for name in names:
        print(f"{name}: {_counted(v['kind'] for _, each, v in _verdicts(results, 'layouts') if each == name)}")
    print(f"switches: {_counted(verdict['kind'] for *_, verdict in _verdicts(results, 'switches'))}")
    both = [*_verdicts(results, "layouts"), *_verdicts(results, "switches")]
    return int(any(verdict["kind"] in ("WRONG", "CRASH") for *_, verdict in both))


def _counted(kinds: Iterable[str]) -> str:
    found = list(kinds)
    return ", ".join(f"{found.count(kind)} {kind}" for kind in sorted(set(found), key=str.lower)) or "none"


# docs/evidence/models.md ----------------------------------------------------------------------------------------------


def write_docs(results: Results, docs: Path) -> None:
    """Put the tables between the marks."""
    parts = [_of_right(results), _of_refused(results), _of_switches(results)]
    put_between(BEGIN, END, "\n\n".join(parts), docs)


def _of_right(results: Results) -> str:
    rows = {name: row for name, row in sorted(results["classes"].items()) if _kind(row, SINGLE) == "right"}
    counts = [f"`{name}` {sum(_kind(row, name) == 'right' for row in rows.values())}" for name in (SINGLE, *SPREAD)]
    lines = [
        f"transformers {results['transformers']}, {len(results['classes'])} classes; right: {', '.join(counts)}.",
        "",
        f"| class | {' | '.join((SINGLE, *SPREAD))} | notes |",
        "| --- |" + " --- |" * (len(SPREAD) + 2),
    ]
    for name, row in rows.items():
        cells = [_cell(row["layouts"].get(layout)) for layout in (SINGLE, *SPREAD)]
        said = {layout: row["layouts"].get(layout, {}).get("reason", "") for layout in SPREAD}
        notes = [f"`{layout}`: {_short(name, reason)}" for layout, reason in said.items() if _is_said(layout, reason)]
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(notes)} |")
    return "\n".join(lines)


def _is_said(layout: str, reason: str) -> bool:
    return bool(reason) and not (layout == "shard2.ep2" and "no experts" in reason)


def _cell(verdict: Results | None) -> str:
    if verdict is None:
        return ""
    if verdict["kind"] == "right":
        return f"{verdict['error']:.0e}"
    return "-" if "no experts" in verdict["reason"] else str(verdict["kind"])


def _kind(row: Results, layout: str) -> str:
    return str(row["layouts"].get(layout, {}).get("kind", ""))


def _of_refused(results: Results) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, row in sorted(results["classes"].items()):
        if _kind(row, SINGLE) != "right":
            verdict = row["layouts"].get(SINGLE, {"kind": "not tried", "reason": ""})
            said = _short(name, verdict["reason"])
            by_reason.setdefault(said if verdict["kind"] == "refused" else f"{verdict['kind']}: {said}", []).append(
                name
            )
    lines = ["| not trained | why |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items())])


def _of_switches(results: Results) -> str:
    found: dict[tuple[str, str], list[str]] = {}
    kinds = [verdict["kind"] for *_, verdict in _verdicts(results, "switches")]
    for name, switch, verdict in _verdicts(results, "switches"):
        if verdict["kind"] not in ("right", "invalid") and _kind(results["classes"][name], SINGLE) == "right":
            said = "" if verdict["kind"] == "refused" else f"{verdict['kind']}: "
            found.setdefault((switch, said + _short(name, verdict["reason"])), []).append(name)
    lines = [
        f"Every boolean of every config the other way once, and windows, chunks, caps, dropout and jitter on: "
        f"{len(kinds)} cases, {_counted(kinds)} (invalid: `transformers` itself cannot do it). "
        "These classes are right above, and not with a switch:",
        "",
        "| switch | classes | why |",
        "| --- | --- | --- |",
    ]
    return "\n".join(
        [*lines, *(f"| `{switch}` | {', '.join(n)} | {why} |" for (switch, why), n in sorted(found.items()))]
    )


def _short(name: str, reason: str) -> str:
    """A reason without the name of the class, on one line of a table."""
    words = re.sub(r"^(tp \d+|sequence parallel) is refused: ", "", reason.splitlines()[0] if reason else "")
    words = re.sub(rf"^{name}( cannot be trained here)?: ", "", words)
    words = re.sub(r"\b(layers|h|blocks)\.\d+\b", r"\1.*", words)
    words = words.replace(name, "it").replace("|", "\\|")
    return words if len(words) <= MOST_WORDS else f"{words[:MOST_WORDS]} ..."


if __name__ == "__main__":
    sys.exit(main())
