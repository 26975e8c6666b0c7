"""Time and memory of `fivefold data --prepare`, by the number of shards and of workers.

    python benchmarks/prepare.py                     10 GB in 64 shards; writes benchmarks/results/prepare.json
    python benchmarks/prepare.py --gigabytes 2       less text, in as many shards
    python benchmarks/prepare.py --write-docs        the results into docs/evidence/tokenising.md
    python benchmarks/prepare.py --quick             16 MB in 4 shards; written nowhere

A job array is simulated: `--shard i/n` runs for one i after the other, as `fivefold` of its own, with one worker. The
share of a shard is the same text for every n, the total over the most shards; so 64 shards have 64 times the text of
one. For n below the most the first, the middle and the last shard are measured; for the most all are, and the last
joins them. `--all` measures every shard for every n.

The text is this machine's Python standard library, or `--text FILE`, over and over with a number in every line. It is a
.jsonl of records of about 2,000 characters. The tokenizer is trained first. Memory is the peak of all processes of a
command together (proportional set size, looked at every 200 ms).

- **join** is the last shard's time beyond its tokenising: the digest of all text, the store, its rows.
- **as one process**: `fivefold data` without `--prepare` made the same tokens and rows, byte for byte. It is compared
  for the smallest n, and for the most too if `--compare` is given. It runs beside the shards, at the lowest priority.
- **workers** is the time of `--prepare --workers N` over the text of two shares, a cache that is empty each time, for 1
  and 2 workers and for as many as there are cores, repeated in turns. The time includes the start of the processes.
  Their CPU seconds tell more than the time where other things run on the machine.
"""

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from pages import put_between
from tokenising import CHARACTERS, CORES, MIB, cpu, memory, standard_library

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "tokenising.md"
RESULT = Path(__file__).parent / "results" / "prepare.json"
BEGIN, END = "<!-- table: python benchmarks/prepare.py --write-docs -->", "<!-- end of prepare -->"
SHARDS = (1, 4, 16, 64)


def write(path: Path, text: str, size: float) -> None:
    """Records of a text, over and over, until they are so many bytes; every line of the text gets a number."""
    numbered = (f"{number} {line}" for number, line in enumerate(cycle(text.splitlines(keepends=True))))
    with path.open("w", encoding="utf-8") as file:
        held, length, written = [""], 0, 0
        for line in numbered:
            held, length = [*held, line], length + len(line)
            if length >= CHARACTERS:
                written += file.write(json.dumps({"text": "".join(held)}) + "\n")
                held, length = [], 0
            if written >= size:
                return


class Bench:
    """Commands over one text, with caches below `folder`."""

    def __init__(self, folder: Path, text: str, tokenizer: str) -> None:
        self.folder, self.text = folder, text
        write(folder / "learn.jsonl", text, 8e6)
        self.tokenizer = tokenizer
        if tokenizer.startswith("train:"):
            self.command(folder / "learn.jsonl", "learn", "--rows", "0")
            self.tokenizer = str(next((folder / "learn" / "tokenizers").glob("train-*")))

    def corpus(self, size: float) -> Path:
        """A file with this much text; the last one is removed."""
        path = self.folder / f"{size:.0f}.jsonl"
        if not path.exists():
            for old in self.folder.glob("[0-9]*.jsonl"):
                old.unlink()
            write(path, self.text, size)
        return path

    def command(self, path: Path, cache: str, *options: str) -> dict[str, Any]:
        """Run `fivefold data`: its seconds, its memory, and what `--json` says."""
        keys = [f"data.train={path}", f"tokenizer.name_or_path={self.tokenizer}", "data.validation=0.01"]
        command = [sys.executable, "-m", "fivefold", "data", *keys, "data.seq_length=2048", *options]
        out, text = self.folder / f"said-{cache}.json", self.folder / f"log-{cache}"
        environment = os.environ | {"FIVEFOLD_CACHE": str(self.folder / cache)}
        began, before, most = time.perf_counter(), cpu(), 0
        with text.open("w") as log:
            process = subprocess.Popen([*command, "--json", str(out)], env=environment, stdout=log, stderr=log)
            while process.poll() is None:
                most = max(most, memory(process.pid))
                time.sleep(0.2)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}\n{text.read_text()}")
        said = json.loads(out.read_text())
        return {"seconds": time.perf_counter() - began, "cpu": cpu() - before, "peak": most, "said": said}

    def alone(self, path: Path) -> dict[str, Any]:
        """One process over a whole text, at the lowest priority."""
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread, and of what it starts
        return self.command(path, "alone", "--rows", "0")

    def prepare(self, path: Path, cache: str, workers: int, shard: str = "") -> dict[str, Any]:
        """`--prepare`, with the seconds that went into tokenising."""
        found = self.command(
            path, cache, "--prepare", "--workers", str(workers), *(["--shard", shard] if shard else [])
        )
        return {**found, "tokenising": found["said"]["seconds"], "bytes": found["said"]["bytes_tokenised"]}

    def forget(self, cache: str) -> None:
        shutil.rmtree(self.folder / cache, ignore_errors=True)

    def same(self, one: str, other: str) -> bool:
        """True if two caches hold the same tokens and rows, byte for byte."""
        roots = [self.folder / one, self.folder / other]
        names = [
            sorted(
                path.relative_to(root)
                for kind in ("stores", "rows")
                for path in (root / kind).rglob("*")
                if path.is_file() and path.suffix != ".lock"
            )
            for root in roots
        ]
        return names[0] == names[1] and all(
            filecmp.cmp(roots[0] / name, roots[1] / name, shallow=False) for name in names[0]
        )


