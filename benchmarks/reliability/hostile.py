"""What do folders and files cost that were made to harm? Time and peak memory of the command that meets each.

    python benchmarks/reliability/hostile.py            writes benchmarks/results/hostile.json
    python benchmarks/reliability/hostile.py --quick    every tenth, written nowhere

The folders and files are those of the tests (weights, configs, tokenizers), and files of data and templates
besides. Each is given to the command that a user would type. It must end with exit code 2 and the sentence of an error,
or well, and with no traceback. Time and memory are of the largest process, beside those of the same command with a
sound folder. Exits with 1 when a command ends otherwise, or takes more than it may.
"""

import argparse
import bz2
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

from safetensors.torch import save_file
from tests.models import tiny
from tests.models.test_hostile_config import CONFIGS, TOKENIZERS, WORDS
from tests.models.test_hostile_folder import HARM

from common import RESULTS, machine
from reliability.kills import below

MOST_SECONDS, MOST_MIB = 5.0, 500.0  # beyond a sound folder
CONFIG = tiny.llama()
BOMB = 2**28  # bytes that a small file unpacks to

DATA: dict[str, Callable[[], tuple[str, bytes]]] = {
    "a bomb in gzip": lambda: ("x.jsonl.gz", gzip.compress(b"[" * BOMB)),
    "a bomb in bzip2": lambda: ("x.jsonl.bz2", bz2.compress(b"[" * BOMB)),
    "one line of 100 MB": lambda: ("x.jsonl", b'{"text": "' + b"a" * 10**8),
    "deep JSON": lambda: ("x.jsonl", b'{"text": ' + b"[" * 10**6),
    "NUL bytes": lambda: ("x.jsonl", b"\0" * 10**6),
    "half a character": lambda: ("x.jsonl", b'{"text": "\\ud800"}'),
    "a number of a million digits": lambda: ("x.jsonl", b'{"text": "a", "n": ' + b"9" * 10**6 + b"}"),
    "a text that is a number": lambda: ("x.jsonl", b'{"text": 7}'),
    "messages that are a text": lambda: ("x.jsonl", b'{"messages": "hello"}'),
    "a role that is none": lambda: ("x.jsonl", b'{"messages": [{"role": "boss", "content": "a"}]}'),
    "a parquet file cut short": lambda: ("x.parquet", b"PAR1" + b"\0" * 1000),
    "a pickle": lambda: ("x.jsonl", b"\x80\x02cos\nsystem\n(S'false'\ntR."),
    "no gzip at all": lambda: ("x.jsonl.gz", b"plain"),
    "a CSV with a quote that never ends": lambda: ("x.csv", b'text\n"' + b"a,b\n" * 10**6),
    "an empty file": lambda: ("x.jsonl", b""),
    "a web page": lambda: ("x.jsonl", b"<!DOCTYPE html><html>rate limited</html>"),
}
TEMPLATES = {
    "an endless loop": "{% for a in range(10**9) %}{% for b in range(10**9) %}{% endfor %}{% endfor %}",
    "a text of gigabytes": "{{ 'a' * 10**10 }}",
    "a list of gigabytes": "{{ ['a'] * 10**9 }}",
    "a way to the interpreter": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a file": "{% include '/etc/passwd' %}",
    "a syntax error": "{% for %}",
    "nothing": "",
    "an error of its own": "{{ raise_exception('no') }}",
}
CHATS = '{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b a"}]}\n'


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every tenth")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FIVEFOLD_CACHE"] = str(Path(folder, "cache"))
        sound = {kind: measured(command) for kind, command in sound_commands(Path(folder))}
        cases = []
        for number, (kind, name, command) in enumerate(all_cases(Path(folder))):
            if not args.quick or number % 10 == 0:
                cases.append(judged(kind, name, measured(command), sound[kind]))
    result: dict[str, Any] = {"machine": machine(), "sound": sound, "cases": cases}
    if not args.quick:
        (RESULTS / "hostile.json").write_text(json.dumps(result, indent=1) + "\n")
    good = sum(case["good"] for case in cases)
    beyond = f"within {MOST_SECONDS:g} s and {MOST_MIB:g} MiB beyond a sound one"
    print(f"{good} of {len(cases)} ended in a sentence, {beyond}")
    return 0 if good == len(cases) else 1


