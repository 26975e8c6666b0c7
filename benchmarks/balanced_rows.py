"""Rows shared out over data ranks by their cost (`data.balance_rows`) and by order: how long the ranks wait.

    python benchmarks/balanced_rows.py              writes results/balanced_rows.json and the tables of
                                                    docs/evidence/balanced_rows.md; some six minutes on two idle cores
    python benchmarks/balanced_rows.py --steps 2    fewer steps, on the screen alone

Lengths of documents are lognormal with a long tail (median 1,000 tokens, sigma 1.5). Longer ones than a row are cut,
and all are packed into rows as in a run.

First by arithmetic, for Llama 3.1 8B on many ranks: a micro batch takes the FLOPs of its matmuls and its attention, and
begins when the slowest one before it has ended. Then for real, on two ranks with a core each: a Llama with 3 layers of
width 128, rows of 4,096 tokens, fp32, the same batches by both ways in turns. A rank waits while its process uses no
processor.
"""

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import AutoConfig

from common import LEARNING_RATE, OPTIONS, RESULTS, SEED, machine, run_ranks
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.data.pack import pack
from fivefold.data.shares import row_cost, shares, waiting
from fivefold.launch.world import find_world, join, threads_per_worker
from fivefold.models.build import build_meta
from fivefold.models.config_facts import facts_of_config
from fivefold.models.flops import Costs
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step
from pages import put_between

RESULT, DOCS = RESULTS / "balanced_rows.json", Path(__file__).parents[1] / "docs" / "evidence" / "balanced_rows.md"
BEGIN, END = "<!-- table of {}: python benchmarks/balanced_rows.py -->", "<!-- end of {} -->"
MEDIAN, SIGMA = 1000, 1.5  # tokens of a document
MODEL, PLANNED_BATCHES = "llama-3.1-8b", 20
LENGTHS, PLANNED = (8192, 32768, 131072), ((8, 8), (64, 8), (64, 1))  # data ranks, micro batches of a rank
STEPS, ROWS, LENGTH, VOCABULARY, LAYOUTS = 10, 16, 4096, 2048, ("shard2", "shard2+zero1", "dp2")
KINDS = {"by order": False, "by cost": True}


