"""Tokenising ahead (`fivefold data --prepare`): the same bytes in the cache, whatever the processes and shards."""

import filecmp
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest

from fivefold.core.errors import RunFailed, UserError
from fivefold.data import ahead, prepare, units
from fivefold.data.ahead import Ahead, parse_shard, prepare_ahead
from fivefold.data.tokenizer import _loaded
from fivefold.data.units import TextUnits, shares
from tests.data.helpers import config_for, random_texts, write_jsonl
from tests.data.test_token_files import ids_of, megatron

UNIT = 1009  # bytes


def in_process(todo: Any, *_: object) -> None:
    """In place of the pool of processes, which tests marked `full` start."""
    for one, number in todo:
        one.tokenise(number)


def prepared(config: Any, cache: Path, **knobs: Any) -> Ahead:
    with patch.object(ahead, "_tokenise", in_process):
        return prepare_ahead(config, cache=cache, unit_bytes=UNIT, **knobs)


def assert_same(one: Path, other: Path) -> None:
    """Compare the tokens and rows of two caches, byte for byte."""
    files = [path for kind in ("stores", "rows") for path in (one / kind).rglob("*") if path.is_file()]
    files = [path for path in files if path.suffix != ".lock"]
    assert any(path.name == "tokens.bin" for path in files) and any(path.name == "counts.json" for path in files)
    for path in files:
        assert filecmp.cmp(path, other / path.relative_to(one), shallow=False), path
    assert {path.name for path in (one / "stores").iterdir()} == {path.name for path in (other / "stores").iterdir()}


def write_records(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def sources(folder: Path) -> dict[str, Any]:
    """A list of sources for each way in which a source is divided."""
    texts = random_texts(0, 97)
    long = write_jsonl(folder / "long.jsonl", ["a" * 5003, *texts, "b" * 5003, "c"])
    (folder / "many").mkdir()
    for number, text in enumerate(texts[2:40]):
        (folder / f"many/{number:02}.txt").write_text(text + "x", encoding="utf-8")
    chats = [{"prompt": f"q{n} {text}", "completion": text + "!", "id": n} for n, text in enumerate(texts)]
    table = folder / "table.csv"
    table.write_text("text\n" + "".join(f'"{text}x"\n' for text in texts), encoding="utf-8")
    many_keys = [json.dumps({"text": f"t{number}", f"k{number % 400}": 1}) for number in range(500)]
    odd = folder / "odd.jsonl"
    odd.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(many_keys).encode())  # no line end at the end
    return {
        "lines": long,
        "odd lines": odd,
        "many files": folder / "many",
        "examples": write_records(folder / "chats.jsonl", chats),
        "sources": [{"path": str(long)}, {"path": str(table), "weight": 2.0}],
    }


