"""How long `fivefold plan` takes: processor seconds of its search, and of the whole command.

    python -m benchmarks.plan_speed

Each question runs in a process of its own. Seconds are those of one core, its user and system time; other work on the
machine changes them less than time on the clock, but not by nothing.
"""

import json
import resource
import subprocess
import sys

QUESTIONS = (
    ("llama-3.1-70b", "8x8xH100", 8192, 256),
    ("mixtral-8x7b", "8x8xH100", 8192, 256),
    ("llama-3.1-405b", "2048x8xH100", 8192, 2048),
    ("llama-3.1-405b", "2048x8xH100", 8192, 16384),
    ("llama-3.1-405b", "2048x8xH100", 8192, 65536),
)
SEARCH = """
import json, sys, time
start = time.process_time()
from fivefold.planner.estimate import Workload
from fivefold.planner.plan import price_list
from fivefold.planner.search import search
model, cluster, length, rows = json.loads(sys.argv[1])
imported = time.process_time()
found = search(price_list(model, cluster), Workload(length, rows))
print(json.dumps([found.legal, imported - start, time.process_time() - imported]))
"""


def spent(command: list[str]) -> tuple[str, float]:
    """What a command prints, and the processor seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return said, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    for model, cluster, length, rows in QUESTIONS:
        said, _ = spent([sys.executable, "-c", SEARCH, json.dumps([model, cluster, length, rows])])
        legal, imports, search = json.loads(said)
        command = ["plan", model, "--cluster", cluster, "--seq-length", str(length), "--global-batch-size", str(rows)]
        _, whole = spent([sys.executable, "-m", "fivefold", *command])
        print(
            f"{model} on {cluster}, {rows:,} rows: {legal:,} layouts searched in {search:.1f} s "
            f"({legal / search:,.0f} a second), imports {imports:.1f} s, the command {whole:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
