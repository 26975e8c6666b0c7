"""Local workers: how many, what they see, and how a failure is told."""

import gc
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.config import RunConfig, load_config
from fivefold.core.errors import RunFailed, UserError
from fivefold.launch.failure import WorkerDied, failure_file, hang_flag
from fivefold.launch.folder import LOCK, check_shared, claim_fresh, holder_of, open_folder
from fivefold.launch.processes import Workers
from fivefold.launch.worker import imported
from fivefold.launch.workers import start_workers, worker_count
from fivefold.launch.world import World
from fivefold.parallel.layout import Layout
from fivefold.training import launch
from fivefold.training.schedule import settled
from tests.commands import Crew
from tests.tiers import put_off

ROOT = Path(__file__).parents[2]
PATHS = f"{ROOT / 'src'}:{ROOT}"


def test_ranks_are_waited_for_as_long_as_the_run_file_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Enough(Exception):
        pass

    def join(world: object, timeout: float = -1.0) -> None:
        raise Enough(timeout)

    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29555"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "join", join)
    monkeypatch.setattr(launch, "_prepare", lambda *_, **__: None)
    with pytest.raises(Enough, match=r"^7\.0$"):
        launch.run(None, [f"run.dir={tmp_path}", "launch.timeout=7"])


@pytest.mark.parametrize(
    ("text", "kind", "devices", "nproc", "workers"),
    [
        ("shard-1", "cpu", 0, None, 2),
        ("shard-1", "cpu", 0, 3, 3),
        ("shard-1", "cuda", 8, None, 8),
        ("shard-1", "cuda", 8, 4, 4),
        ("shard-1.tp2", "cpu", 0, None, 2),
        ("shard-1.tp4", "cpu", 0, None, 4),
        ("shard-1.tp4", "cuda", 8, None, 8),
        ("tp2", "cpu", 0, None, 2),
        ("shard2.tp2", "cpu", 0, 4, 4),
        ("single", "cuda", 8, None, 1),
    ],
)
def test_worker_count(text: str, kind: str, devices: int, nproc: int | None, workers: int) -> None:
    assert worker_count(Layout.parse(text), kind=kind, devices=devices, nproc=nproc) == workers


@pytest.mark.parametrize(
    ("text", "kind", "devices", "nproc", "what"),
    [
        ("shard2.tp2", "cpu", 0, 3, "dp_shard 2 x tp 2 = 4, but 3 workers started"),
        ("shard-1.tp2", "cpu", 0, 3, "2 does not divide 3"),
        ("shard-1.tp4", "cuda", 6, None, "4 does not divide 6"),
        ("shard2.tp2", "cuda", 2, None, "dp_shard 2 x tp 2 needs 4 GPUs, but this machine has 2"),
    ],
)
def test_a_disagreement_shows_the_arithmetic(text: str, kind: str, devices: int, nproc: int | None, what: str) -> None:
    with pytest.raises(UserError) as caught:
        worker_count(Layout.parse(text), kind=kind, devices=devices, nproc=nproc)
    assert what in caught.value.what


def test_the_demo_takes_a_fresh_name_each_time(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}"])
    names = [claim_fresh(config).run.name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]
    assert all((tmp_path / name).is_dir() for name in names)


def test_a_run_folder_on_a_disk_of_the_node_s_own_is_refused(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}"])
    open_folder(config)
    holder = holder_of(config.run_dir)
    assert f"process {os.getpid()} on" in holder
    check_shared(config.run_dir, holder, 0)
    with pytest.raises(UserError, match="another disk"):
        check_shared(tmp_path / "empty", holder, 0)
    (config.run_dir / LOCK).write_text("process 1 on node-2\n")  # of an earlier run
    with pytest.raises(UserError, match="another disk"):
        check_shared(config.run_dir, holder, 0)


def test_the_resolved_file_is_saved_once(tmp_path: Path) -> None:
    config = load_config(None, [f"run.dir={tmp_path}"])
    assert open_folder(config) == tmp_path / "demo" / "logs"
    assert load_config(tmp_path / "demo" / "run.yaml") == config
    # A second run under the same name is compared with the first before anything of it is replaced.
    open_folder(load_config(None, [f"run.dir={tmp_path}", "train.seed=9"]))
    assert load_config(tmp_path / "demo" / "run.yaml") == config


def body(name: str) -> str:
    return f"tests.launch.bodies:{name}"


def start(name: str, folder: Path, workers: int = 2) -> None:
    """In workers of its own, which write where this test's output goes."""
    with Workers(body(name), count=workers) as crew:
        start_workers(crew, request_of(name, folder), logs=folder / "logs")


def request_of(name: str, folder: Path) -> dict[str, str]:
    return {"device": "cpu", "out": str(folder), "body": name}


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)


@pytest.fixture(scope="module")
def crew() -> Iterator[Workers]:
    """Two workers that start again for each test, as they do where one has died."""
    with patch.dict(os.environ, {"PYTHONPATH": PATHS}), Workers(body("named"), count=2) as both:
        yield both


