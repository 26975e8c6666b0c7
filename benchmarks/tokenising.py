"""Memory and time from texts on the disk to packed rows, beside `datasets.map` and a pool of `encode_batch`.

    python benchmarks/tokenising.py                    100 MB in each format; writes benchmarks/results/tokenising.json
    python benchmarks/tokenising.py --megabytes 1000 --repeats 1 --formats txt --contenders fivefold --add
    python benchmarks/tokenising.py --text FILE        another text than Python's standard library, over and over
    python benchmarks/tokenising.py --write-docs       the results into docs/evidence/tokenising.md
    python benchmarks/tokenising.py --quick            1 MB, once; written nowhere

- **fivefold**: what `fivefold train` does before its first step: read, tokenise, hold 1% out, pack, index; one process.
- **datasets.map**: the same tokenizer through `transformers`, batched, a process for each core; nothing is packed.
- **encode_batch**: what Megatron-LM's `preprocess_data` does: a pool of one process for each core encodes records, and
  the tokens are written to one file.

Every run is a fresh process with an empty cache, which has loaded the tokenizer when the clock starts. The contenders
take turns. Memory is the peak of all processes of a run together (proportional set size, looked at every 200 ms), of
fivefold no less than the kernel's own peak of its process. `limit` is 1 GB and 20 bytes for each token of the longest
document.
"""

import argparse
import csv
import gzip
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fivefold.config import RunConfig
from fivefold.data import formats, prepare
from fivefold.data.source import Source, resolve
from fivefold.data.tokenizer import find_tokenizer
from pages import put_between

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "tokenising.md"
RESULT = Path(__file__).parent / "results" / "tokenising.json"
CORES = len(os.sched_getaffinity(0))
BEGIN, END = "<!-- table: python benchmarks/tokenising.py --write-docs -->", "<!-- end of tokenising -->"
FORMATS = ("txt", "jsonl", "csv", "parquet", "jsonl.gz", "jsonl.zst")
CONTENDERS = ("fivefold", "datasets.map", "encode_batch")
CHARACTERS = 2_000  # of a document, roughly
MIB = 2**20


# ---- the texts ------------------------------------------------------------------------------------------------------


def documents(text: str, megabytes: float) -> Iterator[str]:
    """Pieces of a text, whole lines, over and over, until they are so much."""
    left = megabytes * 1e6
    lines, held = cycle(text.splitlines(keepends=True)), ""
    while left > 0:
        held += next(lines)
        if len(held) >= CHARACTERS:
            left -= len(held.encode())
            yield held
            held = ""


def write(path: Path, texts: Iterator[str]) -> None:
    """The texts in the format that the name says; of a .txt one document."""
    kind = path.name.partition(".")[2]
    if kind == "parquet":
        return write_parquet(path, texts)
    opened: Any = {"gz": gzip.open, "zst": zstd_open}.get(path.suffix[1:], open)
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        if kind == "txt":
            file.writelines(texts)
        elif kind == "csv":
            csv.writer(file).writerow(["text"])
            csv.writer(file).writerows([text] for text in texts)
        else:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return None


def zstd_open(path: Path, mode: str, **options: Any) -> Any:
    stream = import_module("pyarrow").output_stream(str(path), compression="zstd")
    return io.TextIOWrapper(stream, **options)


