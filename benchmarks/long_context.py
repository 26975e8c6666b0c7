"""How long may sequences be? Context parallelism measured: memory against length, and one step of a very long row.

    python benchmarks/long_context.py                       both parts, on idle cores; writes benchmarks/results/
    python benchmarks/long_context.py --part memory         the longest row that a budget of memory trains
    python benchmarks/long_context.py --part step --length 131072
    python benchmarks/long_context.py --quick               toy sizes, written nowhere

**memory**: one optimizer step of a small Llama in bf16 on one row that is one document, by 1, 2 and 4 ranks of cp,
with and without recompute, each in fresh processes. A rank's peak memory is a straight line over the tokens that it
holds, `fixed + slope x length / cp`; two lengths make the line, the longest row of the budget is read off it and then
trained, to see. Were the slope of one process that of all, cp ranks would train rows cp times as long: the formula.

**step**: one optimizer step on a row of 131,072 tokens of a tiny Llama with cp 2: seconds and memory.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from common import OPTIONS, PRECISIONS, RESULTS, SEED, machine, run_ranks
from fivefold.data.batch import Piece, assemble
from fivefold.launch.world import alone, find_world, join
from fivefold.models.build import build_meta
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.training.memory import PeakMemory
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step

SCRIPT = Path(__file__)
CPS, RECOMPUTE = (1, 2, 4), ("none", "full")
# Tokens of a rank between which the line is drawn, by recompute; long enough for the row to outweigh the rest.
LINE = {"none": (1024, 2048), "full": (4096, 8192)}
SMALL = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
BUDGET_GIB = 0.2


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("memory", "step"), help="one of the two (default: both)")
    parser.add_argument("--length", type=int, default=131_072, help="tokens of the long row")
    parser.add_argument("--cp", type=int, default=2, help="ranks of the long row")
    parser.add_argument("--quick", action="store_true", help="toy sizes")
    args = parser.parse_args()
    precision = PRECISIONS[-1]
    file = RESULTS / "long_context.json"
    result = json.loads(file.read_text()) if file.exists() and not args.quick else {}
    if args.part != "step":
        line = {"none": (64, 128), "full": (128, 256)} if args.quick else LINE
        cps = CPS[:2] if args.quick else CPS
        budget = 0.05 if args.quick else BUDGET_GIB
        about = {"machine": machine(), "model": SMALL, "precision": precision, "budget_gib": budget}
        rows: list[dict[str, Any]] = []
        for cp, how in ((cp, how) for how in RECOMPUTE for cp in cps):
            rows.append(longest(cp, how, line[how], budget, precision))
            result["memory"] = about | {"rows": compared(rows)}
            if not args.quick:  # what has been measured stays, should the rest be cut short
                file.write_text(json.dumps(result, indent=1) + "\n")
    if args.part != "memory":
        length = 512 if args.quick else args.length
        result["step"] = {"machine": machine(), "model": TINY} | one_step(args.cp, length, precision)
    print(json.dumps(result, indent=1))
    if not args.quick:
        file.write_text(json.dumps(result, indent=1) + "\n")
    return 0


# ---- the longest row of a budget -------------------------------------------------------------------------------------


def longest(cp: int, recompute: str, tokens: tuple[int, int], budget: float, precision: str) -> dict[str, Any]:
    """The line of a rank's memory over its tokens, and the row that it allows, tried."""
    layout = layout_of(cp, recompute, precision)
    peaks = [measured(SMALL, layout, each * cp)["peak_gib"] for each in tokens]
    slope = (peaks[1] - peaks[0]) / (tokens[1] - tokens[0])
    fixed = peaks[0] - slope * tokens[0]
    unit = 64 * cp
    length = max(unit, int((budget - fixed) / slope) * cp // unit * unit)
    tried = measured(SMALL, layout, length)
    found = {
        "cp": cp, "recompute": recompute, "fixed_gib": fixed, "kib_per_token_of_a_rank": slope * 2**20,
        "longest": length, "peak_gib": tried["peak_gib"], "step_seconds": tried["seconds"],
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found


def compared(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With what the formula says: cp times the longest row of one process."""
    alone_ = {row["recompute"]: row["longest"] for row in rows if row["cp"] == 1}
    return [row | {"formula": row["cp"] * alone_[row["recompute"]]} for row in rows]


def layout_of(cp: int, recompute: str, precision: str) -> str:
    """Its text."""
    return str(Layout(cp=cp, recompute=recompute, precision=precision))


# ---- one very long row -----------------------------------------------------------------------------------------------


def one_step(cp: int, length: int, precision: str) -> dict[str, Any]:
    """Time and memory of a step of the tiny model."""
    layout = layout_of(cp, "none", precision)
    return {"layout": layout, "length": length, "precision": precision} | measured(TINY, layout, length)


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def measured(model: dict[str, int], layout: str, length: int) -> dict[str, Any]:
    """The slowest and the fullest of the ranks."""
    request = {"model": model, "layout": layout, "length": length}
    ranks = run_ranks(SCRIPT, request, ranks=Layout.parse(layout).world, timeout=7200.0)
    return {key: max(rank[key] for rank in ranks) for key in ("peak_gib", "seconds", "loss")}


def rank(request: dict[str, Any], out: Path) -> None:
    """One optimizer step on one row of random tokens."""
    world = find_world("cpu") or alone("cpu")
    layout, length = Layout.parse(request["layout"]), request["length"]
    config = AutoConfig.for_model(
        "llama", **request["model"], num_key_value_heads=request["model"]["num_attention_heads"] // 2,
        vocab_size=256, max_position_embeddings=length, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    drawn = np.random.default_rng(SEED).integers(0, 256, length, dtype=np.uint16)
    with join(world):
        memory = PeakMemory(torch.device("cpu"))
        model = parallelize(build_meta(config), layout, device="cpu", seed=SEED)
        optimizer = build_optimizer(model, OPTIONS)
        batch = assemble([[Piece(drawn, drawn[1:])]], row_length=length, pad_id=0)
        started = time.perf_counter()
        result = train_step(model, optimizer, [batch], learning_rate=1e-3, max_grad_norm=1.0)
        seconds = time.perf_counter() - started
    out.write_text(json.dumps({"peak_gib": memory.gib, "seconds": seconds, "loss": result.loss}))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        rank(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(main())
