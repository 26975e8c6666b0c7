"""Stages for `test_launch.py`, in place of the real one: `python -m tests.rehearsed.stages REPORTS`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fivefold.launch.world import LAUNCHER


def main(reports: int) -> None:
    """For each folder do what the `config` of its request says."""
    for line in sys.stdin:
        folder = Path(line.removesuffix("\n"))
        told = json.loads((folder / "request.json").read_text(encoding="utf-8"))["config"]
        if told == "sleep":
            time.sleep(1000)
        if told == "compile":
            (folder / "compiler").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
            os.kill(os.getpid(), signal.SIGKILL)
        if told == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if told == "who":
            print(f"{os.environ.get(LAUNCHER) == str(os.getppid())} was said", flush=True)
            sys.exit(1)
        print(f"{told} was said", flush=True)
        os.write(reports, f"{told}\n".encode())


if __name__ == "__main__":
    main(int(sys.argv[1]))
