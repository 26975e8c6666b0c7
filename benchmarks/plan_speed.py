"""How long `fivefold plan` takes: its search on one core, and the whole command.

    python -m benchmarks.plan_speed [--write benchmarks/results/plan_speed.json]

Each question runs in a process of its own, with an empty cache. Of the search, processor seconds are told; of the
command, seconds on the clock, which mean nothing beside other work, and processor seconds.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

QUESTIONS = (
    ("llama-3.1-70b", "8x8xH100", 8192, 256),
    ("mixtral-8x7b", "8x8xH100", 8192, 256),
    ("llama-3.1-405b", "2048x8xH100", 8192, 2048),
    ("llama-3.1-405b", "2048x8xH100", 8192, 16384),
    ("llama-3.1-405b", "2048x8xH100", 8192, 65536),
)
SEARCH = """
import json, sys, time
from fivefold.planner.estimate import Workload
from fivefold.planner.plan import price_list
from fivefold.planner.search import search
model, cluster, length, rows = json.loads(sys.argv[1])
start = time.process_time()
found = search(price_list(model, cluster), Workload(length, rows))
print(json.dumps([found.legal, time.process_time() - start]))
"""


def spent(command: list[str], cache: str) -> tuple[str, dict[str, float]]:
    """What a command prints, and the seconds that it took."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    env = os.environ | {"FIVEFOLD_CACHE": cache}
    said = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True, env=env).stdout
    after, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return said, {"clock_seconds": round(clock, 2), "processor_seconds": round(processor, 2)}


def measured(question: tuple[str, str, int, int]) -> dict[str, Any]:
    """Of one question: the command, then the search alone."""
    model, cluster, length, rows = question
    command = ["-m", "fivefold", "plan", model, "--cluster", cluster, "--seq-length", str(length)]
    command += ["--global-batch-size", str(rows)]
    with tempfile.TemporaryDirectory() as cache:
        _, whole = spent(command, cache)
        legal, seconds = json.loads(spent(["-c", SEARCH, json.dumps(question)], cache)[0])
    of_search = {"layouts": legal, "search_processor_seconds": round(seconds, 2)}
    return {"model": model, "cluster": cluster, "rows": rows, "command": whole, **of_search}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    file, results = parser.parse_args().write, []
    for question in QUESTIONS:
        results.append(measured(question))
        print(json.dumps(results[-1]), flush=True)
    if file:
        file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
