"""The progress of a run for a person: one line that says how far it is, in place of thousands of dots.

    1,204 of 3,310 tests (36 %)  1 min 12 s  2 failed  parallel/test_plan.py

On a terminal the line is written over itself; elsewhere it comes every half minute. A failure is told at once.
"""

import sys
import time
from typing import Any

EVERY = {True: 0.2, False: 30.0}  # seconds between two lines: on a terminal, and elsewhere


class Progress:
    """A plugin of the process that reports."""

    def __init__(self) -> None:
        self.session: Any = None
        self.reporter: Any = None
        self.on_terminal = sys.stdout.isatty()
        self.done = self.failed = 0
        self.started = time.monotonic()
        self.told = self.started if not self.on_terminal else 0.0

    def pytest_sessionstart(self, session: Any) -> None:
        self.session, self.reporter = session, session.config.pluginmanager.getplugin("terminalreporter")

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No letter for a test that went well."""
        if hasattr(report, "context") or (report.when != "call" and not report.failed):
            return None  # of a part of a test, which has a way of its own
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        return outcome, "", ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count it, and say so when it is time."""
        self.done += report.when == "teardown"
        if report.failed:
            self.failed += 1
            self._write(f"{report.when} FAILED  {report.nodeid}", stays=True)
        now = time.monotonic()
        if now - self.told >= EVERY[self.on_terminal]:
            self.told = now
            self._write(self.line(report.nodeid), stays=not self.on_terminal)

    def line(self, nodeid: str) -> str:
        """How far the run is."""
        total, spent = max(self.session.testscollected, self.done), int(time.monotonic() - self.started)
        failed = f"  {self.failed} failed" if self.failed else ""
        return (
            f"{self.done:,} of {total:,} tests ({100 * self.done // total} %)  {spent // 60} min {spent % 60:02} s"
            f"{failed}  {nodeid.partition('::')[0].removeprefix('tests/')}"
        )

    def _write(self, text: str, *, stays: bool) -> None:
        width = self.reporter._tw.fullwidth - 1
        start = "\r" if self.on_terminal else ""
        self.reporter.write(f"{start}{text[:width] if not stays else text:<{width if self.on_terminal else 0}}")
        if stays:
            self.reporter.write("\n")
        self.reporter.flush()
