"""Results of an evaluation."""

import json as json_format
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fivefold.report.findings import Cell, Column, Facts, Findings, Notes, Part, Row, Section, Table, to_text

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class TextResult:
    """Loss of a text. `loss`: nats per target token; `targets`: predicted tokens; `tokens`: real input tokens;
    `text_bytes`: of the trained text in UTF-8, None if only a part of the text was read, or no text is at hand."""

    text: str
    loss_sum: float
    targets: int
    tokens: int
    rows: int
    seq_length: int
    text_bytes: int | None

    @property
    def loss(self) -> float:
        return self.loss_sum / self.targets if self.targets else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits that the model needs for a byte of the text, the end of each document included."""
        return self.loss_sum / math.log(2) / self.text_bytes if self.text_bytes else None


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A metric of a task, under lm-eval's names. `error`: its standard error."""

    task: str
    metric: str
    value: float
    error: float | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class EvaluateReport:
    """Results of an evaluation. `layout`: as it was run. `versions`: of the tasks."""

    model: str
    layout: str
    text: TextResult | None = None
    tasks: tuple[TaskResult, ...] = ()
    versions: Mapping[str, Any] = field(default_factory=dict)
    ok: bool = True

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "EvaluateReport":
        """Build from the fields in `values`."""
        text, tasks = values["text"], tuple(TaskResult(**task) for task in values["tasks"])
        return cls(**{**values, "text": TextResult(**text) if text else None, "tasks": tasks})

    @property
    def values(self) -> dict[str, Any]:
        """Its fields, as JSON values."""
        return asdict(self)

    def to_json(self) -> str:
        """One JSON object."""
        values = self.values
        if self.text:
            more = ("loss", "perplexity", "bits_per_byte")
            values["text"] |= {name: _finite(getattr(self.text, name)) for name in more}
        return json_format.dumps(values, indent=2, ensure_ascii=False)

    def findings(self) -> Findings:
        """The loss of the text, and the tasks."""
        parts: list[Part] = [Notes([f"{self.model} ({self.layout})"])]
        if text := self.text:
            bits = f"{text.bits_per_byte:.4f}" if text.bits_per_byte is not None else "-"
            read = f"{text.tokens:,} read in {text.rows:,} rows of {text.seq_length:,} tokens"
            facts = {
                "text": text.text, "loss": f"{text.loss:.6f} nats per token", "perplexity": f"{text.perplexity:.4f}",
                "bits per byte": bits, "tokens": f"{text.targets:,} predicted, {read}",
            }  # fmt: skip
            parts.append(Facts(facts))
        if self.tasks:
            columns = [Column("task"), Column("metric"), Column("value", "n"), Column("±", "n"), Column("samples", "n")]
            rows = [
                (task.task, task.metric, f"{task.value:.4f}", "" if task.error is None else f"{task.error:.4f}",
                 f"{task.samples:,}")
                for task in self.tasks
            ]  # fmt: skip
            parts.append(Table(columns, [Row([Cell(text) for text in row]) for row in rows]))
        return Findings(command="fivefold evaluate", headline=self.model, sections=[Section(parts)])

    def show(self, console: "Console") -> None:
        """Print for people."""
        to_text(self.findings(), console)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
