"""Model FLOPs and device peaks, for `perf/tflops_per_device` and `perf/mfu_pct`.

Counted: every matmul of the model, forward and backward (6 per weight and token), and attention inside documents,
causally halved. Not counted: recompute, padding, element-wise work. (The convention of PaLM, arXiv:2204.02311.)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.models.facts import ModelFacts

# Dense bf16 peak of one device in TFLOP/s, summed in fp32, by words of the name that CUDA or ROCm gives it; the first
# match counts. Where a datasheet states it with sparsity, half of that. Devices without bf16 (V100, T4) have none, nor
# have slices (MIG).
BF16_PEAKS = {
    # NVIDIA's datasheets: GB200 and GB300 NVL72 (360 PFLOP/s sparse of 72), HGX B200 and B300 (36 of 8), GH200, H200,
    # H100; H800 is an H100 with slower links, H20 as its own datasheet has it.
    "GB300": 2500.0, "GB200": 2500.0, "B300": 2250.0, "B200": 2250.0, "GH200": 989.4,
    "H200 NVL": 835.0, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4,
    "H800 PCIe": 756.0, "H800": 989.4, "H20": 148.0,
    # A100 and its A800, A30, A40, A10; A10G as AWS states it for G5.
    "A100": 312.0, "A800": 312.0, "A30": 165.0, "A40": 149.7, "A10G": 70.0, "A10": 125.0,
    # L4, L40, L40S; NVIDIA's whitepapers of Ada and of Blackwell for RTX.
    "L4": 121.0, "L40": 181.0, "L40S": 362.0, "RTX 6000 Ada": 364.2, "RTX 4090": 165.2, "RTX 5090": 209.5,
    # AMD's datasheets. A device is one of the two dies of an MI250X, and all of the others.
    "MI250X": 191.5, "MI300A": 980.6, "MI300X": 1307.4, "MI325X": 1307.4, "MI350X": 2306.9, "MI355X": 2516.6,
}  # fmt: skip


@dataclass(frozen=True)
class Costs:
    """What training a model costs: `parameters`; FLOPs `per_token` (matmuls) and `per_squared_length` (causal
    attention, per squared document length, all layers)."""

    parameters: int
    per_token: int
    per_squared_length: int

    @classmethod
    def of(cls, facts: ModelFacts) -> "Costs":
        """Of a whole model. The embedding lookup costs nothing; the head does, tied or not."""
        active = sum(cost.active for cost in facts.layer_costs) + sum(each.weights for each in facts.outside)
        attention = [shape for cost in facts.layer_costs for shape in cost.attention]
        return cls(
            parameters=facts.size,
            per_token=6 * active,
            per_squared_length=sum(3 * shape.query * (shape.key_size + shape.value_size) for shape in attention),
        )


def squared_lengths(batch: Sequence[MicroBatch]) -> int:
    """Sum of squared lengths of the documents in these rows; segments without a target (padding) left out."""
    total = 0
    for part in batch:
        lengths = np.diff(part.cu_seqlens).astype(np.int64)
        with_target = np.add.reduceat(part.labels.reshape(-1) != IGNORE, part.cu_seqlens[:-1]) > 0
        total += int((lengths[with_target] ** 2).sum())
    return total


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's dense bf16 peak in TFLOP/s, or None where it is not known (every CPU, other precisions)."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return bf16_peak(torch.cuda.get_device_name(device))


def bf16_peak(name: str) -> float | None:
    """The dense bf16 peak in TFLOP/s of a device of this name, or None where it is not known."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((peak for words, peak in BF16_PEAKS.items() if re.search(rf"\b{words}\b", name)), None)
