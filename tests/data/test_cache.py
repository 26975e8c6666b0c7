"""The cache: made once, found again, made anew when what it came from changed or it is damaged."""

import errno
import json
import multiprocessing
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from fivefold.core import cache, integrity
from fivefold.core.errors import UserError
from fivefold.data import PreparedData, cache_root, prepare, tokenizer
from tests.data import tokenizers_zoo
from tests.data.helpers import config_for, prepare_texts, random_texts, whole, write_jsonl


def rows(data: PreparedData) -> list[list[list[int]]]:
    return [batch.input_ids.tolist() for batch in whole(data.train)]


def entries(folder: Path, kind: str) -> dict[str, int]:
    """Name and inode of each entry: a rebuilt one has another inode."""
    return {path.name: path.stat().st_ino for path in (folder / "cache" / kind).iterdir() if path.is_dir()}


def test_the_root_is_named_or_found_in_the_environment(tmp_path: Path) -> None:
    assert cache_root(tmp_path, {"FIVEFOLD_CACHE": "/x"}) == tmp_path
    assert cache_root(environ={"FIVEFOLD_CACHE": "/x", "XDG_CACHE_HOME": "/y"}) == Path("/x")
    assert cache_root(environ={"XDG_CACHE_HOME": "/y"}) == Path("/y/fivefold")
    assert cache_root(environ={}) == Path.home() / ".cache" / "fivefold"
    with pytest.raises(UserError, match=r"cache folder, .*udcff.*, is not UTF-8"):
        cache_root(environ={"FIVEFOLD_CACHE": "/x\udcff"})


