"""Model FLOPs and device peaks, for `perf/tflops_per_device` and `perf/mfu_pct`.

Counted: every matmul of the model, forward and backward (6 per weight and token), and attention inside documents,
causally halved. Not counted: recompute, padding, element-wise work. (The convention of PaLM, arXiv:2204.02311.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.models.facts import ModelFacts
from fivefold.planner.chips import bf16_peak


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
