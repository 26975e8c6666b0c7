"""What another user of this machine can reach of a run that is under way: nothing from outside, no store, no pickle."""

import ast
import os
import signal
import socket
import stat
import struct
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.launch.test_workers import PATHS, ROOT, is_alive, waiting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")  # as the kernel says it
STORE = (
    b"\0" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", 7)
)  # torch's store answers: its magic, a ping
RUNS_CODE = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list")


def listeners(pids: list[int]) -> list[tuple[str, int]]:
    """(address in hexadecimal, port) of every TCP socket on which one of these processes listens."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            address, _, port = words[1].partition(":")
            if words[3] == "0A" and words[9] in inodes:
                found.append((address, int(port, 16)))
    return found


def answer(port: int, said: bytes) -> bytes:
    """What whoever connects to a port and says something is told."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as attacker:
        attacker.sendall(said)
        attacker.settimeout(0.3)
        with suppress(TimeoutError, ConnectionResetError):
            return attacker.recv(1000)
    return b""


@pytest.mark.full
def test_a_run_listens_to_nobody_outside_and_has_no_store_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # of a cluster, where this machine has another
    starter, workers = waiting(tmp_path)
    try:
        found = listeners([starter.pid, *workers])
        assert len(found) >= 2  # gloo's own, on which ranks send each other numbers
        assert [each for each in found if each[0] not in LOOPBACK] == []
        for _, port in found:
            for said in (STORE, b"\0" * 64, b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n"):
                assert answer(port, said) == b""
        assert all(is_alive(pid) for pid in workers)
        (folder,) = scratch.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and folder.stat().st_uid == os.getuid()
    finally:
        starter.send_signal(signal.SIGTERM)
        starter.communicate(timeout=60)
    assert list(scratch.iterdir()) == []  # nothing stays behind


def test_no_rank_sends_another_one_a_pickle() -> None:
    """What reads a pickle runs what it says, and gloo's sockets believe whoever connects first."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {getattr(node, "attr", None), getattr(node, "id", None)}
            names |= {alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)}
            found += [f"{path.name} {name}" for name in names & {*RUNS_CODE, "pickle"}]
    assert not found
