"""The pool of ranks that the tests share: what one test kills does not fail the next."""

import os
import signal

import pytest

from tests import pool
from tests.pool import RankError, run_ranks


def process_id() -> int:
    return os.getpid()


def end_rank_one(once: str) -> int:
    import torch.distributed as dist

    if dist.get_rank() == 1 and not os.path.exists(once):
        open(once, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def fail() -> None:
    raise ValueError("on purpose")


@pytest.mark.full
def test_a_killed_worker_costs_its_pool_and_no_test(tmp_path: object) -> None:
    first = run_ranks(2, process_id)
    assert run_ranks(2, process_id) == first
    os.kill(first[1], signal.SIGKILL)  # between two calls
    pool._pools[2].processes[1].join()
    assert not set(run_ranks(2, process_id)) & set(first)
    assert run_ranks(2, end_rank_one, f"{tmp_path}/once") == [0, 1]  # in the midst of a call, which is made again
    with pytest.raises(RankError, match="ValueError: on purpose"):
        run_ranks(2, fail)
