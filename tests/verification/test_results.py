"""Verdicts: tolerances come from floors, errors from the worst rank, and `where` says what is known."""

import math

import pytest
import torch

from fivefold.parallel.layout import Layout
from fivefold.verification.reference_tensors import logit_distances
from fivefold.verification.results import ComparisonRow, Distance, LayoutResult, Tolerances, judge

LAYOUT = Layout.parse("shard2.tp2")


def distance(factor: float = 1.0, wrong: bool = False) -> Distance:
    expected = torch.arange(1.0, 9.0)
    return Distance().add(expected * factor + wrong * torch.tensor([1.0, -1] * 4), expected)


def row(per_rank: list[Distance | None], tolerance: float = 1e-10, key: str = "gradient/a.b") -> ComparisonRow:
    return judge(key, per_rank, float(torch.arange(1.0, 9.0).norm()), 0.0, tolerance, LAYOUT)


def test_equal_is_zero_and_ok() -> None:
    found = row([distance()] * 4)
    assert (found.error, found.ok, found.where) == (0.0, True, "a.b")


def test_the_axis_is_named_where_only_some_ranks_are_wrong() -> None:
    good, bad = distance(), distance(wrong=True)
    assert row([good, bad, good, bad]).where == "a.b (tp rank 1)"
    assert row([good, good, bad, bad]).where == "a.b (dp_shard rank 1)"
    assert row([good, bad, bad, good]).where == "a.b (ranks 1, 2)"
    assert row([None, bad, None, bad]).where == "a.b"  # all that have it


def test_a_factor_is_named() -> None:
    assert row([distance(0.5)] * 4).where == "a.b: 0.5 times the reference's"
    assert row([distance(0.5), distance(0.5), distance(2.0), distance(0.5)]).where == "a.b"


def test_weights_may_differ_in_no_bit() -> None:
    expected = torch.ones(8)
    one_bit = Distance().add(torch.nextafter(expected, expected + 1), expected)
    found = row([one_bit] * 4, tolerance=0.0, key="weight/a.b")
    assert found.error == 1.0 and not found.ok


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_a_number_is_wrong(value: float) -> None:
    broken = Distance().add(torch.full((8,), value), torch.arange(1.0, 9.0))
    assert not row([broken] * 4, tolerance=0.9).ok
    assert not row([distance(), broken, distance(), distance()], tolerance=0.9).ok


def test_tolerances_are_ten_floors_and_raw_is_held_to_the_reduced() -> None:
    tolerances = Tolerances("fp32", {"gradient/a": 1e-6, "gradient/b": 3e-6, "gradient/c": 5e-4, "loss": 1e-9})
    assert tolerances.of("gradient/c") == pytest.approx(5e-3)
    assert tolerances.of("gradient/a") == pytest.approx(3e-5)  # not less than is usual
    assert tolerances.of("raw/c") == pytest.approx(5e-3)
    assert tolerances.of("loss") == 1e-6
    assert tolerances.of("weight/a") == 0.0
    assert Tolerances("fp64", {}).of("gradient/a") == 1e-10


def test_what_cannot_be_told_is_not_counted_as_proved() -> None:
    found = LayoutResult("tp2")
    found.add(ComparisonRow("update", 1.4, 1.5, True, "a"))
    assert not found.ok and found.not_told == ["update"]
    found.add(ComparisonRow("loss", 0.0, 1e-2, True))
    assert found.ok and LayoutResult.of(found.to_json()) == found


def test_logits_over_k() -> None:
    expected = torch.randn(7, 101, generator=torch.Generator().manual_seed(0))
    same = logit_distances(expected.clone(), expected)
    assert set(same.values()) == {0.0}
    found = expected.clone()
    found[3, expected[3].argmax()] -= 100.0
    off = logit_distances(found, expected)
    assert off["logits, largest error"] == pytest.approx(100, rel=1e-4)
    assert off["logits, mean error of top 1"] == pytest.approx(100 / 7, rel=1e-4)
    assert off["logits, mean error of top all"] == pytest.approx(100 / 7 / 101, rel=1e-4)
    assert off["tokens, other top 1"] == off["tokens, other top 5"] == pytest.approx(1 / 7)
    assert "tokens, other top all" not in off
