"""What the screen shows while the data is prepared, before any worker starts."""

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fivefold.core.terminal import shown


class Preparing:
    """A `fivefold.data.Progress`: a bar per stage on a terminal, a line per stage elsewhere; nothing when cached."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stdout)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> "Preparing":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._tasks and self._console.is_terminal:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        stage = shown(stage)
        is_new = stage not in self._tasks
        if self._console.is_terminal:
            if not self._tasks:
                self._bars.start()
            task = self._tasks.get(stage)
            if task is None:
                task = self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(task, completed=done, total=total)
        elif is_new:
            self._tasks[stage] = TaskID(0)
            self._console.print(f"{stage} ...", highlight=False, markup=False, soft_wrap=True)
