"""The display of a training run: a live panel on a terminal, plain lines anywhere else.

Both take the rows of `metrics.jsonl` as they are written. Rank 0 opens one; those of the other ranks stay invisible.
"""

import io
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fivefold.core.best import Best
from fivefold.core.text import shown
from fivefold.core.units import human

BARS = "▁▂▃▄▅▆▇█"
PLAIN_SECONDS = 5.0  # between two plain lines
PACE_STEPS = 30  # the remaining time is estimated from this many last steps
SAMPLE_LINES = 5  # of a generated text, at most

Row = Mapping[str, Any]
Line = tuple[str, str]  # (label, text); an empty label continues the line above


@dataclass(frozen=True)
class Sample:
    """Text written after `step` steps. `prompt`: the text before it; `messages`: its turns, of a conversation."""

    step: int
    prompt: str
    text: str
    messages: Sequence[Mapping[str, Any]] = ()

    @property
    def row(self) -> dict[str, Any]:
        """The line of `samples.jsonl`."""
        turns = {"messages": self.messages} if self.messages else {}
        return {"step": self.step, "prompt": self.prompt, **turns, "text": self.text}


def open_display(
    *, total_steps: int, total_tokens: float | None = None, start: int = 0, console: Console | None = None
) -> "PlainDisplay":
    """A live panel when standard output is a terminal, plain lines otherwise. `start` steps are done already.
    `total_tokens`: input tokens of all steps, about."""
    console = console or Console(file=sys.stdout, highlight=False)
    is_live = console.is_terminal and not console.is_dumb_terminal
    kind = LiveDisplay if is_live else PlainDisplay
    return kind(console, total_steps=total_steps, total_tokens=total_tokens, start=start)


def unseen() -> "PlainDisplay":
    """A display without output, for every rank but the first."""
    return PlainDisplay(Console(file=io.StringIO(), quiet=True), total_steps=sys.maxsize)


class RemainingTime:
    """Estimate of the remaining seconds from the wall clock of the last steps, evaluations and checkpoints included."""

    def __init__(self, total_steps: int, start: int, clock: Callable[[], float]) -> None:
        self._total, self._clock = total_steps, clock
        self._marks: deque[tuple[int, float]] = deque([(start, clock())], maxlen=PACE_STEPS)

    def mark(self, step: int) -> None:
        self._marks.append((step, self._clock()))

    def remaining(self) -> float | None:
        """The remaining seconds; None before the first steps are done."""
        (first_step, first_time), (step, now) = self._marks[0], self._marks[-1]
        if step <= first_step:
            return None
        return (now - first_time) / (step - first_step) * max(0, self._total - step)


