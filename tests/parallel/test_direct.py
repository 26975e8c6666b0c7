"""Collectives between machines over gloo's sends and receives: their results, beside those of one process."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.cli import LOST_RANK
from tests.parallel import transport
from tests.pool import run_ranks

IN_TIME = 60.0
COUNTS = [0, 1, 2, 127, 10_007, 300_001]  # numbers of a rank
FLOATS = ("sum", "avg", "max")
TYPES = {torch.float32: FLOATS, torch.float64: FLOATS, torch.bfloat16: FLOATS[:2], torch.int64: (), torch.uint8: ()}

pytestmark = pytest.mark.full


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("world", [2, 3])
def test_every_kind_of_every_size(world: int, dtype: torch.dtype) -> None:
    """Bit for bit those of one process, but for the sums of three ranks that gloo does still."""
    found = run_ranks(world, transport.directly, "all_kinds", dtype, COUNTS, TYPES[dtype], timeout=IN_TIME)
    wrong = {name for each in found for name in each}
    assert {name for name in wrong if world == 2 or not name.startswith("all_reduce")} == set()


@pytest.mark.parametrize(
    ("world", "body", "arguments", "wanted"),
    [
        (2, "uneven", (997,), True),
        (3, "uneven", (60_000,), True),
        (2, "asynchronous", (200_000,), []),
        (2, "crossed", (5_000_000,), True),
        (2, "left_to_gloo", (), [True] * 9),
        (2, "forgotten", (), [True] * 7),
        (2, "in_threads", (), True),
        (3, "in_threads", (), True),
        (2, "operators", (), [True] * 3),
        (2, "several_tensors", (), []),
    ],
)
def test_what_else_shared_memory_is_asked(world: int, body: str, arguments: Any, wanted: Any) -> None:
    assert run_ranks(world, transport.directly, body, *arguments, timeout=IN_TIME) == [wanted] * world


@pytest.mark.parametrize("world", [2, 3])
def test_tensors_that_lie_apart_or_share_memory(world: int) -> None:
    """gloo itself is wrong about an all-reduce of these."""
    for found in run_ranks(world, transport.directly, "laid_out_otherwise", timeout=IN_TIME):
        assert [name for name, is_right in found.items() if not is_right] == ["all_reduce"] * (world > 2)


def test_a_nan_reaches_all_ranks() -> None:
    assert all(map(all, run_ranks(2, transport.directly, "not_a_number", timeout=IN_TIME)))


def test_ranks_of_one_machine_and_the_switch() -> None:
    """Two ranks of one machine among three do not exchange directly, nor does anybody if all is left to gloo."""
    assert run_ranks(3, transport.who_is_direct, timeout=IN_TIME) == [[True, False, False]] * 3


# ---- ranks that end, or mean something else --------------------------------------------------------------------------


@pytest.fixture
def two(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[transport.Two]:
    found = transport.Two(request.param, str(tmp_path / "store"), transport.directly)
    yield found
    found.close()


@pytest.mark.parametrize("two", ["waits"], indirect=True)
def test_a_rank_that_was_killed_is_named(two: transport.Two) -> None:
    time.sleep(0.3)
    began = time.monotonic()
    two.processes[1].kill()
    rank, said = two.heard()
    assert rank == 0 and said.startswith("all_reduce [4] of group") and "with rank 1: " in said
    assert any(words in said for words in LOST_RANK) and time.monotonic() - began < 5


@pytest.mark.parametrize("two", ["is_patient"], indirect=True)
def test_the_timeout_of_a_call_is_kept(two: transport.Two) -> None:
    rank, said = two.heard()
    assert rank == 0 and said.startswith("all_reduce [4] of group") and "400ms" in said


@pytest.mark.parametrize("two", ["is_watched"], indirect=True)
def test_the_watchdog_sees_what_waits(two: transport.Two) -> None:
    rank, said = two.heard()
    assert rank == 0 and said.startswith("True True waits in: all_reduce [[4]] of group")


@pytest.mark.parametrize("two", [f"means_another {what}" for what in ("size", "type", "operation")], indirect=True)
def test_another_collective_is_waited_for_in_vain(two: transport.Two) -> None:
    """None gets something else for the result; both are told which."""
    assert sorted(rank for rank, said in (two.heard(), two.heard()) if said.startswith("all_reduce [")) == [0, 1]
