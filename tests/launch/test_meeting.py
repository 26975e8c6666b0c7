"""Ranks that something else has started meet at a port of rank 0 and name who does not come. Here ranks are threads."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from fivefold.core.errors import RunFailed, UserError
from fivefold.launch import meeting
from fivefold.launch.meeting import LOOPBACK, OthersGone, meet

FIRST = meeting.FIRST  # tests shorten it


@pytest.fixture
def port() -> int:
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, seconds in (("FIRST", 0.3), ("EVERY", 0.4), ("_PAUSE", 0.1)):
        monkeypatch.setattr(meeting, name, seconds)
    meeting._of_slurm.cache_clear()
    yield
    meeting._of_slurm.cache_clear()


def ranks(come: list[int], size: int, port: int, *, timeout: float = 1.0, host: str = LOOPBACK) -> list[Any]:
    """What each of the ranks that come gets: a store, or an error. Rank 0, if it comes, gives up first."""

    def one(rank: int) -> Any:
        patience = timeout + 20 if rank and 0 in come else timeout
        try:
            return meet(rank, size, host, port, hosts=rank == 0, timeout=patience)
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(come)) as threads:
        return list(threads.map(one, come))


def test_ranks_that_all_come_share_a_store(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    first, *others = ranks([0, 2, 1], 3, port, timeout=20)
    first.set("key", "value")
    assert [each.get("key") for each in others] == [b"value"] * 2
    assert capfd.readouterr().err == ""


@pytest.fixture
def agent(port: int) -> Any:
    """The store of torchrun's agent, which outlives the ranks and holds all that they have said."""
    return TCPStore(LOOPBACK, port, 2, is_master=True, wait_for_workers=False)


def test_ranks_that_torchrun_starts_again_meet_each_other_alone(agent: Any, port: int) -> None:
    """Nothing in the environment tells rounds apart: the nodes count restarts separately."""
    again = partial(meet, size=2, host=LOOPBACK, port=port, hosts=False, timeout=20)
    with ThreadPoolExecutor(2) as threads:
        first, _ = threads.map(again, range(2))
        first.set("key", "of before")
        with pytest.raises(RunFailed, match=r"rank 1 waits at .+ for rank 0 \("):
            again(1, timeout=0.5)
        with pytest.raises(RunFailed, match=r"rank 0 waits at .+ for rank 1: 1 of 2 have come"):
            again(0, timeout=0.5)
        assert not any(store.check(["key"]) for store in threads.map(again, range(2)))


