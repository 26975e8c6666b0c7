"""How long `fivefold plan` takes: its search on one core, and the whole command, asked for the first time and again.

    python -m benchmarks.plan_speed [--write benchmarks/results/plan_speed.json]

Each question runs in a process of its own, with a cache that is empty the first time. Of the search, processor seconds
are told; of the command, seconds on the clock, which mean nothing beside other work, and processor seconds.
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
PAGE = QUESTIONS[0]  # with --html
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


def measured(question: tuple[str, str, int, int], folder: str, *, with_page: bool) -> dict[str, Any]:
    """Of one question: the search alone, then the command twice."""
    model, cluster, length, rows = question
    command = ["-m", "fivefold", "plan", model, "--cluster", cluster, "--seq-length", str(length)]
    command += ["--global-batch-size", str(rows)] + ["--html", f"{folder}/plan.html"] * with_page
    with tempfile.TemporaryDirectory() as cache:
        _, first = spent(command, cache)
        _, again = spent(command, cache)
        found = {"model": model, "cluster": cluster, "rows": rows, "html": with_page, "first": first, "again": again}
        if not with_page:
            legal, seconds = json.loads(spent(["-c", SEARCH, json.dumps(question)], cache)[0])
            found |= {"layouts": legal, "search_processor_seconds": round(seconds, 2)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    file, results = parser.parse_args().write, []
    with tempfile.TemporaryDirectory() as folder:
        for question, with_page in (*((each, False) for each in QUESTIONS), (PAGE, True)):
            results.append(measured(question, folder, with_page=with_page))
            print(json.dumps(results[-1]), flush=True)
    if file:
        file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
