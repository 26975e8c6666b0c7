"""Code that is run is kept where other users cannot put theirs."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fivefold.core import code_cache
from fivefold.core.code_cache import INDUCTOR, code_folder, keep_compiled
from fivefold.core.errors import UserError
from fivefold.ops.cpu import cpu_attention
from tests.tiers import put_off
from tests.training.bodies import run_file

ANOTHER = 4242  # the number of a user
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache, and another folder for temporary files than the machine's."""
    for name in ("cache", "temporary"):
        (tmp_path / name).mkdir(mode=0o755)
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache"


@pytest.fixture
def own(cache):
    """Where it is kept in place of the cache."""
    return cache.parent / "temporary" / f"fivefold-{os.getuid()}" / "kernels"


def test_a_cache_of_ones_own_keeps_it(cache):
    assert code_folder("kernels") == cache / "kernels"
    assert (cache / "kernels").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_nothing_is_kept_in_a_folder_that_others_write(cache, own, mode):
    (cache / "kernels").mkdir()
    (cache / "kernels").chmod(mode)
    assert code_folder("kernels") == own


@as_root
def test_nothing_is_kept_in_the_folder_of_another(cache, own):
    (cache / "kernels").mkdir()
    os.chown(cache / "kernels", ANOTHER, ANOTHER)
    assert code_folder("kernels") == own


@pytest.mark.full
@as_root
def test_a_library_that_another_user_left_is_not_loaded(cache, own):
    ask = "from fivefold.ops.cpu import cpu_attention; print(cpu_attention._library()._name)"
    env = os.environ | {"TMPDIR": str(cache.parent / "temporary")}

    def loaded():
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, env=env, check=True)
        return Path(done.stdout.strip())

    if cpu_attention.lacks():
        pytest.skip(cpu_attention.lacks())
    assert loaded().parents[1] == cache / "kernels"
    for at in (cache / "kernels", *(cache / "kernels").rglob("*")):
        os.chown(at, ANOTHER, ANOTHER)
    assert loaded().parents[1] == own


def test_where_programs_cannot_run_it_is_kept_elsewhere(cache, own, monkeypatch):
    real = os.statvfs

    def statvfs(path):
        is_there = str(path).startswith(str(cache))
        return type("Disk", (), {"f_flag": real(path).f_flag | os.ST_NOEXEC * is_there})

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert code_folder("kernels") == own


def test_a_cache_that_cannot_be_written_serves_if_it_has_something(cache, own, monkeypatch):
    """It may be part of a container's image."""
    (cache / "kernels").mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != cache / "kernels" and real(path, mode))
    assert code_folder("kernels") == own
    (cache / "kernels" / "one").mkdir()
    assert code_folder("kernels") == cache / "kernels"


def test_without_any_place_the_user_hears_why_the_cache_is_none(cache, monkeypatch):
    monkeypatch.setattr(code_cache, "_lacks", lambda folder: f"{folder} is another user's")
    with pytest.raises(UserError, match=rf"alone can change: {cache}/kernels is another user's"):
        code_folder("kernels")


def test_what_torch_compiles_lies_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    env: dict[str, str] = {}
    keep_compiled(env)
    assert Path(env[INDUCTOR]).parent == tmp_path / "inductor"
    monkeypatch.setattr(code_cache, "cpuinfo", lambda: "model name : another\n\nmodel name : another\n")
    other: dict[str, str] = {}
    keep_compiled(other)
    assert other[INDUCTOR] != env[INDUCTOR]
    env[INDUCTOR] = "/mine"
    keep_compiled(env)
    assert env == {INDUCTOR: "/mine"}
    (tmp_path / "inductor" / "one").mkdir()
    monkeypatch.setattr(os, "access", lambda _, mode: mode != os.W_OK)  # a cache that is only read
    keep_compiled(env := {})
    assert not env


def test_what_torch_compiles_is_apart_for_each_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path))
    cpus = [("flags", "sse avx"), ("flags", "sse"), ("Features", "asimd sve"), ("Features", "asimd")]
    found: dict[str, str] = {}
    for key, value in cpus:
        monkeypatch.setattr(code_cache, "cpuinfo", lambda said=f"model name : a\n{key} : {value}\n": said)
        keep_compiled(env := {})
        found[value] = env[INDUCTOR]
    assert len({*found.values()}) == len(cpus)


def test_without_any_place_torch_keeps_to_its_own(cache, monkeypatch):
    asked = []
    monkeypatch.setattr(code_cache, "_lacks", lambda folder: asked.append(folder) or "no")
    keep_compiled(env := {})
    assert not env
    of_user = f"fivefold-{os.getuid()}/inductor"
    own = [Path(base, of_user) for base in (cache.parent / "temporary", "/tmp", "/var/tmp")]
    assert asked == [cache / "inductor", *own]


@pytest.mark.full
@pytest.mark.parametrize("is_compiled", [False, put_off(True)])
def test_a_run_leaves_nothing_in_the_temporary_folder(tmp_path: Path, is_compiled: bool) -> None:
    tree = run_file(tmp_path, train__max_steps=1, train__compile=is_compiled)
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    (tmp_path / "tmp").mkdir()
    env = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "FIVEFOLD_CACHE": str(tmp_path / "cache")}
    env.pop(INDUCTOR, None)
    command = [sys.executable, "-m", "fivefold", "train", str(tmp_path / "run.yaml"), "--nproc", "1"]
    subprocess.run(command, env=env, check=True)
    assert not list((tmp_path / "tmp").iterdir())
    assert bool(list(tmp_path.glob("cache/inductor/*/precompiled_headers"))) == is_compiled
