"""What fp8 kernels are given, against what they are documented to take and to compute.

There is no GPU here. Each call goes to PyTorch's own check of shapes, strides and types (its meta kernels), and to a
stand-in that computes from the same arguments: it finds each scale by the layout that cuBLAS documents.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.fp8 import kernels as fp8_kernels
from fivefold.parallel.fp8.kernels import emulated, is_served, is_served_grouped, scaled_matmul
from fivefold.parallel.fp8.matmul import Float8, Float8Grouped, casts, restored
from fivefold.parallel.fp8.recipes import RECIPES, by_row

ONE_SCALE = [name for name, recipe in RECIPES.items() if recipe.block == 1]
PRODUCTS = ["output", "input_grad", "weight_grad"]
Types = F.ScalingType


# ---- stand-ins -------------------------------------------------------------------------------------------------------


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _number_in_tiles(row: int, block: int, blocks: int) -> int:
    """Where cuBLAS looks for the scale of a row's block: tiles of 128 x 4, row by row of tiles."""
    tile = (row // 128) * -(-blocks // 4) + block // 4
    return 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4


def _spread(scale: Tensor, kind: Any, rows: int, k: int) -> Tensor:
    """The scale of every number of an operand [rows, K]."""
    at, blocks = torch.arange(k), -(-k // 32)
    if kind == Types.TensorWise:
        return scale.reshape(1, 1).expand(rows, k)
    if kind == Types.RowWise:
        return scale.reshape(rows, 1).expand(rows, k)
    if kind == Types.BlockWise1x128:
        return scale[:, at // 128]
    if kind == Types.BlockWise128x128:
        return scale.T[torch.arange(rows) // 128][:, at // 128]
    flat = scale.float().flatten()
    places = torch.tensor([[_number_in_tiles(row, block, blocks) for block in range(blocks)] for row in range(rows)])
    return flat[places][:, at // 32]


class Kernels:
    """In the place of both kernels; counts the calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def scaled_mm(
        self, a: Tensor, b: Tensor, scale_a: Tensor, kind_a: Any, scale_b: Tensor, kind_b: Any,
        swizzle_a: Any = F.SwizzleType.NO_SWIZZLE, swizzle_b: Any = F.SwizzleType.NO_SWIZZLE,
        *, output_dtype: torch.dtype, use_fast_accum: bool,
    ) -> Tensor:  # fmt: skip
        self.calls.append((kind_a, kind_b, use_fast_accum))
        kinds, swizzles = [[each.value] for each in (kind_a, kind_b)], [[each.value] for each in (swizzle_a, swizzle_b)]
        scales = [[_on_meta(scale)] for scale in (scale_a, scale_b)]
        torch.ops.aten._scaled_mm_v2(
            _on_meta(a), _on_meta(b), scales[0], kinds[0], swizzles[0], scales[1], kinds[1], swizzles[1],
            None, output_dtype, (), use_fast_accum,
        )  # fmt: skip
        assert a.stride(1) == 1 and b.stride(0) == 1 and not (a.shape[1] % 16 or b.shape[1] % 16)
        wide_a = a.float() * _spread(scale_a, kind_a, len(a), a.shape[1])
        wide_b = b.T.float() * _spread(scale_b, kind_b, b.shape[1], a.shape[1])
        return (wide_a @ wide_b.T).to(output_dtype)

    def scaled_grouped_mm(
        self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, offs: Tensor, out_dtype: torch.dtype,
        use_fast_accum: bool,
    ) -> Tensor:  # fmt: skip
        self.calls.append(use_fast_accum)
        given = map(_on_meta, (a, b, scale_a, scale_b, offs))
        torch._scaled_grouped_mm(*given, out_dtype=out_dtype, use_fast_accum=use_fast_accum)  # type: ignore[attr-defined]
        assert not (a.shape[-1] % 16 or b.shape[-1] % 16)
        bounds = zip([0, *offs.tolist()[:-1]], offs.tolist(), strict=True)
        parts = [
            (a[start:end].float() * scale_a[start:end, None]) @ (b[at].float() * scale_b[at, None])
            for at, (start, end) in enumerate(bounds)
        ]
        return torch.cat(parts).to(out_dtype)


@contextmanager
def a_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[Kernels]:
    """This device multiplies fp8, and the kernels are stand-ins."""
    found = Kernels()
    with (
        patch.object(fp8_kernels, "_has_units", lambda device: True),
        patch.object(fp8_kernels, "CUDA", (13, 0)),
        patch.object(torch.cuda, "get_device_capability", lambda device=None: capability),
        patch.object(F, "scaled_mm", found.scaled_mm),
        patch.object(fp8_kernels, "scaled_grouped_mm", found.scaled_grouped_mm),
    ):
        yield found


def _operands(recipe: str, which: Any, sizes: Sequence[int]) -> Any:
    m, n, k = sizes
    # Scales of neighbours differ, so that a scale in the wrong place shows.
    a, b = (torch.randn(rows, k).mul(torch.randn(rows, k).exp()).bfloat16() for rows in (m, n))
    [x], [y] = casts(which, RECIPES[recipe], {}, [a], [b])
    return x, y, getattr(RECIPES[recipe], which)


def _near(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found.float(), expected.float(), rtol=2**-7, atol=1e-2 * float(expected.float().std()))


# ---- linears ---------------------------------------------------------------------------------------------------------


def test_the_kernel_multiplies_what_is_emulated(subtests: pytest.Subtests) -> None:
    """PyTorch has this scaled matmul on a CPU too."""
    for recipe, which in product(ONE_SCALE, ["output", "input_grad"]):
        with subtests.test(recipe=recipe, which=which):
            x, y, pair = _operands(recipe, which, (32, 64, 48))
            expected = restored(*x, torch.float32) @ restored(*y, torch.float32).T
            assert _near(scaled_matmul(x, y, pair, torch.bfloat16, fast=False), expected)
            assert not is_served(x[0], y[0], pair, torch.bfloat16)


def test_a_kernel_finds_the_scale_of_every_block(subtests: pytest.Subtests) -> None:
    for recipe, which, sizes in product(
        ["blockwise", "mxfp8"], PRODUCTS, [(256, 384, 640), (128, 128, 128), (144, 256, 1024)]
    ):
        with subtests.test(recipe=recipe, which=which, sizes=sizes):
            x, y, pair = _operands(recipe, which, sizes)
            with a_gpu((10, 0) if recipe == "mxfp8" else (9, 0)) as kernels:
                assert is_served(x[0], y[0], pair, torch.bfloat16)
                found = scaled_matmul(x, y, pair, torch.bfloat16, fast=True)
            assert _near(found, restored(*x, torch.float32) @ restored(*y, torch.float32).T)
            assert kernels.calls[0][2] is False  # a choice that block scales do not have


def test_scales_in_the_wrong_order_would_show() -> None:
    """A stand-in that agreed with any layout would prove nothing."""
    x, y, pair = _operands("mxfp8", "output", (256, 128, 256))
    expected = restored(*x, torch.float32) @ restored(*y, torch.float32).T

    def by_rows(scale: Tensor) -> Tensor:
        return scale.to(torch.float8_e8m0fnu).flatten()

    with a_gpu((10, 0)), patch.object(fp8_kernels, "_in_tiles", by_rows):
        assert not _near(scaled_matmul(x, y, pair, torch.bfloat16, fast=False), expected)


def test_tiles_hold_powers_of_2_exactly() -> None:
    scale = torch.exp2(torch.arange(-64.0, 64.0)).view(32, 4)
    assert torch.equal(fp8_kernels._in_tiles(scale).float()[:512].view(32, 4, 4)[:, 0], scale)
    assert fp8_kernels._in_tiles(torch.full((1, 1), float("nan"))).float()[0].isnan()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_uses_the_kernel_for_each_product(recipe: str) -> None:
    """Outputs and gradients are those of emulation; where weight gradients stay in bf16 there are two products."""
    x, weight, grad = (torch.randn(*shape).bfloat16() for shape in ((128, 256), (384, 256), (128, 384)))
    products = Float8(RECIPES[recipe], {}, False)
    if products.recipe.casts_once:
        pytest.skip("its weights come cast: see test_a_kernel_finds_the_scale_of_every_block and the CPU's kernel")

    def all_three() -> list[Tensor]:
        (out,), kept = products.outputs(x, [weight])
        back, later = products.gradients([grad], [weight], kept, wants_input=True)
        assert back is not None
        return [out, back, *later()]

    expected = all_three()
    with a_gpu((10, 0) if recipe == "mxfp8" else (9, 0)) as kernels:
        assert all(map(_near, all_three(), expected))
    assert len(kernels.calls) == (2 if products.recipe.weight_grad is None else 3)


def test_sizes_that_a_kernel_does_not_take_are_emulated() -> None:
    for recipe, served, sizes in [
        ("blockwise", False, (128, 128, 192)),  # a part of a block
        ("blockwise", False, (128, 192, 128)),
        ("blockwise", False, (40, 128, 128)),
        ("blockwise", True, (48, 128, 128)),
        ("mxfp8", False, (128, 40, 128)),
        ("mxfp8", False, (128, 48, 48)),
        ("mxfp8", True, (3, 48, 64)),
        ("rowwise", True, (3, 48, 16)),
    ]:
        x, y, pair = _operands(recipe, "output", sizes)
        with a_gpu((10, 0) if recipe == "mxfp8" else (9, 0)):
            assert is_served(x[0], y[0], pair, torch.bfloat16) is served, (recipe, sizes)
            assert not is_served(x[0], y[0], pair, torch.float32)


def test_why_a_product_is_emulated(subtests: pytest.Subtests) -> None:
    cases = [
        ("rowwise", (8, 9), (12, 8), None, "needs compute capability 9.0 to 10.9"),
        ("rowwise", (9, 0), (12, 8), None, None),
        ("rowwise", (12, 0), (13, 0), None, "needs compute capability 9.0 to 10.9"),
        ("delayed", (9, 0), (13, 0), None, "no grouped matmul for gradients in e5m2"),
        ("blockwise", (9, 0), (12, 9), None, "no grouped matmul for blocks of 128"),
        ("blockwise", (9, 0), (12, 8), "needs compute capability 9.0, and CUDA 12.9", "no grouped matmul"),
        ("blockwise", (10, 0), (13, 0), "needs compute capability 9.0, and CUDA 12.9", "no grouped matmul"),
        ("mxfp8", (10, 0), (12, 8), None, "no grouped matmul for blocks of 32"),
        ("mxfp8", (9, 0), (13, 0), "needs compute capability 10.0 or later", "no grouped matmul"),
    ]
    for recipe, capability, cuda, linears, experts in cases:
        with subtests.test(recipe=recipe, capability=capability, cuda=cuda):
            with a_gpu(capability), patch.object(fp8_kernels, "CUDA", cuda):
                for expected, of_experts in ((linears, False), (experts, True)):
                    said = emulated(recipe, "cpu", "bf16", of_experts=of_experts)
                    assert said is None if expected is None else expected in str(said)
                assert emulated(recipe, "cpu", "fp32")
            assert emulated(recipe, "cpu", "bf16") == "this device has no fp8 units"


def test_a_graph_holds_blocks_as_one_operator() -> None:
    """Inductor would give what `F.scaled_mm` is given to another operator, which asks for other scales."""
    x, y, pair = _operands("blockwise", "output", (128, 128, 384))
    with a_gpu():
        expected = scaled_matmul(x, y, pair, torch.bfloat16, fast=False)
        compiled = torch.compile(scaled_matmul, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, y, pair, torch.bfloat16, fast=False), expected)


# ---- experts ---------------------------------------------------------------------------------------------------------


def test_experts_use_the_grouped_kernel(subtests: pytest.Subtests) -> None:
    for recipe, is_transposed in product(RECIPES, [False, True]):
        with subtests.test(recipe=recipe, is_transposed=is_transposed):
            counts = torch.tensor([5, 0, 27])
            x, grad = torch.randn(32, 64).bfloat16(), torch.randn(32, 48).bfloat16()
            weight = torch.randn(3, 48, 64).mul(torch.randn(3, 48, 64).exp()).bfloat16()
            products = Float8Grouped(RECIPES[recipe], counts, is_transposed, is_served=True)
            weight = weight.transpose(1, 2).contiguous() if is_transposed else weight
            expected = products.output(x, weight), products.input_grad(grad, weight)
            with a_gpu() as kernels:
                found = products.output(x, weight), products.input_grad(grad, weight)
            assert all(map(_near, found, expected))
            # The kernel takes rows in e4m3: not blocks, nor gradients in e5m2.
            of_gradients = [False] * recipe.startswith("rowwise")
            assert kernels.calls == ([True, *of_gradients] if recipe in ONE_SCALE else [])
            pair = by_row(RECIPES[recipe]).output
            with a_gpu((8, 9)):
                assert not is_served_grouped(x, weight, pair, torch.bfloat16)
