"""What a worker that fails leaves beside the logs, and how it is read again: JSON, never a pickle. No torch."""

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from fivefold.errors import RunFailed, UserError
from fivefold.terminal import say


def failure_file(logs: Path, rank: int) -> Path:
    """Where rank `rank` leaves what went wrong."""
    return logs / f"failure-{rank}.json"


def hang_flag(logs: Path) -> Path:
    """The file by which a rank whose collective hangs tells the others."""
    return logs / "hung"


def leave_failure(logs: Path, rank: int, error: Exception, stack: str | None = None) -> None:
    """Write `error`, with its traceback or, if given, `stack`."""
    said = error if isinstance(error, UserError) else UserError(_one_line(error))
    failure = {
        "is_users": isinstance(error, UserError),
        "rank": rank,
        "time": time.time(),
        "exit_code": error.exit_code if isinstance(error, UserError) else RunFailed.exit_code,
        "what": said.what,
        "fix": said.fix,
        "more": said.more,
        "traceback": stack or "".join(traceback.format_exception(error)),
    }
    unfinished = logs / f".failure-{rank}.json"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(failure, indent=1), encoding="utf-8")
        unfinished.replace(failure_file(logs, rank))
    except OSError as full:  # a full disk, too, ends in words
        say(f"{said}\n{logs} cannot be written: {full.strerror or full}", stream=sys.stderr)


def failures(logs: Path) -> list[dict[str, Any]]:
    """All that were left, those of the user first, then the earliest."""
    left = [json.loads(file.read_text(encoding="utf-8")) for file in logs.glob("failure-*.json")]
    return sorted(left, key=lambda failure: (not failure["is_users"], failure["time"]))


def _one_line(error: Exception) -> str:
    """`RuntimeError: the first line of the message`, not the pages that C++ adds to it."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
