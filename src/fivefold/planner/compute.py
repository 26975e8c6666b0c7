"""Kernel times on a chip: a roofline, less what unfavourable shapes lose of the peak. No torch.

A matmul is cut into tiles, which are dealt to the chip's multiprocessors in waves. A partial last wave leaves some of
them idle; a short inner dimension does not fill the pipeline of a tile.
"""

from dataclasses import dataclass
from typing import Any

from fivefold.core.errors import UserError
from fivefold.hardware.chip import Chip

ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "fp8": 1}


@dataclass(frozen=True)
class Product:
    """`count` identical matmuls of a micro batch on a rank: [rows, inputs] times [inputs, outputs]."""

    rows: int
    inputs: int
    outputs: int
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inputs * self.outputs * self.count


def matmul_seconds(chip: Chip, product: Product, dtype: str) -> float:
    """Forward seconds: the longer of arithmetic and memory traffic."""
    rows, inputs, outputs, count = product.rows, product.inputs, product.outputs, product.count
    numbers = count * (rows * inputs + inputs * outputs + rows * outputs)
    rate = flops_per_second(chip, dtype) * chip.step_fraction
    arithmetic = product.flops / (rate * _fill(chip, rows, outputs, inputs, count))
    return max(arithmetic, traffic_seconds(chip, numbers * ITEMSIZE[dtype]))


def flops_per_second(chip: Chip, dtype: str) -> float:
    """FLOP/s of the best large matmul. Raises `UserError` if the chip lacks the dtype."""
    rate = chip.flops_per_second(dtype)
    if rate is None:
        raise UserError(f"{chip.name} has no {dtype}", fix=f"choose a precision of {', '.join(chip.peak_tflops)}")
    return rate


def _fill(chip: Chip, rows: int, outputs: int, inputs: int, count: int) -> float:
    """Part of the achievable peak that a shape reaches."""
    tile_m, tile_n = chip.tile
    tiles_m, tiles_n = -(-rows // tile_m), -(-outputs // tile_n)
    tiles = tiles_m * tiles_n * count
    of_tiles = rows * outputs / (tiles_m * tile_m * tiles_n * tile_n)
    of_waves = tiles / (-(-tiles // chip.sms) * chip.sms)
    return of_tiles * of_waves * inputs / (inputs + chip.tile_fill)


def attention_seconds(chip: Chip, flops: float, dtype: str) -> float:
    """Forward seconds of causal attention; `flops` counts only the half of the scores that is computed."""
    return flops / (flops_per_second(chip, dtype) * chip.attention_fraction)


def traffic_seconds(chip: Chip, size: float) -> float:
    """Seconds of element-wise work that reads and writes `size` bytes."""
    return size / chip.memory_bytes_per_second


def traffic_bytes(chip: Chip, seconds: float) -> float:
    """Bytes that element-wise work reads and writes in `seconds`."""
    return seconds * chip.memory_bytes_per_second


def host_seconds(chip: Chip, size: Any) -> Any:
    """Seconds to copy `size` bytes (a number or an array) to host memory, or back; both ways at once take as long."""
    return size / (chip.host_gbs * 1e9)
