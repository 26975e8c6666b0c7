"""What dropout costs a step, on one thread of a CPU: the same GPT-2 with and without it, in turns in one process.

    python benchmarks/dropout.py               writes results/dropout.json and the table of docs/explain/dropout.md;
                                               some three minutes on an idle core
    python benchmarks/dropout.py --rounds 2    fewer rounds, on the screen alone

GPT-2 with 6 layers of width 384 and a vocabulary of 8,192 (14M parameters), 4 rows of 512 tokens, fp32, AdamW: forward,
backward and update by a loop of one's own. Every round times a step of each model, in alternating order, as processor
time. A cost is the median over rounds of step / step without dropout in the same round, and its quartiles.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config

import fivefold as ff
from common import RESULTS, SEED, machine
from pages import put_between

RESULT, DOCS = RESULTS / "dropout.json", Path(__file__).parents[1] / "docs" / "explain" / "dropout.md"
BEGIN, END = "<!-- table: python benchmarks/dropout.py -->", "<!-- end of dropout -->"
ROUNDS, ROWS, LENGTH, VOCABULARY, RATE = 30, 4, 512, 8192, 0.1
HIDDEN = ("resid_pdrop", "embd_pdrop")
DROPPED = {
    "nothing": (), "residual and embedding": HIDDEN, "attention": ("attn_pdrop",), "all": (*HIDDEN, "attn_pdrop"),
}  # fmt: skip


class Contender:
    """A model whose dropout keys are `keys`, and its optimizer."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        torch.manual_seed(SEED)
        rates = {key: RATE * (key in keys) for key in DROPPED["all"]}
        config = GPT2Config(
            n_embd=384, n_layer=6, n_head=6, vocab_size=VOCABULARY, n_positions=LENGTH, use_cache=False,
            bos_token_id=None, eos_token_id=None, **rates,
        )  # fmt: skip
        self.model = ff.parallelize(AutoModelForCausalLM.from_config(config), "single+fp32").train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, ids: torch.Tensor) -> float:
        """Take a step, and return its processor time, s."""
        began = time.process_time()
        self.model(input_ids=ids, labels=ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.process_time() - began


def measure(rounds: int) -> list[dict[str, Any]]:
    """Time all contenders in turns."""
    torch.set_num_threads(1)
    contenders = {name: Contender(keys) for name, keys in DROPPED.items()}
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(SEED))
    for contender in [*contenders.values()] * 2:  # compiled, and the allocator is warm
        contender.step(ids)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders) if number % 2 else list(contenders)[::-1]
        for name in names:
            seconds[name].append(contenders[name].step(ids))
    rows = []
    for name, times in seconds.items():
        ratios = [one / plain for one, plain in zip(times, seconds["nothing"], strict=True)]
        low, _, high = quantiles(ratios, n=4)
        rows.append({"dropped": name, "seconds": median(times), "ratio": median(ratios), "low": low, "high": high})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| dropped | a step, ms | cost | quartiles |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        cost, low, high = (f"{100 * (row[key] - 1):+.1f} %" for key in ("ratio", "low", "high"))
        is_plain = row["dropped"] == "nothing"
        lines.append(
            f"| {row['dropped']} | {1e3 * row['seconds']:,.0f} | {'' if is_plain else cost} | "
            f"{'' if is_plain else f'{low} to {high}'} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the results of a full measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    rows = measure(rounds)
    print(table(rows))
    if rounds < ROUNDS:
        return
    about = machine()
    RESULT.write_text(json.dumps({"machine": about, "rounds": rounds, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    made = f"`python benchmarks/dropout.py`: medians of {rounds} rounds, {about['cpu']}, torch {about['torch']}."
    put_between(BEGIN, END, f"{table(rows)}\n\n{made}", DOCS)


if __name__ == "__main__":
    main()
