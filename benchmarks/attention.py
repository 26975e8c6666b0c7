"""Causal attention on this CPU: PyTorch's fused kernel beside fivefold's (`ops/cpu`), as a Markdown table.

    python benchmarks/attention.py               on two threads
    python benchmarks/attention.py --threads 1

Milliseconds of forward + backward, medians. They take turns, so that the machine's noise hits all alike. Freed memory
is kept by the process, as it is in `fivefold train`.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from fivefold.ops.blockwise_attention import AttentionParams
from fivefold.ops.cpu import cpu_attention
from fivefold.ops.cpu.tuning import tune
from fivefold.torch_internals import cpu_attention_backward, cpu_attention_forward

SHAPES = ((12, 4, 64, 32), (4, 16, 512, 16), (2, 12, 1024, 64), (1, 2, 8192, 32), (1, 8, 4096, 128))
TURNS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if lacks := cpu_attention.lacks():
        parser.exit(1, f"fivefold's kernel is not here: {lacks}\n")
    tune()
    torch.set_num_threads(args.threads)
    print("| rows, heads, tokens, size of a head | type | PyTorch's kernel | fivefold's | times as fast |")
    print("| --- | --- | ---: | ---: | ---: |")
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            theirs, ours = measured(*shape, dtype)
            texts = [f"{forward:.3g} + {backward:.3g}" for forward, backward in (theirs, ours)]
            sizes = ", ".join(map(str, shape))
            print(f"| {sizes} | {str(dtype)[6:]} | {' | '.join(texts)} | {sum(theirs) / sum(ours):.1f} |", flush=True)


def measured(rows: int, heads: int, tokens: int, size: int, dtype: torch.dtype) -> tuple[list[float], list[float]]:
    """Milliseconds of forward and backward by PyTorch's kernel and by fivefold's."""
    q, k, v, grad = (torch.randn(rows, tokens, heads, size, dtype=dtype).transpose(1, 2) for _ in range(4))
    params = AttentionParams(size**-0.5)
    theirs = cpu_attention_forward(q, k, v, 0.0, True, scale=params.scale)
    ours = cpu_attention.forward(q, k, v, params)
    kinds: tuple[Callable[[], object], ...] = (
        lambda: cpu_attention_forward(q, k, v, 0.0, True, scale=params.scale),
        lambda: cpu_attention_backward(grad, q, k, v, *theirs, 0.0, True, scale=params.scale),
        lambda: cpu_attention.forward(q, k, v, params),
        lambda: cpu_attention.backward(grad, q, k, v, *ours, params),
    )
    took: tuple[list[float], ...] = ([], [], [], [])
    for _ in range(TURNS):
        for run, seconds in zip(kinds, took, strict=True):
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
    medians = [1000 * median(each) for each in took]
    return medians[:2], medians[2:]


if __name__ == "__main__":
    main()
