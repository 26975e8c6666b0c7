"""Parts of the user's own, which the run file names: `train.parts: [my_parts.py:Mine]`."""

import json
import math
from collections.abc import Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.named_code import NamedCode
from fivefold.parallel import plain
from fivefold.training.part import LiveRun, Part

_MORE = "docs/howto/parts.md"
_MOMENTS = [name for name, value in vars(Part).items() if callable(value)]


def own_parts(config: RunConfig) -> list[Part]:
    """Make the parts that a run file names; their files are run. Raises `UserError`."""
    parts = [OwnPart(NamedCode.read(text, key), key) for key, text in config.part_code.items()]
    names = [part.name for part in parts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"train.parts has two parts called {twice[0]}", fix="give each a `name` of its own", more=_MORE)
    return [*parts]


class OwnPart(Part):
    """Passes each moment on to a part of the user's own.

    Errors name the line of the file. What the first rank's part decides holds for all ranks, and numbers that it adds
    to a row are numbers that files and trackers take. `key`, `digest`: of its file, as it was run.
    """

    def __init__(self, code: NamedCode, key: str) -> None:
        """Raises `UserError` if the file does not make a part."""
        self._code, self.key, self.digest, self._why, self._saves = code, key, code.digest, "", False
        with self._named():
            self._part = code.load()()
        if not isinstance(self._part, Part):
            what = f"{key}: {code.name} of {code.path} makes a {type(self._part).__name__}, which is no part of a run"
            raise UserError(what, fix=f"derive it: class {code.name}(fivefold.Part)", more=_MORE)
        for moment in set(_MOMENTS) - set(vars(OwnPart)):
            setattr(self, moment, partial(self._pass_on, moment))

    @property
    def name(self) -> str:
        return str(self._part.name)

    def _pass_on(self, moment: str, *args: Any, **options: Any) -> Any:
        with self._named():
            return getattr(self._part, moment)(*args, **options)

    @contextmanager
    def _named(self) -> Any:
        """Give an error of the user's code the line of its file."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # sys.exit(0) would pass for the end of the run
            raise self._code.error(error, more=_MORE) from error

    def begin(self, run: LiveRun) -> None:
        self._pass_on("begin", run)
        self.state()  # one that cannot be saved is refused now
        self._decide(run)

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        self._add("after_step", run, row)

    def finish_step(self, run: LiveRun, row: dict[str, Any], *, owes: bool) -> None:
        self._add("finish_step", run, row, owes=owes)

    def _add(self, moment: str, run: LiveRun, row: dict[str, Any], **options: bool) -> None:
        """Let the part add numbers to the row, and decide."""
        before = dict(row)
        self._pass_on(moment, run, row, **options)
        for name in row:
            row[name] = row[name] if row[name] is before.get(name) else self._number(name, row[name])
        if changed := [name for name in before if name not in row or row[name] is not before[name]]:
            what = f"{self.key}: {self.name} changes {changed[0]} of the row, which the run has measured"
            raise UserError(what, fix=f"add a number of another name: mine/{changed[0]}", more=_MORE)
        self._decide(run)

    def _decide(self, run: LiveRun) -> None:
        """Ask the part once after each step, the first rank's for all."""
        if type(self._part).why_over is Part.why_over and type(self._part).saves is Part.saves:
            return
        mine = [str(self._pass_on("why_over", run) or ""), bool(self._pass_on("saves", run))]
        self._why, self._saves = plain.of_first(mine)

    def why_over(self, run: LiveRun) -> str:
        return self._why

    def saves(self, run: LiveRun) -> bool:
        return self._saves

    def state(self) -> Mapping[str, Any]:
        state = self._pass_on("state")
        with self._named():
            return dict(json.loads(json.dumps(state, allow_nan=False)))

    def _number(self, name: Any, value: Any) -> float | int | None:
        """A number of a row as JSON has it; NaN and infinities are None."""
        try:
            number = value if isinstance(value, bool | int) else float(value)
        except (TypeError, ValueError) as error:
            what = f"{self.key}: {self.name} adds {name} to the row, a {type(value).__name__}, which is no number"
            raise UserError(what, fix="add numbers", more=_MORE) from error
        return number if math.isfinite(number) else None
