"""`fivefold plan --mtbf`: the arithmetic against a simulation and a published run, and what the command shows."""

import json
import random
from pathlib import Path

import pytest

from fivefold import cli
from fivefold.config import load_config
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Workload, estimate_layout
from fivefold.planner.failures import HANG_SECONDS, Failures, best_interval, failures, goodput
from fivefold.planner.plan import price_list

SMALL = ("llama-3.2-1b", "--cluster", "2xH100", "--seq-length", "2k", "--global-batch-size", "16", "--top", "2")


def simulated(cost: Failures, every: int, *, blows: int) -> float:
    """Goodput of a run, moment by moment: steps, stalls, checkpoints that count once they are written, failures that
    strike restarts, too."""
    draw = random.Random(1)
    now = done = 0.0  # `done`: seconds of steps in the newest checkpoint that counts
    for _ in range(blows):
        end = now + draw.expovariate(1 / cost.between)
        begin = now + cost.restart_seconds
        now = end
        if end <= begin:
            continue
        cycle = every * cost.step + cost.stall_seconds
        # A save ends `cycle`, 2 `cycle`, ... after the restart, and counts `write` later.
        done += every * cost.step * max(0, int((end - begin - cost.write) // cycle))
    return done / now


def test_goodput_is_that_of_a_simulation_and_the_interval_the_best(subtests: pytest.Subtests) -> None:
    cases = [
        Failures(
            step=2.0, between=between, checkpoint_bytes=1, stall={"": stall}, write=write, restart={"": restart},
            storage=1.0,
        )
        for between, stall, write, restart in (
            (10_000, 1, 5, 700), (10_000, 20, 0, 300), (2_000, 5, 60, 100), (600, 1, 20, 60),
        )
    ]  # fmt: skip
    for cost in cases:
        with subtests.test(msg=str(cost)):
            found = simulated(cost, cost.every, blows=40_000)
            # 40,000 failures leave 0.5 %; a rollback over a restart leaves out that its steps fail again, below 1 %.
            assert cost.goodput == pytest.approx(found, rel=0.015)
            least = -(-cost.write // cost.step)
            best = max(range(max(1, int(least)), 2000), key=cost.goodput_at)
            assert cost.every == pytest.approx(best, abs=1, rel=0.02)
            # Others are measurably worse, or not allowed: the next save would wait.
            assert cost.goodput_at(3 * cost.every) < cost.goodput


def test_formulas_at_their_ends() -> None:
    assert best_interval(1, 1e9) == pytest.approx((2 * 1e9) ** 0.5, rel=1e-3)  # Young
    assert best_interval(30, 10) == 10
    assert goodput(100, 0, 0, 1e12) == pytest.approx(1)
    assert goodput(100, 0, 1e6, 10) == 0.0


def test_a_hang_is_named_after_the_time_out_of_a_run() -> None:
    """The planner loads no run file; the number of one stands in it all the same."""
    assert load_config(None).train.collective_timeout + 5 == HANG_SECONDS


def test_the_failures_of_llama_3() -> None:
    """419 unexpected interruptions in 54 days of 16,384 H100, and an effective training time above 90 % (arXiv
    2407.21783, section 3.3.4)."""
    prices = price_list("llama-3.1-405b", "2048x8xH100")
    found = estimate_layout(prices, Layout.parse("shard128.tp8.pp16"), Workload(8192, 2048))
    cost = failures(prices, found, 16_384 * 54 * 24 / 419)
    assert cost.between == pytest.approx(54 * 86400 / 419)
    assert 0.90 < cost.goodput < 0.95
    assert cost.checkpoint_bytes == pytest.approx(12 * 405.85e9, rel=1e-3)  # fp32 weights and two moments
    assert cost.goodput_of_hangs < cost.goodput


def test_plan_shows_the_interval_and_keeps_the_ranking(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def planned(*more: str) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["plan", *SMALL, *more])
        assert ended.value.code == 0
        return capsys.readouterr().out

    file, page, data = (tmp_path / name for name in ("run.yaml", "plan.html", "plan.json"))
    shown = planned("--mtbf", "1000", "--write", str(file), "--html", str(page), "--json", str(data))
    found, without = json.loads(data.read_text()), json.loads(planned("--json", "-"))
    assert found["rows"] == without["rows"] and "failures" not in without
    first = found["failures"][found["rows"][0]["layout"]]
    every = first["checkpoint_every"]
    assert first["between_seconds"] == 1000 * 3600 / 2
    assert load_config(file).checkpoint.every == every
    words = " ".join(shown.split())
    assert "One failure in 20.8 days" in words and f"checkpoint.every={every}" in words and "goodput" in words
    assert all(f"{item} " in words for item in first["restart"]) and max(map(len, shown.splitlines())) <= 80
    assert "One failure in 20.8 days" in page.read_text() and "goodput" in page.read_text()