def shards(bench: Bench, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each number of shards of one size."""
    share = args.gigabytes * 1e9 / max(args.shards)
    for number in args.shards:
        path, cache = bench.corpus(share * number), f"cache{number}"
        is_whole = args.all or number in (min(args.shards), max(args.shards))
        measured = range(number) if is_whole else sorted({0, number // 2, number - 1})
        turns = []
        is_compared = is_whole and (number == min(args.shards) or args.compare)
        beside = ThreadPoolExecutor(1)
        one_process = beside.submit(bench.alone, path) if is_compared else None
        for at in measured:
            turns.append(bench.prepare(path, cache, 1, f"{at}/{number}"))
            print(f"{at}/{number}", json.dumps({k: v for k, v in turns[-1].items() if k != "said"}), flush=True)
        join = turns[-1]["seconds"] - turns[-1]["tokenising"] if is_whole else None
        compared = None
        if one_process:
            alone = one_process.result()
            print("one process", json.dumps({k: v for k, v in alone.items() if k != "said"}), flush=True)
            compared = {**alone, "same": bench.same("alone", cache), "said": None}
            if not compared["same"]:
                raise SystemExit(f"{number} shards and one process made other tokens or rows: {bench.folder}")
        bench.forget(cache)
        bench.forget("alone")
        yield {
            "shards": number,
            "measured": len(turns),
            "bytes": path.stat().st_size,
            "per_shard": median(turn["bytes"] for turn in turns),
            "tokenising": median(turn["tokenising"] for turn in turns),
            "slowest": max(turn["tokenising"] for turn in turns),
            "peak": median(turn["peak"] for turn in turns[: -1 if join else None] or turns),
            "join": join,
            "join_peak": turns[-1]["peak"] if join else None,
            "one_process": compared,
        }


def workers(bench: Bench, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each number of workers."""
    path = bench.corpus(2 * args.gigabytes * 1e9 / max(args.shards))
    numbers = sorted({1, 2, CORES})
    turns: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
    for repeat in range(args.repeats):
        for number in numbers[:: -1 if repeat % 2 else 1]:
            turns[number].append(bench.prepare(path, "workers", number))
            bench.forget("workers")
            found = turns[number][-1]
            print(f"{number} workers", json.dumps({k: v for k, v in found.items() if k != "said"}), flush=True)
    middle = {number: median(turn["tokenising"] for turn in found) for number, found in turns.items()}
    return [
        {
            "workers": number,
            "bytes": path.stat().st_size,
            "tokenising": middle[number],
            "speedup": middle[1] / middle[number],
            "cpu": median(turn["cpu"] for turn in turns[number]),
            "peak": median(turn["peak"] for turn in turns[number]),
        }
        for number in numbers
    ]


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| shards | measured | text, MB | a shard, MB | tokenising, s | slowest, s | peak, MiB | join, s | join, MiB | "
        "as one process |",
        "| ---: " * 9 + "| --- |",
    ]
    for row in result["shards"]:
        join = f"{row['join']:,.1f} | {row['join_peak'] / MIB:,.0f}" if row["join"] else " | "
        same = "the same bytes" if row["one_process"] else ""
        lines.append(
            f"| {row['shards']} | {row['measured']} | {row['bytes'] / 1e6:,.0f} | {row['per_shard'] / 1e6:,.0f} | "
            f"{row['tokenising']:,.1f} | {row['slowest']:,.1f} | {row['peak'] / MIB:,.0f} | {join} | {same} |"
        )
    lines += [
        "",
        "| workers | text, MB | tokenising, s | times one worker | CPU seconds | peak, MiB |",
        "| ---: " * 6 + "|",
    ]
    lines += [
        f"| {row['workers']} | {row['bytes'] / 1e6:,.0f} | {row['tokenising']:,.1f} | {row['speedup']:.2f} | "
        f"{row['cpu']:,.0f} | "
        f"{row['peak'] / MIB:,.0f} |"
        for row in result["workers"]
    ]
    return "\n".join(lines)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=10, help="of text over the most shards")
    parser.add_argument("--shards", type=int, nargs="+", default=SHARDS)
    parser.add_argument("--repeats", type=int, default=3, help="turns of each number of workers")
    parser.add_argument("--all", action="store_true", help="every shard of every number")
    parser.add_argument("--compare", action="store_true", help="with one process over all text of the most shards too")
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--tokenizer", default="train:8192", help="byte, train:N or a folder")
    parser.add_argument("--folder", type=Path, help="where texts and caches are, among temporary files else")
    parser.add_argument("--write-docs", action="store_true", help="the results into docs/evidence/tokenising.md")
    parser.add_argument("--quick", action="store_true", help="16 MB in 1 and 4 shards, once")
    args = parser.parse_args(given)
    if args.quick:
        args.gigabytes, args.shards, args.repeats, args.compare = 0.016, (1, 4), 1, True
    return args


def main() -> int:
    """The command."""
    args = arguments()
    if args.write_docs:
        put_between(BEGIN, END, table(json.loads(RESULT.read_text())), PAGE)
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        text = args.text.read_text(encoding="utf-8") if args.text else standard_library(folder / "learn")
        bench = Bench(folder, text, args.tokenizer)
        result = {"workers": workers(bench, args), "shards": list(shards(bench, args))}
    print(table(result))
    if not args.quick:
        from common import machine  # which has torch, and tokenising needs none

        RESULT.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
