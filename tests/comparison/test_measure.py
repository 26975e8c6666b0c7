"""What repeated runs say, on numbers that a reader can check by hand."""

from dataclasses import replace

import pytest

from fivefold.comparison.logs import LoggedStep, TrainerLog, without_warm_up
from fivefold.comparison.measure import ConfigurationRow, MeasuredRun, PercentDifference, Spread, common_tokens, rows
from fivefold.comparison.report import change, report_of


def run(name: str, devices: int | None, repeat: int, speed: float, losses: list[float], rate: int = 100) -> MeasuredRun:
    """A run of a step for each of `losses`, `rate` tokens long, all at one speed; the last is evaluated, 1 higher."""
    steps = [
        LoggedStep(at, rate * at, loss, loss + 1 if at == len(losses) else None, speed, at / 10)
        for at, loss in enumerate(losses, start=1)
    ]
    return MeasuredRun(name, devices, repeat, "", steps, steps)


def by_cell(found: list[ConfigurationRow]) -> dict[tuple[str, int | None], ConfigurationRow]:
    return {(row.configuration, row.devices): row for row in found}


def test_a_spread_is_the_median_and_what_lies_around_it() -> None:
    assert Spread.of([4.0, None, 1.0, 2.0]) == Spread(2.0, 1.0, 4.0, 3)
    assert Spread(200.0, 190.0, 230.0, 3).half_range_pct == pytest.approx(10.0)
    assert Spread(200.0, 200.0, 200.0, 1).half_range_pct is None
    assert Spread.of([None]) is None


@pytest.mark.parametrize(
    ("own", "base", "percent", "low", "high", "measured"),
    [
        ({1: 103.0, 2: 206.0, 3: 420.0}, {1: 100.0, 2: 200.0, 3: 400.0}, 3.0, 3.0, 5.0, True),
        ({1: 99.0, 2: 102.0}, {1: 100.0, 2: 100.0}, 0.5, -1.0, 2.0, False),
        ({1: 101.0, 2: 103.5}, {1: 100.0, 2: 100.0}, 2.25, 1.0, 3.5, False),  # the whole range, not the half of it
        # The machine grew slower by a half from repeat to repeat: what is measured is within each.
        ({1: 110.0, 2: 55.0}, {1: 100.0, 2: 50.0}, 10.0, 10.0, 10.0, True),
        ({1: 50.0}, {1: 100.0}, -50.0, -50.0, -50.0, None),
        ({1: 50.0, 2: None, 3: 7.0}, {1: 100.0, 2: 100.0}, -50.0, -50.0, -50.0, None),
        ({1: 2.0, 2: 3.0}, {1: 2.0, 2: 3.0}, 0.0, 0.0, 0.0, False),
    ],
)
def test_a_difference_is_that_of_the_medians_and_is_held_against_its_spread(
    own: dict[int, float | None], base: dict[int, float | None], percent: float, low: float, high: float,
    measured: bool | None,
) -> None:  # fmt: skip
    found = PercentDifference.of(own, base)
    assert found is not None
    assert (found.percent, found.low, found.high) == pytest.approx((percent, low, high))
    assert found.measured is measured


def test_nothing_in_common_is_no_difference() -> None:
    assert PercentDifference.of({1: 1.0}, {2: 1.0}) is None
    assert PercentDifference.of({1: None}, {1: 1.0}) is None
    assert PercentDifference.of({1: 1.0}, {1: 0.0}) is None


def test_a_start_warms_up_again() -> None:
    steps = [LoggedStep(at) for at in range(1, 11)]
    assert [each.step for each in without_warm_up(steps, [0, 6], 2)] == [3, 4, 5, 6, 9, 10]
    assert without_warm_up(steps, [0, 6], 0) == steps


def test_losses_are_those_after_as_many_tokens() -> None:
    """Nine steps of 100 tokens and two of 450: both have seen 900. The last tenth is 810 to 900."""
    short = run("a", 1, 1, 10.0, [9, 8, 7, 6, 5, 4, 3, 2, 1])
    long = run("b", 1, 1, 10.0, [6, 5, 4], rate=450)
    assert common_tokens([short, long]) == {1: 900}
    assert (short.loss(900), long.loss(900)) == (1, 5)
    assert (short.eval_loss(900), long.eval_loss(900)) == (2, None)  # evaluated after 1350 tokens alone
    assert run("c", 1, 1, 1.0, list(range(20))).loss(2000) == 18.5  # of the steps 19 and 20
    early = replace(short, steps=[LoggedStep(1, 100, 9.0, 8.0), *short.steps[1:-1], LoggedStep(9, 900, 1.0)])
    assert early.eval_loss(900) is None  # evaluated after 100 tokens alone


def test_the_peak_is_that_of_all_steps() -> None:
    """Compilation and the first batches need the most, and are not timed."""
    steps = [LoggedStep(1, peak_gib=3.0), LoggedStep(2, peak_gib=2.0)]
    assert MeasuredRun("a", 1, 1, "", steps, steps[1:]).peak_gib == 3.0


def test_repeats_end_where_their_own_runs_do() -> None:
    runs = [run(name, 1, repeat, 1.0, [4.0, 3.0], rate) for repeat, rate in ((1, 100), (2, 97)) for name in "ab"]
    assert common_tokens(runs) == {1: 200, 2: 194}
    assert rows(runs, [("a", 1)], {}, base="a")[0].loss == Spread(3.0, 3.0, 3.0, 2)
    log = run("log", None, 0, 1.0, [4.0, 3.0], 90)
    assert common_tokens([*runs, log]) == {1: 180, 2: 180, 0: 180}


