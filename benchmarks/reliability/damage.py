"""Is every damage to a checkpoint refused, and the tensor named? Is what is damaged in the cache made again?

    python benchmarks/reliability/damage.py            writes benchmarks/results/damage.json
    python benchmarks/reliability/damage.py --quick    a tenth of it, written nowhere

A small Llama is trained a little under shard2 and saved twice. 1,000 flipped bits, 200 cut files and 50 files or
tensors in another's place are each done to the later step and looked at as `fivefold train` does before a weight
changes. Of a cache with the rows of two tokenizers and the facts of a model, 500 bits of the tokenizers and 500 of the
rest are flipped: rows and facts must be those from before. Exits with 1 when a damage passes, or is named wrongly.
"""

import argparse
import io
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from common import RESULTS, machine
from fivefold.checkpoint import Checkpoint, CorruptCheckpoint, step_folder
from fivefold.config import RunConfig
from fivefold.data import prepare
from fivefold.models.config_facts import facts_of_config

STEPS = (2, 4)
COUNTS = {"flips": 1000, "cuts": 200, "swaps": 50, "flips of tokenizers": 500, "flips of the rest of the cache": 500}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the damages")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        older, newer = train(Path(folder))
        cache, rng = Cache(Path(folder)), random.Random(1)
        damages: dict[str, Callable[[], tuple[bool, bool | None]]] = {
            "flips": lambda: flip(newer, rng),
            "cuts": lambda: cut(newer, rng),
            "swaps": lambda: swap(newer, older, rng),
            "flips of tokenizers": lambda: (cache.flip(rng, of_tokenizers=True), None),
            "flips of the rest of the cache": lambda: (cache.flip(rng, of_tokenizers=False), None),
        }
        assert damages.keys() == COUNTS.keys()
        outcomes = {
            kind: [damage() for _ in range(COUNTS[kind] // (10 if args.quick else 1))]
            for kind, damage in damages.items()
        }
        assert look(newer) == "", "the damages were not undone"
        size = sum(path.stat().st_size for path in newer.rglob("*") if path.is_file())
    result: dict[str, Any] = {
        "machine": machine(),
        "bytes": size,
        "minutes": (time.monotonic() - started) / 60,
        **{
            kind: {
                "done": len(all_of_it),
                "refused": sum(refused for refused, _ in all_of_it),
                "in tensors": sum(named is not None for _, named in all_of_it),
                "tensor named": sum(named is True for _, named in all_of_it),
            }
            for kind, all_of_it in outcomes.items()
        },
    }
    print(json.dumps(result, indent=1))
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "damage.json").write_text(json.dumps(result, indent=1) + "\n")
    perfect = all(refused and named is not False for all_of_it in outcomes.values() for refused, named in all_of_it)
    done = ", ".join(f"{result[kind]['refused']} of {result[kind]['done']} {kind}" for kind in outcomes)
    print(f"refused or mended: {done}; {'each' if perfect else 'not each'} names the tensor that it hit")
    return 0 if perfect else 1


def train(folder: Path) -> tuple[Path, Path]:
    """The checkpoints of two steps of one run."""
    keys = [
        f"run.dir={folder}", "run.name=run", f"train.max_steps={STEPS[1]}", f"checkpoint.every={STEPS[0]}",
        "eval.every=0", "sample.every=0", "train.global_batch_size=2", "train.micro_batch_size=1",
        "model.overrides.hidden_size=64", "model.overrides.intermediate_size=96", "model.overrides.head_dim=16",
        "data.seq_length=64", "tokenizer.name_or_path=byte",
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "fivefold", "train", *keys], check=True, stdout=subprocess.DEVNULL)
    older, newer = (folder / "run" / "checkpoints" / step_folder(step) for step in STEPS)
    return older, newer


def look(folder: Path) -> str:
    """What is found wrong; empty when nothing is."""
    try:
        return next(Checkpoint.open(folder).damages(), "")
    except CorruptCheckpoint as damage:
        return damage.what


