"""The length of a run, its warm-up, and the learning rate as a pure function of the optimizer step: no state to save or
to advance twice."""

from fractions import Fraction
from math import ceil

from fivefold.config import RunConfig
from fivefold.core.schedules import SCHEDULES
from fivefold.data.prepare import PreparedData

_WARMUP_STEPS, _WARMUP_PART = 100, Fraction(1, 20)  # `auto` takes the smaller of the two


def learning_rate(
    step: int, *, name: str, peak: float, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> float:
    """The rate of optimizer step `step` (0 is the first).

    The warm-up rises linearly from `peak / warmup_steps` and reaches `peak` at its last step. After it, the rate is
    that of the schedulers of `transformers` at the same step (docs/explain/learning_rate.md). Those that decay would
    reach `min_lr_ratio * peak` one step after the last, so no step has a rate of 0.

    Raises `ValueError` if the shape leaves 0 to 1: no other check would see it, for all of them ask this function.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    left = SCHEDULES[name](step, warmup_steps, total_steps)
    if not 0 <= left <= 1:  # nor NaN
        raise ValueError(f"the schedule {name} gives {left} at step {step} of {total_steps}, which is not from 0 to 1")
    return peak if left == 1 else peak * (min_lr_ratio + (1 - min_lr_ratio) * left)


def total_steps(config: RunConfig, data: PreparedData) -> int:
    """Optimizer steps of the run, at least 1, from `max_steps`, `max_epochs` or `max_tokens`."""
    train = config.train
    if train.max_steps:
        return train.max_steps
    if train.max_epochs:
        rows = Fraction(str(train.max_epochs)) * data.whole.epoch_rows  # str: 0.1 is a tenth
        return max(1, ceil(rows / train.global_batch_size))
    tokens_per_step = data.train.tokens_per_row * train.global_batch_size
    return max(1, ceil((train.max_tokens or 0) / tokens_per_step))


def total_tokens(config: RunConfig, data: PreparedData, total: int) -> float:
    """Input tokens of `total` steps by the mean of the rows; the steps of a run read about as many."""
    return data.train.tokens_per_row * config.train.global_batch_size * total


def settled(config: RunConfig, total: int, *, before: int | None) -> RunConfig:
    """The config with a number for `scheduler.warmup_steps`.

    `before`: that of the checkpoint resumed from. If the run file leaves the number open, a lengthened run keeps it:
    another one would contradict the rates of the steps already done.
    """
    asked = config.scheduler.warmup_steps
    if isinstance(asked, int):
        return config
    part = _WARMUP_PART if isinstance(asked, str) else Fraction(str(asked))
    steps = ceil(part * total) if before is None else before
    if asked == "auto" and before is None:
        steps = min(_WARMUP_STEPS, steps)
    return config.model_copy(update={"scheduler": config.scheduler.model_copy(update={"warmup_steps": steps})})


def warning(config: RunConfig, total: int) -> str | None:
    """A warning if the warm-up is longer than the run, which then never reaches its learning rate; else None."""
    warmup, peak = int(config.scheduler.warmup_steps), config.optimizer.learning_rate
    if warmup <= total:
        return None
    return (
        f"scheduler.warmup_steps {warmup:,} is longer than the run of {total:,} steps: the learning rate reaches "
        f"{peak * total / warmup:.3g}, not the {peak:.3g} of optimizer.learning_rate; scheduler.warmup_steps=auto fits"
    )


def epochs_text(config: RunConfig, data: PreparedData, steps: int) -> str:
    """A text such as `1.8 epochs: 20 steps over 178 rows`."""
    return data.train.extent(steps * config.train.global_batch_size, f"{steps:,} steps")