def test_a_rank_that_came_and_ended_is_missing_and_may_come_again(
    agent: Any, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed, it takes nothing back: its last sign stays in the store."""
    monkeypatch.setattr(meeting, "_GONE", 0.5)
    presence = [meeting._RankPresence(agent, rank, 3, "here") for rank in range(3)]
    for _ in range(2):
        for each in (*presence[:2], presence[0]):
            assert each.round() == ""
    assert presence[0].missing() == "rank 0 waits at here for rank 2: 2 of 3 have come" and presence[1].missing() == ""
    time.sleep(0.6)  # rank 1 has been killed
    again = meeting._RankPresence(agent, 1, 3, "here")
    for _ in range(2):
        assert [presence[2].round(), again.round(), presence[0].round()] == [""] * 3
    assert presence[0].missing() == "rank 0 waits at here for rank 1: 2 of 3 have come; rank 1 had come, and ended"
    time.sleep(0.6)
    alive = presence[0], again, presence[2]
    names = [{each.round() for each in alive} for _ in range(5)][-1]
    assert len(names) == 1 and names != {""}
    for each in alive:
        each.withdraw()
    assert not any(agent.get(meeting._key(rank)) for rank in range(3))


def test_a_rank_that_two_processes_are_is_told_so(port: int) -> None:
    """As many have come as there are ranks, and one of these has not."""
    errors = ranks([0, 1, 1], 3, port)
    (twice,) = (error for error in errors if type(error) is UserError)
    assert re.match(r"rank 1 has come already: it is process \d+ of .+, and this is process \d+ of ", twice.what)
    waiting = [error for error in errors if type(error) in (RunFailed, OthersGone)]
    assert len(waiting) == 2 and "for rank 2: 2 of 3 have come" in waiting[0].what


def test_missing_ranks_are_named_within_ten_seconds() -> None:
    assert FIRST <= 10


def test_ranks_of_worlds_of_other_sizes_are_told_so(port: int) -> None:
    def one(rank: int) -> Any:
        try:
            return meet(rank, rank + 2, LOOPBACK, port, hosts=rank == 0, timeout=1.0)
        except UserError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        errors = list(threads.map(one, range(2)))
    assert {type(error) for error in errors} in ({UserError, RunFailed}, {UserError, OthersGone})
    told = {f"rank {a} was started with WORLD_SIZE {a + 2}, and rank {b} with {b + 2}" for a, b in ((0, 1), (1, 0))}
    assert len(told & {error.what for error in errors}) == 1


def test_ranks_of_other_machines_reach_rank_0_and_nobody_a_run_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting._listen("node7", 0) as all_addresses, meeting._listen(LOOPBACK, 0) as this_machine:
        found = all_addresses.getsockname()[0], this_machine.getsockname()[0]
        assert found in (("::", LOOPBACK), ("0.0.0.0", LOOPBACK))
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with meeting._listen("node7", 0) as all_addresses:
        assert all_addresses.getsockname()[0] == "0.0.0.0"


def test_rank_0_listens_at_the_address_that_its_host_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where others may resolve its name otherwise: of several addresses, or of the loopback interface; nor at an
    address of a machine in front of it."""
    known = {"one": ["127.0.0.2"], "two": ["127.0.0.2", "127.0.0.3"], "hosts": ["127.0.1.1"], "service": ["192.0.2.77"]}
    plain = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo",
        lambda host, *rest, **more: [(2, 1, 6, "", (each, 0)) for each in known[host]] if host in known
        else plain(host, *rest, **more),
    )  # fmt: skip

    def at(host: str) -> str:
        with meeting._listen(host, 0) as listening:
            return str(listening.getsockname()[0])

    everywhere = at("nowhere.invalid")
    assert everywhere in ("::", "0.0.0.0")
    assert [at("localhost"), at("127.0.0.2")] == [LOOPBACK, "127.0.0.2"]
    assert [at(host) for host in ("two", "hosts", "service")] == [everywhere] * 3
    monkeypatch.setattr(meeting, "is_loopback", lambda host: host == LOOPBACK)  # 127.0.0.2 is as another interface
    assert at("one") == "127.0.0.2" and at("two") == everywhere


def test_rank_0_reaches_its_store_where_that_listens(port: int) -> None:
    first, second = ranks([0, 1], 2, port, timeout=20, host="127.0.0.2")
    first.set("key", "value")
    assert second.get("key") == b"value"


LISTENERS = """
import os, sys
import torch.distributed as dist
from fivefold.launch.world import find_world, join

with join(find_world("cpu")):
    dist.barrier()
    own = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(path) for path in own if os.path.lexists(path)}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in open(f"/proc/net/{kind}").read().splitlines()[1:]]
    print(*sorted({row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes}))
    dist.barrier()
"""


@pytest.mark.full
def test_ranks_of_one_machine_listen_on_loopback_alone(port: int) -> None:
    """Started by hand: nothing but the address of rank 0 says that they are on one machine."""
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen([sys.executable, "-c", LISTENERS], env={**env, "RANK": str(rank)}, stdout=-1, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[0].split() for process in processes]
    assert said == [["0100007F"], ["0100007F"]]  # 127.0.0.1


def test_a_rank_that_never_comes_is_named_by_the_first_of_the_others(
    port: int, capfd: pytest.CaptureFixture[str]
) -> None:
    errors = ranks([0, 3], 5, port)
    assert {type(error) for error in errors} <= {RunFailed, OthersGone} and "(1 s: launch.timeout)" in errors[0].what
    said = rf"rank 0 waits at {LOOPBACK}:{port} \(here: .+\) for rank 1, 2, 4: 2 of 5 have come \("
    assert re.match(said, errors[0].what)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and all(re.match(said, line) for line in lines), lines


