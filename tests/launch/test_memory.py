"""Memory: what there is, what a run needs of it by arithmetic, and a death for want of it, which is not tried again."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.launch import workers
from fivefold.launch.failure import failures, leave_failure
from fivefold.launch.memory import Pressure, Room, room
from fivefold.launch.world import World
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.training import preflight
from fivefold.training.preflight import check_memory, needs_of

MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"


def machine(folder: Path, cgroup: str = "", **files: str) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup; `files` by path, with __ for a slash and _d_ for a dot."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "groups").mkdir()
    (folder / "proc" / "meminfo").write_text(MEMINFO)
    (folder / "proc" / "vmstat").write_text("oom_kill 2\n")
    (folder / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        file = folder / "groups" / name.replace("__", "/").replace("_d_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder / "proc", folder / "groups"


def test_the_room_is_that_of_the_machine(tmp_path: Path) -> None:
    assert room(*machine(tmp_path)) == Room(16 * GIB, 8 * GIB)
    assert room(tmp_path / "none", tmp_path) is None


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        ("0::/job/step\n", {"job__memory_d_max": f"{4 * GIB}\n", "job__memory_d_current": f"{GIB}\n"}),
        ("0::/of/the/host\n", {"memory_d_max": f"{4 * GIB}\n", "memory_d_current": f"{GIB}\n"}),
        (
            "4:memory:/job\n1:cpu:/\n",
            {
                "memory__job__memory_d_limit_in_bytes": f"{4 * GIB}\n",
                "memory__job__memory_d_usage_in_bytes": f"{GIB}\n",
            },
        ),
    ],
)
def test_a_control_group_may_leave_less(cgroup: str, files: dict[str, str], tmp_path: Path) -> None:
    assert room(*machine(tmp_path, cgroup, **files)) == Room(4 * GIB, 3 * GIB)


def test_no_limit_is_none(tmp_path: Path) -> None:
    unlimited = {"memory_d_max": "max\n", "memory_d_current": f"{GIB}\n"}
    assert room(*machine(tmp_path, "0::/\n", **unlimited)) == Room(16 * GIB, 8 * GIB)


def test_a_kill_for_want_of_memory_is_known(tmp_path: Path) -> None:
    proc, groups = machine(tmp_path, "0::/\n", memory_d_events="oom 1\noom_kill 1\noom_group_kill 0\n")
    pressure = Pressure(proc, groups)
    pressure.look([])
    assert not pressure.killed
    (groups / "memory.events").write_text("oom 2\noom_kill 2\noom_group_kill 0\n")
    assert pressure.killed
    pressure = Pressure(proc, groups)
    (proc / "meminfo").write_text(MEMINFO.replace("8388608", "100000"))  # another killer than the kernel's
    pressure.look([])
    assert pressure.killed


class Out(Pressure):
    """Memory ran out."""

    def __init__(self, *, killed: bool) -> None:
        self._out, self.held = killed, 15 * GIB

    @property
    def killed(self) -> bool:
        return self._out


def test_a_death_for_want_of_memory_names_the_sizes_and_is_final(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(workers, "room", lambda: Room(14 * GIB, 0))
    error: Any = workers._first_failure(tmp_path, {1: -signal.SIGKILL, 0: 1}, Out(killed=True))
    assert error.what == "rank 1 was killed by SIGKILL: the system ran out of memory" and error.comes_again
    assert error.fix.startswith("the workers held 15.00 GiB at most, this machine has 14.00; train.micro_batch_size")
    error = workers._first_failure(tmp_path, {1: -signal.SIGKILL}, Out(killed=False))
    assert not error.comes_again and "the system still had memory" in error.fix


CUDA = type("OutOfMemoryError", (Exception,), {})
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:128] . DefaultCPUAllocator: can't allocate memory: you tried")


@pytest.mark.parametrize("error", [MemoryError(), CPU, CUDA("CUDA out of memory"), RuntimeError("std::bad_alloc")])
def test_an_allocation_that_failed_is_not_tried_again(error: Exception, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(workers, "room", lambda: Room(20 * GIB, 0))
    leave_failure(tmp_path, 0, error)
    found: Any = workers._first_failure(tmp_path, {0: 1}, Out(killed=False))
    assert failures(tmp_path) and found.comes_again
    assert "memory.recompute: full" in found.fix


LAYOUTS = [("single", 1, 1), ("shard4", 4, 1), ("shard4", 1, 0.25), ("dp2.shard2", 4, 2), ("dp4", 4, 4)]


@pytest.mark.parametrize(("layout", "ranks", "copies"), LAYOUTS)
def test_what_a_run_needs(layout: str, ranks: int, copies: float) -> None:
    """Of the state, 4 bytes a number; the demo has 2 million parameters, whose rows 4 shards divide."""
    facts, parsed = facts_of_config("demo"), Layout.parse(layout)
    embedding_and_norms = 2048 * 192 + 9 * 192  # of which Muon keeps AdamW's two moments
    for name, kept in (("adamw", 2 * facts.size), ("muon", facts.size + embedding_and_norms)):
        config = load_config(None, [f"optimizer.name={name}", "train.global_batch_size=4"])
        needs = needs_of(facts, config, parsed, ranks=range(ranks))
        assert (needs.parameters, needs.ranks) == (facts.size, ranks)
        assert needs.weights == needs.gradients == 4 * copies * facts.size and needs.optimizer == 4 * copies * kept


def test_activations_are_those_of_the_plan() -> None:
    """Of both pipeline ranks, one of which also makes logits."""
    facts, layout = facts_of_config("demo"), Layout.parse("pp2.cp2+mb2")
    config = load_config(None, ["data.seq_length=250", "train.global_batch_size=8", "memory.loss_chunks=4"])
    needs, of_ranks = needs_of(facts, config, layout, ranks=range(4)), [lower(facts, layout, rank) for rank in range(4)]
    found = [step_bytes(plan, plan.step_shape(2, 252, 4, loss_chunks=4)) for plan in of_ranks]
    assert needs.activations == sum(each.logits + sum(each.saved.values()) for each in found)
    assert [bool(each.logits) for each in found] == [False, False, True, True]


def test_a_run_that_cannot_fit_is_refused_before_it_takes_anything(monkeypatch: Any, tmp_path: Path) -> None:
    config, layout = load_config(None, ["optimizer.name=adamw"]), Layout.parse("shard2")
    world = World(rank=1, local_rank=1, size=2, local_size=2, folder=str(tmp_path))
    monkeypatch.setattr(preflight, "room", lambda: Room(20 * GIB, 10 * GIB))
    large, middle, small = map(facts_of_config, ("llama-3.1-8b", "llama-3.2-1b", "demo"))
    with pytest.raises(UserError, match=r"does not fit: weights 29\.92, gradients 29\.92, optimizer 59\.83") as caught:
        check_memory(large, config, layout, world)
    assert "8.03 billion parameters need 119.66 GiB" in (caught.value.fix or "")
    assert "memory may run out: 10.00 GiB of this machine are free" in str(check_memory(middle, config, layout, world))
    assert check_memory(small, config, layout, replace(world, rank=0, local_rank=0)) is None
