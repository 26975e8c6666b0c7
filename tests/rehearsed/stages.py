"""Stages for `test_launch.py`, in place of the real one: `python -m tests.rehearsed.stages REPORTS`."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(reports: int) -> None:
    """For each folder do what the `config` of its request says."""
    for line in sys.stdin:
        folder = Path(line.removesuffix("\n"))
        told = json.loads((folder / "request.json").read_text(encoding="utf-8"))["config"]
        if told == "sleep":
            time.sleep(1000)
        if told == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        print(f"{told} was said", flush=True)
        os.write(reports, f"{told}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
