"""PyTorch's fp8 matmul kernels: the operands that they take, and the layout of their scales.

| regions of a, of b | scales of a [M, K] | scales of b [N, K] | kernel |
|---|---|---|---|
| tensor, tensor | one number | one number | `F.scaled_mm`, TensorWise |
| row, row | [M, 1] | [1, N] | `F.scaled_mm`, RowWise |
| 1 x 128, 128 x 128 | [M, K/128], M contiguous | [K/128 padded to 4, N/128], K contiguous | `F.scaled_mm`, BlockWise |
| 1 x 128, 1 x 128 | [M, K/128], M contiguous | [N, K/128], N contiguous | `F.scaled_mm`, BlockWise |
| 1 x 32, 1 x 32 | e8m0 in tiles of 128 x 4 | the same | `F.scaled_mm`, BlockWise1x32 |
| row, row or tensor of each expert | [S] | [E, N] | `_scaled_grouped_mm` |

A kernel multiplies by scales, so it gets 1 / those of `scale_of`. The grouped one takes e4m3 alone. Source:
`_scaled_mm_v2` and `_scaled_grouped_mm` in PyTorch's ScaledBlas.cpp and GroupedBlas.cpp; cuBLAS, "1D block scaling
factors layout".
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.fp8.recipes import ALIGNED, GROUPED_KERNELS, KERNELS, RECIPES, Kernel, Pair
from fivefold.torch_internals import scaled_grouped_mm

CUDA = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])  # that this torch was built with

Rounded = tuple[Tensor, Tensor]  # fp8 numbers, and the scale that they were multiplied by


def emulated(recipe: str, device: str, precision: str, *, of_experts: bool = False) -> str | None:
    """Return why `recipe` is emulated on `device`, which costs time; None if a kernel multiplies its products."""
    of, block = torch.device(device), RECIPES[recipe].block
    kernel = (GROUPED_KERNELS if of_experts else KERNELS).get(block)
    blocks = f"blocks of {block}" if block > 1 else "rows"
    if not _has_units(of):
        return "this device has no fp8 units"
    if kernel is None or (of_experts and scaled_grouped_mm is None):
        return f"this torch has no grouped matmul for {blocks} in fp8"
    if of_experts and RECIPES[recipe].input_grad[0].form != "e4m3":
        return "this torch has no grouped matmul for gradients in e5m2"
    if not _has(of, kernel):
        return f"PyTorch's kernel for {blocks} needs {_asked(kernel)}"
    return None if precision == "bf16" else "the kernel multiplies for precision.compute: bf16"


def is_served(a_MK: Tensor, b_NK: Tensor, pair: Pair, dtype: torch.dtype) -> bool:
    """True if PyTorch's scaled matmul takes these operands for a result in `dtype`, on this device."""
    block = pair[0].region[1] or 1
    kernel, sizes = KERNELS[block], [len(b_NK)] + [len(a_MK)] * (block == 128)
    if dtype != torch.bfloat16 or not _has(a_MK.device, kernel):
        return False
    is_whole = pair[1].region[0] != 128 or len(b_NK) % 128 == 0  # torch 2.13 counts whole blocks, in a graph
    return is_whole and not (a_MK.shape[1] % kernel.summed or any(size % ALIGNED for size in sizes))


def is_served_grouped(rows_SK: Tensor, weight_ENK: Tensor, pair: Pair, dtype: torch.dtype) -> bool:
    """True if PyTorch's scaled grouped matmul takes these operands."""
    kernel = GROUPED_KERNELS.get(pair[0].region[1] or 1)
    if kernel is None or scaled_grouped_mm is None or dtype != torch.bfloat16:
        return False
    if any(cast.form != "e4m3" for cast in pair):
        return False
    return _has(rows_SK.device, kernel) and not any(size % ALIGNED for size in weight_ENK.shape[1:])


def _has_units(device: torch.device) -> bool:
    """True if a device multiplies e4m3 and e5m2 as defined here. (AMD's MI300 has formats of its own.)"""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= KERNELS[1].first


def _has(device: torch.device, kernel: Kernel) -> bool:
    """True if a kernel runs on this device with this torch."""
    if not _has_units(device) or kernel.cuda > CUDA:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= kernel.first and (kernel.last is None or capability <= kernel.last)


def _asked(kernel: Kernel) -> str:
    first, last = (None if place is None else f"{place[0]}.{place[1]}" for place in (kernel.first, kernel.last))
    until = " or later" if last is None else "" if last == first else f" to {last}"
    return f"compute capability {first}{until}, and CUDA {kernel.cuda[0]}.{kernel.cuda[1]}"


