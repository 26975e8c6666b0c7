"""PyTorch's fp8 kernels beside the emulation that they replace, and beside bf16, on one CUDA GPU.

python benchmarks/fp8_kernels.py                          every recipe and product whose kernel this GPU has
python benchmarks/fp8_kernels.py --json FILE              `benchmarks/gpu_levers.py` calls it so

One row a product: the largest difference from the emulated one, as a part of the largest value of that, and the time of
the kernel with the casts before it, of both, and of the bf16 matmul. Ends with 1 where a kernel raises, or differs by
more than 2 %: bf16 results of two orders of summation differ by some 0.4 %.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.ops.linear import Dense, Grouped
from fivefold.parallel.fp8 import matmul as fp8
from fivefold.parallel.fp8.kernels import emulated
from fivefold.parallel.fp8.matmul import Float8, Float8Grouped
from fivefold.parallel.fp8.recipes import RECIPES

SIZES = ((4096, 2048, 8192), (4096, 8192, 2048), (8192, 4096, 4096))  # tokens, inputs, outputs
EXPERTS = 8
LIMIT = 0.02


def main() -> int:
    """The command: 2 without a GPU, 1 where a kernel is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"this benchmark needs a CUDA GPU, and torch {torch.__version__} sees none", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    found = [line for recipe in RECIPES for line in of_recipe(recipe)]
    for line in found:
        print(said(line), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any("failed" in line or not line.get("error", 0.0) <= LIMIT for line in found))


def of_recipe(recipe: str) -> Iterator[dict[str, Any]]:
    """The rows of its linears and of its experts; one row with the reason where these are emulated."""
    for of_experts in (False, True):
        kind = "experts" if of_experts else "linears"
        if why := emulated(recipe, "cuda", "bf16", of_experts=of_experts):
            yield {"recipe": recipe, "of": kind, "emulated": why}
        for sizes in () if why else SIZES:
            for product, run, plain in products(recipe, sizes, of_experts=of_experts):
                yield {"recipe": recipe, "of": kind, "product": product, "sizes": sizes, **compared(run, plain)}


def products(
    recipe: str, sizes: tuple[int, int, int], *, of_experts: bool
) -> Iterator[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]]:
    """(product, its fp8, its bf16) of operands whose rows differ in size, so that a scale out of place shows."""
    tokens, inputs, outputs = sizes
    shape = (outputs, inputs)
    x, grad = _uneven(tokens, inputs), _uneven(tokens, outputs)
    if of_experts:
        counts = torch.full((EXPERTS,), tokens // EXPERTS, device="cuda")
        counts[0], counts[1] = counts[0] + 5, counts[1] - 5
        weight, grouped = _uneven(EXPERTS, *shape), Grouped(counts, False, True)
        experts = Float8Grouped(RECIPES[recipe], counts, False, True)
        yield "output", lambda: experts.output(x, weight), lambda: grouped.output(x, weight)
        yield "input_grad", lambda: experts.input_grad(grad, weight), lambda: grouped.input_grad(grad, weight)
        return
    weight, dense, linear = _uneven(*shape), Dense(False), Float8(RECIPES[recipe], {}, False)

    def cast(which: Any, a: Tensor, b: Tensor) -> Tensor:
        (rows,), (others,) = fp8.casts(which, linear.recipe, {}, [a], [b])
        return linear._product(which, rows, others, torch.bfloat16)

    yield "output", lambda: cast("output", x, weight), lambda: dense.output(x, weight)
    yield "input_grad", lambda: cast("input_grad", grad, weight.T), lambda: dense.input_grad(grad, weight)
    if linear.recipe.weight_grad is not None:
        yield "weight_grad", lambda: cast("weight_grad", grad.T, x.T), lambda: dense.weight_grad(grad, x)


def compared(run: Callable[[], Tensor], plain: Callable[[], Tensor]) -> dict[str, Any]:
    """The kernel's result against the emulated one, and the times of the three."""
    try:
        kernel = run()
        torch.cuda.synchronize()
    except RuntimeError as error:
        return {"failed": str(error).splitlines()[0]}
    with _emulating(True):
        expected = run().float()
    error = float((kernel.float() - expected).abs().max() / expected.abs().max())
    times = {"kernel_ms": _milliseconds(run), "emulated_ms": _milliseconds(run, is_emulated=True)}
    return {"error": error, **times, "bf16_ms": _milliseconds(plain)}


def said(line: dict[str, Any]) -> str:
    """One row in words."""
    name = f"{line['recipe']:14} {line['of']:8}"
    if "emulated" in line:
        return f"{name} emulated: {line['emulated']}"
    name += f" {line['product']:12} {' x '.join(map(str, line['sizes'])):20}"
    if "failed" in line:
        return f"{name} FAILED: {line['failed']}"
    verdict = "" if line["error"] <= LIMIT else "  WRONG"
    times = f"{line['kernel_ms']:8.3f} ms, emulated {line['emulated_ms']:8.3f}, bf16 {line['bf16_ms']:8.3f}"
    return f"{name} {times}  difference {line['error']:.1e}{verdict}"


def _uneven(*shape: int) -> Tensor:
    sizes = torch.randn(*shape[:-1], 1, device="cuda").exp()
    return (torch.randn(*shape, device="cuda") * sizes).bfloat16()


def _emulating(is_emulated: bool) -> Any:
    if not is_emulated:
        return nullcontext()
    return patch.multiple(fp8, is_served=lambda *_: False, is_served_grouped=lambda *_: False)


def _milliseconds(run: Callable[[], Tensor], *, is_emulated: bool = False, repeats: int = 10) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with _emulating(is_emulated):
        run()
        start.record()
        for _ in range(repeats):
            run()
        end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats


if __name__ == "__main__":
    sys.exit(main())
