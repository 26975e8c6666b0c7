"""Rows shared out over data ranks by their cost (`data.balance_rows`) and by order, and documents of a row in an order
for the ranks of cp (`data.balance_documents`) and as packed: how long the ranks wait, and what a ring sends.

    python benchmarks/balanced_rows.py              writes results/balanced_rows.json and the table of
                                                    docs/evidence/balanced_rows.md; seconds
    python benchmarks/balanced_rows.py --times 96   times that many rows as well, on the screen alone; minutes on a core
    python benchmarks/balanced_rows.py --sent       counts what rings of processes send, on the screen alone

Lengths of documents are lognormal with a long tail (median 1,000 tokens, sigma 1.5). Longer ones than a row are cut,
and all are packed into rows as in a run.

First by arithmetic, for Llama 3.1 8B on many ranks: a micro batch takes the FLOPs of its matmuls and its attention, and
begins when the slowest one before it has ended. Then with times in place of FLOPs: forward and backward of each row are
timed, as processor time of one thread, on a Llama with 3 layers of width 128, rows of 4,096 tokens, fp32. How long
ranks wait follows from the times of their rows. Nothing is sent.

Ranks of cp have equal tokens of a row, and so equal matmuls; the pairs of a query and a key that each has are counted.
What a ring sends is counted by the function that its runtime asks; `--sent` records it in steps of a tiny Llama.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig

from common import OPTIONS, RESULTS, SEED, run_ranks
from fivefold.data.batch import Piece, assemble
from fivefold.data.order import row_cost, shares, waiting
from fivefold.data.pack import ordered, pack, pairs_by_rank
from fivefold.launch.world import alone, find_world, join
from fivefold.models.build import build_meta
from fivefold.models.config_facts import facts_of_config
from fivefold.models.flops import Costs
from fivefold.parallel.apply import parallelize
from fivefold.parallel.collectives import Collective, total
from fivefold.parallel.context.spec import SharedRows, hops, tokens_of
from fivefold.parallel.layout import Layout
from fivefold.parallel.mesh import record
from fivefold.parallel.ranks import tokens_by_rank
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import accumulate as gradients_of
from fivefold.training.step import declare, step_shape, train_step
from pages import put_between

RESULT, DOCS = RESULTS / "balanced_rows.json", Path(__file__).parents[1] / "docs" / "evidence" / "balanced_rows.md"
BEGIN, END = "<!-- table: python benchmarks/balanced_rows.py -->", "<!-- end of rows -->"
MEDIAN, SIGMA = 1000, 1.5  # tokens of a document
MODEL, PLANNED_BATCHES = "llama-3.1-8b", 20
LENGTHS, PLANNED = (8192, 32768, 131072), ((8, 8), (64, 8), (64, 1))  # data ranks, micro batches of a rank
CP, CP_ROWS = (2, 4, 8, 16, 32, 64), 100
CP_BEGIN, CP_END = "<!-- table: documents of a row -->", "<!-- end of documents -->"
SENT_CP = (2, 4, 8, 16)
SENT_BEGIN, SENT_END = "<!-- table: what a ring sends -->", "<!-- end of what a ring sends -->"
TOKEN_BYTES = 2 * 8 * 128 * 2  # keys and values of a token of Llama 3.1 8B, bf16
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


def sent_tokens(documents: Sequence[int], length: int, ranks: int) -> NDArray[np.int64]:
    """(tokens of a row whose keys and values, or their gradients, are sent; messages) of each rank, for a forward and a
    backward of one layer."""
    edges = tuple(accumulate(documents, initial=0))
    if edges[-1] < length:  # padding at the end of the row
        edges = (*edges, length)
    rows = SharedRows(tokens_by_rank(length, ranks), edges)
    found = []
    for rank in range(ranks):
        sent = [tokens_of(pieces) for hop in hops(rows, rank) for pieces in (hop.sent, hop.sent, hop.received)]
        found.append((sum(sent), sum(map(bool, sent))))
    return np.array(found)


def of_rings() -> list[dict[str, Any]]:
    """What rings send of a row in a layer of `MODEL`: MiB of all ranks, MiB of the busiest, and the part of the
    messages that is left. Means over rows, for rows of one document, documents as packed, and ordered."""
    found = []
    for length in LENGTHS[1:]:
        rows = [np.array(row, np.int64) for row in packed_rows(CP_ROWS, length)]
        for ranks in SENT_CP:
            chosen = {
                "one document": [np.array([length])], "as packed": rows,
                "ordered": [row[ordered(row, length, ranks)] for row in rows],
            }  # fmt: skip
            numbers: dict[str, Any] = {"length": length, "ranks": ranks}
            for kind, every in chosen.items():
                sent = np.array([sent_tokens(row.tolist(), length, ranks) for row in every])
                tokens, messages = sent[..., 0] * TOKEN_BYTES / 2**20, sent[..., 1].sum(1).mean()
                numbers[kind] = [tokens.sum(1).mean(), tokens.max(1).mean(), messages / (3 * ranks * (ranks - 1))]
            found.append(numbers)
    return found


# ---- recorded --------------------------------------------------------------------------------------------------------


def recorded() -> list[dict[str, Any]]:
    """What all ranks of a ring send in a step of a tiny Llama with 3 layers, recorded and declared."""
    found = []
    for ranks in (2, 4):
        for kind in ("one document", "as packed"):
            of_ranks = run_ranks(Path(__file__), {"cp": ranks, "kind": kind}, ranks=ranks)
            both = {key: sum(each[key] for each in of_ranks) for key in ("sent", "declared")}
            found.append({"ranks": ranks, "kind": kind, **both})
    return found


def on_rank(request: dict[str, Any], out: Path) -> None:
    """One optimizer step of this rank, on two rows of 4,096 tokens."""
    rows = packed_rows(2, LENGTH) if request["kind"] == "as packed" else [[LENGTH]] * 2
    rng = np.random.default_rng(SEED)
    with join(find_world("cpu") or alone("cpu")):
        layout = Layout.parse(f"cp{request['cp']}+ring+mb2")
        model = parallelize(build_meta(tiny_llama()), layout, device="cpu", seed=SEED)
        pieces = [[Piece(ids, ids[1:]) for ids in (rng.integers(0, VOCABULARY, n) for n in row)] for row in rows]
        batch = [assemble(pieces, row_length=LENGTH, pad_id=0)]
        optimizer = build_optimizer(model, OPTIONS)
        with record(state_of(model).mesh) as found:
            train_step(model, optimizer, batch, learning_rate=1e-3, max_grad_norm=1.0)
        declared = declare(model, step_shape(model, 2, LENGTH, 1, batch=batch))
    out.write_text(json.dumps({"sent": sends(total(found)), "declared": sends(declared)}), encoding="utf-8")


def sends(found: Iterable[Collective]) -> int:
    """Bytes of its messages."""
    return sum(each.bytes for each in found if each.kind == "send")


def tiny_llama() -> Any:
    """Config of 3 layers of width 128."""
    return AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


# ---- with times ------------------------------------------------------------------------------------------------------


def seconds_of(rows: list[list[int]]) -> list[float]:
    """Processor seconds of forward and backward of each row, on one thread."""
    rng, found = np.random.default_rng(SEED), []
    with join(alone("cpu")):
        torch.set_num_threads(1)
        model = parallelize(build_meta(tiny_llama()), Layout.parse("single+fp32"), device="cpu", seed=SEED)
        for row in [rows[0], *rows]:  # the first one warms up
            documents = [rng.integers(0, VOCABULARY, length) for length in row]
            batch = assemble([[Piece(ids, ids[1:]) for ids in documents]], row_length=LENGTH, pad_id=0)
            began = time.process_time()
            gradients_of(model, [batch])
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


def sent_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| tokens of a row | cp | MiB sent, one document | as packed | ordered | busiest rank, one document |"]
    lines[0] += " as packed | ordered | messages left, as packed | ordered |"
    lines += ["| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        kinds = [row[kind] for kind in ("one document", "as packed", "ordered")]
        numbers = [f"{kind[at]:,.0f}" for at in (0, 1) for kind in kinds]
        left = [f"{100 * kind[2]:.0f} %" for kind in kinds[1:]]
        lines.append(f"| {row['length']:,} | {row['ranks']} | {' | '.join([*numbers, *left])} |")
    return "\n".join(lines)


def recorded_table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| cp | rows | MiB sent | declared |", "| ---: | --- | ---: | ---: |"]
    for row in rows:
        numbers = " | ".join(f"{row[key] / 2**20:.3f}" for key in ("sent", "declared"))
        lines.append(f"| {row['ranks']} | {row['kind']} | {numbers} |")
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
    parser.add_argument("--sent", action="store_true", help="count what rings of processes send")
    args = parser.parse_args()
    table = planned_table(arithmetic := planned())
    print(table, flush=True)
    of_cp = cp_table(documents := under_cp())
    print(of_cp, flush=True)
    of_ring = sent_table(rings := of_rings())
    print(of_ring, flush=True)
    result = {"arithmetic": arithmetic, "cp": documents, "rings": rings}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    put_between(BEGIN, END, f"{table}\n\n`python benchmarks/balanced_rows.py`.", DOCS)
    put_between(CP_BEGIN, CP_END, f"{of_cp}\n\n`python benchmarks/balanced_rows.py`.", DOCS)
    put_between(SENT_BEGIN, SENT_END, f"{of_ring}\n\n`python benchmarks/balanced_rows.py`.", DOCS)
    if args.sent:
        print(recorded_table(recorded()), flush=True)
    if args.times:
        print(timed_table(timed(args.times)))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        on_rank(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