class PlainDisplay(AbstractContextManager["PlainDisplay"]):
    """A context manager: `header` first, then steps, evaluations and samples as they come, `closing` last.

    Prints one line for each; for steps only the first, the last, and one every few seconds between them.
    """

    def __init__(
        self, console: Console, *, total_steps: int, total_tokens: float | None = None, start: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._console, self._total, self._start, self._clock = console, total_steps, start, clock
        self._total_tokens = total_tokens
        self._pace = RemainingTime(total_steps, start, clock)
        self._said: float | None = None

    def __exit__(self, *_: object) -> None:
        pass

    def header(self, lines: Sequence[Line]) -> None:
        self._say(*(f"{label:<8} {text}" for label, text in lines))

    def step(self, row: Row) -> None:
        self._pace.mark(row["step"])
        now = self._clock()
        if self._said is None or now - self._said >= PLAIN_SECONDS or row["step"] >= self._total:
            self._said = now
            loss = f"loss {number(row.get('train/loss'), '.4f')}"
            parts = [f"step {row['step']}/{self._total}", loss, *details(row), self._tokens(row), self._times(row)]
            self._say("  ".join(filter(None, parts)))

    def _tokens(self, row: Row) -> str:
        """The tokens seen, of those of all steps; "" if they are not known."""
        seen = row.get("train/tokens_seen")
        of_all = f" of {human(max(self._total_tokens, seen or 0))}" if self._total_tokens else ""
        return f"{human(seen)}{of_all} tokens" if seen is not None else ""

    def _times(self, row: Row, since: float = 0.0) -> str:
        """The time since the run began, `since` seconds after this row, and the remaining time."""
        before, left = row.get("perf/elapsed_seconds"), f"{clock_time(self._pace.remaining())} left"
        return left if before is None else f"{clock_time(before + since)} elapsed, {left}"

    def evaluated(self, step: int, loss: float, best: Best | None = None) -> None:
        """Show a validation loss, in nats per token. `best`: the best validations so far, this one included."""
        at_best = f"  best: {best}" if best and best.step not in (None, step) else "  (best)" if best else ""
        self._say(f"step {step}/{self._total}  validation loss {loss:.4f}{at_best if best and best.ranking else ''}")

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """Show `text`, the model's continuation of `prompt`."""
        self._say(f"sample @{step}  {prompt + text!r}")

    def note(self, text: str) -> None:
        """Show something that needs attention, such as a skipped step."""
        self._say(f"note: {text}")

    def closing(self, lines: Sequence[Line]) -> None:
        self._say(*(f"{label:<8} {text}" for label, text in lines))

    def _say(self, *lines: str) -> None:
        for line in lines:
            self._console.print(shown(line), highlight=False, soft_wrap=True, markup=False)
        self._console.file.flush()


class LiveDisplay(PlainDisplay):
    """A panel that stays at the bottom of the terminal; evaluations, samples and notes scroll above it."""

    def __init__(self, console: Console, **options: Any) -> None:
        super().__init__(console, **options)
        self._row: Row = {}
        self._row_time = 0.0  # of the clock
        self._losses: list[float] = []
        self._validations: deque[tuple[int, float]] = deque(maxlen=2)
        self._best: Best | None = None
        self._live = Live(get_renderable=self.panel, console=console, refresh_per_second=4)

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def header(self, lines: Sequence[Line]) -> None:
        self._console.print(_labelled(lines))
        self._live.start(refresh=True)

    def step(self, row: Row) -> None:
        self._pace.mark(row["step"])
        self._row, self._row_time = row, self._clock()
        if row.get("train/loss") is not None:
            self._losses.append(row["train/loss"])

    def evaluated(self, step: int, loss: float, best: Best | None = None) -> None:
        before, self._best = self._validations[-1] if self._validations else None, best
        self._validations.append((step, loss))
        change = f"  ({loss - before[1]:+.3f})" if before else ""
        self._console.print(
            Text.assemble((f"step {step}", "cyan"), "  validation loss ", (f"{loss:.3f}", "bold"), change)
        )

    def sampled(self, step: int, prompt: str, text: str) -> None:
        first, *rest = text.rstrip().split("\n")
        lines = [first, *(line for line in rest if line.strip())]
        text = shown("\n".join(lines[:SAMPLE_LINES])) + (" ..." if len(lines) > SAMPLE_LINES else "")
        body = Text.assemble((shown(prompt), "dim"), (text, "green"))
        grid = Table.grid(padding=(0, 2))
        grid.add_row(Text(f"step {step}", style="cyan"), body)
        self._console.print(grid)

    def note(self, text: str) -> None:
        self._console.print(Text(shown(text), style="yellow"))

    def closing(self, lines: Sequence[Line]) -> None:
        self._live.stop()
        self._console.print(_labelled(lines))

    def panel(self) -> RenderableType:
        done = self._row.get("step", self._start)
        since = self._clock() - self._row_time
        waiting = "the first step takes longest" if not self._row else self._times(self._row, since)
        body = [_line(ProgressBar(total=max(1, self._total), completed=done), Text(waiting), wide=0)]
        if self._row:
            health = Text("   ".join(details(self._row)), style="dim", overflow="ellipsis", no_wrap=True)
            body += [self._loss_line(), *self._validation_lines(), health]
        title = ", ".join(filter(None, (f"step {done}/{self._total}", self._tokens(self._row))))
        return Panel(Group(*body), title=title, title_align="left", border_style="cyan", padding=(0, 1))

    def _loss_line(self) -> RenderableType:
        loss = number(self._row.get("train/loss"), ".3f")
        losses = Text(sparkline(self._losses, max(8, self._console.width - 20)), style="green")
        return _line(Text.assemble("loss ", (loss, "bold green")), losses, Text(), wide=1)

    def _validation_lines(self) -> list[RenderableType]:
        """The last validation, the best one and the one before the last; nothing before the first."""
        if not self._validations:
            return []
        *before, last = (f"{loss:.3f} @{step}" for step, loss in self._validations)
        best = self._best if self._best and self._best.ranking else None
        metric = f" {best.metric}" if best and best.metric != "eval/loss" else ""
        more = [f"best{metric} {best.value:.3f} @{best.step}"] if best else []
        more += [f"before {text}" for text in before]
        return [
            Text.assemble("val  ", (last, "bold"), *(f"   {text}" for text in more), overflow="ellipsis", no_wrap=True)
        ]


def _line(*cells: RenderableType, wide: int) -> RenderableType:
    """Cells side by side over the whole width, the last one right-aligned; cell `wide` takes the remaining width."""
    line = Table.grid(expand=True, padding=(0, 2))
    for at in range(len(cells)):
        justify: JustifyMethod = "right" if at == len(cells) - 1 else "left"
        line.add_column(ratio=1 if at == wide else None, justify=justify, no_wrap=True)
    line.add_row(*cells)
    return line


def _labelled(lines: Sequence[Line]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for label, text in lines:
        grid.add_row(Text(label, style="bold"), Text(shown(text), overflow="fold"))
    return grid


def details(row: Row) -> list[str]:
    """Speed and health of one step in a few words each; metrics missing from the row are left out."""
    said: tuple[tuple[str, Callable[[float], str]], ...] = (
        ("perf/tokens_per_second", lambda value: f"{human(value)} tok/s"),
        ("perf/mfu_pct", lambda value: f"mfu {value:.1f}%"),
        ("perf/matmul_pct", lambda value: f"matmul {value:.0f}%"),
        ("train/learning_rate", lambda value: f"lr {value:.1e}".replace("e-0", "e-")),
        ("train/grad_norm", lambda value: f"grad {value:.2f}"),
        ("perf/data_wait_pct", lambda value: f"data wait {value:.0f}%"),
        ("memory/peak_gib", lambda value: f"{value:.2f} GiB"),
    )
    return [say(row[name]) for name, say in said if row.get(name) is not None]


def sparkline(values: Sequence[float], width: int) -> str:
    """The whole history of `values` in at most `width` characters, each the mean of its share."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def clock_time(seconds: float | None) -> str:
    """`1:05`, `2:03:04`; `-:--` when not known yet."""
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None, form: str) -> str:
    """Format a number that may be missing: a non-finite loss is null in the row."""
    return "not finite" if value is None else format(value, form)
