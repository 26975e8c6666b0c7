"""Model FLOPs and device peaks, for `perf/tflops_per_device` and `perf/mfu_pct`.

Counted: every matmul of the model, forward and backward (6 per weight and token), and attention inside documents,
causally halved. Not counted: recompute, padding, element-wise work. (The convention of PaLM, arXiv:2204.02311.)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.heads import head_counts
from fivefold.models import surfaces
from fivefold.models.anatomy import Anatomy

# Dense bf16 peak of one device in TFLOP/s without sparsity, by words of the name CUDA gives it; the first match counts.
BF16_PEAKS = {
    "B200": 2250.0,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "A100": 312.0,
    "L40S": 362.0,
    "A10G": 70.0,
    "A10": 125.0,
}


@dataclass(frozen=True)
class Costs:
    """What training a model costs: `parameters`; FLOPs `per_token` (matmuls) and `per_squared_length` (causal
    attention, per squared document length, all layers)."""

    parameters: int
    per_token: int
    per_squared_length: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Costs":
        """Read off a whole model (not yet cut). The embedding lookup costs nothing; the head does, tied or not."""
        anatomy = Anatomy.of(model)
        weights = sum(p.numel() for _, p in model.named_parameters() if p.ndim == 2)
        weights += sum(_used(module, model.config) for module in model.modules() if surfaces.is_experts(module))
        embedding = model.get_parameter(f"{anatomy.embedding}.weight").numel()
        query, _, size = head_counts(model.config.get_text_config())
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            per_token=6 * (weights if anatomy.tied else weights - embedding),
            per_squared_length=6 * len(anatomy.layers) * query * size,
        )


def _used(experts: nn.Module, config: Any) -> int:
    """Weights of a layer's experts that a token meets."""
    cubes = [p for p in experts.parameters() if p.ndim == 3]
    return sum(p.numel() // p.shape[0] for p in cubes) * int(config.get_text_config().num_experts_per_tok)


def squared_lengths(batch: Sequence[MicroBatch]) -> int:
    """Sum of squared lengths of the documents in these rows; segments without a target (padding) left out."""
    total = 0
    for part in batch:
        lengths = np.diff(part.bounds).astype(np.int64)
        with_target = np.add.reduceat(part.labels.reshape(-1) != IGNORE, part.bounds[:-1]) > 0
        total += int((lengths[with_target] ** 2).sum())
    return total


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's dense bf16 peak in TFLOP/s, or None where it is not known (every CPU, other precisions)."""
    if device.type != "cuda" or precision != "bf16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for words, peak in BF16_PEAKS.items() if re.search(rf"\b{words}\b", name)), None)
