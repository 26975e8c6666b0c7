"""Rows of a run that tokenises while training (`data.streaming`)."""

import json
import os
import shutil
import sys
import threading
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.config import check_supported
from fivefold.core import cache
from fivefold.core.errors import UserError
from fivefold.data import IGNORE, PreparedData, ahead, prepare, stream, units
from fivefold.data.ahead import OpenWindows, fill, prepare_ahead
from fivefold.data.store import TokenStore
from fivefold.data.stream import StreamedRows
from tests.data.helpers import config_for, random_texts, segments, write_jsonl

SIZE, WINDOW = 1009, 3  # bytes of a unit, units


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "unit_bytes", lambda _: SIZE)
    monkeypatch.setattr(stream, "WINDOW", WINDOW)


def streamed(train: Any, cache: Path, **changes: Any) -> tuple[PreparedData, StreamedRows]:
    data = prepare(config_for(train, streaming=True, **changes), cache=cache, say=lambda _: None)
    assert isinstance(data.train, StreamedRows)
    return data, data.train


def corpus(folder: Path, seed: int = 0) -> Path:
    return write_jsonl(folder / "a.jsonl", random_texts(seed, 97))


def read(data: PreparedData, places: range) -> list[list[int]]:
    """The tokens of the rows at these places."""
    return [data.train.rows([row], row_multiple=1).input_ids[0].tolist() for row in data.train.in_order(places)]


def trained(data: PreparedData, places: range) -> Counter[str]:
    """The pieces with targets in the rows at these places."""
    batches = [data.train.rows([row], row_multiple=1) for row in data.train.in_order(places)]
    return Counter(str(one) for batch in batches for one in segments(batch) if set(one[1]) != {IGNORE})


def rows_in(rows: StreamedRows, windows: range) -> int:
    return sum(len(rows._window(number)) for number in windows)


def test_an_epoch_reads_every_document_once_in_an_order_of_its_own(subtests: pytest.Subtests, tmp_path: Path) -> None:
    chats = [{"prompt": f"q{n}", "completion": text + "!"} for n, text in enumerate(random_texts(1, 53))]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    both = [{"path": str(corpus(tmp_path))}, {"path": str(tmp_path / "chats.jsonl")}]
    for name, train in {"texts": both[:1], "examples": both[1:], "two sources": both}.items():
        with subtests.test(msg=name):
            (_, rows), whole = streamed(train, tmp_path / name), prepare(config_for(train), cache=tmp_path / "whole")
            data, windows = streamed(train, tmp_path / name)[0], rows.order.windows
            assert windows > 2
            first, both_epochs = rows_in(rows, range(windows)), rows_in(rows, range(2 * windows))
            wanted = trained(whole, range(len(whole.whole)))
            assert trained(data, range(first)) == wanted == trained(data, range(first, both_epochs))
            assert read(data, range(first)) != read(data, range(first, both_epochs))


def test_the_order_follows_from_the_seed_and_the_epoch(tmp_path: Path) -> None:
    _, rows = streamed(corpus(tmp_path), tmp_path / "cache")
    windows, orders = rows.order.windows, [rows.order, replace(rows.order, seed=rows.order.seed + 1)]
    epochs = [
        [unit for number in range(begin, begin + windows) for unit in order.window(number)]
        for order in orders
        for begin in (0, windows)
    ]
    assert all(sorted(epoch) == rows.order.units for epoch in epochs)
    assert len({tuple(epoch) for epoch in [*epochs, rows.order.units]}) == 5
    first = [place % 2**32 for place in rows.in_order(range(rows_in(rows, range(1))))]
    assert sorted(first) == list(range(len(first))) != first


def test_windows_of_equally_many_rows_have_each_an_order_of_their_own(tmp_path: Path) -> None:
    _, rows = streamed(write_jsonl(tmp_path / "a.jsonl", [f"{n:040}" for n in range(199)]), tmp_path / "cache")
    ends = [rows_in(rows, range(number)) for number in range(2 * rows.order.windows + 1)]  # of two epochs
    orders = [tuple(row % 2**32 for row in rows.in_order(range(*places))) for places in pairwise(ends)]
    alike = [order for order in orders if len(order) == median_low(map(len, orders))]
    assert len({*alike}) == len(alike) > 3


def test_a_position_leads_to_the_same_rows_with_an_empty_cache(tmp_path: Path) -> None:
    data, rows = streamed(corpus(tmp_path), tmp_path / "cache")
    place = rows_in(rows, range(4)) + 2
    before = read(data, range(place, place + 40))
    position = json.loads(json.dumps(dict(rows.position(place))))
    assert position == {"stream": {"window": 4, "begin": place - 2}}
    shutil.rmtree(tmp_path / "cache")
    again, other = streamed(tmp_path / "a.jsonl", tmp_path / "cache")
    other.go_on(position)
    assert again.fingerprint == data.fingerprint
    assert read(again, range(place, place + 40)) == before
    tokenised = {path.parent.name for path in (tmp_path / "cache/streams").rglob("unit.json")}
    assert len(tokenised) < len(rows.order.units) - WINDOW  # windows 1 to 3 were not read again
    assert read(again, range(3)) == read(data, range(3))