def test_rank_0_that_never_comes_is_named(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    (error,) = ranks([1], 2, port)
    said = f"rank 1 waits for rank 0 at {LOOPBACK}:{port}: Connection refused"
    assert error.what == f"{said} (1 s: launch.timeout)" and "unset RANK" in error.fix
    lines = capfd.readouterr().err.splitlines()  # torch writes to the descriptor
    assert lines and all(line.startswith(f"{said} (") for line in lines)


def test_a_port_that_is_taken_is_said_at_once(port: int) -> None:
    with socket.create_server((LOOPBACK, port)):
        for host in (LOOPBACK, "localhost"):
            (error,) = ranks([0], 2, port, timeout=60, host=host)
            assert type(error) is UserError and "MASTER_PORT" in error.fix
            assert (
                error.what == f"rank 0 cannot listen at port {port} of {socket.gethostname()}: Address already in use"
            )


def test_another_service_at_the_port_is_no_store(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_ANSWER", 0.3)
    with socket.create_server((LOOPBACK, port)):  # takes connections, and never says anything
        (error,) = ranks([1], 2, port)
    assert error.what == f"rank 1 waits for rank 0 at {LOOPBACK}:{port}: no answer (1 s: launch.timeout)"


def no_names(monkeypatch: pytest.MonkeyPatch, scontrol: Callable[..., Any]) -> None:
    """Numbers alone are addresses; Slurm is asked by `scontrol`."""
    resolve = socket.getaddrinfo

    def numbers(host: str, *rest: Any, **options: Any) -> Any:
        if re.fullmatch(r"[0-9.:]+", host):
            return resolve(host, *rest, **options)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", numbers)
    monkeypatch.setattr(meeting, "subprocess", SimpleNamespace(run=scontrol, **SUBPROCESS))


SUBPROCESS = {name: getattr(subprocess, name) for name in ("DEVNULL", "SubprocessError")}


def test_slurm_is_asked_for_the_address_of_a_node(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def scontrol(command: list[str], **_: Any) -> Any:
        asked.append(command)
        return SimpleNamespace(stdout=f"NodeName=gpu-7 Arch=x86_64\n   NodeAddr={LOOPBACK} NodeHostName=x Port=0\n")

    no_names(monkeypatch, scontrol)
    first, second = ranks([0, 1], 2, port, timeout=20, host="gpu-7")
    first.set("key", "value")
    assert second.get("key") == b"value"
    assert asked == [["scontrol", "show", "node", "gpu-7"]]


@pytest.mark.parametrize("there", [False, True])
def test_a_name_without_an_address_is_said(there: bool, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def scontrol(*_: Any, **__: Any) -> Any:
        if not there:
            raise FileNotFoundError("scontrol")
        return SimpleNamespace(stdout="NodeName=other NodeAddr=\n")

    no_names(monkeypatch, scontrol)
    (error,) = ranks([1], 2, port, host="gpu-7", timeout=0.3)
    assert error.what.startswith(f"rank 1 waits for rank 0 at gpu-7:{port}: no address of gpu-7 is known (")


def test_the_end_of_rank_0_ends_the_wait_of_the_others(port: int) -> None:
    kept = [meeting._open(3, LOOPBACK, port)]
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(ranks, [1], 3, port, timeout=20)
        kept[0].wait([meeting._key(1)], timedelta(seconds=20))
        kept.clear()
        (error,) = waits.result(timeout=20)
    assert type(error) is OthersGone and "has ended" in error.what


def test_rank_0_that_gives_up_says_so_before_its_store_ends(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    """torch would print a stack of C++ on the ranks that use it."""

    first, second = ranks([0, 1], 3, port)
    assert "for rank 2: 2 of 3 have come" in first.what
    assert second.what.startswith("rank 1 was waiting at ") and second.what.endswith("has ended")
    assert all(line.startswith("rank 0 waits at ") for line in capfd.readouterr().err.splitlines())
