"""Document lengths and device peaks for `perf/tflops_per_device` and `perf/mfu_pct`; see also `models/flops.py`."""

from collections.abc import Sequence

import numpy as np
import torch

from fivefold.core.errors import UserError
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.hardware.chip import bf16_peak
from fivefold.hardware.cluster import Cluster


def squared_lengths(batch: Sequence[MicroBatch]) -> int:
    """Sum of squared lengths of the documents in these rows, without segments that have no target (padding)."""
    total = 0
    for part in batch:
        lengths = np.diff(part.cu_seqlens).astype(np.int64)
        with_target = np.add.reduceat(part.labels.reshape(-1) != IGNORE, part.cu_seqlens[:-1]) > 0
        total += int((lengths[with_target] ** 2).sum())
    return total


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The device's dense bf16 peak in TFLOP/s; None if unknown (every CPU, other precisions)."""
    if device.type != "cuda" or precision != "bf16":
        return None
    return bf16_peak(torch.cuda.get_device_name(device))


def measured_tflops(hardware: str, precision: str, workers: int) -> float | None:
    """TFLOP/s of large matmuls on the cores of this machine that each of its `workers` has, by the file that `fivefold
    calibrate` wrote; None without a file of a CPU. `hardware`: `layout.hardware` of the run."""
    try:
        cluster = Cluster.parse(hardware) if hardware else None
    except UserError:  # moved since the run began: this number is not worth ending it
        cluster = None
    if cluster is None or not cluster.chip.is_host or cluster.chip.is_guess:
        return None
    of_core = cluster.chip.flops_per_second(precision)
    return None if of_core is None else of_core * (cluster.node.cores or workers) / workers / 1e12
