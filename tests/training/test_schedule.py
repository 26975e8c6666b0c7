"""The ledger of learning rates: what every step of a run uses."""

from itertools import product
from math import cos, pi
from typing import Any

import pytest

from fivefold.training.schedule import learning_rate

NAMES = ("cosine", "linear", "wsd", "constant")


def ledger(name: str, *, warmup_steps: int, total_steps: int, **changes: Any) -> list[float]:
    options = {"peak": 1.0, "min_lr_ratio": 0.1, **changes}
    return [
        learning_rate(step, name=name, warmup_steps=warmup_steps, total_steps=total_steps, **options)
        for step in range(total_steps)
    ]


def test_cosine() -> None:
    tail = [0.1 + 0.9 * (1 + cos(pi * done)) / 2 for done in (0.25, 0.5, 0.75, 1)]
    assert ledger("cosine", warmup_steps=2, total_steps=6) == pytest.approx([0.5, 1.0, *tail])


def test_linear() -> None:
    assert ledger("linear", warmup_steps=2, total_steps=6) == pytest.approx([0.5, 1.0, 0.775, 0.55, 0.325, 0.1])


def test_wsd_decays_over_the_last_tenth() -> None:
    rates = ledger("wsd", warmup_steps=3, total_steps=20)
    assert rates == pytest.approx([1 / 3, 2 / 3, *[1.0] * 16, 0.55, 0.1])


def test_constant() -> None:
    assert ledger("constant", warmup_steps=2, total_steps=5) == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])


def test_ends_of_every_shape(subtests: pytest.Subtests) -> None:
    """The warm-up reaches the peak at its last step, the last step of the run has the lowest rate, nothing is above."""
    lengths = [(0, 7), (1, 7), (3, 7), (6, 7), (0, 1), (5, 101), (0, 3)]
    for name, (warmup_steps, total_steps) in product(NAMES, lengths):
        with subtests.test(name=name, warmup_steps=warmup_steps, total_steps=total_steps):
            rates = ledger(name, warmup_steps=warmup_steps, total_steps=total_steps, peak=3e-4)
            assert max(rates) <= 3e-4 * (1 + 1e-12) and min(rates) > 0
            if warmup_steps:
                assert rates[warmup_steps - 1] == pytest.approx(3e-4)
                assert rates[:warmup_steps] == sorted(rates[:warmup_steps])
            assert rates[-1] == pytest.approx(3e-4 if name == "constant" else 3e-5)
            assert rates[warmup_steps:] == sorted(rates[warmup_steps:], reverse=True)


def test_a_run_shorter_than_its_warm_up_only_rises(subtests: pytest.Subtests) -> None:
    for name in NAMES:
        with subtests.test(msg=name):
            assert ledger(name, warmup_steps=10, total_steps=4) == pytest.approx([0.1, 0.2, 0.3, 0.4])
            assert ledger(name, warmup_steps=4, total_steps=4) == pytest.approx([0.25, 0.5, 0.75, 1.0])


def test_ratio_of_zero_and_one() -> None:
    assert ledger("cosine", warmup_steps=0, total_steps=5, min_lr_ratio=0.0)[-1] == pytest.approx(0.0, abs=1e-15)
    assert ledger("linear", warmup_steps=0, total_steps=5, min_lr_ratio=1.0) == pytest.approx([1.0] * 5)
