"""A tiny model learns to follow instructions, then to prefer a manner of answering (docs/evidence/instruct.md).

    python benchmarks/instruct.py            some 15 minutes on 2 idle cores; writes results/instruct.json, the
                                             tables and the picture of docs/evidence/instruct.md
    python benchmarks/instruct.py --quick    a toy model and few steps, on the screen alone: does it run?

Every step is a command that a user types: `fivefold train` on generated conversations, `fivefold generate --chat` on
questions that are not among them, `fivefold train` with DPO on pairs of answers, from the folder that the first run
exported. Instructions, words and sums are drawn by this file; `KINDS` has all of them.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, machine
from pages import put_between

RESULT = RESULTS / "instruct.json"
DOCS = Path(__file__).parents[1] / "docs" / "evidence"
PAGE, PICTURE = DOCS / "instruct.md", DOCS / "instruct.svg"
BEGIN, END = "<!-- table: python benchmarks/instruct.py -->", "<!-- end of instruct -->"
SEED, HELD_OUT = 1, 10  # one word and one sum of so many is asked about, and trained in no example
MANNER = "Sure: "  # half of the answers begin so; DPO learns to leave it out
SHOWN = ("write lamp in capitals", "say moon twice", "first letter of tree", "last letter of tree",
         "how many letters has bird", "write snow backwards", "7 plus 9")  # fmt: skip


# ---- what is asked ---------------------------------------------------------------------------------------------------


def capitals(word: str) -> tuple[str, str]:
    return f"write {word} in capitals", word.upper()


def twice(word: str) -> tuple[str, str]:
    return f"say {word} twice", f"{word} {word}"


def first(word: str) -> tuple[str, str]:
    return f"first letter of {word}", word[0]


def last(word: str) -> tuple[str, str]:
    return f"last letter of {word}", word[-1]


def letters(word: str) -> tuple[str, str]:
    return f"how many letters has {word}", str(len(word))


def backwards(word: str) -> tuple[str, str]:
    return f"write {word} backwards", word[::-1]


KINDS: dict[str, Callable[[str], tuple[str, str]]] = {
    each.__name__: each for each in (capitals, twice, first, last, letters, backwards)
}
SUM = "sum"


@dataclass(frozen=True)
class Question:
    """One instruction, and its right answer."""

    kind: str
    asked: str
    answer: str

    def is_right(self, said: str) -> bool:
        """In either manner."""
        return said.removeprefix(MANNER) == self.answer


def question(kind: str, rng: random.Random, *, held_out: bool) -> Question:
    """Drawn among those that are trained, or among the others."""
    while True:
        if kind == SUM:
            a, b = rng.randint(0, 20), rng.randint(0, 20)
            about, asked, answer = f"{a}+{b}", f"{a} plus {b}", str(a + b)
        else:
            about = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 5)))
            asked, answer = KINDS[kind](about)
        if is_held_out(about) == held_out:
            return Question(kind, asked, answer)


def is_held_out(about: str) -> bool:
    """Of a word or a sum; words of `SHOWN` are never trained."""
    shown = any(about in each.split() for each in SHOWN) or about == "7+9"
    return shown or random.Random(about).randrange(HELD_OUT) == 0


def questions(count: int, *, held_out: bool) -> list[Question]:
    """So many, every kind alike."""
    rng, kinds = random.Random(SEED + held_out), [*KINDS, SUM]
    return [question(kinds[number % len(kinds)], rng, held_out=held_out) for number in range(count)]


# ---- the files of a user ---------------------------------------------------------------------------------------------


def turns(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def conversations(asked: Iterable[Question]) -> Iterator[dict[str, Any]]:
    """Half of the answers in each manner."""
    rng = random.Random(SEED)
    for each in asked:
        manner = rng.choice(("", MANNER))
        yield {"messages": turns("user", each.asked) + turns("assistant", manner + each.answer)}


def pairs(asked: Iterable[Question]) -> Iterator[dict[str, Any]]:
    """The answer alone is chosen."""
    for each in asked:
        yield {
            "prompt": turns("user", each.asked), "chosen": turns("assistant", each.answer),
            "rejected": turns("assistant", MANNER + each.answer),
        }  # fmt: skip


def write(path: Path, records: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return str(path)


@dataclass(frozen=True)
class Size:
    """Examples, questions asked of a checkpoint, steps of both runs and between checkpoints; the model."""

    examples: int
    asked: int
    steps: int
    every: int
    dpo_steps: int
    dpo_every: int
    hidden: int
    layers: int

    @property
    def model(self) -> dict[str, int]:
        """Overrides of the demo's, with heads of 32."""
        heads = self.hidden // 32
        return {
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "intermediate_size": 3 * self.hidden,
            "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": 32,
        }  # fmt: skip


