"""The report of a proof, for people and for programs: JSON, and the findings of `sections.py`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from fivefold.report.findings import Findings
from fivefold.report.table import Report
from fivefold.verification.results import LayoutResult, Row
from fivefold.verification.sections import cut_of, headline, sections

HUGE = 1e308  # an infinite error: JSON has no infinities


@dataclass(frozen=True)
class LayoutRow(Row):
    """A row of a proof with its layout."""

    layout: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Report[LayoutRow]):
    """The report of a proof. `.rows`: those of all layouts in sequence; `.found`: the results by layout."""

    found: tuple[LayoutResult, ...] = ()
    subject: str = ""
    losses: Mapping[str, list[float]] = field(default_factory=dict)  # precision -> the reference's, step by step
    shows_all: bool = False  # a terminal shows each kind of comparison of each layout

    def to_json(self) -> str:
        """`{"ok", "layouts": [{"layout", "ok", "rows": [{"what", "error", "tolerance", "ok", "where"}]}]}`.

        Each layout also has `not_run`, why it did not run, else null; `not_told`, comparisons for which its precision
        is too coarse; `not_shown`, modules whose values on a rank could not be located."""
        layouts = [
            {
                "layout": result.layout,
                "ok": result.ok,
                "not_run": result.refused or None,
                "not_told": result.not_told,
                "not_shown": result.not_shown,
                "seconds": round(result.seconds, 3),
                "rows": [asdict(row) | {"error": min(row.error, HUGE)} for row in result.rows],
            }
            for result in self.found
        ]
        return json.dumps({"ok": self.ok, "subject": self.subject, "layouts": layouts}, indent=1, ensure_ascii=False)

    def findings(self) -> Findings:
        """The verdict and its sections."""
        parts = tuple(sections(self.found, self.subject, self.losses, shows_all=self.shows_all))
        title = headline(self.found, cut_of(self.subject))
        return Findings(command="fivefold verify", headline=title, ok=self.ok, sections=parts)


def report_of(found: Sequence[LayoutResult], subject: str, losses: Mapping[str, list[float]]) -> VerifyReport:
    """Make the report of the results `found`."""
    rows = tuple(LayoutRow(**asdict(row), layout=result.layout) for result in found for row in result.rows)
    why = [f"{result.layout}: {result.why}" for result in found if not result.ok]
    return VerifyReport(
        title="fivefold verify", rows=rows, ok=bool(found) and not why, closing="\n".join(why),
        found=tuple(found), subject=subject, losses=losses,
    )  # fmt: skip