def test_any_number_of_shards_makes_the_same_bytes(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for (name, train), number in zip(sources(tmp_path).items(), (1, 2, 3, 7, 5), strict=True):
        with subtests.test(msg=name):
            config, cache = config_for(train, validation=0.1), tmp_path / f"ahead {name}"
            calls = [prepared(config, cache, shard=(share, number)) for share in reversed(range(number))]
            assert [call.data is None for call in calls] == [True] * (number - 1) + [False]
            assert all(call.tokenised for call in calls) or number > sum(one.units for one in calls[0].sources)
            alone = prepare(config, cache=tmp_path / f"alone {name}")
            assert_same(tmp_path / f"alone {name}", cache)
            assert calls[-1].data and calls[-1].data.counts == alone.counts
            assert not list(cache.glob("units/*/0*"))  # joined
            again = prepared(config, cache, shard=(0, number))
            assert again.tokenised == 0 and again.data


def test_units_divide_a_file_between_its_lines(tmp_path: Path) -> None:
    config = config_for(write_jsonl(tmp_path / "a.jsonl", random_texts(1, 97)))
    first = prepared(config, tmp_path / "cache", shard=(0, 4))
    assert first.sources[0].units == -(-(tmp_path / "a.jsonl").stat().st_size // UNIT)
    assert first.left == first.sources[0].units - first.tokenised > 0


def test_parquet_is_divided_between_its_row_groups(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": random_texts(2, 397)}), path, row_group_size=29)
    done = prepared(config_for(path), tmp_path / "ahead", shard=None)
    assert done.sources[0].units > 5
    prepare(config_for(path), cache=tmp_path / "alone")
    assert_same(tmp_path / "alone", tmp_path / "ahead")


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_what_is_done_is_kept_and_what_is_missing_is_made(tmp_path: Path) -> None:
    """A process that ends in the middle, then a run that does not wait for the other shards."""
    config, cache = config_for(write_jsonl(tmp_path / "a.jsonl", random_texts(3, 97)), validation=0.1), tmp_path / "a"
    whole = units.TextUnits.tokenise
    calls: list[int] = []

    def tokenise(one: TextUnits, number: int) -> bool:
        calls.append(number)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(one, number)

    with patch.object(TextUnits, "tokenise", tokenise), pytest.raises(KeyboardInterrupt):
        prepared(config, cache, shard=(0, 2))
    kept = {path.name: path.stat().st_ino for path in cache.glob("units/*/0*") if path.is_dir()}
    assert len(kept) == 3
    rest = prepared(config, cache, shard=(0, 2))
    assert (
        rest.data is None
        and {path.name: path.stat().st_ino for path in cache.glob("units/*/0*")}.items() >= kept.items()
    )
    add = units.TextUnits._add
    with patch.object(TextUnits, "_add", autospec=True, side_effect=add) as read:
        prepare(config, cache=cache)  # `fivefold train`
    assert read.call_count == rest.left > 0
    prepare(config, cache=tmp_path / "alone")
    assert_same(tmp_path / "alone", cache)


def test_files_beside_the_tokens_must_not_change_either(tmp_path: Path) -> None:
    """Tokens with an index: the time of the tokens does not tell."""
    lines = write_jsonl(tmp_path / "a.jsonl", random_texts(3, 97))
    tokens = megatron(tmp_path / "corpus", ids_of(["ab", "cd"]))
    joined = megatron(tmp_path / "joined", ids_of(["ab", "cd"]), bounds=[0, 2]).with_suffix(".idx").read_bytes()
    config, cache = config_for([{"path": str(tokens)}, {"path": str(lines)}]), tmp_path / "cache"
    for share in range(8):  # until the tokens are a unit
        prepared(config, cache, shard=(share, 9))
    tokens.with_suffix(".idx").write_bytes(joined)
    with pytest.raises(UserError, match="changed since"):
        prepared(config, cache, shard=(8, 9))
    prepare(config, cache=cache)  # reads what is there now
    prepare(config, cache=tmp_path / "alone")
    assert_same(tmp_path / "alone", cache)


def test_damaged_units_are_made_again(tmp_path: Path) -> None:
    config, cache = config_for(write_jsonl(tmp_path / "a.jsonl", random_texts(4, 97))), tmp_path / "a"
    prepared(config, cache, shard=(0, 2))
    damaged = sorted(cache.glob("units/*/0*/tokens.bin"))[1]
    damaged.write_bytes(damaged.read_bytes()[:-2])
    sorted(cache.glob("units/*/0*/unit.json"))[0].write_text("{}")
    sorted(cache.glob("units/*/0*/meta.json"))[2].unlink()  # as a unit of an earlier version, of which nothing is said
    said: list[str] = []
    assert prepared(config, cache, shard=(1, 2), say=said.append).data is None  # unit.json does not count as done
    assert prepared(config, cache, say=said.append).data
    assert len(said) == 1 and said[0].startswith(f"DAMAGED: the prepared tokens in {damaged.parent}")
    prepare(config, cache=tmp_path / "alone")
    assert_same(tmp_path / "alone", cache)


def test_input_that_changed_between_shards_is_refused(tmp_path: Path) -> None:
    texts, folder = random_texts(5, 97), tmp_path / "texts"
    folder.mkdir()
    path, config = write_jsonl(folder / "a.jsonl", texts), config_for(folder)
    cache = tmp_path / "cache"
    prepared(config, cache, shard=(0, 3))
    stat = path.stat()
    write_jsonl(path, [*texts, "more"])
    with pytest.raises(UserError, match=r"a\.jsonl changed since .* began") as refused:
        prepared(config, cache, shard=(1, 3))
    assert f"rm -r {next(cache.glob('units/*/manifest.json')).parent}" in str(refused.value)
    prepare(config, cache=cache)  # a run has the new text alone
    prepare(config, cache=tmp_path / "alone")
    assert_same(tmp_path / "alone", cache)
    write_jsonl(path, texts)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    write_jsonl(folder / "b.jsonl", ["b"])
    with pytest.raises(UserError, match=r"b\.jsonl was added since"):
        prepared(config, cache, shard=(1, 3))
    (folder / "b.jsonl").unlink()
    assert prepared(config, cache, shard=(1, 3)).tokenised

    changing = units.TextUnits._write  # while a unit is read

    def write(one: TextUnits, beside: Path, number: int) -> None:
        changing(one, beside, number)
        os.utime(path)

    with patch.object(TextUnits, "_write", write), pytest.raises(UserError, match="changed since"):
        prepared(config, cache, shard=(2, 3))


def test_a_joined_source_may_change(tmp_path: Path) -> None:
    texts, cache = random_texts(6, 41), tmp_path / "cache"
    config = config_for(write_jsonl(tmp_path / "a.jsonl", texts))
    first = prepared(config, cache)
    write_jsonl(tmp_path / "a.jsonl", [*texts, "more"])
    second = prepared(config, cache, shard=(0, 1))
    assert first.data and second.data and second.data.counts.documents == first.data.counts.documents + 1
    other = prepared(config_for(tmp_path / "a.jsonl", tokenizer="train:300"), cache, shard=(0, 1))
    assert other.tokenised == second.tokenised  # another tokenizer has nothing of it


def test_an_error_names_the_row_of_the_file(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in random_texts(7, 97)]
    for row, line in ((61, '{"text": 1}'), (90, "{")):
        path = tmp_path / f"{row}.jsonl"
        path.write_text("\n".join([*lines[: row - 1], line, *lines[row:]]), encoding="utf-8")
        with pytest.raises(UserError) as alone:
            prepare(config_for(path), cache=tmp_path / "alone")
        with pytest.raises(UserError) as refused:
            prepared(config_for(path), tmp_path / "cache")
        assert str(refused.value) == str(alone.value) and f".jsonl:{row}: " in str(alone.value)


def test_two_jobs_on_one_shard_do_no_harm(tmp_path: Path) -> None:
    config, cache = config_for(write_jsonl(tmp_path / "a.jsonl", random_texts(10, 97)), validation=0.1), tmp_path / "a"
    with (
        patch.object(ahead, "_tokenise", in_process),
        patch.object(TextUnits, "_write", autospec=True, side_effect=TextUnits._write) as made,
        ThreadPoolExecutor(4) as pool,
    ):
        knobs: dict[str, Any] = {"cache": cache, "unit_bytes": UNIT}
        calls = [pool.submit(prepare_ahead, config, shard=(at % 2, 2), **knobs) for at in range(4)]
        results = [call.result() for call in calls]
    assert any(result.data for result in results)
    assert made.call_count == results[0].sources[0].units  # each unit was made once
    prepare(config, cache=tmp_path / "alone")
    assert_same(tmp_path / "alone", cache)


def test_a_file_without_a_record_is_an_error_of_the_whole_file(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    write_jsonl(tmp_path / "texts/a.jsonl", random_texts(4, 23))
    (tmp_path / "texts/b.jsonl").write_bytes(b"\xef\xbb\xbf" + b" \r\n" * UNIT)
    config = config_for(tmp_path / "texts")
    for refused in (prepare, prepared):
        with pytest.raises(UserError, match=r"b\.jsonl:1: the file is empty"):
            refused(config, cache=tmp_path / "cache")


def test_a_full_disk_is_said(tmp_path: Path) -> None:
    config, cache = config_for(write_jsonl(tmp_path / "a.jsonl", random_texts(8, 41))), tmp_path / "cache"
    with (
        patch("fivefold.data.store.chunk_checksums", side_effect=OSError(28, "No space left on device")),
        pytest.raises(UserError, match=r"cannot write .*/units/.*: No space left") as refused,
    ):
        prepared(config, cache)
    assert "free space" in str(refused.value) and not list(cache.glob("units/*/0*/unit.json"))
    assert prepared(config, cache).data


def test_shards() -> None:
    assert parse_shard("0/8") == (0, 8) and parse_shard("7/8") == (7, 8)
    with pytest.raises(UserError, match=r"shards are counted from 0: 0/8 to 7/8"):
        parse_shard("8/8")
    for wrong in ("1", "-1/8", "0/0", "a/b"):
        with pytest.raises(UserError, match="no shard i/n"):
            parse_shard(wrong)
    assert [units.unit_bytes(n) for n in (1, 2**31, 2**36, 2**42)] == [2**20, 2**21, 2**24, 2**30]
    assert shares([5, 0, 7], 10**15) == [[2], [0], [1]]  # no list for each share
    divided = shares([5, 1, 1, 1, 1, 1, 3], 3)
    assert sorted(unit for share in divided for unit in share) == list(range(7))
    assert sorted(sum([5, 1, 1, 1, 1, 1, 3][unit] for unit in share) for share in divided) == [4, 4, 5]


def test_a_process_loads_its_tokenizer_once(tmp_path: Path) -> None:
    """Each more that has encoded would stay in memory."""
    texts = write_jsonl(tmp_path / "a.jsonl", random_texts(3))
    before = _loaded.cache_info().misses
    done = prepared(config_for(texts), tmp_path / "cache")
    assert (
        done.sources[0].units > 4 and _loaded.cache_info().misses <= before + 2
    )  # to ask for its facts, and for these


@pytest.mark.parametrize("error", [EOFError(), ConnectionResetError()])
def test_the_end_of_a_process_is_told(error: Exception) -> None:
    """Its end of the pipe is closed, or reset if something was on its way."""
    with pytest.raises(RunFailed, match="was killed"), ahead._processes(0, []):
        raise error


def test_a_process_is_ended_by_its_parent_alone() -> None:
    """Ctrl-C, which the terminal sends to all of them, would leave a traceback of each."""
    before, pipe = signal.getsignal(signal.SIGINT), Mock(recv=Mock(side_effect=EOFError))
    try:
        with patch.dict(os.environ):
            ahead._serve(pipe, [])
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    finally:
        signal.signal(signal.SIGINT, before)


def test_units_go_to_processes_the_longest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_for(write_jsonl(tmp_path / "a.jsonl", [*random_texts(3, 9), "x" * 3000]))
    told, asked, counts = list[tuple[str, int, int]](), list[int](), list[int]()

    class Process:
        """The parent's end of the pipe to one that tokenises."""

        def __init__(self, sources: Sequence[TextUnits]) -> None:
            self.sources = sources

        def send(self, unit: tuple[int, int]) -> None:
            source, number = unit
            asked.append(self.sources[source].units[number].size)
            self.sources[source].tokenise(number)

        def recv(self) -> None:
            return None

    @contextmanager
    def processes(number: int, sources: Sequence[TextUnits]) -> Iterator[list[Process]]:
        counts.append(number)
        yield [Process(sources) for _ in range(number)]

    monkeypatch.setattr(ahead, "_processes", processes)
    monkeypatch.setattr(ahead, "wait", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(10**6), raising=False)
    knobs: dict[str, Any] = {"cache": tmp_path / "cache", "unit_bytes": UNIT}
    first = prepare_ahead(config, progress=lambda *said: told.append(said), **knobs)
    assert asked == sorted(asked, reverse=True) and len({*asked}) > 1 and counts == [len(asked)]
    assert (first.tokenised, first.size) == (len(asked), sum(asked))
    assert [line[1:] for line in told if line[0] == f"tokenising in {len(asked)} processes"][-1] == (sum(asked),) * 2
    again = prepare_ahead(config, **knobs)
    assert (again.tokenised, again.size) == (0, 0) and again.data


@pytest.mark.full
def test_a_killed_process_costs_a_unit(tmp_path: Path) -> None:
    """Two processes, one of which is killed; then the same command again. A process of the caller's own lives on."""
    bystander = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    bystander.start()
    others = {process.pid for process in multiprocessing.active_children()}  # among them the pool of the tests
    texts = random_texts(9, 4999)
    config, cache = config_for(write_jsonl(tmp_path / "a.jsonl", texts)), tmp_path / "cache"
    knobs: dict[str, Any] = {"workers": 2, "cache": cache, "unit_bytes": 3001}

    def kill(what: str, tokenised: int, total: int) -> None:
        """Kill one of the two after the first unit: with the four that may be on their way, a hundred are left."""
        workers = [each for each in multiprocessing.active_children() if each.pid not in others]
        if what.startswith("tokenising") and len(workers) == 2:
            assert 0 < tokenised < total / 2
            workers[0].kill()
            workers[0].join()

    with pytest.raises(RunFailed, match="was killed"):
        prepare_ahead(config, progress=kill, **knobs)
    assert bystander.is_alive() and others <= {process.pid for process in multiprocessing.active_children()}
    bystander.kill()
    kept = len(list(cache.glob("units/*/0*/unit.json")))
    done = prepare_ahead(config, **knobs)
    assert kept and done.tokenised == done.sources[0].units - kept and done.data
    prepare(config, cache=tmp_path / "alone")
    assert_same(tmp_path / "alone", cache)


@pytest.mark.full
def test_processes_killed_at_once_leave_nothing_in_shared_memory(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", random_texts(9, 9999))
    before = set(os.listdir("/dev/shm"))
    script = (
        "from pathlib import Path\nfrom fivefold.config import load_config\n"
        "from fivefold.data.ahead import prepare_ahead\nif __name__ == '__main__':\n"
        "    config = load_config(None, ['data.train=a.jsonl', 'tokenizer.name_or_path=byte', 'data.validation=0'])\n"
        "    prepare_ahead(config, workers=2, cache=Path('cache'), unit_bytes=3001)\n"
    )
    (tmp_path / "script.py").write_text(script)
    started = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, start_new_session=True)
    while started.poll() is None and not list(tmp_path.glob("cache/units/*/0*/unit.json")):
        time.sleep(0.05)
    assert started.poll() is None, "it was killed before it ended"
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()
    assert set(os.listdir("/dev/shm")) <= before


def test_token_ids_are_prepared_in_units_too(subtests: pytest.Subtests, tmp_path: Path) -> None:
    ids = ids_of(random_texts(7, 97))
    stream = [(row + [7] * 9)[:9] for row in ids]
    labels = [[-100] * (n > 60) + row[n > 60 :] for n, row in enumerate(ids)]
    trains = {
        "files": megatron(tmp_path / "one", ids).parent / "*.bin",
        "documents": write_records(tmp_path / "ids.jsonl", [{"input_ids": row} for row in ids]),
        "stream": write_records(tmp_path / "stream.jsonl", [{"input_ids": row} for row in stream]),
        "labels": write_records(
            tmp_path / "labels.jsonl",
            [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)],
        ),
    }
    megatron(tmp_path / "two", ids[:5])
    for name, train in trains.items():
        with subtests.test(msg=name):
            ahead_of_it = prepared(config_for(train), tmp_path / f"ahead {name}")
            alone = prepare(config_for(train), cache=tmp_path / f"alone {name}")
            assert_same(tmp_path / f"alone {name}", tmp_path / f"ahead {name}")
            assert ahead_of_it.data and ahead_of_it.data.counts == alone.counts and alone.counts.ids
