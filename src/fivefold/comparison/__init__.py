"""`fivefold compare`: train configurations alternately, and tabulate their throughput, scaling and loss.

Every missing run is trained on this machine, one after the other, as by `fivefold train`, in a folder of its own; then
all are reported. No torch here: the workers import it.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import yaml

from fivefold.comparison import logs
from fivefold.comparison.configurations import Configuration, Contest, PlannedRun, configurations, fresh, unlike
from fivefold.comparison.measure import MeasuredRun
from fivefold.comparison.report import CompareReport, report_of
from fivefold.core import files, history
from fivefold.core.errors import UserError
from fivefold.core.files import writing
from fivefold.core.interrupts import sigterm_raises
from fivefold.core.text import shown
from fivefold.core.units import human, many
from fivefold.launch.events import Listener
from fivefold.launch.folder import FolderLock
from fivefold.launch.world import find_world

RECORD = "compare.yaml"  # in the folder of a comparison: its configurations
SCREEN = "screen.log"  # in the logs of a run: its terminal output
MORE = "fivefold docs howto/compare"
Publish = Callable[[CompareReport], object]


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of `fivefold compare`.

    `vary`: the keys that each further configuration sets. `nproc`: numbers of devices (none: as many as `fivefold
    train` takes; for one configuration also 1). `warmup`: untimed steps after each start. `out`: the folder of the runs
    (none: one next to the runs, named after the configurations). `against`: logs of other trainers.
    """

    paths: Sequence[Path] = ()
    overrides: Sequence[str] = ()
    vary: Sequence[Sequence[str]] = ()
    nproc: Sequence[int] = ()
    repeats: int = 3
    steps: int | None = None
    warmup: int = 2
    out: Path | None = None
    against: Sequence[str] = field(default=())


def main(request: Request, publish: Publish, *, quiet: bool = False) -> CompareReport:
    """Train the missing runs, and pass the results to `publish`: all of them at the end, or those so far on an
    interrupt. Raises `UserError` for an impossible request; a run that fails becomes a row that says why."""
    if request.against and not (request.paths or request.overrides or request.vary):
        return _of_logs(_read(request.against, []), request, publish)
    if find_world("cpu") is not None:
        raise UserError(
            "fivefold compare starts its own workers, and this process is one that something else has started",
            fix="train each under the launcher, then compare their folders: fivefold compare --against runs/a "
            "--against runs/b",
            more=MORE,
        )
    some = configurations(request.paths, request.overrides, request.vary, request.steps)
    others = _read(request.against, [configuration.name for configuration in some])
    counts: Sequence[int | None] = request.nproc or ([None] if len(some) > 1 or others else [1, None])
    contest = Contest.of(some, counts, request.repeats)
    _check_steps(some, request.warmup)
    out = (
        request.out
        or Path(some[0].config.run.dir) / ("compare-" + "-".join(configuration.slug for configuration in some))[:120]
    )
    comparison = ComparisonRuns(request, contest, out, others)
    with _claimed(out, some), sigterm_raises(), comparison.shown(quiet):
        try:
            comparison.run()
        except (KeyboardInterrupt, SystemExit):
            publish(comparison.report())
            raise
    report = comparison.report()
    publish(report)
    return report


def _read(against: Sequence[str], taken: Sequence[str]) -> list[logs.TrainerLog]:
    names, found = list(taken), list[logs.TrainerLog]()
    for folder in against:
        log = logs.read(folder)
        found.append(replace(log, name=fresh(log.name, names)))
        names.append(found[-1].name)
    return found


def _of_logs(others: Sequence[logs.TrainerLog], request: Request, publish: Publish) -> CompareReport:
    """Compare logs alone, without a run of our own."""
    if len(others) < 2:
        raise UserError(
            "one log is nothing to compare", fix="name a run file too, or a second --against LOG", more=MORE
        )
    report = report_of([_measured(other, request.warmup) for other in others], others=others, warmup=request.warmup)
    publish(report)
    return report


def _measured(log: logs.TrainerLog, warmup: int) -> MeasuredRun:
    return MeasuredRun(log.name, log.devices, 0, "", log.steps, logs.without_warm_up(log.steps, [], warmup))


