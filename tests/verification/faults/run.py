"""Bugs of a whole run, which a proof on its own batches cannot see: what the ranks read, and the rates of the steps.

They are planted when a run goes on from its checkpoint. What has to see them are its standing checks.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from fivefold.data.rows import PackedRows
from fivefold.training import run
from tests.verification.faults.fault import fault

WRONG_ROWS = [("standing check", r"^ranks? .* read .* in place of rows ")]
WRONG_RATE = [("standing check", r"^the learning rate ")]


def _reading(change: Callable[[int, dict[str, Any]], int]) -> Any:
    """A rank reads the rows of step `change(step, knobs)`."""
    plain = PackedRows.batch

    def batch(self: PackedRows, step: int, **knobs: Any) -> Any:
        return plain(self, change(step, knobs), **knobs)

    return patch.object(PackedRows, "batch", batch)


@fault(
    "all data ranks read the same rows",
    known="VisCy #408, rbyte #106",
    layout="shard2",
    kind="run",
    expects=[("standing check", r"^rank 1 read ")],
)
def data_ranks_read_the_same_rows() -> Any:
    def first(step: int, knobs: dict[str, Any]) -> int:
        knobs["data_rank"] = 0
        return step

    return _reading(first)


@fault(
    "tensor parallel ranks read different rows",
    known="accelerate #3092",
    layout="tp2",
    kind="run",
    expects=[("standing check", r"^rank 1 read ")],
)
def tensor_ranks_read_different_rows() -> Any:
    return _reading(lambda step, _: step + dist.get_rank())


@fault(
    "a resumed run reads from the beginning again",
    known="a loader that does not skip what was read",
    layout="shard2",
    kind="run",
    expects=WRONG_ROWS,
)
def rows_start_again_on_resume() -> Any:
    seen: list[int] = []

    def from_the_start(step: int, _: Any) -> int:
        seen.append(step)
        return step - seen[0]

    return _reading(from_the_start)


@fault(
    "a resumed run passes the rows of a step over",
    known="a step counted before and after it was saved",
    layout="shard2",
    kind="run",
    expects=WRONG_ROWS,
)
def rows_of_a_step_passed_over() -> Any:
    return _reading(lambda step, _: step + 1)


def _rates(change: Callable[[int, float], float]) -> Any:
    """The step that is the n-th of this start is made with the rate `change(n, rate)`."""
    plain, steps = run.train_step, [0]

    def train_step(*args: Any, learning_rate: float, **options: Any) -> Any:
        steps[0] += 1
        return plain(*args, learning_rate=change(steps[0], learning_rate), **options)

    return patch.object(run, "train_step", train_step)


@fault(
    "the learning rate warms up again after a resume",
    known="openfold #181, speculators #900",
    layout="shard2",
    kind="run",
    expects=WRONG_RATE,
)
def rate_restarts_on_resume() -> Any:
    return _rates(lambda step, rate: rate * min(1.0, step / 4))


@fault(
    "steps are made with the rate of the step before",
    known="scheduler and optimizer in the wrong order",
    layout="shard2",
    kind="run",
    expects=WRONG_RATE,
)
def rate_of_the_step_before() -> Any:
    before: list[float] = []

    def late(_: int, rate: float) -> float:
        before.append(rate)
        return before[-2] if len(before) > 1 else rate * 1.1  # it falls

    return _rates(late)
