"""Rows shared out over data ranks by their cost (`data.balance_rows`) and by order, and documents of a row in an order
for the ranks of cp (`data.balance_documents`) and as packed: how long the ranks wait.

    python benchmarks/balanced_rows.py              writes results/balanced_rows.json and the table of
                                                    docs/evidence/balanced_rows.md; seconds
    python benchmarks/balanced_rows.py --times 96   times that many rows as well, on the screen alone; minutes on a core

Lengths of documents are lognormal with a long tail (median 1,000 tokens, sigma 1.5). Longer ones than a row are cut,
and all are packed into rows as in a run.

First by arithmetic, for Llama 3.1 8B on many ranks: a micro batch takes the FLOPs of its matmuls and its attention, and
begins when the slowest one before it has ended. Then with times in place of FLOPs: forward and backward of each row are
timed, as processor time of one thread, on a Llama with 3 layers of width 128, rows of 4,096 tokens, fp32. How long
ranks wait follows from the times of their rows. Nothing is sent.

Ranks of cp have equal tokens of a row, and so equal matmuls; the pairs of a query and a key that each has are counted.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from common import RESULTS, SEED
from fivefold.data.batch import Piece, assemble
from fivefold.data.documents import ordered, pairs_by_rank
from fivefold.data.pack import pack
from fivefold.data.shares import row_cost, shares, waiting
from fivefold.launch.world import alone, join
from fivefold.models.build import build_meta
from fivefold.models.config_facts import facts_of_config
from fivefold.models.flops import Costs
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.training.step import accumulate
from pages import put_between

RESULT, DOCS = RESULTS / "balanced_rows.json", Path(__file__).parents[1] / "docs" / "evidence" / "balanced_rows.md"
BEGIN, END = "<!-- table: python benchmarks/balanced_rows.py -->", "<!-- end of rows -->"
MEDIAN, SIGMA = 1000, 1.5  # tokens of a document
MODEL, PLANNED_BATCHES = "llama-3.1-8b", 20
LENGTHS, PLANNED = (8192, 32768, 131072), ((8, 8), (64, 8), (64, 1))  # data ranks, micro batches of a rank
CP, CP_ROWS = (2, 4, 8, 16, 32, 64), 100
CP_BEGIN, CP_END = "<!-- table: documents of a row -->", "<!-- end of documents -->"
BATCH, LENGTH, VOCABULARY, RANKS = 16, 4096, 2048, (2, 4, 8)
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


def under_cp() -> list[dict[str, Any]]:
    """The part of their time that the ranks of cp wait in a row, of all FLOPs and of those of attention, before and
    after documents are ordered: over all rows."""
    costs, found = Costs.of(facts_of_config(MODEL)), []
    for length in LENGTHS:
        rows = [np.array(row, np.int64) for row in packed_rows(CP_ROWS, length)]
        for ranks in CP:
            chosen = {"as packed": rows, "ordered": [row[ordered(row, length, ranks)] for row in rows]}
            numbers: dict[str, Any] = {"length": length, "ranks": ranks}
            for kind, every in chosen.items():
                pairs = np.array([pairs_by_rank(row, length, ranks) for row in every])
                flops = 2 * costs.per_squared_length * pairs + costs.per_token * length // ranks
                each = np.arange(CP_ROWS * ranks).reshape(CP_ROWS, ranks, 1)
                numbers[kind] = [waiting(one.flatten(), each) for one in (flops, pairs)]
            found.append(numbers)
    return found


# ---- with times ------------------------------------------------------------------------------------------------------


def seconds_of(rows: list[list[int]]) -> list[float]:
    """Processor seconds of forward and backward of each row, on one thread."""
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    rng, found = np.random.default_rng(SEED), []
    with join(alone("cpu")):
        torch.set_num_threads(1)
        model = parallelize(build_meta(config), Layout.parse("single+fp32"), device="cpu", seed=SEED)
        for row in [rows[0], *rows]:  # the first one warms up
            documents = [rng.integers(0, VOCABULARY, length) for length in row]
            batch = assemble([[Piece(ids, ids[1:]) for ids in documents]], row_length=LENGTH, pad_id=0)
            began = time.process_time()
            accumulate(model, [batch])
            found.append(time.process_time() - began)
            model.zero_grad()
    return found[1:]


def timed(rows: int) -> dict[str, Any]:
    """Times of rows beside their costs, and the part of their time that ranks wait: means over batches."""
    lengths = packed_rows(rows, LENGTH)
    costs, seconds = costs_of(lengths, LENGTH), np.array(seconds_of(lengths))
    found = []
    for ranks in RANKS:
        waited = {
            kind: mean(
                waiting(seconds[at], shares(BATCH, data_ranks=ranks, micro_batch_size=1, costs=own))
                for at in np.arange(rows).reshape(-1, BATCH)
                for own in [costs[at] if balance else None]
            )
            for kind, balance in KINDS.items()
        }
        found.append({"ranks": ranks, "micro_batches": BATCH // ranks, **waited})
    slope, base = np.polyfit(costs, seconds, 1)
    return {
        "rows": rows, "costs": costs.tolist(), "seconds": seconds.tolist(), "base": base, "slope": slope,
        "correlation": float(np.corrcoef(costs, seconds)[0, 1]), "waiting": found,
    }  # fmt: skip


# ---- tables ----------------------------------------------------------------------------------------------------------


def planned_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| tokens of a row | data ranks | micro batches | waiting, by order | by cost |"]
    lines += ["| ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        waited = " | ".join(f"{100 * row[kind]:.1f} %" for kind in KINDS)
        lines.append(f"| {row['length']:,} | {row['ranks']} | {row['micro_batches']} | {waited} |")
    return "\n".join(lines)


def cp_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| tokens of a row | cp | waiting, as packed | ordered | of attention, as packed | ordered |"]
    lines += ["| ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        (packed, attended), (ordered_, attended_) = row["as packed"], row["ordered"]
        waited = " | ".join(f"{100 * part:.1f} %" for part in (packed, ordered_, attended, attended_))
        lines.append(f"| {row['length']:,} | {row['ranks']} | {waited} |")
    return "\n".join(lines)


def timed_table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = ["| data ranks | micro batches | waiting, by order | by cost |", "| ---: | ---: | ---: | ---: |"]
    for row in found["waiting"]:
        waited = " | ".join(f"{100 * row[kind]:.1f} %" for kind in KINDS)
        lines.append(f"| {row['ranks']} | {row['micro_batches']} | {waited} |")
    low, high = min(found["seconds"]), max(found["seconds"])
    text = (
        f"{found['rows']} rows in batches of {BATCH}. A row took {low:.2f} to {high:.2f} s. The correlation of time "
        f"and cost was {found['correlation']:.3f}."
    )
    return "\n".join(lines) + f"\n\n{text}"


def main() -> None:
    """Compute the waiting by FLOPs, and time rows if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=0, help=f"rows to time, a multiple of {BATCH}")
    rows = parser.parse_args().times
    table = planned_table(arithmetic := planned())
    print(table, flush=True)
    of_cp = cp_table(documents := under_cp())
    print(of_cp, flush=True)
    RESULT.write_text(json.dumps({"arithmetic": arithmetic, "cp": documents}, indent=1) + "\n", encoding="utf-8")
    put_between(BEGIN, END, f"{table}\n\n`python benchmarks/balanced_rows.py`.", DOCS)
    put_between(CP_BEGIN, CP_END, f"{of_cp}\n\n`python benchmarks/balanced_rows.py`.", DOCS)
    if rows:
        print(timed_table(timed(rows)))


if __name__ == "__main__":
    main()