def _check_steps(some: Sequence[Configuration], warmup: int) -> None:
    for configuration in some:
        steps = configuration.config.train.max_steps
        if steps is not None and steps <= warmup:
            name, have = configuration.name, many(steps, "step")
            raise UserError(
                f"{name} has {have}, of which the first {warmup} are not timed: none is left",
                fix=f"--steps {10 * (warmup + 1)}, or --warmup 0", more=MORE,
            )  # fmt: skip


@contextmanager
def _claimed(out: Path, some: Sequence[Configuration]) -> Iterator[None]:
    """Lock the folder `out` for this process and these configurations. Raises `UserError` if it holds others."""
    instead = "name another folder: --out DIR"
    says = yaml.safe_dump(
        {configuration.name: configuration.tree for configuration in some}, sort_keys=False, allow_unicode=True
    )
    with writing(out, instead=instead):
        out.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(out, instead=instead)
    try:
        with writing(out / RECORD, instead=instead):
            if (out / RECORD).exists():
                _agree(out, _recorded(out / RECORD), yaml.safe_load(says), instead)
            elif any(path.name != ".lock" for path in out.iterdir()):
                raise UserError(f"{out} holds something else than a comparison", fix=instead)
            files.replace(out / RECORD, says.encode())
        yield
    finally:
        lock.release()