def write_parquet(path: Path, texts: Iterator[str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetWriter(path, pa.schema([("text", pa.string())])) as writer:
        while some := [text for text, _ in zip(texts, range(10_000), strict=False)]:
            writer.write_table(pa.table({"text": some}))


def standard_library(cache: Path) -> str:
    files = resolve(Source("python-stdlib", "text"), formats.discover(), cache).files
    return "".join(path.read_text(encoding="utf-8") for path, _ in files)


# ---- the contenders, each in a process of its own ---------------------------------------------------------------


def cpu() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def config_of(path: Path, tokenizer: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": "demo"},
            "tokenizer": {"name_or_path": tokenizer},
            "data": {"train": str(path), "validation": 0.01, "seq_length": 2048},
        }
    )


def of_fivefold(path: Path, tokenizer: str, out: Path) -> dict[str, Any]:
    find_tokenizer(tokenizer, model="", corpus=(), root=out)  # others have loaded it too
    before, began = cpu(), time.perf_counter()
    data = prepare(config_of(path, tokenizer), cache=out)
    again = time.perf_counter()
    spent = cpu()
    prepare(config_of(path, tokenizer), cache=out)
    again_seconds = time.perf_counter() - again
    offsets = import_module("numpy").load(next(out.glob("stores/*/offsets.npy")))
    return {
        "seconds": again - began,
        "cpu_seconds": spent - before,
        "again_seconds": again_seconds,
        "tokens": data.counts.tokens,
        "longest": int((offsets[1:] - offsets[:-1]).max()),
        "own_peak": field_of("/proc/self/status", "VmHWM:"),
    }


def of_datasets(path: Path, tokenizer: str, out: Path) -> dict[str, Any]:
    import datasets
    from transformers import AutoTokenizer

    kind = {"jsonl": "json", "txt": "text"}.get(kind := path.name.split(".")[1], kind)
    options = {"sample_by": "document"} if kind == "text" else {}
    encode = AutoTokenizer.from_pretrained(tokenizer)
    before, began = cpu(), time.perf_counter()
    rows = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(out), **options)
    rows = rows.map(
        lambda some: {"input_ids": encode(some["text"], add_special_tokens=False)["input_ids"]},
        batched=True, num_proc=min(CORES, len(rows)), remove_columns="text",
    )  # fmt: skip
    return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu() - before}


def of_pool(path: Path, tokenizer: str, out: Path) -> dict[str, Any]:
    import numpy as np

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process uses one core
    before, began = cpu(), time.perf_counter()
    with multiprocessing.Pool(CORES, _load, (tokenizer,)) as pool, (out / "tokens.bin").open("wb") as file:
        for some in pool.imap(_encode, records(path), chunksize=1):
            for ids in some:
                file.write(np.array([*ids, 0], np.uint16).tobytes())
    return {"seconds": time.perf_counter() - began, "cpu_seconds": cpu() - before}


def records(path: Path) -> Iterator[list[str]]:
    """Lines of a .jsonl, 32 together; the one document of a .txt."""
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".txt":
            yield [json.dumps({"text": file.read()})]
        while some := [line for line, _ in zip(file, range(32), strict=False)]:
            yield some


def _load(folder: str) -> None:
    from tokenizers import Tokenizer

    global _tokenizer
    _tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")


def _encode(lines: list[str]) -> list[list[int]]:
    return [each.ids for each in _tokenizer.encode_batch([json.loads(line)["text"] for line in lines])]


RUNS = {"fivefold": of_fivefold, "datasets.map": of_datasets, "encode_batch": of_pool}


# ---- measuring ------------------------------------------------------------------------------------------------------


def run(contender: str, path: Path, tokenizer: str) -> dict[str, Any]:
    """One turn: what the contender says, and the most memory that it had."""
    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        command = [sys.executable, __file__, "--run", contender, str(path), tokenizer, out]
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        with Path(out, "said").open("w") as said:
            process = subprocess.Popen(command, stdout=said, env=environment)
        most = 0
        while process.poll() is None:
            most = max(most, memory(process.pid))
            time.sleep(0.2)
        if process.returncode:
            raise SystemExit(f"{contender} ended with {process.returncode} on {path.name}")
        found: dict[str, Any] = json.loads(Path(out, "said").read_text().splitlines()[-1])
        return found | {"peak": max(most, found.get("own_peak", 0))}