class Cache:
    """A cache that two runs and a model have filled. One learns its tokenizer, the other has one in a folder."""

    def __init__(self, folder: Path) -> None:
        self._cache, self._whole = folder / "cache", folder / "whole"
        os.environ["FIVEFOLD_CACHE"] = str(self._cache)
        texts = folder / "texts.jsonl"
        texts.write_text("".join(f'{{"text": "{"word " * (n % 97)}{n}"}}\n' for n in range(997)), encoding="utf-8")
        self._runs = [self._run(texts, "train:300")]
        self._read()
        shutil.copytree(next((self._cache / "tokenizers").glob("train-*")), folder / "tokenizer")
        self._runs.append(self._run(texts, str(folder / "tokenizer")))
        self._expected = self._read()
        shutil.copytree(self._cache, self._whole)

    def flip(self, rng: random.Random, *, of_tokenizers: bool) -> bool:
        """Whether one flipped bit changes nothing that is read."""
        shutil.rmtree(self._cache)
        shutil.copytree(self._whole, self._cache)
        files = [path for path in _files(self._cache) if ("tokenizers" in path.parts) == of_tokenizers]
        file, at, bit = _place(files, rng)
        _xor(file, at, bit)
        with redirect_stderr(io.StringIO()):
            try:
                return self._read() == self._expected
            except Exception as error:
                print(f"{file.relative_to(self._cache)} byte {at} bit {bit}: {type(error).__name__}: {error}")
                return False

    def _run(self, texts: Path, tokenizer: str) -> RunConfig:
        return RunConfig.model_validate({
            "tokenizer": {"name_or_path": tokenizer},
            "data": {"train": str(texts), "seq_length": 64, "validation": 0.1},
        })  # fmt: skip

    def _read(self) -> list[Any]:
        """The rows of the runs, and the facts of the model."""
        found: list[Any] = [facts_of_config("demo", {"hidden_size": 64}).to_json()]
        for run in self._runs:
            data = prepare(run, say=lambda _: None)
            batches = data.train.sequential(data_rank=0, data_ranks=1, micro_batch_size=8, row_multiple=1)
            found += [data.fingerprint, data.tokenizer.vocab_size, [batch.input_ids.tolist() for batch in batches]]
        return found


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)


def _place(files: Sequence[Path], rng: random.Random) -> tuple[Path, int, int]:
    """A bit: file, byte and mask. The file is chosen by size or, every fourth time, whichever."""
    sizes = [path.stat().st_size if rng.random() < 0.75 else 1 for path in files]
    file = rng.choices(files, sizes)[0]
    return file, rng.randrange(file.stat().st_size), 1 << rng.randrange(8)


def flip(folder: Path, rng: random.Random) -> tuple[bool, bool | None]:
    """One bit: (refused, tensor named, None in a header)."""
    file, at, bit = _place(_files(folder), rng)
    _xor(file, at, bit)
    found = look(folder)
    _xor(file, at, bit)
    tensor = next((key for key, start, stop in _tensors(file) if start <= at < stop), None)
    return str(file) in found, None if tensor is None else _said(tensor) in found


def cut(folder: Path, rng: random.Random) -> tuple[bool, bool | None]:
    """A file shortened to a random length; of tensors the first three that are lost with it are named."""
    file = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])
    found = look(folder)
    file.write_bytes(content)
    tensors = list(_tensors(file))
    named = None if not tensors else sum(_said(key) in found for key, _, _ in tensors) >= min(3, len(tensors))
    return str(file) in found, named


def swap(folder: Path, older: Path, rng: random.Random) -> tuple[bool, bool | None]:
    """A safetensors file in the place of another rank's or step's of the same names or shapes, or two tensors of one
    shape exchanged within a file."""
    files = sorted(folder.glob("*.safetensors"))
    file = rng.choice(files)
    content = file.read_bytes()
    if rng.random() < 0.5:
        shutil.copyfile(older / file.name, file)
        named: bool | None = None
        found = look(folder)
    else:
        same = [
            (one, other) for one in _tensors(file) for other in _tensors(file)
            if one[0] < other[0] and one[2] - one[1] == other[2] - other[1]
            and content[one[1] : one[2]] != content[other[1] : other[2]]
        ]  # fmt: skip
        one, other = rng.choice(same)
        mixed = bytearray(content)
        mixed[one[1] : one[2]], mixed[other[1] : other[2]] = content[other[1] : other[2]], content[one[1] : one[2]]
        file.write_bytes(mixed)
        found = look(folder)
        named = _said(one[0]) in found or _said(other[0]) in found
    file.write_bytes(content)
    return str(file) in found, named


def _xor(file: Path, at: int, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ bit]))


def _tensors(file: Path) -> Iterator[tuple[str, int, int]]:
    """(key, first byte, byte after the last) of the tensors of a safetensors file; none in another."""
    if file.suffix != ".safetensors":
        return
    with file.open("rb") as opened:
        start = 8 + struct.unpack("<Q", opened.read(8))[0]
        for key, entry in json.loads(opened.read(start - 8)).items():
            if ":" in key:  # not its checksums
                yield key, start + entry["data_offsets"][0], start + entry["data_offsets"][1]


def _said(key: str) -> str:
    """How an error names the tensor of a key: `weight:NAME[0:4]` is `weight of NAME`."""
    kind, _, name = key.partition("[")[0].partition(":")
    return f"{kind} of {name}"


if __name__ == "__main__":
    sys.exit(main())
