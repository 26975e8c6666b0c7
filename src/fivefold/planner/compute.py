"""How long kernels take on a chip: a roofline with the shapes that lose some of the peak. No torch.

A matmul is cut into tiles, and the tiles are dealt to the chip's multiprocessors in waves. A last wave that is not full
keeps the others waiting; a short inner dimension does not fill the pipeline of a tile.
"""

from dataclasses import dataclass

from fivefold.core.errors import UserError
from fivefold.planner.chips import Chip

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8": 1}
ATTENTION = 0.5  # of the matmul rate that attention reaches in a step: 447 TFLOP/s of H200's 794 (ml-engineering, FA3)
TILE_M, TILE_N, FILL_K = 128, 256, 64  # of a tile's outputs; FILL_K: inner products in which a tile gets going


@dataclass(frozen=True)
class Product:
    """`count` matmuls alike of a micro batch on a rank: [rows, inputs] times [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs * self.count


def matmul_seconds(chip: Chip, product: Product, dtype: str) -> float:
    """Forward of it: the longer of arithmetic and memory traffic."""
    rows, inputs, outputs, count = product.rows, product.inputs, product.outputs, product.count
    numbers = count * (rows * inputs + inputs * outputs + rows * outputs)
    arithmetic = product.flops / (flops_per_second(chip, dtype) * _fill(chip, rows, outputs, inputs, count))
    return max(arithmetic, traffic_seconds(chip, numbers * ITEMSIZE[dtype]))


def flops_per_second(chip: Chip, dtype: str) -> float:
    """What the best large matmul reaches. Raises `UserError` where the chip has no such dtype."""
    rate = chip.flops_per_second(dtype)
    if rate is None:
        raise UserError(f"{chip.name} has no {dtype}", fix=f"choose a precision of {', '.join(chip.peak_tflops)}")
    return rate


def _fill(chip: Chip, rows: int, outputs: int, inputs: int, count: int) -> float:
    """The part of the achievable peak that a shape gets."""
    tiles_m, tiles_n = -(-rows // TILE_M), -(-outputs // TILE_N)
    tiles = tiles_m * tiles_n * count
    of_tiles = rows * outputs / (tiles_m * TILE_M * tiles_n * TILE_N)
    of_waves = tiles / (-(-tiles // chip.sms) * chip.sms)
    return of_tiles * of_waves * inputs / (inputs + FILL_K)


def attention_seconds(chip: Chip, flops: float, dtype: str) -> float:
    """Forward of causal attention: `flops` are those of the half of the scores that is computed."""
    return flops / (flops_per_second(chip, dtype) * ATTENTION)


def traffic_seconds(chip: Chip, size: float) -> float:
    """Element-wise work that reads and writes so many bytes."""
    return size / chip.memory_bytes_per_second