def test_runs_with_other_rows_have_other_fingerprints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By it a run that goes on is refused, and rows are found in the cache."""
    path, changes = corpus(tmp_path), ({}, {"packing": False}, {"seq_length": 53}, {"validation": 0.3})
    made = [streamed(path, tmp_path / "cache", **change) for change in changes]
    monkeypatch.setattr(units, "unit_bytes", lambda _: SIZE + 100)
    made.append(streamed(path, tmp_path / "other"))
    assert len({data.fingerprint for data, _ in made}) == 5
    unpacked = streamed(path, tmp_path / "third", packing=False)[0]
    assert read(made[1][0], range(20)) != read(made[0][0], range(20))
    assert [
        len(data.train.pieces_of(data.train.in_order([at])[0])) for data in (made[1][0], unpacked) for at in range(9)
    ] == [1] * 18


def test_preferences_are_refused_whenever_they_come(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": "a", "chosen": f"b{n}", "rejected": "c"}) + "\n" for n in range(7)))
    with pytest.raises(UserError, match="holds preference records"):
        _, rows = streamed([{"path": str(corpus(tmp_path))}, {"path": str(pairs)}], tmp_path / "cache")
        assert (1, 0) not in rows.first
        rows_in(rows, range(rows.order.windows))


def test_no_window_trains_on_what_is_held_out(tmp_path: Path) -> None:
    data, rows = streamed(corpus(tmp_path), tmp_path / "cache", validation=0.3)
    assert data.validation and data.counts.validation
    held = {
        str(one) for row in range(len(data.validation)) for one in segments(data.validation.rows([row], row_multiple=1))
    }
    count = rows_in(rows, range(rows.order.windows))
    assert not held & set(trained(data, range(count)))
    everything = streamed(tmp_path / "a.jsonl", tmp_path / "cache")[1]
    assert count < rows_in(everything, range(everything.order.windows))


def test_a_list_is_held_out_as_a_whole(tmp_path: Path) -> None:
    held = write_jsonl(tmp_path / "held.jsonl", random_texts(5, 31))
    data, _ = streamed(corpus(tmp_path), tmp_path / "cache", validation=[{"path": str(held)}])
    wanted = prepare(config_for(held), cache=tmp_path / "cache")
    assert data.validation and len(data.validation) == len(wanted.whole)
    other, _ = streamed(tmp_path / "a.jsonl", tmp_path / "cache", validation=[{"path": str(tmp_path / "a.jsonl")}])
    assert other.fingerprint != data.fingerprint


def test_rows_of_a_list_are_kept_apart_by_how_they_are_packed(tmp_path: Path) -> None:
    path, held = corpus(tmp_path), write_jsonl(tmp_path / "held.jsonl", random_texts(5, 31))
    changes: list[dict[str, Any]] = [{}, {"packing": False}, {"seq_length": 53}]
    found = [
        streamed(path, tmp_path / "cache", validation=[{"path": str(held)}], **change)[0].validation
        for change in changes
    ]
    wanted = [prepare(config_for(held, **change), cache=tmp_path / "other").whole for change in changes]
    assert [rows and (len(rows), rows.counts.padding) for rows in found] == [
        (len(rows), rows.counts.padding) for rows in wanted
    ]
    assert len({len(rows) for rows in wanted}) == 3


def test_a_damaged_unit_is_made_again(tmp_path: Path) -> None:
    data, rows = streamed(corpus(tmp_path), tmp_path / "cache")
    before = read(data, range(20))
    at, number = rows.first[0]
    tokens = rows.order.sources[at].path(number) / "tokens.bin"
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    assert read(streamed(tmp_path / "a.jsonl", tmp_path / "cache")[0], range(20)) == before


def test_files_that_changed_are_refused(tmp_path: Path) -> None:
    streamed(corpus(tmp_path), tmp_path / "cache")
    os.utime(tmp_path / "a.jsonl", (1, 1))
    with pytest.raises(UserError, match=r"a\.jsonl changed since data.streaming began") as error:
        streamed(tmp_path / "a.jsonl", tmp_path / "cache")
    shutil.rmtree(str(error.value.fix).rpartition("rm -r ")[2])
    streamed(tmp_path / "a.jsonl", tmp_path / "cache")


def test_a_file_that_changes_during_a_run_is_named(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """Whatever reading it raises then: the folder of the cache is not to blame."""
    for change, said in {"removed": "is gone", "cut": "changed", "a folder": "changed"}.items():
        with subtests.test(msg=change):
            (folder := tmp_path / change).mkdir()
            path = corpus(folder)
            _, rows = streamed(path, folder / "cache")
            if change == "cut":
                os.truncate(path, 7)
            else:
                path.unlink()
            if change == "a folder":
                path.mkdir()
            with pytest.raises(UserError, match=rf"a\.jsonl {said} since data.streaming began"):
                rows_in(rows, range(2))


def test_a_row_that_cannot_be_read_is_named_when_it_comes(tmp_path: Path) -> None:
    texts = random_texts(0, 97)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([*lines[:80], '{"other": 1}', *lines[81:]]) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.jsonl.*81"):
        _, rows = streamed(path, tmp_path / "cache")
        rows_in(rows, range(rows.order.windows))


def test_what_needs_all_rows_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    path = str(corpus(tmp_path))
    base = config_for(path, streaming=True)
    check_supported(base)
    two = [{"path": path}, {"path": path, "weight": 2.0}]
    refused: dict[str, dict[str, Any]] = {
        "train.max_epochs": {"train": {"max_epochs": 1}},
        "train:300": {"tokenizer": {"name_or_path": "train:300"}},
        "weights": {"data": {"train": two, "streaming": True}},
        "objective.name: dpo": {"objective": {"name": "dpo"}},
    }
    for what, changes in refused.items():
        with subtests.test(msg=what):
            tree = base.model_dump(mode="json", by_alias=True, exclude_unset=True)
            with pytest.raises(UserError, match=f"data.streaming with .*{what}"):
                check_supported(type(base).model_validate(tree | changes))


# ---- ahead of the trainer --------------------------------------------------------------------------------------------


class _Opened:
    """A trainer at window `number` that opens no other."""

    def __init__(self, number: int) -> None:
        self.number = number

    def wait_for(self, number: int) -> None:
        if number > self.number + 2:
            raise TimeoutError


def test_two_windows_are_filled_beyond_the_one_that_is_read(tmp_path: Path) -> None:
    """And none that the trainer has passed."""
    _, rows = streamed(corpus(tmp_path), tmp_path / "cache")
    with pytest.raises(TimeoutError):
        fill(rows.order, _Opened(2))  # type: ignore[arg-type]
    done = {(at, number) for at, number in rows.order.units if rows.order.sources[at].counts(number) is not None}
    assert done == {unit for number in (0, 2, 3, 4) for unit in rows.order.window(number)}
    assert not done & {*rows.order.window(1)}


def test_the_process_that_fills_waits_for_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, reached, (reads, writes) = threading.Event(), threading.Event(), os.pipe()
    monkeypatch.setattr(os, "_exit", lambda _: ended.set())
    with os.fdopen(reads) as stdin, os.fdopen(writes, "w") as trainer:
        monkeypatch.setattr(sys, "stdin", stdin)
        opened = OpenWindows()
        opened.wait_for(2)
        waiting = threading.Thread(target=lambda: (opened.wait_for(3), reached.set()), daemon=True)
        waiting.start()
        assert not reached.wait(0.1)
        print(1, file=trainer, flush=True)
        assert reached.wait(20) and not ended.is_set()
        trainer.close()
        assert ended.wait(20)  # a trainer that is killed


def test_the_units_of_a_stream_are_prepared_ahead(tmp_path: Path) -> None:
    config, cache = config_for(corpus(tmp_path), streaming=True), tmp_path / "cache"
    with patch.object(ahead, "_tokenise", lambda todo, *_: [source.tokenise(number) for source, number in todo]):
        halves = [prepare_ahead(config, cache=cache, shard=(share, 2)) for share in range(2)]
    assert halves[0].left and not halves[1].left and halves[1].data
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("unit.json")}
    _, rows = streamed(tmp_path / "a.jsonl", cache)
    rows_in(rows, range(rows.order.windows))
    assert before == {path: path.stat().st_mtime_ns for path in cache.rglob("unit.json")}
    assert len(before) == len(rows.order.units) and not list(cache.glob("stores/*"))


def test_a_long_wait_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = config_for(corpus(tmp_path), streaming=True)
    rows = prepare(config, cache=tmp_path / "cache", say=said.append).train
    assert isinstance(rows, StreamedRows)
    told, store = threading.Event(), rows._store

    def slow(*unit: int) -> TokenStore:
        assert told.wait(20)
        return store(*unit)

    def say(text: str) -> None:
        said.append(text)
        told.set()

    monkeypatch.setattr(cache, "_TELL_AFTER", 0.01)
    monkeypatch.setattr(rows, "_say", say)
    monkeypatch.setattr(rows, "_store", slow)
    with (tmp_path / "filler").open("wb") as rows._filler:
        rows.in_order([rows_in(rows, range(1))])
    assert said == ["waiting for text: window 2 of the units is being tokenised"]
    assert (tmp_path / "filler").read_text() == "1\n"