def memory(pid: int) -> int:
    """Bytes of a process and of those that came from it."""
    total, pids = 0, [pid]
    while pids:
        at = pids.pop()
        with suppress(OSError, StopIteration, ValueError):
            total += field_of(f"/proc/{at}/smaps_rollup", "Pss:")
            for task in Path(f"/proc/{at}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
    return total


def field_of(file: str, name: str) -> int:
    """Bytes, of a file of kilobytes."""
    return 1024 * int(next(line for line in Path(file).read_text().splitlines() if line.startswith(name)).split()[1])


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    text = args.text.read_text(encoding="utf-8") if args.text else standard_library(folder)
    Path(folder, "learn.txt").write_text(text, encoding="utf-8")
    learned = prepare(config_of(folder / "learn.txt", args.tokenizer), cache=folder / "cache").tokenizer.folder
    for kind in args.formats:
        path = folder / f"texts.{kind}"
        write(path, documents(text, args.megabytes))
        allowed = [each for each in args.contenders if each == "fivefold" or kind in READ_BY[each]]
        turns: dict[str, list[dict[str, Any]]] = {each: [] for each in allowed}
        for repeat in range(args.repeats):
            for each in allowed[:: -1 if repeat % 2 else 1]:
                turns[each].append(run(each, path, str(learned)))
                print(kind, each, json.dumps(turns[each][-1]), flush=True)
        size = path.stat().st_size
        for each, found in turns.items():
            middle = {key: median(turn[key] for turn in found) for key in found[0]}
            what = {"format": kind, "megabytes": args.megabytes, "on_disk": size, "tokenizer": args.tokenizer}
            yield {**what, "contender": each, "turns": len(found), **middle}
        path.unlink()


READ_BY = {"datasets.map": ("txt", "jsonl", "csv", "parquet"), "encode_batch": ("txt", "jsonl")}


# ---- results --------------------------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    numbers = "turns | seconds | MB/s | CPU seconds | peak, MiB | limit, MiB | again, s"
    lines = [f"| text | tokenizer | contender | {numbers} |", "| --- | --- | --- " + "| ---: " * 7 + "|"]
    for row in rows:
        limit = f"{(1e9 + 20 * row['longest']) / MIB:,.0f}" if "longest" in row else ""
        again = f"{row['again_seconds']:.2f}" if "again_seconds" in row else ""
        spent = f"{row['cpu_seconds']:,.0f}" if "cpu_seconds" in row else ""
        speed = f"{row['seconds']:,.1f} | {row['megabytes'] / row['seconds']:.2f} | {spent}"
        what = f"{row['megabytes']:,g} MB, {row['format']} | `{row['tokenizer']}` | {row['contender']} | {row['turns']}"
        lines.append(f"| {what} | {speed} | {row['peak'] / MIB:,.0f} | {limit} | {again} |")
    return "\n".join(lines)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100, help="of text")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each contender")
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--tokenizer", default="train:8192", help="byte, train:N or a folder")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--folder", type=Path, help="where the texts are written, among temporary files else")
    parser.add_argument("--add", action="store_true", help="keep the rows of earlier results")
    parser.add_argument("--write-docs", action="store_true", help="the results into docs/evidence/tokenising.md")
    parser.add_argument("--quick", action="store_true", help="1 MB, once")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        contender, path, tokenizer, out = args.run
        print(json.dumps(RUNS[contender](Path(path), tokenizer, Path(out))))
        return 0
    if args.write_docs:
        put_between(BEGIN, END, table(json.loads(RESULT.read_text())["rows"]), PAGE)
        return 0
    if args.quick:
        args.megabytes, args.repeats = 1, 1
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = list(measure(args, Path(folder)))
    print(table(rows))
    if not args.quick:
        from common import machine  # which has torch, and the contenders need none

        before = json.loads(RESULT.read_text())["rows"] if args.add and RESULT.exists() else []
        RESULT.write_text(json.dumps({"machine": machine(), "rows": [*before, *rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
