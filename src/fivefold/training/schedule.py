"""The learning rate as a pure function of the optimizer step: nothing to save, nothing to tick twice."""

from math import cos, pi

WSD_DECAY = 0.1  # the last tenth of the run decays (MiniCPM, arXiv:2404.06395)


def learning_rate(
    step: int, *, name: str, peak: float, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> float:
    """Rate of optimizer step `step` (0 is the first). Warm-up rises linearly and reaches `peak` at its last step.

    `cosine` and `linear` fall to `min_lr_ratio * peak` at the last step of the run; `wsd` stays at the peak and
    falls linearly over the last tenth; `constant` stays.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    low = min_lr_ratio * peak
    if name == "constant":
        return peak
    start = warmup_steps if name != "wsd" else max(warmup_steps, total_steps - max(1, round(WSD_DECAY * total_steps)))
    if step < start:
        return peak
    done = min(1.0, (step + 1 - start) / max(1, total_steps - start))
    if name == "cosine":
        return low + (peak - low) * (1 + cos(pi * done)) / 2
    return peak + (low - peak) * done
