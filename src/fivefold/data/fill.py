"""The process that tokenises ahead of a trainer (`data.streaming`): `python -m fivefold.data.fill`, one a machine.

Its first line of input is the run file and the folder of the cache; then comes the number of each window that the
trainer opens. It ends with its input, and so with the trainer.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread

from fivefold.config import parse_config
from fivefold.core.errors import UserError
from fivefold.data.prepare import inputs
from fivefold.data.stream import UnitOrder
from fivefold.data.units import TextUnits

_AHEAD = 2  # windows tokenised beyond the one that was opened last


class OpenWindows:
    """The last window that the trainer opened, as its lines come in."""

    def __init__(self) -> None:
        self.number, self._changed = 0, Condition()
        Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for line in sys.stdin:
            with self._changed:
                self.number = max(self.number, int(line))
                self._changed.notify_all()
        os._exit(0)

    def wait_for(self, number: int) -> None:
        """Wait until window `number` is near enough."""
        with self._changed:
            self._changed.wait_for(lambda: number <= self.number + _AHEAD)


def main() -> None:
    """Tokenise the windows that come, until all units are done."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a core beside the trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the trainer decides
    request = json.loads(sys.stdin.readline())
    opened, config, root = OpenWindows(), parse_config(request["config"]), Path(request["cache"])
    with suppress(UserError):  # the trainer comes to the same unit, and reports it
        train, _, tokenizer = inputs(config, root)
        sources = tuple(TextUnits.begin(files, tokenizer, root, streamed=True) for files in train)
        fill(UnitOrder(sources, config.train.seed), opened)


def fill(order: UnitOrder, opened: OpenWindows) -> None:
    """Tokenise window after window, except those that the trainer has passed, until no unit is left."""
    number, left = 0, set(order.units)
    while left:
        opened.wait_for(number)
        number = max(number, opened.number)
        for source, unit in order.window(number):
            order.sources[source].tokenise(unit)
            left.discard((source, unit))
        number += 1


if __name__ == "__main__":
    main()
