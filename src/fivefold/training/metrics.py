"""Metrics of a step: its row in `metrics.jsonl`. Names have groups: `train/loss`."""

import math
import time
from collections.abc import Mapping
from typing import Any

from fivefold.training.part import LiveRun
from fivefold.training.step import StepResult


def row(run: LiveRun, result: StepResult, rate: float, *, seconds: float, waited: float) -> dict[str, Any]:
    """The row of the step just done at learning rate `rate`. It took `seconds`, `waited` of them for its rows."""
    tokens_per_second = result.tokens / seconds
    flops_done = run.costs.per_token * result.tokens + run.costs.per_squared_length * result.squared_lengths
    tflops = flops_done / seconds / run.world.size / 1e12
    peak, measured = run.peak_tflops, run.measured_tflops
    return {
        "step": run.step,
        "train/loss": finite(result.loss),
        "train/grad_norm": finite(result.grad_norm),
        "train/learning_rate": rate,
        "train/tokens_seen": run.progress.tokens_seen,
        "train/skipped_steps": run.progress.skipped,
        "perf/tokens_per_second": tokens_per_second,
        "perf/tokens_per_second_per_device": tokens_per_second / run.world.size,
        "perf/tflops_per_device": tflops,
        "perf/mfu_pct": 100 * tflops / peak if peak else None,
        **({"perf/matmul_pct": 100 * tflops / measured} if measured else {}),
        "perf/step_seconds": seconds,
        "perf/data_wait_pct": 100 * waited / seconds,
        "perf/elapsed_seconds": run.log.seconds_before + time.monotonic() - run.log.began,
        **result.balance.metrics(),
        **{name: finite(number) for name, number in result.metrics.items()},
    }


def of_evaluation(loss: float, more: Mapping[str, float]) -> dict[str, Any]:
    """The part of a row that an evaluation adds. `more`: metrics of a preference objective."""
    return {"eval/loss": finite(loss), **{f"eval/{name}": finite(number) for name, number in more.items()}}


def finite(number: float) -> float | None:
    """Map NaN and infinities, which JSON does not have, to None."""
    return number if math.isfinite(number) else None
