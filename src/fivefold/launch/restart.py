"""Starts the workers again after one has died, from the newest checkpoint, while that helps."""

from collections.abc import Callable

from fivefold.core.errors import RunFailed


class WorkerDied(RunFailed):
    """A worker ended without being the user's fault. `cause` says of what, whichever rank it was; `comes_again`: there
    is no doubt that it would, as where memory does not suffice."""

    cause = ""
    comes_again = False


def with_restarts(
    start: Callable[[], None], *, most: int, steps: Callable[[], tuple[int, int]], say: Callable[[str], None]
) -> None:
    """Call `start`, and again when it raises `WorkerDied`, up to `most` times without a new checkpoint in between.

    `steps`: (the last step that was logged, the last that was saved). Raises the last `WorkerDied` when `most` are used
    up, and at once when it comes again: that is known, or the same cause came at the same step twice.
    """
    restarts, last, saved = 0, None, -1
    while True:
        try:
            return start()
        except WorkerDied as death:
            step, newest = steps()
            same = last == (death.cause, step)
            restarts = restarts if newest <= saved else 0
            if same or death.comes_again or restarts == most:
                raise _final(death, step, same=same, restarts=restarts) from None
            last, saved, restarts = (death.cause, step), newest, restarts + 1
            origin = f"from step {newest}" if newest else "from the start"
            say(f"{death.what} at step {step}; starting again {origin} (restart {restarts} of {most})")


def _final(death: WorkerDied, step: int, *, same: bool, restarts: int) -> WorkerDied:
    what = death.what
    if same:
        what += f", twice at step {step}: it would come again"
    elif restarts:
        what += f", after {restarts} restarts without a new checkpoint"
    final = type(death)(what, fix=death.fix, more=death.more)
    vars(final).update({**vars(death), "what": what})
    return final
