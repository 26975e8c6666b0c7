"""The ledger of learning rates: what every step of a run uses, beside the schedulers of `transformers`."""

from itertools import product
from math import cos, pi
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import get_scheduler

from fivefold.core.schedules import SCHEDULES
from fivefold.training.schedule import learning_rate

NAMES = (*SCHEDULES,)
LENGTHS = [(0, 1), (0, 3), (0, 7), (1, 1), (1, 2), (1, 7), (3, 7), (6, 7), (7, 7), (9, 7), (5, 101), (95, 101)]


def ledger(name: str, *, warmup_steps: int, total_steps: int, **changes: Any) -> list[float]:
    options = {"peak": 1.0, "min_lr_ratio": 0.1, **changes}
    return [
        learning_rate(step, name=name, warmup_steps=warmup_steps, total_steps=total_steps, **options)
        for step in range(total_steps)
    ]


def of_transformers(name: str, *, warmup_steps: int, total_steps: int, peak: float, min_lr_ratio: float) -> list[float]:
    """The rates that `optimizer.step()` has under the scheduler of `transformers` which has this shape."""
    theirs, options = {
        "constant": ("constant_with_warmup", {}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": min_lr_ratio}),
        "linear": ("polynomial", {"lr_end": min_lr_ratio * peak, "power": 1.0}),
        "wsd": ("warmup_stable_decay", {
            "num_decay_steps": max(1, min(round(total_steps / 10), total_steps - warmup_steps)),
            "decay_type": "linear", "min_lr_ratio": min_lr_ratio,
        }),
    }[name]  # fmt: skip
    if (name, min_lr_ratio) in (("linear", 0.0), ("cosine", 0.0)):
        theirs, options = name, {}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    scheduler = get_scheduler(
        theirs, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps,
        scheduler_specific_kwargs=options,
    )  # fmt: skip
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(total_steps - 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_every_step_after_the_warm_up_has_the_rate_of_transformers(subtests: pytest.Subtests) -> None:
    for name, lengths, least in product(NAMES, LENGTHS, (0.0, 0.1)):
        warmup_steps, total_steps = lengths
        with subtests.test(name=name, warmup_steps=warmup_steps, total_steps=total_steps, least=least):
            options = {"warmup_steps": warmup_steps, "total_steps": total_steps, "peak": 3e-4, "min_lr_ratio": least}
            rising = [3e-4 * step / warmup_steps for step in range(1, min(warmup_steps, total_steps) + 1)]
            after = of_transformers(name, **options)[warmup_steps:]
            assert ledger(name, **options) == pytest.approx([*rising, *after], rel=1e-12)


def test_three_steps_and_one() -> None:
    """Rates that a reader can follow: none of them is 0, although the lowest rate is."""
    options = {"warmup_steps": 0, "peak": 0.003, "min_lr_ratio": 0.0}
    assert ledger("linear", total_steps=3, **options) == pytest.approx([0.003, 0.002, 0.001])
    assert ledger("cosine", total_steps=3, **options) == pytest.approx([0.003, 0.00225, 0.00075])
    for name in NAMES:
        assert ledger(name, total_steps=1, **options) == [0.003]


def test_cosine() -> None:
    tail = [0.1 + 0.9 * (1 + cos(pi * done)) / 2 for done in (0, 0.25, 0.5, 0.75)]
    assert ledger("cosine", warmup_steps=2, total_steps=6) == pytest.approx([0.5, 1.0, *tail])


def test_linear() -> None:
    assert ledger("linear", warmup_steps=2, total_steps=6) == pytest.approx([0.5, 1.0, 1.0, 0.775, 0.55, 0.325])


@pytest.mark.parametrize(("steps", "decay"), [(4, 1), (14, 1), (15, 2), (24, 2), (26, 3), (100, 10)])
def test_the_last_tenth_is_rounded(steps: int, decay: int) -> None:
    rates = ledger("wsd", warmup_steps=0, total_steps=steps)
    assert sum(rate == max(rates) for rate in rates) == steps - decay + 1


def test_wsd_decays_over_the_last_tenth() -> None:
    rates = ledger("wsd", warmup_steps=3, total_steps=30)
    assert rates == pytest.approx([1 / 3, 2 / 3, *[1.0] * 26, 0.7, 0.4])


def test_constant() -> None:
    assert ledger("constant", warmup_steps=2, total_steps=5) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])


def test_no_rate_is_zero_and_none_is_above_the_peak(subtests: pytest.Subtests) -> None:
    for name, lengths, least in product(NAMES, [*LENGTHS, (100, 20_000)], (0.0, 0.1, 1.0)):
        warmup_steps, total_steps = lengths
        with subtests.test(name=name, warmup_steps=warmup_steps, total_steps=total_steps, least=least):
            rates = ledger(name, warmup_steps=warmup_steps, total_steps=total_steps, peak=3e-4, min_lr_ratio=least)
            assert max(rates) <= 3e-4 * (1 + 1e-12) and min(rates) > 0
            assert rates[:warmup_steps] == sorted(rates[:warmup_steps])
            assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)


def test_a_run_shorter_than_its_warm_up_only_rises(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(msg=name):
            assert ledger(name, warmup_steps=10, total_steps=4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
            assert ledger(name, warmup_steps=4, total_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_a_step_after_the_last_has_the_lowest_rate() -> None:
    """What a run that was longer is asked for on a resume."""
    options = {"warmup_steps": 0, "total_steps": 5, "peak": 1.0, "min_lr_ratio": 0.25}
    stays_up = {"constant": 1.0}
    for name in NAMES:
        assert learning_rate(9, name=name, **options) == pytest.approx(stays_up.get(name, 0.25)), name


@pytest.mark.parametrize("part", [-0.5, 1.5, float("nan")])
def test_a_shape_that_leaves_0_to_1_is_an_error(part: float) -> None:
    """A negative rate climbs the loss, and the standing check of rates asks the same function."""
    options = {"warmup_steps": 1, "total_steps": 5, "peak": 1.0, "min_lr_ratio": 0.1}
    with patch.dict(SCHEDULES, wrong=lambda *_: part):
        assert learning_rate(0, name="wrong", **options) == 1.0
        with pytest.raises(ValueError, match=f"the schedule wrong gives {part} at step 1 of 5"):
            learning_rate(1, name="wrong", **options)


def test_a_peak_of_zero_is_what_was_asked_for() -> None:
    assert ledger("linear", warmup_steps=1, total_steps=3, peak=0.0) == [0.0, 0.0, 0.0]
