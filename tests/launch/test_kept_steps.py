"""Which step the nodes go on from, of those that they keep in memory, and who is waited for until it is there."""

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fivefold.checkpoint import kept
from fivefold.checkpoint.kept import in_first_replica
from fivefold.config import load_config
from fivefold.core.errors import RunFailed
from fivefold.core.kept_steps import KeptStep, MemoryOfNode, newest_kept
from fivefold.launch import processes
from fivefold.launch.failure import Suspected, WorkerDied, leave_failure
from fivefold.launch.meeting import _store_has_ended
from fivefold.launch.memory import ENDING, Memory, Pressure
from fivefold.launch.nodes import Member
from fivefold.launch.workers import GONE, NodesChanged, OtherNodes, _first_failure, start_workers
from fivefold.launch.world import NodeRanks
from fivefold.parallel.layout import Layout
from fivefold.parallel.placement import Placement
from fivefold.parallel.ranks import RankGrid
from fivefold.training import nodes


def test_a_step_without_all_of_its_parts_is_not_one() -> None:
    def told(*steps: tuple[int, Mapping[str, Any]], round: int = 7, count: int = 2) -> str:
        return json.dumps(
            {f"round-{round:06d}": {str(step): {"count": count, "parts": parts} for step, parts in steps}}
        )

    zero, one = {"0": {"weight": "a"}}, {"1": {"weight": "b"}}

    def step(*nodes: str, newer_than: int = 0) -> tuple[int, dict[int, int]]:
        kept = newest_kept(nodes, round=7, newer_than=newer_than)
        return kept.step, dict(kept.holders)

    assert step(told((5, zero)), told((5, one))) == (5, {0: 0, 1: 1})
    assert step(told((5, zero | one)), told((5, one))) == (5, {0: 0, 1: 0})
    assert step(told((5, zero)), told((6, one))) == (0, {})  # steps do not mix
    assert step(told((5, zero), (6, one)), told((5, one))) == (5, {0: 0, 1: 1})
    assert step(told((5, zero | one)), told((6, zero | one))) == (6, {0: 1, 1: 1})
    assert step(told((5, zero)), told((5, one)), newer_than=5) == (0, {})
    assert step(told((5, zero | one), round=6), told((5, one))) == (0, {})  # of a round that another has followed
    assert step("{}", told((5, zero | one))) == (5, {0: 1, 1: 1})
    differ = newest_kept([told((5, zero | one)), told((5, {"0": {"weight": "c"}}))], round=7, newer_than=0)
    assert (differ.step, differ.why) == (0, "replicas differ at step 5")
    newer = [told((6, zero), (5, zero | one)), told((6, {"0": {"weight": "c"}}))]
    assert newest_kept(newer, round=7, newer_than=0).why == "replicas differ at step 6"  # though it is not whole


def test_the_memory_of_a_request() -> None:
    memory = MemoryOfNode("/x", 1, 6, KeptStep(5, {0: 1}), 7, acts=True)
    request = {"folder": "/x", "node": 1, "before": 6, "kept": asdict(memory.kept)}
    assert MemoryOfNode.of_request(json.loads(json.dumps(request)), round=7, acts=True) == memory
    assert MemoryOfNode.of_request(None, round=7, acts=True) == MemoryOfNode()


def test_a_part_is_that_of_the_first_replica() -> None:
    grid = RankGrid(Layout.parse("dp2.shard2.cp2.tp2.pp2"))
    for rank in range(grid.world):
        here = Placement(cast(Any, None), grid.layout, rank, grid, {}, cast(Any, None), {})
        assert in_first_replica(here).coords == replace(here.coords, dp_replicate=0)


