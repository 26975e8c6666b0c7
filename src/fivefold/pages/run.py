"""`fivefold report`: the page of a run, from what lies in its folder. `run.html.j2` lays it out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

import yaml
from markupsafe import Markup

from fivefold.config import RunConfig, load_config
from fivefold.errors import UserError
from fivefold.json_lines import read
from fivefold.nearby import is_run, runs
from fivefold.pages import curves
from fivefold.pages.load import heat
from fivefold.pages.names import ranks_text
from fivefold.pages.render import render, write
from fivefold.pages.slices import places, slice_map
from fivefold.pages.timeline import Drawing, drawing
from fivefold.step_folders import steps
from fivefold.units import human, human_bytes

SAMPLES = 12  # the last ones are shown
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Sent:
    """The collectives of a step that some ranks issue alike. `rows`: axis, kind, how many, their size in words."""

    ranks: str
    rows: tuple[tuple[str, str, int, str], ...]


def main(run: Path, out: Path | None = None) -> Path:
    """Write the page of the run folder `run` to `out` (None: `report.html` in it) and return where it lies.

    Raises `UserError` when that is no run folder, or the run has not come to its first step.
    """
    check_run(run)
    config = load_config(run)
    rows = read(run / "metrics.jsonl").rows
    if not rows:
        raise UserError(
            f"{run} has no metrics yet: nothing was trained", fix=f"train it first: fivefold train {quote(str(run))}"
        )
    path = out or run / "report.html"
    write(page(config, run, rows), path, instead="name another file: --out FILE")
    return path


def check_run(run: Path) -> None:
    """Raise `UserError` unless `run` is a run folder, naming those that are near."""
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
    """The run that a run file is trained in, if there is one."""
    if not file.is_file():
        return ""
    try:
        folder = file.parent if file.name == "run.yaml" else load_config(file).run_dir
    except UserError:  # no run file either
        return ""
    return f"its run: fivefold report {quote(str(folder))}" if is_run(folder) else ""


def page(config: RunConfig, run: Path, rows: Rows) -> str:
    """The HTML of a run. `rows`: its metrics."""
    spread = json.loads(text) if (text := _text(run / "spread.json")) else {}
    slices = slice_map(spread.get("holds", {}))
    return render(
        "run.html.j2", "fivefold.pages", [slices] if slices else [], {}, run=config.run.name,
        headline=_headline(config, rows), facts=_facts(config, run, rows, spread), slices=slices,
        places=places(spread.get("layout", ""), len(slices.shares)) if slices else [],
        curves=Markup(curves.draw(curves.panels(rows))), timelines=_timelines(spread.get("timeline", {})),
        heat=heat(rows), sent=_sent(spread.get("collectives", [])),
        changed=_changed(config), config=config.to_yaml(), samples=read(run / "samples.jsonl").rows[-SAMPLES:],
    )  # fmt: skip


def _headline(config: RunConfig, rows: Rows) -> str:
    step, total = rows[-1]["step"], config.train.max_steps
    done = f"{step} of {total} steps" if total and step < total else f"{step} steps"
    loss = rows[-1].get("train/loss")
    return done + (f", loss {loss:.4f}" if loss is not None else ", and the last loss is not a number")


def _facts(config: RunConfig, run: Path, rows: Rows, spread: Mapping[str, Any]) -> dict[str, str]:
    """What a run is and came to, in words; what is not known is left out."""
    usual = rows[1:] or rows  # the first step also sets up
    last = rows[-1]
    validation = [(row["eval/loss"], row["step"]) for row in rows if row.get("eval/loss") is not None]
    peak = [row["memory/peak_gib"] for row in rows if row.get("memory/peak_gib") is not None]
    saved = ", ".join(str(step) for step in steps(run / "checkpoints"))
    weights = f"{spread['model']}, {human(spread['parameters'])} parameters, " if spread else ""
    ranks = f", {spread['world']} rank{'s' * (spread['world'] > 1)} on {spread['device']}" if spread else ""
    facts = {
        "model": f"{weights}{config.model.name_or_path} ({config.model.init} weights)",
        "layout": f"{spread.get('layout') or config.layout}{ranks}",
        "batch": f"{config.train.global_batch_size} rows of {config.data.seq_length} tokens",
        "trained on": f"{last['train/tokens_seen']:,} tokens",
        "validation": f"{validation[-1][0]:.4f} at step {validation[-1][1]}, best {min(validation)[0]:.4f}"
        if validation else "",
        "speed": f"{median(row['perf/tokens_per_second'] for row in usual):,.0f} tokens per second, "
        f"{median(row['perf/step_seconds'] for row in usual):.3g} s a step (medians)",
        "peak memory": f"{max(peak):.2f} GiB on the fullest rank" if peak else "",
        "skipped": f"{skipped} steps without a finite loss or gradient"
        if (skipped := last.get("train/skipped_steps")) else "",
        "checkpoints": f"step {saved}" if saved else "",
    }  # fmt: skip
    return {name: text for name, text in facts.items() if text}


def _timelines(found: Mapping[str, Any]) -> list[Drawing]:
    """Of a pipeline: as it ran, where that was measured, and as its schedule is meant."""
    ideal = found.get("ideal_bubble")
    drawn = [drawing(f"measured at step {found['step']}", found["measured"], unit="s")] if "measured" in found else []
    if "simulated" in found:
        title = "as scheduled, backward taking twice as long as forward"
        drawn.append(drawing(title, found["simulated"], unit="forward passes", ideal=ideal))
    return drawn


def _sent(by_rank: Sequence[Sequence[Mapping[str, Any]]]) -> list[Sent]:
    """Ranks that send alike together."""
    alike: dict[tuple[tuple[str, str, int, str], ...], list[int]] = {}
    for rank, listed in enumerate(by_rank):
        rows = tuple((each["axis"], each["kind"], each["count"], human_bytes(each["bytes"])) for each in listed)
        alike.setdefault(rows, []).append(rank)
    return [Sent(_ranks(ranks, len(by_rank)), rows) for rows, ranks in alike.items() if rows]


def _ranks(ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return f"each of the {world} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks, world)}"


def _changed(config: RunConfig) -> list[tuple[str, str, str]]:
    """Keys that are not at their default: (key, value, default)."""
    own, default = (_flat(each.model_dump(mode="json", by_alias=True)) for each in (config, RunConfig()))
    return [(key, _written(value), _written(default[key])) for key, value in own.items() if value != default.get(key)]


def _flat(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, keys in values.items() for key, value in keys.items()}


def _written(value: Any) -> str:
    """As a run file has it, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("\n").removesuffix("\n...")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
