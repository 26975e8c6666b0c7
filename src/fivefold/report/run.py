"""`fivefold report`: the page of a run, from the files in its folder. `run.html.j2` lays it out."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from fivefold.config import RunConfig, load_config
from fivefold.core import history
from fivefold.core.errors import UserError, first_line
from fivefold.core.files import put
from fivefold.core.json_lines import needed
from fivefold.core.run_folder import is_run, runs, steps
from fivefold.core.units import human, human_bytes
from fivefold.report import curves, story
from fivefold.report.figures import Figure, heat, timeline
from fivefold.report.findings import SCRIPT, render
from fivefold.report.slices import EXPLAINED, of_ranks, slice_map

SAMPLES = 12  # the last ones, shown
Rows = Sequence[Mapping[str, Any]]
Sent = tuple[tuple[str, str, int, str], ...]  # the collectives of a step: axis, kind, how many, their size in words


# Predicts a step of a run from its config, layout, device (cpu or cuda:0) and the record of its newest start.
Expect = Callable[[RunConfig, str, str, Mapping[str, Any]], story.Expected]


def main(
    run: Path, out: Path | None = None, *, expect: Expect | None = None, tell: Callable[[str], object] | None = None
) -> Path:
    """Write the page of the run folder `run` to `out` (None: `report.html` in it) and return its path.

    `expect`: predicts a step, for a comparison with the measurements; `tell` gets both as lines. Raises `UserError` if
    that is no run folder, or the run has not completed a step.
    """
    check_run(run)
    config = load_config(run)
    rows = needed(run / "metrics.jsonl").rows
    if not rows:
        raise UserError(
            f"{run} has no metrics yet: nothing was trained", fix=f"train it first: fivefold train {quote(str(run))}"
        )
    planned = Planned.of(config, run, rows, expect)
    path = out or run / "report.html"
    put(path, page(config, run, rows, planned).encode(), instead="name another file: --out FILE")
    for line in planned.lines if tell else ():
        tell(line)  # type: ignore[misc]
    return path


@dataclass(frozen=True)
class Planned:
    """Planned and measured numbers. `why`: what was planned, or why there is nothing."""

    why: str = ""
    rows: tuple[story.Compared, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, run: Path, rows: Rows, expect: Expect | None) -> "Planned":
        """Plan the newest start of a run. If the planner fails, the page lacks this comparison alone."""
        spread, past = _spread(run / "spread.json")[0], history.load(run)
        if expect is None or not spread.get("layout") or not past.starts:
            return cls()
        try:
            expected = expect(config, spread["layout"], str(spread.get("device")), past.starts[-1].about)
        except UserError as error:
            return cls(f"{spread['layout']} was not planned: {error.what}")
        except Exception as error:
            return cls(f"{spread['layout']} was not planned: {type(error).__name__}: {first_line(error)}")
        _, seconds, peak = _measured(rows, story.spans(past, rows))
        return cls(f"{spread['layout']} on {expected.cluster}", story.compared(expected, seconds, peak))

    @property
    def lines(self) -> tuple[str, ...]:
        return (self.why, *(f"  {row}" for row in self.rows)) if self.why else ()


def check_run(run: Path) -> None:
    """Raise `UserError` unless `run` is a run folder, and name those nearby."""
    if run.is_dir() and is_run(run):
        return
    if not run.exists():
        what = f"{run}: there is no such folder"
    elif run.is_dir():
        what = f"{run} is not a run folder: it holds no run.yaml"
    else:
        what = f"{run} is a file, not a run folder"
    raise UserError(
        what,
        fix=_run_of(run) or runs(run) or runs(run.parent) or runs(Path("runs")) or "fivefold train makes one",
        more="a run folder is what fivefold train writes: runs/NAME, with run.yaml and metrics.jsonl",
    )


def _run_of(file: Path) -> str:
    """Name the run of a run file, if there is one."""
    if not file.is_file():
        return ""
    try:
        folder = file.parent if file.name == "run.yaml" else load_config(file).run_dir
    except UserError:  # not a run file either
        return ""
    return f"its run: fivefold report {quote(str(folder))}" if is_run(folder) else ""


def page(config: RunConfig, run: Path, rows: Rows, planned: Planned | None = None) -> str:
    """The HTML of a run. `rows`: its metrics. If the history is malformed, the page is made without it."""
    past = history.load(run)
    try:
        return _page(config, run, rows, past, planned or Planned())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"{run / history.NAME} says what no start says ({type(error).__name__}: {first_line(error)})"
        return _page(config, run, rows, history.History(damaged=[*past.damaged, why]), planned or Planned())


def _page(config: RunConfig, run: Path, rows: Rows, past: history.History, planned: Planned) -> str:
    spread, torn = _spread(run / "spread.json")
    slices = slice_map(spread.get("holds", {}), spread.get("layout", ""))
    samples = needed(run / "samples.jsonl")
    newest: Mapping[str, Any] = past.starts[-1].about if past.starts else {}
    seen, marks, spans = rows[-1].get("train/tokens_seen", 0), story.marks(past, rows), story.spans(past, rows)
    damaged = [*map(str, needed(run / "metrics.jsonl").damaged), *map(str, samples.damaged), *past.damaged, *torn]
    return render(
        "run.html.j2", [slices] if slices else [], script=SCRIPT, explained=EXPLAINED, run=config.run.name,
        headline=_headline(config, rows), facts=_facts(config, run, rows, spread, past, spans), slices=slices,
        curves=curves.draw(curves.panels(rows), marks, averaged=len(rows) > curves.POINTS), marks=marks,
        spans=spans, planned=planned,
        data=story.data_facts(config, newest, seen), damaged=damaged,
        timelines=_timelines(spread.get("timeline", {})), heat=heat(rows), sent=_sent(spread.get("collectives", [])),
        changed=_changed(config), config=config.to_yaml(), samples=[_sample(row) for row in samples.rows[-SAMPLES:]],
    )  # fmt: skip


def _spread(path: Path) -> tuple[Mapping[str, Any], list[str]]:
    """Contents of `spread.json`, empty if it is missing; and a message if it is damaged."""
    try:
        said = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError):
        said = None
    is_whole = isinstance(said, dict) and (not said or {"model", "parameters", "world"} <= said.keys())
    return (said, []) if is_whole else ({}, [f"{path} is not an object of JSON that says what a run is"])


def _sample(row: Mapping[str, Any]) -> tuple[int, str, str]:
    prompt, text = str(row.get("prompt", "")), str(row.get("text", ""))
    return row["step"], prompt, text.removeprefix(prompt)


def _headline(config: RunConfig, rows: Rows) -> str:
    step, total = rows[-1]["step"], config.train.max_steps
    done = f"{step} of {total} steps" if total and step < total else f"{step} steps"
    done += f" of LoRA, rank {config.adapter.rank}" * (config.adapter.name != "none")
    loss = rows[-1].get("train/loss")
    return done + (f", loss {loss:.4f}" if loss is not None else ", and the last loss is not a number")


def _facts(
    config: RunConfig,
    run: Path,
    rows: Rows,
    spread: Mapping[str, Any],
    past: history.History,
    spans: list[story.StartSummary],
) -> dict[str, str]:
    """Facts and results of a run, in words; unknown ones are left out."""
    last, newest = rows[-1], past.starts[-1].about if past.starts else {}
    validation = [(row["eval/loss"], row["step"]) for row in rows if row.get("eval/loss") is not None]
    saved = ", ".join(str(step) for step in steps(run / "checkpoints"))
    weights = f"{spread['model']}, {human(spread['parameters'])} parameters, " if spread else ""
    device = newest.get("device") or spread.get("device")
    ranks = f", {spread['world']} rank{'s' * (spread['world'] > 1)} on {device}" if spread else ""
    layouts = list(dict.fromkeys(span.layout for span in spans))
    earlier = f" (before: {', '.join(layouts[:-1])})" if len(layouts) > 1 else ""
    versions = ", ".join(f"{name} {number}" for name, number in (newest.get("versions") or {}).items())
    machine = newest.get("machine") or {}
    facts = {
        "model": f"{weights}{config.model.name_or_path} ({config.model.init} weights)",
        "adapter": _adapter(config, newest),
        "layout": f"{spread.get('layout') or config.layout}{ranks}{earlier}",
        "batch": f"{config.train.global_batch_size} rows of {config.data.seq_length} tokens",
        "trained on": f"{last.get('train/tokens_seen', 0):,} tokens",
        "validation": f"loss {validation[-1][0]:.4f} at step {validation[-1][1]} (perplexity "
        f"{curves.perplexity(validation[-1][0])})" if validation else "",
        "best": _best(config, rows, steps(run / "checkpoints")),
        **_speed(rows, spans),
        "skipped": f"{skipped} steps without a finite loss or gradient"
        if (skipped := last.get("train/skipped_steps")) else "",
        "checkpoints": f"step {saved}" if saved else "",
        "began": story.moment(past.starts[0].time) if past.starts else "not recorded",
        "elapsed": story.took(past),
        "machine": ", ".join(filter(None, (machine.get("host"), machine.get("system")))),
        "versions": versions or "not recorded",
    }  # fmt: skip
    return {name: text for name, text in facts.items() if text}


def _adapter(config: RunConfig, about: Mapping[str, Any]) -> str:
    """The adapter, its rank and the trained parameters, as the header of the newest start has them; "" without one."""
    if config.adapter.name == "none":
        return ""
    lines = [line for line in about.get("header") or () if isinstance(line, list) and line and line[0] == "adapter"]
    return str(lines[0][-1]) if lines else f"LoRA of rank {config.adapter.rank}"


def _best(config: RunConfig, rows: Rows, kept: Sequence[int]) -> str:
    """The best validation by `eval.metric`, and whether its checkpoint is kept; "" before the first."""
    metric, direction = config.eval.metric, config.eval.direction
    found = [(row[metric], row["step"]) for row in rows if "eval/best" in row and row.get(metric) is not None]
    if not found:
        return ""
    value, step = min(found, key=lambda entry: (entry[0] if direction == "min" else -entry[0], entry[1]))
    return f"{metric} {value:.4f} at step {step}{', whose checkpoint is kept' if step in kept else ''}"


def _speed(rows: Rows, spans: Sequence[story.StartSummary]) -> dict[str, str]:
    """Speed of the whole run, or of its last start if there were several: layouts are not averaged."""
    tokens, seconds, peak = _measured(rows, spans)
    of = "since the last start; the table of starts has them all" if len(spans) > 1 else "medians"
    is_known = tokens is not None and seconds is not None
    return {
        "speed": f"{tokens:,.0f} tokens per second, {seconds:.3g} s a step ({of})" if is_known else "",
        "peak memory": f"{peak:.2f} GiB on the fullest rank" if peak is not None else "",
    }


def _measured(rows: Rows, spans: Sequence[story.StartSummary]) -> tuple[float | None, float | None, float | None]:
    """Tokens per second, seconds of a step, peak GiB: of the last start, if there were several."""
    if len(spans) < 2:
        return story.speeds(rows)
    return spans[-1].tokens_per_second, spans[-1].step_seconds, spans[-1].peak_gib


def _timelines(found: Mapping[str, Any]) -> list[Figure]:
    """Timelines of a pipeline: as measured, if it was, and as scheduled."""
    ideal = found.get("ideal_bubble")
    drawn = [timeline(f"measured at step {found['step']}", found["measured"], unit="s")] if "measured" in found else []
    if "simulated" in found:
        title = "as scheduled, backward taking twice as long as forward"
        drawn.append(timeline(title, found["simulated"], unit="forward passes", ideal=ideal))
    return drawn


def _sent(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, Sent]]:
    """Collectives by rank, with ranks that send the same merged."""
    alike: dict[Sent, list[int]] = {}
    for rank, listed in enumerate(by_rank):
        rows = tuple((sent["axis"], sent["kind"], sent["count"], human_bytes(sent["bytes"])) for sent in listed)
        alike.setdefault(rows, []).append(rank)
    world = len(by_rank)
    return [
        (f"each of the {world} ranks" if len(ranks) == world else of_ranks(ranks, world), rows)
        for rows, ranks in alike.items()
        if rows
    ]


def _changed(config: RunConfig) -> list[tuple[str, str, str]]:
    """Keys that differ from their default: (key, value, default)."""
    own, default = (_flat(settings.model_dump(mode="json", by_alias=True)) for settings in (config, RunConfig()))
    return [(key, _written(value), _written(default[key])) for key, value in own.items() if value != default.get(key)]


def _flat(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}


def _written(value: Any) -> str:
    """Format as in a run file, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
