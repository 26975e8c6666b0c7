"""What a search found is read when it is asked again, and never for another question."""

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.planner import answers
from fivefold.planner.answers import answer
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
    yield PriceList(of.facts, of.cluster, whole_logits=True)
    yield PriceList(of.facts, of.cluster, compiled=False)
    for cluster in (
        replace(of.cluster, devices_per_node=4), replace(of.cluster, chip=replace(chip, memory_gib=80.1)),
        replace(of.cluster, chip=replace(chip, peak_tflops={**chip.peak_tflops, "bf16": 988.0})),
        replace(of.cluster, node=replace(node, inside=replace(node.inside, latency_us=4.3))),
    ):  # fmt: skip
        yield of.repriced(cluster)


def test_all_that_an_answer_follows_from_is_in_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = prices("llama", "2xH100", 4)
    keys = [answers._key(each, WORKLOAD, 10, {}) for each in (of, *other_models(of))]
    keys += [answers._key(of, each, 10, {}) for each in (Workload(1025, 8), Workload(1024, 9))]
    keys += [answers._key(of, WORKLOAD, 9, {}), answers._key(of, WORKLOAD, 10, {"tp": 2})]
    assert answers._key(prices("llama", "2xH100", 4), WORKLOAD, 10, {}) == keys[0]
    monkeypatch.setattr(answers, "_code", lambda: "other code")
    keys.append(answers._key(of, WORKLOAD, 10, {}))
    assert len(set(keys)) == len(keys)


def changed(record: Any) -> Iterator[Any]:
    """A record once for each of its numbers, which is another one there."""
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, bool):
            yield replace(record, **{each.name: not value})
        elif isinstance(value, int | float):
            yield replace(record, **{each.name: value + 1})


def test_every_number_of_the_hardware_is_in_the_name(folder: Path) -> None:
    """An answer may follow from each."""
    of = prices("llama", "2x2xH100", 4)
    cluster, node = of.cluster, of.cluster.node
    chips = [replace(cluster, chip=each) for each in changed(cluster.chip)]
    nodes = [replace(node, inside=each) for each in changed(node.inside)]
    nodes += [replace(node, between=each) for each in changed(node.between)]
    clusters = [*chips, *(replace(cluster, node=each) for each in (*nodes, *changed(node)))]
    assert len(chips) > 10 and len(nodes) > 6
    keys = [answers._key(each, WORKLOAD, 10, {}) for each in (of, *map(of.repriced, clusters))]
    assert len(set(keys)) == len(keys)


def test_the_name_has_all_code_that_an_answer_follows_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of any file of these packages, and of folders in them, that is another; not one of other packages."""
    files = [tmp_path / name for name in ("core/a.py", "core/b/c.py", "models/a.py", "parallel/a.py", "planner/a.py")]
    other = tmp_path / "training/a.py"
    for file in (*files, other):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    monkeypatch.setattr(answers, "__file__", str(tmp_path / "planner/answers.py"))
    keys = [answers._code.__wrapped__()]
    for file in files:
        file.write_text("x = 1")
        keys.append(answers._code.__wrapped__())
    assert len(set(keys)) == 6
    other.write_text("x = 1")
    assert answers._code.__wrapped__() == keys[-1]
    monkeypatch.setattr(answers.np, "__version__", "0.1")
    of = prices("llama", "2xH100", 4)
    with monkeypatch.context() as usual:
        usual.setattr(answers.np, "__version__", "0.2")
        another = answers._key(of, WORKLOAD, 10, {})
    assert answers._key(of, WORKLOAD, 10, {}) != another


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
    """What is no file is passed over."""
    monkeypatch.setattr(answers, "MOST_FILES", 3)
    (folder / "other.json").mkdir(parents=True)
    (folder / "nowhere.json").symlink_to("nowhere")
    for name in ("other.json", "nowhere.json"):
        os.utime(folder / name, (0, 0), follow_symlinks=False)
    price_list = prices("llama", "2xH100", 4)
    for rows in range(1, 7):
        answer(price_list, Workload(1024, 2 * rows))
    assert len(list(folder.iterdir())) == 3 + 1


def test_the_newest_files_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_FILES", 3)
    for age in range(5):
        file = tmp_path / f"{age}.json"
        file.write_text("")
        os.utime(file, (1000 - age, 1000 - age))
    answers._tidy(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"0.json", "1.json", "2.json"}
