"""Estimated MFU of the layout that the planner chooses, and what keeps it from more: models x rows x numbers of H100.

    python -m benchmarks.estimated_mfu      plans every cell; writes the table of docs/evidence/estimated_mfu.md

These are estimates, not measurements: the planner's roofline of the issued work (matmuls at measured rates, memory
traffic, exposed collectives, launches), see docs/explain/planner.md.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.long_sequences import best
from benchmarks.pages import put_between

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "estimated_mfu.md"
BEGIN, END = "<!-- table: python -m benchmarks.estimated_mfu -->", "<!-- end of estimated MFU -->"
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "mixtral-8x7b", "qwen3-30b-a3b")
LENGTHS = (8192, 32768, 131072)
DEVICES = (8, 64, 256, 1024)
USEFUL = ("matmuls", "attention")
SMALL = 0.02  # of a step


def row(model: str, length: int, devices: int) -> str:
    found = best(model, devices, length)
    head = f"| {model} | {length:,} | {devices:,} "
    if found is None:
        return head + "| none fits | | | | |"
    step = found.step_seconds
    lost = {item: seconds / step for item, seconds in found.seconds.items() if item not in USEFUL}
    parts = sorted(((part, item) for item, part in lost.items() if part >= SMALL), reverse=True)
    named = ", ".join(f"{item} {100 * part:.0f} %" for part, item in parts)
    useful = 100 * (1 - sum(lost.values()))
    return head + (
        f"| `{found.layout}` | {100 * found.mfu:.0f} | {found.tokens_per_second_per_device:,.0f} | {useful:.0f} "
        f"| {named} |"
    )


def lines() -> Iterator[str]:
    heads = "model", "tokens a row", "H100", "layout", "MFU, %", "tokens/s a device", "matmuls and attention, %"
    yield f"| {' | '.join(heads)} | beside them |"
    yield "| --- " * (len(heads) + 1) + "|"
    for model in MODELS:
        for length in LENGTHS:
            for devices in DEVICES:
                found = row(model, length, devices)
                print(found, flush=True)
                yield found


if __name__ == "__main__":
    put_between(BEGIN, END, "\n".join(lines()), PAGE)
