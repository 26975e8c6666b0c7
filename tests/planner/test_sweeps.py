"""Throughput over devices and over the length of rows, and the page that draws them."""

from pathlib import Path

import pytest

from fivefold import cli
from fivefold.hardware.cluster import Cluster
from fivefold.planner.estimate import Workload
from fivefold.planner.plan import planned
from fivefold.planner.search import search
from fivefold.planner.sweeps import scaled, sweeps
from fivefold.report.render import to_html
from tests.planner.settings import prices, with_memory
from tests.report.html import asks_for_nothing


@pytest.mark.parametrize(
    ("cluster", "texts"),
    [
        ("4xH100", ["1x1xH100", "1x2xH100", "1x4xH100", "2x4xH100"]),
        ("6x8xH100", ["3x1xH100", "3x2xH100", "3x4xH100", "3x8xH100", "6x8xH100", "12x8xH100"]),
        ("3xH100", ["1x3xH100", "2x3xH100"]),
    ],
)
def test_a_cluster_is_halved_and_doubled(cluster: str, texts: list[str]) -> None:
    assert [each.text for each in scaled(Cluster.parse(cluster))] == texts


def test_a_point_is_the_best_of_its_search() -> None:
    workload, price_list = Workload(2048, 16), prices("llama", "4xH100")
    found = sweeps(price_list, workload)
    assert [each.layout.world for each in found.devices] == [1, 2, 4, 8]
    assert [each.workload.seq_length for each in found.lengths] == [512 * 2**number for number in range(8)]
    assert {each.workload.tokens for each in found.lengths} == {workload.tokens, 2 * workload.tokens}
    best = search(price_list, workload).best[0]
    at = [each for each in (*found.devices, *found.lengths) if each.cluster == best.cluster]
    assert [each.layout for each in at if each.workload == workload] == [best.layout] * 2


def test_what_does_not_fit_is_left_out() -> None:
    small = with_memory(prices("llama", "4xH100"), gib=0.075)
    found = sweeps(small, Workload(2048, 16))
    assert 0 < len(found.lengths) < 8 and all(each.fits for each in (*found.devices, *found.lengths))


def test_the_page_draws_them(tmp_path: Path) -> None:
    asked = ["--seq-length", "1k", "--global-batch-size", "8", "--top", "2", "--html", str(tmp_path / "plan.html")]
    with pytest.raises(SystemExit):
        cli.main(["plan", "qwen3-0.6b", "--cluster", "2xH100", *asked])
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    asks_for_nothing(text)
    drawn = ("Time of a step", "Memory of the fullest device", "Throughput over devices", "over sequence length")
    assert all(said in text for said in drawn) and "NaN" not in text and "nan" not in text.split("<body")[1]


def test_the_page_says_that_a_few_micro_batches_of_a_step_are_drawn(tmp_path: Path) -> None:
    """Their bubble is 3 of 15 slots, and that of the step 3 of 67."""
    report = planned("qwen3-0.6b", "4xH100", Workload(1024, 64), layout="pp4+mb1")
    text = to_html(report.findings())
    assert all(f"({row.step_seconds_interval[0]:.3g} to " in text for row in report.rows)
    assert "with 12 of the 64 micro batches of a step" in text and "% of the time" not in text