def again(crew: Workers, name: str, folder: Path) -> None:
    start_workers(crew, request_of(name, folder), logs=folder / "logs")


def seen_by_ranks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.full
def test_workers_run_and_write_their_own_logs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    start("sum_ranks", tmp_path)
    seen = seen_by_ranks(tmp_path)
    assert [(each["rank"], each["size"], each["local_size"], each["sum"]) for each in seen] == [
        (0, 2, 2, 1),
        (1, 2, 2, 1),
    ]
    assert all(each["threads"] == int(each["omp"]) for each in seen)
    assert capfd.readouterr().out == "hello from rank 0\n"
    assert "hello from rank 1" in (tmp_path / "logs" / "rank-1.log").read_text()
    assert (tmp_path / "logs" / "rank-0.log").exists()


def test_modules_are_imported_without_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they leave is not looked through again, which holds once: garbage of later would stay for ever."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "told.py").write_text("import gc\nwas_on = gc.isenabled()\n")
    (tmp_path / "broken.py").write_text("raise OSError\n")
    before = gc.get_freeze_count()
    assert not imported("told").was_on and gc.isenabled()
    frozen = gc.get_freeze_count()
    later = [[number] for number in range(1000)]
    assert frozen > before and imported("told") and later
    assert gc.get_freeze_count() <= frozen  # fewer: what another thread gives back meanwhile
    with pytest.raises(OSError):
        imported("broken")
    assert gc.isenabled()


@pytest.mark.full
def test_one_process_imports_for_all_and_for_the_next_start(crew: Workers, tmp_path: Path) -> None:
    for _ in range(2):
        again(crew, "sum_ranks", tmp_path)
        seen = seen_by_ranks(tmp_path)
        assert [each["pid"] for each in seen] == crew.ids
        assert {each["imported_by"] for each in seen} == {crew._server.pid}


@pytest.mark.full
def test_what_has_started_cuda_is_imported_anew(tmp_path: Path) -> None:
    with Workers("tests.launch.uses_gpu:sum_ranks", count=2) as crew:
        start_workers(crew, {"device": "cpu", "out": str(tmp_path)}, logs=tmp_path / "logs")
        assert [each["imported_by"] for each in seen_by_ranks(tmp_path)] == crew.ids


