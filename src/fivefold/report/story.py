"""Text of a run's page: its starts, the events during the run, and its data."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import median
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.history import History, RunEvent, Start, changes
from fivefold.report.curves import Mark

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class StartSummary:
    """A start of the run and the steps that it made: medians without the first step, which includes setup."""

    began: str
    took: str
    layout: str
    place: str
    steps: str
    tokens_per_second: float | None
    step_seconds: float | None
    peak_gib: float | None
    ended: str


@dataclass(frozen=True)
class Expected:
    """A planner's prediction of a step: its seconds, GiB of tensors on the fullest rank, and the devices;
    `likely_seconds`: 80 % interval, if known."""

    step_seconds: float
    peak_gib: float
    cluster: str
    likely_seconds: tuple[float, float] | None = None


@dataclass(frozen=True)
class Compared:
    """A planned number and the measured one."""

    what: str
    unit: str
    planned: float
    measured: float
    interval: tuple[float, float] | None = None

    @property
    def likely(self) -> str:
        """`1.2 to 1.5`, the 80 % interval."""
        return "{:.3g} to {:.3g}".format(*self.interval) if self.interval else ""

    @property
    def ratio(self) -> str:
        """Measured over planned: `1.08 x`."""
        return f"{self.measured / self.planned:.2f} x"

    def __str__(self) -> str:
        likely = f" (80 %: {self.likely})" if self.likely else ""
        planned = f"planned {self.planned:.3g} {self.unit}{likely}"
        return f"{self.what}: {planned}, measured {self.measured:.3g} ({self.ratio})"


def compared(planned: Expected, step_seconds: float | None, peak_gib: float | None) -> tuple[Compared, ...]:
    found = list[Compared]()
    if step_seconds is not None:
        found.append(Compared("step time", "s", planned.step_seconds, step_seconds, planned.likely_seconds))
    if peak_gib is not None:
        found.append(Compared("peak memory", "GiB", planned.peak_gib, peak_gib))
    return tuple(found)


# ---- starts and events ---------------------------------------------------------------------------------------------


def spans(history: History, rows: Rows) -> list[StartSummary]:
    """List each start that made steps of the run as it is now."""
    found = []
    for start, first, last in history.spans():
        own = [row for row in rows if row["step"] > first and (last is None or row["step"] <= last)]
        if own:
            found.append(_span(start, own))
    return found


def _span(start: Start, rows: Rows) -> StartSummary:
    about = start.about
    tokens_per_second, step_seconds, peak_gib = speeds(rows)
    ranks = f"{about.get('world')} rank{'s' * (about.get('world') != 1)}"
    return StartSummary(
        began=moment(start.time), took=duration(start.seconds), layout=str(about.get("layout", "")),
        place=f"{ranks} on {about.get('device')}, {(about.get('machine') or {}).get('host', '')}".rstrip(", "),
        steps=f"{rows[0]['step']}–{rows[-1]['step']}",
        tokens_per_second=tokens_per_second, step_seconds=step_seconds, peak_gib=peak_gib,
        ended=start.how or "not recorded: killed, or still running",
    )  # fmt: skip


def speeds(rows: Rows) -> tuple[float | None, float | None, float | None]:
    """Tokens per second and seconds of a step, medians without the first row, which includes setup; the highest peak of
    memory, GiB. None: not measured."""

    def known(name: str, some: Rows) -> list[float]:
        return [row[name] for row in some if row.get(name) is not None]

    usual = rows[1:] or rows
    tokens, seconds = known("perf/tokens_per_second", usual), known("perf/step_seconds", usual)
    peaks = known("memory/peak_gib", rows)
    return median(tokens) if tokens else None, median(seconds) if seconds else None, max(peaks, default=None)


def marks(history: History, rows: Rows) -> list[Mark]:
    """Events during the run, in order of time: `kind` is `start`, `layout`, `nodes`, `skipped`, `died` or `note`."""
    found: list[tuple[int, Mark]] = []
    for number, (before, start) in enumerate(zip(history.starts, history.starts[1:], strict=False), start=1):
        found.append((number, _resumed(before, start, rows)))
    for event in history.events:
        found.append((event.number, _event(event, history)))
    return [mark for _, mark in sorted(found, key=lambda pair: pair[0])] or _skipped(rows)


def _resumed(before: Start, start: Start, rows: Rows) -> Mark:
    changed = changes(before.about, start.about)
    rows = [row for row in rows if "train/learning_rate" in row]
    origin = str(start.about.get("resumed") or "the start").rpartition("/")[2]
    again = f", whose steps after {start.step} are done again" if before.last and before.last > start.step else ""
    what = f"{moment(start.time)}: goes on from {origin}{again}"
    old = next((row["train/learning_rate"] for row in rows[::-1] if row["step"] <= start.step), 0.0)
    new = next((row["train/learning_rate"] for row in rows if row["step"] > start.step), 0.0)
    if before.about.get("schedule") != start.about.get("schedule") and abs(new - old) > 0.01 * max(new, old):
        changed.append(f"learning rate {old:.2e} → {new:.2e}")
    damages = [f"DAMAGED {damage}" for damage in start.about.get("damages", ())]
    is_layout = any(text.startswith("layout ") for text in changed)
    return Mark(start.step, "layout" if is_layout else "start", "; ".join((what, *changed, *damages)))


def _event(event: RunEvent, history: History) -> Mark:
    again = "" if history.is_left(event) else " (this step was done again since)"
    kind = event.kind if event.kind in ("skipped", "died", "nodes") else "note"
    return Mark(event.step, kind, f"{event.what}{again}")


def _skipped(rows: Rows) -> list[Mark]:
    """Non-finite losses of a run without a history."""
    wrong = [row["step"] for row in rows if "train/loss" in row and row["train/loss"] is None]
    return [Mark(step, "skipped", "the loss was not finite; the update was skipped") for step in wrong]


def took(history: History) -> str:
    """Wall-clock time of all starts."""
    known = [start.seconds for start in history.starts if start.seconds is not None]
    more = len(history.starts) - len(known)
    if not known:
        return ""
    starts = f" in {len(history.starts)} starts" if len(history.starts) > 1 else ""
    return f"{duration(sum(known))}{starts}" + (f" ({more} of unknown length not counted)" if more else "")


# ---- data ----------------------------------------------------------------------------------------------------------


def data_facts(config: RunConfig, about: Mapping[str, Any], tokens_seen: int) -> dict[str, str]:
    """The data of a run: what its newest start said of it (`about`: its record), and what was read since."""
    data = about.get("data") or {}
    vocabulary = f", {data['vocabulary']:,} tokens" if data.get("vocabulary") else ""
    facts = {
        "sources": ", ".join(source.path for source in config.data.train),
        "tokenizer": f"{config.tokenizer.name_or_path}{vocabulary}",
    }
    for line in (*_said(about), *(f"note  {line}" for line in data.get("answers_alone") or ())):
        name, _, text = line.partition("  ")
        name, text = (name, text.strip()) if text else ("read", name)
        facts[name] = f"{facts[name]}; {text}" if name in facts else text
    if train := data.get("train"):
        facts["read so far"] = f"{tokens_seen:,} tokens: {tokens_seen / max(1, train['tokens']):.2f} epochs"
    return facts


def _said(about: Mapping[str, Any]) -> Iterator[str]:
    """The lines about data in the header of a start."""
    is_of_data = False
    for label, text in about.get("header") or ():
        is_of_data = label == "data" or (is_of_data and not label)
        if is_of_data:
            yield text


# ---- words ---------------------------------------------------------------------------------------------------------


def moment(text: str) -> str:
    """Format an ISO time as `2026-01-31 12:34:56 +0100`; "" if it is none."""
    try:
        return datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S %z").strip() if text else ""
    except ValueError:
        return ""


def duration(seconds: float | None) -> str:
    """Format as `2 h 03 min`, `4 min 05 s` or `7 s`; "" if unknown."""
    if seconds is None:
        return ""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