# ---- calls -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("fivefold::laid_out", mutates_args=())
def laid_out(x: Tensor, beside: Tensor) -> Tensor:
    """Copy `x`, row after row. To a compiler the copy depends on `beside`, so backward makes it. Otherwise forward
    would make it, and a graph would save it in addition to its source."""
    return x.clone(memory_format=torch.contiguous_format)


@laid_out.register_fake
def _(x: Tensor, beside: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def scaled_matmul(a_MK: Rounded, b_NK: Rounded, pair: Pair, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """`a` times `b` transposed by the kernel, [M, N], from operands in fp8 and their scales. `fast`: sums are kept in
    fewer bits inside a tile, which is enough in forward. Blocks have no such choice."""
    (a, of_a), (b, of_b) = a_MK, b_NK
    if block := pair[0].region[1]:
        rows = pair[1].region[0] or 1
        return multiply_blocks(a, 1 / of_a[:, ::block], b, 1 / of_b[::rows, ::block], block, rows)  # type: ignore[no-any-return]
    if of_a.numel() == of_b.numel() == 1:
        recipe, scales = F.ScalingType.TensorWise, [(1 / scale).reshape(()) for scale in (of_a, of_b)]
    else:
        recipe = F.ScalingType.RowWise
        scales = [(1 / of_a).expand(len(a), 1).contiguous(), (1 / of_b).expand(len(b), 1).contiguous().T]
    return F.scaled_mm(
        a.contiguous(), b.contiguous().T, scales[0], recipe, scales[1], recipe, output_dtype=dtype, use_fast_accum=fast
    )


@torch.library.custom_op("fivefold::multiply_blocks", mutates_args=())
def multiply_blocks(a_MK: Tensor, of_a: Tensor, b_NK: Tensor, of_b: Tensor, block: int, rows: int) -> Tensor:
    """`a` times `b` transposed in bf16, from the decoding scales of blocks of 1 x `block` and of `rows` x `block`.

    A compiler sees one operator, because Inductor gives the arguments of `_scaled_mm_v2` to `_scaled_mm`, which expects
    other shapes of the scales of 128 x 128 (torch 2.14).
    """
    types, swizzle = F.ScalingType, F.SwizzleType.NO_SWIZZLE
    if block == 32:
        recipes, swizzle = (types.BlockWise1x32, types.BlockWise1x32), F.SwizzleType.SWIZZLE_32_4_4
        scales = _in_tiles(of_a), _in_tiles(of_b)
    else:
        recipes = types.BlockWise1x128, types.BlockWise128x128 if rows == 128 else types.BlockWise1x128
        padded = F.pad(of_b, (0, -of_b.shape[1] % 4)).contiguous().T
        scales = of_a.T.contiguous().T, padded if rows == 128 else of_b.T.contiguous().T
    return F.scaled_mm(
        a_MK.contiguous(), b_NK.contiguous().T, scales[0], recipes[0], scales[1], recipes[1], swizzle, swizzle,
        output_dtype=torch.bfloat16, use_fast_accum=False,
    )  # fmt: skip


@multiply_blocks.register_fake
def _(a_MK: Tensor, of_a: Tensor, b_NK: Tensor, of_b: Tensor, block: int, rows: int) -> Tensor:
    return a_MK.new_empty(len(a_MK), len(b_NK), dtype=torch.bfloat16)


def grouped_matmul(rows_SK: Rounded, weight_ENK: Rounded, ends_E: Tensor, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Multiply rows sorted by expert with their expert's matrix transposed, by the kernel: [S, N]."""
    (rows, of_rows), (weight, of_weight) = rows_SK, weight_ENK
    assert scaled_grouped_mm is not None  # see `is_served_grouped`
    return scaled_grouped_mm(
        rows.contiguous(), weight.contiguous().transpose(1, 2), (1 / of_rows).reshape(-1).contiguous(),
        (1 / of_weight).expand(*weight.shape[:2], 1).squeeze(-1).contiguous(), offs=ends_E, out_dtype=dtype,
        use_fast_accum=fast,
    )  # fmt: skip


def _in_tiles(scale_MC: Tensor) -> Tensor:
    """Pack powers of 2 as e8m0 into tiles of 128 x 4: (r, c) is at 16 (r mod 32) + 4 (r div 32) + c."""
    bits = (scale_MC.view(torch.int32) >> 23) & 255  # e8m0 has the exponent of fp32, and 255 is NaN
    padded = F.pad(bits, (0, -bits.shape[1] % 4, 0, -bits.shape[0] % 128)).to(torch.uint8)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e8m0fnu)