def test_a_second_call_makes_nothing(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    path = write_jsonl(tmp_path / "texts.jsonl", random_texts(0))
    config = config_for(path, tokenizer="train:300", validation=0.1)
    first = prepare(config, cache=tmp_path / "cache", progress=lambda *step: told.append(step))
    assert {stage for stage, _, _ in told} == {"training the tokenizer", f"tokenising {path}"}
    assert told[-1][1] == told[-1][2] == path.stat().st_size
    assert [done for stage, done, _ in told[2:]] == sorted(done for stage, done, _ in told[2:])
    made = {kind: entries(tmp_path, kind) for kind in ("stores", "rows", "tokenizers")}
    told.clear()
    again = prepare(config, cache=tmp_path / "cache", progress=lambda *step: told.append(step))
    assert not told and rows(first) == rows(again) and first.counts == again.counts
    assert made == {kind: entries(tmp_path, kind) for kind in made}


def test_the_key_is_the_content_not_the_name(tmp_path: Path) -> None:
    texts = random_texts(0)
    prepare_texts(tmp_path, texts)
    copy = shutil.copy(tmp_path / "texts.jsonl", tmp_path / "elsewhere.jsonl")
    prepare(config_for(copy), cache=tmp_path / "cache")
    assert len(entries(tmp_path, "stores")) == 1
    prepare_texts(tmp_path, [*texts, "more"])
    assert len(entries(tmp_path, "stores")) == 2
    prepare_texts(tmp_path, texts, seq_length=67)
    prepare_texts(tmp_path, texts, tokenizer="train:300")
    assert len(entries(tmp_path, "stores")) == 3 and len(entries(tmp_path, "rows")) == 4


DAMAGE = ["stores/*/tokens.bin", "stores/*/offsets.npy", "stores/*/blocks.npy", "stores/*/meta.json"]
DAMAGE += ["rows/*/counts.json", "rows/*/train/start.npy", "rows/*/train/offsets.npy", "rows/*/validation/length.npy"]
DAMAGE += ["tokenizers/read-*/facts.json", "tokenizers/read-*/tokenizer.json", "tokenizers/read-*/checksums.json"]


def test_a_damaged_entry_is_made_anew(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases = [
        *product(DAMAGE, ["cut", "empty", "gone"]),
        ("tokenizers/*/tokenizer_config.json", "gone"),
    ]
    texts = random_texts(0)
    folder = tokenizers_zoo.made("class: Llama 2, its class", tmp_path / "tokenizer")
    for number, (file, how) in enumerate(cases):
        with subtests.test(msg=f"{file}, {how}"):
            place = tmp_path / str(number)
            place.mkdir()
            named = folder if "read-" in file else "byte"
            before = prepare_texts(place, texts, validation=0.1, tokenizer=named)
            expected = rows(before)  # now: what is mapped must not be read once it is cut
            (path,) = (place / "cache").glob(file)
            if how == "gone":
                path.unlink()
            else:
                os.truncate(path, path.stat().st_size - 1 if how == "cut" else 0)
            after = prepare_texts(place, texts, validation=0.1, tokenizer=named)
            assert rows(after) == expected and after.counts == before.counts
            assert path.exists()


def test_a_builder_that_fails_leaves_nothing_and_a_dead_one_is_cleared_away(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "entry"
    dead = folder.parent / ".entry.dead"
    dead.mkdir(parents=True)

    def fail(beside: Path, damage: str) -> None:
        (beside / "half").touch()
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        cache.entry(folder, read=Path.exists, build=fail)
    assert [path.name for path in folder.parent.iterdir()] == ["entry.lock"]


@pytest.mark.parametrize("what", ["file", "link", "link to a folder"])
def test_what_is_no_folder_makes_way_for_an_entry(tmp_path: Path, what: str) -> None:
    entry, elsewhere = tmp_path / "cache" / "entry", tmp_path / "elsewhere"
    entry.parent.mkdir()
    if what == "file":
        entry.write_text("x", encoding="utf-8")
    else:
        entry.symlink_to(elsewhere)
    if what == "link to a folder":
        elsewhere.mkdir()
        (elsewhere / "kept").touch()
    found = cache.entry(
        entry,
        read=lambda folder: (folder / "a").read_text(encoding="utf-8"),
        build=lambda folder, _: (folder / "a").write_text("built", encoding="utf-8"),
    )
    assert found == "built" and not entry.is_symlink()
    assert what != "link to a folder" or [each.name for each in elsewhere.iterdir()] == ["kept"]


def test_an_entry_is_as_readable_as_any_other_folder(tmp_path: Path) -> None:
    """It is built in a folder that is its builder's alone, and a cache may be of several users."""
    cache.entry(tmp_path / "made" / "entry", read=Path.exists, build=lambda folder, damage: None)
    assert stat.S_IMODE((tmp_path / "made" / "entry").stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match="cannot write to the cache folder"):
        cache.entry(tmp_path / "a" / "entry", read=Path.exists, build=lambda folder, damage: None)


def test_a_cache_under_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to the cache folder"):
        cache.entry(tmp_path / "file" / "entry", read=Path.exists, build=lambda folder, damage: None)


def test_a_long_wait_for_another_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache, "_TELL_AFTER", 0.05)
    folder, waited = tmp_path / "entry", []

    def wait() -> None:
        with cache.locked(folder):
            waited.append(folder)

    with cache.locked(folder):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)
        assert not waited
    thread.join()
    assert waited and f"waiting for another process, which is at work on {folder}" in capfd.readouterr().err


def test_the_digest_of_a_big_file_is_remembered_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_REMEMBER_DIGEST_FROM", 3)
    path = tmp_path / "big"
    path.write_text("first")
    os.utime(path, ns=(0, 10**18))
    first = cache.file_digest(path, tmp_path)
    monkeypatch.setattr(cache, "_hash_file", lambda path: "hashed again")
    assert cache.file_digest(path, tmp_path) == first
    os.utime(path, ns=(0, 10**18 + 1))
    assert cache.file_digest(path, tmp_path) == "hashed again"


def test_the_digest_of_a_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writing within a tick of the clock leaves time stamp and size as they are."""
    monkeypatch.setattr(cache, "_REMEMBER_DIGEST_FROM", 3)
    path, now, found = tmp_path / "big", time.time_ns(), set()
    for text in ("first", "other"):
        path.write_text(text)
        os.utime(path, ns=(now, now))
        found.add(cache.file_digest(path, tmp_path))
    assert len(found) == 2


def _prepare_and_tell(folder: str, barrier: object, answers: object) -> None:
    told: list[str] = []
    barrier.wait()  # type: ignore[attr-defined]
    config = config_for(Path(folder) / "texts.jsonl", tokenizer="train:300")
    data = prepare(config, cache=Path(folder) / "cache", progress=lambda stage, done, total: told.append(stage))
    answers.put((bool(told), data.fingerprint, len(data.train)))  # type: ignore[attr-defined]


@pytest.mark.full
def test_two_processes_at_once_tokenise_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", random_texts(0, 997))
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_prepare_and_tell, args=(str(tmp_path), barrier, answers)) for _ in range(2)]
    for worker in workers:
        worker.start()
    told = [answers.get(timeout=60) for _ in workers]
    for worker in workers:
        worker.join(60)
    assert told[0][1:] == told[1][1:]
    assert len(entries(tmp_path, "stores")) == len(entries(tmp_path, "rows")) == 1
    stages = sum(built for built, _, _ in told)
    assert stages in (1, 2)  # 2: one trained the tokenizer, the other tokenised
    assert not list((tmp_path / "cache").glob("*/.*"))


@pytest.mark.full
def test_reading_needs_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "texts.jsonl", random_texts(0))
    code = (
        "import sys; from pathlib import Path; from tests.data.helpers import config_for, prepare\n"
        f"prepare(config_for({str(path)!r}, tokenizer='train:300'), cache=Path({str(tmp_path / 'cache')!r}))\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


def test_without_a_home_it_is_said_where_the_cache_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    for environ in ({}, {"FIVEFOLD_CACHE": "~/cache"}):
        with pytest.raises(UserError, match="home folder"):
            cache_root(environ=environ)
    with pytest.raises(UserError, match="home folder that ~ stands for"):
        prepare(config_for("~nobody-of-this-name/texts.jsonl"), cache=tmp_path)


@pytest.mark.parametrize("damage", [b"", b"\xff\xfe", b"0" * 32, None])
def test_a_damaged_note_of_a_digest_is_not_believed(
    damage: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_REMEMBER_DIGEST_FROM", 0)
    monkeypatch.setattr(cache, "_SETTLED_SECONDS", 0.0)
    files = [tmp_path / name for name in "ab"]
    for number, file in enumerate(files):
        file.write_text("text" * (number + 1))
        os.utime(file, (0, 0))
    right = [cache.file_digest(file, tmp_path) for file in files]
    one, other = (tmp_path / "digests").iterdir()
    texts = one.read_bytes(), other.read_bytes()
    one.write_bytes(texts[1] if damage is None else damage)  # None: they change places
    other.write_bytes(texts[0] if damage is None else damage)
    assert [cache.file_digest(file, tmp_path) for file in files] == right


def test_notes_that_cannot_be_written_are_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_REMEMBER_DIGEST_FROM", 0)
    monkeypatch.setattr(integrity, "_TRUSTED_FROM", 0)
    (tmp_path / "text").write_text("text")
    os.utime(tmp_path / "text", (0, 0))
    for name in ("digests", "whole"):
        (tmp_path / name).write_text("in the way, as a cache that is read-only")
    assert len(cache.file_digest(tmp_path / "text", tmp_path)) == 32
    integrity.check_file(tmp_path / "text", integrity.file_checksum(tmp_path / "text"), tmp_path)


def test_a_filesystem_without_locks_is_the_user_s_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(UserError, match=r"No locks available\n.*FIVEFOLD_CACHE"):
        cache.entry(tmp_path / "entry", read=Path.exists, build=lambda folder, damage: None)


def test_a_tokenizer_that_finds_no_space_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # tokenizers has a bare Exception
        tokenizer._save(Tokenizer(BPE()), tmp_path / "absent")