def judged(kind: str, name: str, found: dict[str, Any], sound: dict[str, Any]) -> dict[str, Any]:
    """What became of a case, and whether that is well."""
    dear = found["seconds"] - sound["seconds"] > MOST_SECONDS or found["mib"] - sound["mib"] > MOST_MIB
    good = found["code"] in (0, 2) and not found["traceback"] and not dear
    case = {"kind": kind, "name": name, "good": good, **found}
    print(json.dumps(case), flush=True)
    return case


def measured(command: list[str]) -> dict[str, Any]:
    """Run `fivefold` with these arguments: exit code, seconds, MiB of the largest process, the first line of errors."""
    with tempfile.TemporaryFile() as out:
        started, most = time.monotonic(), 0.0
        with subprocess.Popen([sys.executable, "-m", "fivefold", *command], stdout=out, stderr=out) as process:
            while process.poll() is None:
                most = max(most, *map(mib, [process.pid, *below(process.pid)]))
                time.sleep(0.05)
        seconds = time.monotonic() - started
        out.seek(0)
        text = out.read().decode(errors="replace")
    said = next(iter(text.splitlines()), "") if process.returncode else ""
    return {
        "code": process.returncode, "seconds": round(seconds, 2), "mib": round(most), "traceback": "Traceback" in text,
        "said": said[:200],
    }  # fmt: skip


def mib(pid: int) -> float:
    """The peak of a process's memory so far; 0 of one that is gone."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024
    return 0.0


def sound_commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The same commands with nothing wrong. Each runs twice: the first fills the cache."""
    for _ in range(2):
        yield "weights", ["evaluate", str(model(folder / "sound")), "--text", str(notes(folder))]
        yield "config", ["doctor", str(folder / "sound")]
        yield "tokenizer", data_of(folder, "sound", folder / "sound", chats(folder))
        yield "data", data_of(folder, "sound", folder / "sound", chats(folder))
        yield "template", data_of(folder, "sound", folder / "sound", chats(folder))


def all_cases(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, name and command of each case, whose files are written here."""
    for number, name in enumerate(HARM):
        place = model(folder / f"weights-{number}" / "model")
        HARM[name](place)
        yield "weights", name, ["evaluate", str(place), "--text", str(notes(folder))]
    for number, name in enumerate(CONFIGS):
        place = folder / f"config-{number}"
        place.mkdir()
        CONFIGS[name](place / "config.json")
        yield "config", name, ["doctor", str(place)]
    for number, name in enumerate(TOKENIZERS):
        place = model(folder / f"tokenizer-{number}")
        (place / "tokenizer.json").unlink()
        TOKENIZERS[name](place / "tokenizer.json")
        yield "tokenizer", name, data_of(folder, f"tokenizer-{number}", place, chats(folder))
    for number, name in enumerate(DATA):
        place = folder / f"data-{number}"
        place.mkdir()
        called, content = DATA[name]()
        (place / called).write_bytes(content)
        yield "data", name, data_of(folder, f"data-{number}", folder / "sound", place / called)
    for number, name in enumerate(TEMPLATES):
        place = model(folder / f"template-{number}")
        (place / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
        yield "template", name, data_of(folder, f"template-{number}", place, chats(folder))


def model(folder: Path) -> Path:
    """A sound folder: config, weights and a tokenizer of two words."""
    if not folder.exists():
        folder.mkdir(parents=True)
        CONFIG.save_pretrained(folder)
        weights = {name: each.detach().clone() for name, each in tiny.filled(CONFIG).named_parameters()}
        save_file(weights, folder / "model.safetensors")
        (folder / "tokenizer.json").write_text(json.dumps(WORDS | {"pre_tokenizer": {"type": "Whitespace"}}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def data_of(folder: Path, name: str, tokenizer: Path, file: Path) -> list[str]:
    """`fivefold data` of a file with the tokenizer of a folder."""
    run = folder / f"{name}.yaml"
    run.write_text(json.dumps({
        "tokenizer": {"name_or_path": str(tokenizer)}, "data": {"train": str(file), "validation": 0, "seq_length": 64},
    }))  # fmt: skip
    return ["data", str(run)]


def notes(folder: Path) -> Path:
    """A text."""
    (folder / "notes.txt").write_text("a " * 500)
    return folder / "notes.txt"


def chats(folder: Path) -> Path:
    """Conversations."""
    (folder / "chats.jsonl").write_text(CHATS * 50)
    return folder / "chats.jsonl"


if __name__ == "__main__":
    sys.exit(main())