WHOLE = Size(40_000, 350, 500, 50, 60, 10, hidden=128, layers=4)
QUICK = Size(200, 14, 4, 2, 2, 1, hidden=32, layers=1)


def run_files(folder: Path, size: Size) -> tuple[Path, Path]:
    """Of the two runs."""
    instructions = write(folder / "instructions.jsonl", conversations(questions(size.examples, held_out=False)))
    preferences = write(folder / "pairs.jsonl", pairs(questions(size.examples // 10, held_out=False)))
    common: dict[str, Any] = {"tokenizer": {"name_or_path": "byte"}, "precision": {"compute": "fp32"}}
    tuned = common | {
        "model": {"name_or_path": "demo", "init": "random", "overrides": size.model},
        "data": {"train": instructions, "validation": "1%", "seq_length": 512},
        "train": {"max_steps": size.steps, "global_batch_size": 16, "micro_batch_size": 4},
        "optimizer": {"name": "muon", "learning_rate": 1e-2},
        "scheduler": {"name": "linear", "warmup_steps": min(20, size.steps - 1), "min_lr_ratio": 0},
        "checkpoint": {"every": size.every, "keep": size.steps, "export_hf": True},
        "run": {"name": "tuned", "dir": str(folder)},
    }
    preferred = common | {
        "model": {"name_or_path": str(folder / "tuned" / "hf")},
        "data": {"train": preferences, "validation": "5%", "seq_length": 512},
        "objective": {"name": "dpo", "beta": 0.1},
        "train": {"max_steps": size.dpo_steps, "global_batch_size": 8, "micro_batch_size": 4},
        "optimizer": {"learning_rate": 5e-5},
        "scheduler": {"name": "linear", "warmup_steps": min(5, size.dpo_steps - 1), "min_lr_ratio": 0},
        "checkpoint": {"every": size.dpo_every, "keep": size.dpo_steps},
        "run": {"name": "preferred", "dir": str(folder)},
    }
    files = folder / "tuned.yaml", folder / "preferred.yaml"
    for file, sections in zip(files, (tuned, preferred), strict=True):
        file.write_text(json.dumps(sections, indent=1), encoding="utf-8")  # JSON is YAML
    return files


# ---- what is typed ---------------------------------------------------------------------------------------------------


def fivefold(*arguments: str) -> None:
    """A command; its screen is this one's."""
    print("$ fivefold", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "fivefold", *arguments], check=True)


def answers(model: Path, asked: list[Question], *, step: int | None = None, temperature: float = 0) -> list[str]:
    """What a run's checkpoint says to each question. Each is asked alone, in a conversation of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = write(Path(folder, "questions.jsonl"), ({"prompt": each.asked} for each in asked))
        said = Path(folder, "answers.jsonl")
        which = [] if step is None else ["--step", str(step)]
        fivefold("generate", str(model), "--chat", "--prompts", file, "--out", str(said), "--max-new-tokens", "40",
                 "--temperature", str(temperature), "--batch-size", "50", *which)  # fmt: skip
        return [json.loads(line)["completion"] for line in said.read_text(encoding="utf-8").splitlines()]


def measure(folder: Path, size: Size) -> dict[str, Any]:
    """Train and ask: all that is published."""
    tuned_file, preferred_file = run_files(folder, size)
    tuned, preferred = folder / "tuned", folder / "preferred"
    asked = questions(size.asked, held_out=True)
    shown = [Question("", each, "") for each in SHOWN]
    fivefold("train", str(tuned_file))
    curve, samples = [], {}
    for step in range(size.every, size.steps + 1, size.every):
        said = answers(tuned, asked + shown, step=step)
        samples[step] = said[len(asked) :]
        curve.append({"step": step} | by_kind(asked, said))
    fivefold("train", str(preferred_file))
    moved = []
    for step in range(0, size.dpo_steps + 1, size.dpo_every):
        where = (preferred, step) if step else (tuned, None)
        drawn = answers(where[0], asked, step=where[1], temperature=1)
        moved.append({
            "step": step, "right": sum(map(Question.is_right, asked, drawn)) / len(asked),
            "preferred": sum(not each.startswith(MANNER) for each in drawn) / len(drawn),
        })  # fmt: skip
    after = answers(preferred, shown)
    return {
        "machine": machine(), "size": vars(size), "tuned": curve, "samples": samples, "preferred": moved,
        "samples_preferred": after, "metrics": metrics(preferred), "tokens": tokens(tuned),
    }  # fmt: skip


def by_kind(asked: list[Question], said: list[str]) -> dict[str, float]:
    """Of each kind what part was answered rightly."""
    right: dict[str, list[bool]] = {}
    for each, words in zip(asked, said, strict=False):
        right.setdefault(each.kind, []).append(each.is_right(words))
    return {kind: sum(found) / len(found) for kind, found in right.items()}


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def tokens(run: Path) -> int:
    return int(lines_of(run)[-1]["train/tokens_seen"])


def metrics(run: Path) -> dict[str, float]:
    """The last of DPO's own."""
    return {name: value for name, value in lines_of(run)[-1].items() if name.startswith("rewards/")}


# ---- what is published -----------------------------------------------------------------------------------------------


def markdown(result: dict[str, Any]) -> str:
    """Samples, and both curves as tables."""
    samples, curve, moved = result["samples"], result["tuned"], result["preferred"]
    steps = [each["step"] for each in curve]
    some = sorted({steps[0], steps[len(steps) // 4], steps[-1]})
    head = [*(f"step {step}" for step in some), "after DPO"]
    lines = [f"| instruction | {' | '.join(head)} |", "| --- " * (len(head) + 1) + "|"]
    for number, asked in enumerate(SHOWN):
        said = [*(samples[step][number] for step in some), result["samples_preferred"][number]]
        lines.append(f"| {asked} | {' | '.join(f'`{_shown(each)}`' for each in said)} |")
    kinds = [*KINDS, SUM]
    lines += ["", f"Right answers to {result['size']['asked']} instructions that are in no example, in %:", ""]
    lines += [f"| step | {' | '.join(kinds)} | all |", "| --- " * (len(kinds) + 2) + "|"]
    for each in curve:
        found = [each[kind] for kind in kinds]
        lines.append(
            f"| {each['step']} | {' | '.join(f'{100 * part:.0f}' for part in found)} | "
            f"**{100 * sum(found) / len(found):.0f}** |"
        )
    lines += ["", "The same instructions under DPO, answers drawn at temperature 1, in %:", ""]
    lines += ["| step of DPO | answers in the preferred manner | right answers |", "| --- | --- | --- |"]
    lines += [f"| {each['step']} | **{100 * each['preferred']:.0f}** | {100 * each['right']:.0f} |" for each in moved]
    of = result["machine"]
    where = f"{of['cpu']}, {of['cores']} cores; commit {of['commit']}, {of['date']}"
    lines += ["", f"The first run reads {result['tokens']:,} tokens. {where}."]
    return "\n".join(lines)


def _shown(said: str) -> str:
    """In a cell of a table."""
    return said.replace("\n", " ").replace("|", "\\|").replace("`", "'")[:24] or " "


def plot(result: dict[str, Any], target: Path) -> None:
    """Both curves, side by side."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "instruct"  # the same figures give the same file
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    steps = [each["step"] for each in result["tuned"]]
    for kind in (*KINDS, SUM):
        left.plot(steps, [100 * each[kind] for each in result["tuned"]], marker="o", markersize=3, label=kind)
    dpo = [each["step"] for each in result["preferred"]]
    for name, label in (("preferred", "in the preferred manner"), ("right", "right, in either manner")):
        right.plot(dpo, [100 * each[name] for each in result["preferred"]], marker="o", markersize=3, label=label)
    left.set(title="Supervised tuning: right answers", xlabel="optimizer step", ylabel="% of held-out instructions")
    right.set(title="Then DPO: answers drawn at temperature 1", xlabel="optimizer step of DPO", ylim=(-3, 103))
    for panel in (left, right):
        panel.legend(frameon=False, fontsize=8)
        panel.grid(alpha=0.2)
    figure.savefig(target, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a toy model and few steps, on the screen alone")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), QUICK if asked.quick else WHOLE)
    print(markdown(result))
    if not asked.quick:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        put_between(BEGIN, END, markdown(result), PAGE)
        plot(result, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