@pytest.mark.full
def test_the_death_of_the_process_that_forks_is_that_of_its_workers(tmp_path: Path) -> None:
    starter, workers = waiting(tmp_path)
    server = int(Path(f"/proc/{workers[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGKILL)
    _, err = starter.communicate(timeout=40)
    assert starter.returncode == 1 and "rank 0 was killed by SIGKILL" in err
    deadline = time.monotonic() + 10  # they were sent SIGKILL, which the kernel heeds when it comes to it
    while any(is_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.full
def test_one_worker_is_a_world_too(tmp_path: Path) -> None:
    start("sum_ranks", tmp_path, workers=1)
    assert json.loads((tmp_path / "rank-0.json").read_text())["size"] == 1


@pytest.mark.full
def test_a_user_s_error_arrives_as_it_was_raised(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as caught:
        start("wrong_request", tmp_path)
    assert type(caught.value) is UserError
    told = (caught.value.what, caught.value.fix, caught.value.more)
    assert told == ("train.jsonl:3 has no key 'text'", "set text_key", "see the docs")
    assert capfd.readouterr() == ("", "")  # the one who asked prints it, once


@pytest.mark.full
def test_a_failed_run_keeps_its_exit_code(crew: Workers, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="not finite") as caught:
        again(crew, "run_fails", tmp_path)
    assert (type(caught.value), caught.value.exit_code) == (RunFailed, 1)


@pytest.mark.full
def test_want_of_gpu_memory_is_said_with_what_helps_and_ends_the_run(crew: Workers, tmp_path: Path) -> None:
    """As what it is: only a worker that died of something else is started again."""
    with pytest.raises(RunFailed, match=r"rank 1: the memory of its GPU does not suffice: 2\.50 GiB more") as caught:
        again(crew, "fills_its_gpu", tmp_path)
    assert type(caught.value) is RunFailed and "memory.recompute: full" in str(caught.value.fix)


@pytest.mark.full
def test_a_hung_collective_is_ended_and_every_rank_says_where_it_stands(crew: Workers, tmp_path: Path) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        again(crew, "hang", tmp_path)
    assert time.monotonic() - started < 60
    # Who waits for rank 1 finds it, or rank 1 itself, whichever looks first.
    seen = r"(Hung: no answer in a collective for 2 s, which it does not come to:|StoodStill: stood still for 2 s).* "
    assert re.match(rf"rank 1 stopped: {seen}in slumber \(launch/bodies.py:\d+\)$", caught.value.what)
    more = caught.value.more or ""
    assert re.search(r"rank 0, waits in: all_reduce \[\[3\]\] of group default_pg, number \d+, under way", more)
    assert re.search(r"rank 1, last: all_reduce \[\[7\]\] of group default_pg, number \d+, done", more)
    stacks = json.loads((tmp_path / "logs" / "failure-1.json").read_text())["traceback"]
    assert "in slumber" in stacks
    with pytest.raises(RunFailed):
        again(crew, "run_fails", tmp_path)  # what an earlier attempt left is put aside
    assert not (tmp_path / "logs" / "hung").exists()


@pytest.mark.full
def test_a_crash_is_told_in_one_line_with_rank_and_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerDied) as caught:
        start("crash", tmp_path)
    assert caught.value.what == "rank 1 stopped: RuntimeError: boom"
    assert str(tmp_path / "logs" / "rank-1.log") in (caught.value.more or "")
    assert "in crash" in caught.value.traceback
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "last words of rank 1" in log and "RuntimeError: boom" in log
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.full
def test_a_killed_worker_is_told(crew: Workers, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="rank 1 was killed by SIGKILL") as caught:
        again(crew, "killed", tmp_path)
    assert "memory" in (caught.value.fix or "")


STARTER = """
import sys
from pathlib import Path
from fivefold import cli
from fivefold.launch.processes import Workers
from fivefold.launch.workers import start_workers
from fivefold.training import launch

def run(*_, **__):
    with Workers("tests.launch.bodies:wait", count=2) as crew:
        start_workers(crew, {"device": "cpu", "out": sys.argv[1]}, logs=Path(sys.argv[1], "logs"))

launch.run = run
cli.main(["train"])
"""


def waiting(folder: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A command whose workers wait forever, and the ids of the workers."""
    command = [sys.executable, "-c", STARTER, str(folder)]
    starter = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    files = [folder / "pid-0", folder / "pid-1"]
    until = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until and starter.poll() is None, starter.communicate()
        time.sleep(0.05)
    return starter, [int(file.read_text()) for file in files]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and ") Z " not in stat.read_text()


@pytest.mark.full
@pytest.mark.parametrize(
    ("sent", "code", "said"), [(signal.SIGINT, 130, "stopped\n"), put_off(signal.SIGTERM, 143, "")]
)
def test_a_signal_ends_the_workers_without_noise(sent: signal.Signals, code: int, said: str, tmp_path: Path) -> None:
    starter, workers = waiting(tmp_path)
    starter.send_signal(sent)
    out, err = starter.communicate(timeout=40)
    assert (starter.returncode, out, err.lstrip()) == (code, "", said)
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_workers_do_not_outlive_the_one_who_started_them(tmp_path: Path) -> None:
    starter, workers = waiting(tmp_path)
    starter.kill()
    starter.communicate(timeout=40)
    until = time.monotonic() + 20
    while any(is_alive(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in workers)


@pytest.mark.full
def test_the_environment_is_as_it_was(tmp_path: Path) -> None:
    before: dict[str, Any] = dict(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    start("sum_ranks", tmp_path, workers=1)
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_flag_of_an_earlier_hang_does_not_end_a_run_under_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"run.dir={tmp_path}", "run.name=one"]
    logs = open_folder(load_config(None, keys))
    hang_flag(logs).touch()
    failure_file(logs, 0).write_text("{}")
    seen: list[list[Path]] = []
    monkeypatch.setattr(launch, "_prepare", lambda *_, **__: None)
    monkeypatch.setattr(launch, "execute", lambda *_: seen.append([*logs.glob("hung"), *logs.glob("failure-*")]))
    monkeypatch.setattr(launch, "find_world", lambda _: World())
    launch.run(None, keys)
    assert seen == [[]]


def test_a_finished_run_says_so_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"run.dir={tmp_path}", "run.name=one", "train.max_steps=7"]
    config = load_config(None, keys)
    open_folder(settled(config, 7, before=None))
    (config.run_dir / "checkpoints" / "step-000007").mkdir(parents=True)
    started: list[RunConfig] = []
    monkeypatch.setattr(launch, "Workers", Crew)
    monkeypatch.setattr(launch, "_prepare", lambda *_, **__: SimpleNamespace(converses=False))
    monkeypatch.setattr(launch, "_start", lambda config, *_: started.append(config) or tmp_path)
    assert launch.run(None, keys) == config.run_dir and not started
    said = capsys.readouterr().out
    assert "this run is finished: 7 of 7 steps are done" in said
    assert f"fivefold train {config.run_dir} train.max_steps=14   # makes it longer" in said
    others = ("train.max_steps=8", "optimizer.learning_rate=1", "checkpoint.resume=never", "checkpoint.export_hf=true")
    for other in others:
        launch.run(None, [*keys, other])
    assert len(started) == len(others), "whatever is asked for besides is for the workers to look at"
    (config.run_dir / "checkpoints" / "step-000007").rename(config.run_dir / "checkpoints" / "step-000006")
    launch.run(None, keys)
    assert len(started) == len(others) + 1