def _recorded(path: Path) -> Any:
    """Configurations that a comparison began with; None if they cannot be read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        return None


def _agree(out: Path, before: Any, now: dict[str, Any], instead: str) -> None:
    """Raise `UserError` if a configuration differs from that of its runs in `out`."""
    fix = f"{instead}, or remove {out}"
    if not isinstance(before, dict) or list(before) != list(now):
        listed = ", ".join(before) if isinstance(before, dict) else "nothing that can be read"
        raise UserError(f"{out} holds a comparison of {listed}", fix=fix)
    for name, tree in now.items():
        was, own = (dict(_flat(values)) for values in (before[name], tree))
        for key in [key for key in own if key in was]:  # a key that another version lacks has its default value
            if was[key] != own[key]:
                raise UserError(f"{out} holds runs of {name} with {key} {was[key]}, not {own[key]}", fix=fix)


def _flat(tree: Any) -> Iterator[tuple[str, Any]]:
    for section, keys in tree.items() if isinstance(tree, dict) else ():
        if isinstance(keys, dict):
            yield from ((f"{section}.{key}", value) for key, value in keys.items())


class ComparisonRuns:
    """The runs of a comparison, as far as they are done."""

    def __init__(self, request: Request, contest: Contest, out: Path, others: Sequence[logs.TrainerLog]) -> None:
        self.request, self.contest, self.out, self.others = request, contest, out, others
        self.failed: dict[tuple[str, int], str] = {}
        self._screen: TextIO | None = None

    def run(self) -> None:
        """Train every run that is not done yet. After a failure, skip later repeats of the same configuration."""
        done = [run for run in self.contest.runs if self._is_done(run)]
        self._tell_beginning(len(done))
        for number, run in enumerate(self.contest.runs, start=1):
            cell = (run.configuration.name, run.devices)
            if run in done or cell in self.failed:
                continue
            try:
                self._train(run, number)
            except UserError as error:
                self.failed[cell] = f"{error.what.splitlines()[0]} (log: {self.out / run.name / 'logs'})"
                self._say(f"{self._label(run, number)}  failed: {error.what.splitlines()[0]}")
            else:
                self._say(f"{self._label(run, number)}  {self._result(run)}")

    def report(self) -> CompareReport:
        done = [run for run in self.contest.runs if self._is_done(run)]
        measured = [self._measured(run) for run in done] + [
            _measured(other, self.request.warmup) for other in self.others
        ]
        missing = [run for run in self.contest.runs if run not in done]
        places = {str(history.load(self.out / run.name).starts[-1].about.get("device")) for run in done}
        keys = {
            configuration.name: [str(configuration.path or "demo"), *configuration.overrides]
            for configuration in self.contest.configurations
        }
        return report_of(
            measured, contest=self.contest, failed=self.failed, others=self.others, warmup=self.request.warmup,
            missing=len(missing), unlike=unlike(self.contest.configurations),
            about={"device": ", ".join(sorted(places)), "configurations": keys, "out": str(self.out)},
        )  # fmt: skip

    def _is_done(self, run: PlannedRun) -> bool:
        starts = history.load(self.out / run.name).starts
        return bool(starts) and starts[-1].how == "finished"

    def _measured(self, run: PlannedRun) -> MeasuredRun:
        folder = self.out / run.name
        steps = logs.steps_of_run(folder)
        starts = [start.step for start in history.load(folder).starts]
        timed = logs.without_warm_up(steps, starts, self.request.warmup)
        return MeasuredRun(run.configuration.name, run.devices, run.repeat, str(folder), steps, timed)

    def _train(self, run: PlannedRun, number: int) -> None:
        from fivefold.training import launch

        logs_folder = self.out / run.name / "logs"
        with writing(logs_folder, instead="name another folder: --out DIR"):
            logs_folder.mkdir(parents=True, exist_ok=True)
        with self._following(run, number) as listener, elsewhere(logs_folder / SCREEN):
            launch.run(run.configuration.path, run.overrides(self.out), nproc=run.devices, listener=listener)

    # ---- output ------------------------------------------------------------------------------------------------------

    @contextmanager
    def shown(self, quiet: bool) -> Iterator[None]:
        """Inside, print lines to the screen, even if standard output is redirected."""
        if quiet:
            yield
            return
        with a_copy_of(sys.stdout) as self._screen:
            yield
        self._screen = None

    def _say(self, text: str) -> None:
        try:
            if self._screen:
                print(shown(text), file=self._screen, flush=True)
        except OSError:  # the reader is gone: the runs go on
            self._screen = None

    def _tell_beginning(self, done: int) -> None:
        runs = self.contest.runs
        self._say(f"{many(len(runs), 'run')} by turns in {self.out}, {done} done" if done else
                  f"{many(len(runs), 'run')} by turns in {self.out}")  # fmt: skip
        for (name, devices), why in self.contest.refused.items():
            self._say(f"not run: {name} on {many(devices, 'device')}: {why}")

    def _label(self, run: PlannedRun, number: int) -> str:
        place = f"{number:>{len(str(len(self.contest.runs)))}}/{len(self.contest.runs)}"
        width = max(len(configuration.name) for configuration in self.contest.configurations)
        return f"{place}  {run.configuration.name:<{width}}  {many(run.devices, 'device'):<9}  repeat {run.repeat}"

    def _result(self, run: PlannedRun) -> str:
        measured = self._measured(run)
        loss = measured.loss(measured.tokens or 0)
        speed = f"{human(measured.speed)} tok/s per device" if measured.speed else "no step was timed"
        return speed + (f"  loss {loss:.3f}" if loss is not None else "")

    @contextmanager
    def _following(self, run: PlannedRun, number: int) -> Iterator[Listener]:
        """Inside, on a terminal, show a progress line of a run's steps."""
        if not self._screen or not self._screen.isatty():
            yield Listener(on_step=lambda row: None)
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}", markup=False), BarColumn(bar_width=16),
            TextColumn("{task.fields[says]}", markup=False), TimeRemainingColumn(compact=True),
        )  # fmt: skip
        with Progress(*columns, console=Console(file=self._screen), transient=True) as progress:
            task = progress.add_task(
                self._label(run, number), total=run.configuration.config.train.max_steps, says="starting"
            )

            def tell(row: dict[str, Any]) -> None:
                loss = row.get("train/loss")
                says = f"step {row['step']}" + (f"  loss {loss:.3f}" if loss is not None else "")
                progress.update(task, completed=row["step"], says=says)

            yield Listener(on_step=tell)


@contextmanager
def a_copy_of(stream: TextIO) -> Iterator[TextIO]:
    """A stream to the current destination of `stream`, even if `stream` is redirected later."""
    try:
        descriptor = os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):  # not backed by a file
        yield stream
        return
    copy = os.fdopen(descriptor, "w", encoding=stream.encoding, errors="replace")
    try:
        yield copy
    finally:
        with suppress(OSError):
            copy.close()


@contextmanager
def elsewhere(path: Path) -> Iterator[None]:
    """Inside, append the output of this process and its children to `path`."""
    with path.open("a", encoding="utf-8") as file, redirect_stdout(file), redirect_stderr(file):
        before = {}
        for number in (1, 2):
            with suppress(OSError):
                before[number] = os.dup(number)
                os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            file.flush()
            for number, copy in before.items():
                os.dup2(copy, number)
                os.close(copy)