def test_each_column_has_one_base() -> None:
    """Speed: a falls from 100 to 80 per device, b from 200 to 120. Loss: b is 1 % above a."""
    runs = [
        run(name, devices, repeat, speed * repeat, [4.0 * worse])
        for name, worse, speeds in (("a", 1.0, {1: 100.0, 2: 80.0}), ("b", 1.01, {1: 200.0, 2: 120.0}))
        for devices, speed in speeds.items()
        for repeat in (1, 2, 3)
    ]
    found = by_cell(rows(runs, [("a", 1), ("b", 1), ("a", 2), ("b", 2)], {}, base="a"))

    def percent(difference: PercentDifference | None) -> float | None:
        return difference and pytest.approx(difference.percent)

    assert [percent(row.decrease_pct) for row in found.values()] == [None, None, 20, 40]
    assert [percent(row.faster_pct) for row in found.values()] == [None, 100, None, 50]
    assert [percent(row.loss_difference_pct) for row in found.values()] == [None, 1, None, 1]
    apart = by_cell(rows(runs, [("a", 1), ("b", 1)], {}, base="a", other_text=["b"]))
    assert apart["b", 1] == replace(found["b", 1], loss_difference_pct=None, eval_loss_difference_pct=None)
    first = found["a", 1]
    assert first.tokens_per_second_per_device == Spread(200, 100, 300, 3)
    assert (first.repeats, first.loss, first.peak_memory_gib) == (3, Spread(4, 4, 4, 3), 0.1)
    assert first.eval_loss == Spread(5, 5, 5, 3)


def test_what_did_not_run_is_a_row_and_no_base() -> None:
    runs = [run("a", 2, 1, 10.0, [3.0]), run("b", 1, 1, 10.0, [3.0]), run("b", 2, 1, 8.0, [3.0])]
    found = by_cell(rows(runs, [("a", 1), ("b", 1), ("a", 2), ("b", 2)], {("a", 1): "not run: tp 2 = 2"}, base="a"))
    assert found["a", 1].tokens_per_second_per_device is None
    assert found["a", 1].note == "not run: tp 2 = 2"
    assert found["b", 1].faster_pct is None
    assert found["a", 2].decrease_pct is None
    assert found["b", 2].faster_pct is not None
    assert found["b", 2].faster_pct.percent == pytest.approx(-20)


def test_a_decrease_is_from_the_fewest_devices_that_ran() -> None:
    """Of 10 tokens per second and device on 2, 9 and 7 are left on 4; on 1 it did not run."""
    runs = [run("a", 2, repeat, 10.0, [3.0]) for repeat in (1, 2)]
    runs += [run("a", 4, repeat, speed, [3.0]) for repeat, speed in ((1, 9.0), (2, 7.0))]
    decrease = by_cell(rows(runs, [("a", 1), ("a", 2), ("a", 4)], {("a", 1): "not run"}, base="a"))["a", 4].decrease_pct
    assert decrease is not None
    assert (decrease.percent, decrease.low, decrease.high) == pytest.approx((20, 10, 30))


def test_a_log_stands_against_the_median_of_the_repeats() -> None:
    runs = [run("a", 1, repeat, 10.0 * repeat, [3.0]) for repeat in (1, 2, 3)]
    runs += [run("other", 1, 0, 30.0, [3.3]), run("nowhere", None, 0, 30.0, [3.6])]
    found = by_cell(rows(runs, [("a", 1), ("other", 1), ("nowhere", None)], {}, base="a"))
    assert found["other", 1].faster_pct == PercentDifference(50, 50, 50, 1, None)
    assert found["nowhere", None].faster_pct is None
    difference = found["nowhere", None].loss_difference_pct
    assert difference is not None
    assert difference.percent == pytest.approx(20)  # a loss is the same on any number of devices
    evaluated = found["nowhere", None].eval_loss_difference_pct
    assert evaluated is not None
    assert evaluated.percent == pytest.approx(15)


@pytest.mark.parametrize(("measured", "said"), [(True, "+3.2"), (False, "(+3.2)"), (None, "+3.2?")])
def test_a_difference_that_is_not_measured_stands_in_brackets(measured: bool | None, said: str) -> None:
    assert change(PercentDifference(3.2, 3, 4, 2, measured)) == said


def test_notes_say_how_a_difference_is_to_be_read() -> None:
    """Repeats of other lengths are no reason to say that some saw more tokens."""
    runs = [run("a", 1, repeat, 10.0, [3.0], rate) for repeat, rate in ((1, 100), (2, 90))]
    runs += [run("b", 1, repeat, speed, [3.0], rate) for repeat, rate, speed in ((1, 100, 9.0), (2, 90, 11.0))]
    sides = [TrainerLog(name, (), 1, "") for name in "ab"]
    notes = " ".join(report_of(runs, warmup=0, others=sides).notes)
    assert "(x): not larger than the range" in notes and "x?:" not in notes and "saw more tokens" not in notes
    notes = " ".join(report_of([*runs, run("b", 1, 3, 20.0, [3.0, 2.0]), run("a", 1, 3, 10.0, [3.0])], warmup=0,
                               others=sides).notes)  # fmt: skip
    assert "b saw more tokens" in notes
