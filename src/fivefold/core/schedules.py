"""Shapes of the learning rate after its warm-up, by name. No torch.

A shape is a function of the step, counted from 0, of the warm-up's steps and of all steps. It returns the part of the
way from the lowest rate to the peak: 1 is the peak, and the first step after the warm-up has it. One step after the
last it is 0, unless the shape stays up: `scheduler.min_lr_ratio` means the rate there.
"""

from collections.abc import Callable
from math import cos, pi

WSD_DECAY = 0.1  # the last tenth of the run decays (MiniCPM, arXiv:2404.06395)


def _constant(step: int, warmup: int, total: int) -> float:
    return 1.0


def _linear(step: int, warmup: int, total: int) -> float:
    return 1 - _done(step, warmup, total)


def _cosine(step: int, warmup: int, total: int) -> float:
    return (1 + cos(pi * _done(step, warmup, total))) / 2


def _wsd(step: int, warmup: int, total: int) -> float:
    return 1 - _done(step, max(warmup, total - max(1, round(WSD_DECAY * total))), total)


def _done(step: int, start: int, total: int) -> float:
    """The part of a decay that is done: 0 up to the step `start`, 1 one step after the last."""
    return min(1.0, max(0, step - start) / max(1, total - start))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "cosine": _cosine, "linear": _linear, "wsd": _wsd, "constant": _constant
}  # fmt: skip