def packed_rows(count: int, length: int) -> list[list[int]]:
    """The lengths of the documents in each of `count` rows."""
    rng = np.random.default_rng(SEED)
    drawn = MEDIAN * np.exp(SIGMA * rng.normal(size=max(64, 2 * count * length // MEDIAN)))
    full, rest = np.divmod(drawn.astype(np.int64) + 2, length)
    pieces = rng.permutation(np.concatenate([np.full(full.sum(), length), rest[rest > 0]])).astype(np.int32)
    offsets, order = pack(pieces, length)
    rows = [pieces[order[start:end]].tolist() for start, end in pairwise(offsets)]
    return [rows[at] for at in rng.permutation(len(rows))[:count]]


def costs_of(rows: list[list[int]], length: int) -> NDArray[np.int64]:
    """The cost of the attention of each row."""
    return np.array([row_cost(row, length) for row in rows], np.int64)


# ---- by arithmetic ---------------------------------------------------------------------------------------------------


def planned() -> list[dict[str, Any]]:
    """The part of their time that ranks wait: mean over batches."""
    costs, found = Costs.of(facts_of_config(MODEL)), []
    for length in LENGTHS:
        for ranks, times in PLANNED:
            size = ranks * times
            attention = costs_of(packed_rows(size * PLANNED_BATCHES, length), length).reshape(-1, size)
            flops = costs.per_token * length + costs.per_squared_length * attention
            waited = {
                kind: mean(
                    waiting(one, shares(size, data_ranks=ranks, micro_batch_size=1, costs=known if balance else None))
                    for one, known in zip(flops, attention, strict=True)
                )
                for kind, balance in KINDS.items()
            }
            found.append({"length": length, "ranks": ranks, "micro_batches": times, **waited})
    return found


# ---- for real --------------------------------------------------------------------------------------------------------


def micro_batches(rows: list[list[int]], step: int, rank: int, *, balance: bool) -> list[MicroBatch]:
    """The rows of a rank at a step: random tokens."""
    batch = rows[step * ROWS : (step + 1) * ROWS]
    shared = shares(ROWS, data_ranks=2, micro_batch_size=1, costs=costs_of(batch, LENGTH) if balance else None)
    made = []
    for places in shared[:, rank]:
        tokens = [np.random.default_rng([SEED, step, place]).integers(0, VOCABULARY, LENGTH) for place in places]
        cut = [np.split(ids, np.cumsum(batch[place]))[:-1] for ids, place in zip(tokens, places, strict=True)]
        made.append(assemble([[Piece(d, d[1:]) for d in row] for row in cut], row_length=LENGTH, pad_id=0))
    return made


def on_rank(ask: dict[str, Any]) -> list[dict[str, Any]]:
    """Wall and processor seconds of each step of each way, and its loss."""
    world, found = find_world("cpu"), []
    assert world is not None
    with join(world):
        torch.set_num_threads(threads_per_worker(2))
        config = AutoConfig.for_model(
            "llama", hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False,
            bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        layout = Layout.parse(f"{ask['layout']}+mb1+fp32")
        models = {kind: parallelize(build_meta(config), layout, device="cpu", seed=SEED) for kind in KINDS}
        optimizers = {kind: build_optimizer(model, OPTIONS) for kind, model in models.items()}
        rows, rank = packed_rows(ROWS * (ask["steps"] + 1), LENGTH), state_of(models["by cost"]).placement.data_rank
        for step in range(ask["steps"] + 1):
            for kind in list(KINDS)[:: 1 if step % 2 else -1]:
                batch = micro_batches(rows, step, rank, balance=KINDS[kind])
                dist.barrier()
                wall, processor = time.perf_counter(), time.process_time()
                done = train_step(models[kind], optimizers[kind], batch, learning_rate=LEARNING_RATE, max_grad_norm=1.0)
                spent = {"seconds": time.perf_counter() - wall, "busy": time.process_time() - processor}
                if step:  # the first one warms up
                    found.append({"step": step, "kind": kind, "loss": done.loss, **spent})
    return found


def measured(steps: int) -> list[dict[str, Any]]:
    """For each layout and way: seconds of a step, the part of them that ranks wait, and the largest difference of a
    loss to that of the other way."""
    found = []
    for layout in LAYOUTS:
        ranks = run_ranks(Path(__file__), {"layout": layout, "steps": steps}, ranks=2)
        row: dict[str, Any] = {"layout": layout}
        losses = {}
        for kind in KINDS:
            of_kind = [[one for one in rank if one["kind"] == kind] for rank in ranks]  # type: ignore[attr-defined]
            losses[kind] = [one["loss"] for one in of_kind[0]]
            seconds = [max(pair, key=lambda one: one["seconds"])["seconds"] for pair in zip(*of_kind, strict=True)]
            busy = [mean(one["busy"] for one in pair) for pair in zip(*of_kind, strict=True)]
            row[kind] = {"seconds": median(seconds), "waiting": 1 - sum(busy) / sum(seconds), "steps": seconds}
        row["differs"] = max(abs(a - b) / a for a, b in zip(*losses.values(), strict=True))
        found.append(row)
        print(row["layout"], *(f"{kind} {row[kind]['seconds']:.2f} s" for kind in KINDS), flush=True)
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------


def planned_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| tokens of a row | data ranks | micro batches | waiting, by order | by cost |"]
    lines += ["| ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        waited = " | ".join(f"{100 * row[kind]:.1f} %" for kind in KINDS)
        lines.append(f"| {row['length']:,} | {row['ranks']} | {row['micro_batches']} | {waited} |")
    return "\n".join(lines)


def measured_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| layout | a step by order, s | by cost, s | waiting, by order | by cost | losses differ by |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        seconds = " | ".join(f"{row[kind]['seconds']:.2f}" for kind in KINDS)
        waited = " | ".join(f"{100 * row[kind]['waiting']:.1f} %" for kind in KINDS)
        lines.append(f"| `{row['layout']}` | {seconds} | {waited} | {row['differs']:.0e} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the results of a full measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    steps = parser.parse_args().steps
    tables = {"arithmetic": planned_table(arithmetic := planned())}
    print(tables["arithmetic"], flush=True)
    tables["measured"] = measured_table(real := measured(steps)) if steps else ""
    print(tables["measured"])
    if steps < STEPS:
        return
    about = machine()
    result = {"machine": about, "steps": steps, "arithmetic": arithmetic, "measured": real}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    made = f"`python benchmarks/balanced_rows.py`: {steps} steps of each, {about['cpu']}, torch {about['torch']}."
    tables["measured"] += f"\n\n{made}"
    for name, text in tables.items():
        put_between(BEGIN.format(name), END.format(name), text, DOCS)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        Path(sys.argv[2]).write_text(json.dumps(on_rank(json.loads(sys.argv[1]))))
    else:
        main()
