"""What a search found is read when it is asked again, and never for another question."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.planner import answers
from fivefold.planner.answers import answer
from fivefold.planner.engines import ENGINES
from fivefold.planner.estimate import Workload
from fivefold.planner.price import PriceList
from fivefold.planner.search import Found, search
from tests.planner.settings import prices, with_memory

WORKLOAD = Workload(1024, 8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    return tmp_path / "plans"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The searches that are made."""
    made = list[Any]()

    def counted(*asked: Any, **more: Any) -> Found:
        made.append(asked)
        return search(*asked, **more)

    monkeypatch.setattr(answers, "search", counted)
    yield made


def test_what_was_found_is_read(folder: Path, searched: list[Any]) -> None:
    """Of a search that finds layouts, and of one where nothing fits; `anew` searches again."""
    small = with_memory(prices("llama", "2xH100", 4), gib=0.01)
    for price_list in (prices("llama", "2xH100", 4), small):
        searched.clear()
        first, again = answer(price_list, WORKLOAD), answer(price_list, WORKLOAD)
        assert first == again and len(searched) == 1
        assert answer(price_list, WORKLOAD, anew=True) == first and len(searched) == 2
    assert first.closest is not None and not first.best
    assert all(file.stat().st_size < 2000 for file in folder.iterdir())


def other_models(of: PriceList) -> Iterator[PriceList]:
    chip, node = of.cluster.chip, of.cluster.node
    yield prices("llama", "2xH100", 6)
    yield PriceList(of.facts, of.cluster, ENGINES["megatron"])
    yield PriceList(of.facts, of.cluster, replace(ENGINES["fivefold"], traffic=3.4))
    for cluster in (
        replace(of.cluster, devices_per_node=4), replace(of.cluster, chip=replace(chip, memory_gib=80.1)),
        replace(of.cluster, chip=replace(chip, peak_tflops={**chip.peak_tflops, "bf16": 988.0})),
        replace(of.cluster, node=replace(node, inside=replace(node.inside, latency_us=4.3))),
    ):  # fmt: skip
        yield PriceList(of.facts, cluster, of.engine)


def test_all_that_an_answer_follows_from_is_in_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = prices("llama", "2xH100", 4)
    keys = [answers._key(each, WORKLOAD, 10, {}) for each in (of, *other_models(of))]
    keys += [answers._key(of, each, 10, {}) for each in (Workload(1025, 8), Workload(1024, 9))]
    keys += [answers._key(of, WORKLOAD, 9, {}), answers._key(of, WORKLOAD, 10, {"tp": 2})]
    assert answers._key(prices("llama", "2xH100", 4), WORKLOAD, 10, {}) == keys[0]
    monkeypatch.setattr(answers, "_code", lambda: "other code")
    keys.append(answers._key(of, WORKLOAD, 10, {}))
    assert len(set(keys)) == len(keys)


DAMAGE: list[Callable[[Path], object]] = [
    lambda file: file.write_text(""),
    lambda file: file.write_text("[" * 100000),
    lambda file: file.write_bytes(b"\xff\xfe"),
    lambda file: file.write_text(file.read_text()[:-20]),
    lambda file: file.write_text(file.read_text().replace('"legal": ', '"legal": 1')),
    lambda file: file.write_text(answers.signed({"name": "another.json"})),
    lambda file: file.write_text(answers.signed({"name": file.name, "best": ["pp2.pp2"], "options": [1]})),
    lambda file: file.write_text(answers.signed({"name": file.name, "best": 3})),
    lambda file: (file.unlink(), file.mkdir()),
    lambda file: (file.unlink(), os.mkfifo(file)),  # which would never end
    lambda file: os.truncate(file, 2**40),  # more than there is memory
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_searched_anew(damage: Callable[[Path], object], folder: Path, searched: list[Any]) -> None:
    price_list = prices("llama", "2xH100", 4)
    first = answer(price_list, WORKLOAD)
    (file,) = folder.iterdir()
    damage(file)
    assert answer(price_list, WORKLOAD) == first and len(searched) == 2
    if file.is_file():
        assert answer(price_list, WORKLOAD) == first and len(searched) == 2


def test_without_a_place_for_the_cache_all_is_searched(
    tmp_path: Path, searched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    price_list = prices("llama", "2xH100", 4)
    taken = tmp_path / "file"
    taken.write_text("")
    for place in (str(taken), "/proc/none"):
        monkeypatch.setenv("FIVEFOLD_CACHE", place)
        assert answer(price_list, WORKLOAD).best
    assert len(searched) == 2


def test_the_oldest_files_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_FILES", 3)
    price_list = prices("llama", "2xH100", 4)
    for rows in range(1, 7):
        answer(price_list, Workload(1024, 2 * rows))
    assert len(list(folder.iterdir())) == 3
