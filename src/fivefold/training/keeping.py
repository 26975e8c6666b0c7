"""A rank keeps its last whole step in the memory of its node when other ranks are gone.

A thread looks for the word of the launcher, as the main thread may wait for ever in a collective; an error of a
collective says the same sooner. The update of a step and all that follows from it, up to its row of metrics, holds a
lock: a rank that is in the midst of it keeps nothing. Whoever keeps a step holds that lock for good, so that no update
follows.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fivefold.core.best import Best
from fivefold.launch.failure import is_cut_off
from fivefold.launch.memory import ENDING

_PAUSE = 0.1  # seconds between two looks for the word of the launcher
_PATIENCE = 2.0  # seconds for an update to end


@dataclass(frozen=True)
class HeldStep:
    """A whole step beside its tensors: number, counters, best validations so far, and its row of metrics. `owes`: it is
    yet to be evaluated."""

    step: int
    state: Mapping[str, Any]
    best: Best
    row: Mapping[str, Any]
    owes: bool = False


Keep = Callable[[HeldStep, "torch.cuda.Event | None"], object]


class LastStep:
    """The last whole step of a rank. `keep` writes it, after an event of the GPU; None: nothing is ever kept."""

    def __init__(self, keep: Keep | None = None, *, device: str = "cpu") -> None:
        self._keep, self._is_gpu = keep, device != "cpu"
        self._changes, self._once = threading.Lock(), threading.Lock()
        self._held: HeldStep | None = None
        self._updated: torch.cuda.Event | None = None
        self._is_over = False

    def changes(self) -> None:
        """Call before the state changes."""
        if self._keep:
            self._changes.acquire()

    def stands(self, held: HeldStep) -> None:
        """Call when the step is whole."""
        if self._keep:
            self.holds(held)
            self._changes.release()

    def holds(self, held: HeldStep) -> None:
        """Call when more is known of a whole step."""
        self._held = held
        if self._keep and self._is_gpu:
            self._updated = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._updated.record()

    def try_to_keep(self, *, patience: float = _PATIENCE) -> None:
        """Keep the step, once, unless it is changing and does not cease to for so many seconds."""
        with self._once:
            if self._keep and self._held and not self._is_over and self._changes.acquire(timeout=patience):
                self._is_over = True
                try:
                    self._keep(self._held, self._updated)
                except Exception:  # the run goes on from the disk
                    logging.getLogger(__name__).exception("the last step is not kept in memory")
            self._is_over = True

    def give_up(self) -> None:
        """Keep nothing from now on."""
        with self._once:
            self._is_over = True

    @contextmanager
    def kept_if_others_go(self, folder: str, flag: Path) -> Iterator[None]:
        """Inside, the step is kept if a collective fails, or when the launcher ends the workers that meet in `folder`.
        `flag`: a file that is there as long as the launcher has to wait for it."""
        if self._keep is None or not _is_raised(flag):
            yield
            return
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(Path(folder) / ENDING, flag, ended), daemon=True)
        thread.start()
        try:
            yield
        except Exception as error:
            if is_cut_off(error):
                self.try_to_keep(patience=0)
            raise
        finally:
            self.give_up()
            ended.set()
            flag.unlink(missing_ok=True)

    def _watch(self, word: Path, flag: Path, ended: threading.Event) -> None:
        while not ended.wait(_PAUSE):
            if word.exists():
                self.try_to_keep()
                flag.unlink(missing_ok=True)
                return


def _is_raised(flag: Path) -> bool:
    """Raise it. False if the memory of the node has been removed, as at the end of a login: nothing is kept then."""
    try:
        flag.parent.mkdir(mode=0o700, exist_ok=True)
        flag.touch()
    except OSError as error:
        logging.getLogger(__name__).warning("no step is kept in memory: %s", error)
        return False
    return True