def test_a_file_that_does_not_fit_is_told_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes wait in a buffer until then. The other nodes wait for all of the file, so nothing is raised."""
    monkeypatch.setattr(kept.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(kept.dist, "broadcast", lambda piece, src, group: piece.zero_())
    (tmp_path / ".part").symlink_to("/dev/full")
    errors: list[str] = []
    kept._pass_on(tmp_path / "part", 10, 0, cast(Any, None), is_wanted=True, errors=errors)
    assert len(errors) == 1 and "No space left" in errors[0] and not (tmp_path / "part").exists()


@pytest.mark.parametrize(
    ("writes", "until"), [(0.0, 2.0), (5.0, 5.0), (1e9, processes.WRITE_SECONDS)], ids=["none", "one", "a stopped one"]
)
def test_a_worker_that_writes_its_step_is_waited_for(
    writes: float, until: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, sent, asked = 0.0, list[signal.Signals](), set[int]()
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now))

    class Crew(processes.Workers):
        running = cast(Any, property(lambda self: [] if signal.SIGKILL in sent else [1]))

        def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
            sent.append(number)

        def _listen(self, seconds: float = 0) -> None:
            nonlocal now
            now += seconds

    def awaits(ranks: Sequence[int]) -> bool:
        asked.update(ranks)
        return now < writes

    crew = Crew("", count=2)
    crew.first, crew.awaits = 4, awaits
    crew.end(grace=2.0)
    assert now == pytest.approx(until, abs=0.2) and sent == [signal.SIGTERM, signal.SIGKILL] and asked == {5}


def test_workers_are_told_before_they_are_ended(tmp_path: Path) -> None:
    """Where a node is gone those that wait for it, in a collective that may never end, keep their step at this word."""
    told: list[bool] = []

    class Crew(processes.Workers):
        codes = cast(Any, property(lambda self: {0: -signal.SIGTERM}))

        @contextmanager
        def started(self, request: Path, folder: Path, among: NodeRanks | None = None) -> Iterator[None]:
            self.ids, self.place = [os.getpid()], folder
            yield

        def turns(self) -> Iterator[None]:
            yield

        def end(self, *, at_once: bool = False, grace: float | None = None) -> None:
            told.append((self.place / ENDING).exists())

    others = OtherNodes(NodeRanks(first=0, size=2, node=0, nodes=2, meets="", round=1), lambda: GONE)
    with pytest.raises(NodesChanged):
        start_workers(Crew("", count=1), {}, logs=tmp_path, others=others)
    assert told == [True]


@pytest.mark.parametrize("is_news", [True, False])
def test_a_rank_that_waits_for_a_node_that_dies_ends_no_run(tmp_path: Path, is_news: bool) -> None:
    """Its worker says so before the launcher has heard of it."""
    leave_failure(tmp_path, 1, _store_has_ended(1, "10.0.0.1:4242"))
    error = _first_failure(tmp_path, {1: 1}, Pressure())
    ended: list[Any] = []
    meeting: Any = SimpleNamespace(has_news_within=lambda _: is_news, end=lambda current: ended.append(current) or True)
    config = load_config(None, [f"run.dir={tmp_path}", "train.nodes=1:2"])
    with Memory(tmp_path) as memory:
        node = nodes._Node(config, cast(Any, None), meeting, 1, lambda settled, *_: settled, None, {}, memory)
        with nullcontext() if is_news else pytest.raises(RunFailed, match="rank 1 was waiting"):
            assert node._survived(cast(Any, error), cast(Any, "round")) is None
    assert ended == ([] if is_news else ["round"])


def test_the_memory_of_a_launcher(tmp_path: Path) -> None:
    """It is forgotten with a fault that the checks have found, and ends with the launcher."""
    members, leaves = [Member("a", 1, 1), Member("a", 2, 1)], "train.leave_out=true"
    current: Any = SimpleNamespace(
        node=0, members=members, node_of=lambda rank: rank, blame=lambda _: None, blamed=lambda: []
    )
    config = load_config(None, [f"run.dir={tmp_path}", "train.nodes=1:2", leaves])
    with Memory(tmp_path) as memory:
        meeting: Any = SimpleNamespace(spare=0)
        node = nodes._Node(config, cast(Any, None), meeting, 1, lambda settled, *_: settled, None, {}, memory)
        assert memory.folder is not None
        older, kept = (memory.folder / f"round-00000{number}" for number in (6, 7))
        older.mkdir(), kept.mkdir()
        (kept / "ready-3").touch()
        assert memory.is_awaited(7, [2, 3]) and not memory.is_awaited(7, [2]) and not memory.is_awaited(6, [3])
        memory.forget(but=7)
        assert node._survived(WorkerDied("rank 0 was killed"), current) and kept.exists() and not older.exists()
        assert node._survived(Suspected("rank 1 is wrong", ranks=[1]), current) is None and not kept.exists()
    assert not any(tmp_path.glob("fivefold-memory-*"))
