"""Nodes that come and go: how they meet, what ranks they get, and a run that goes on with those that are left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

from fivefold.config import RunConfig, load_config
from fivefold.core import history
from fivefold.core.errors import UserError
from fivefold.core.units import parse_nodes
from fivefold.launch import nodes as launch_nodes
from fivefold.launch.failure import Suspected, WorkerDied
from fivefold.launch.folder import FolderLock, held
from fivefold.launch.memory import Memory
from fivefold.launch.nodes import Meeting, MeetingState, Member, NodeRound, Unreachable, _agree, _LauncherLocks, changed
from fivefold.launch.rounds import take
from fivefold.launch.workers import NodesChanged, OtherNodes, workers_of_node
from fivefold.launch.world import NodeRanks, World, check_nodes, find_world, is_started_by_node, worker_environment
from fivefold.report import story
from fivefold.training import nodes
from fivefold.training.model import compile_pays
from tests.launch.test_preemption import with_descendants
from tests.launch.test_restart import _last, _wait
from tests.training.bodies import column, run_dir, run_file, train

A, B, C = Member("a", 1, 2), Member("b", 2, 2), Member("c", 3, 3)


def met(node: int, *members: Member) -> NodeRound:
    return NodeRound(7, node, members, "a:1", store=None, wait=lambda keys: None)


# ---- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "nodes"), [("2:4", (2, 4)), (3, (3, 3)), ("2:2", (2, 2)), (None, None)])
def test_the_nodes_of_a_run_file(written: Any, nodes: tuple[int, int] | None, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"train: {{nodes: {'null' if written is None else written}}}\n")
    config = load_config(tmp_path / "run.yaml")
    assert config.train.node_range == nodes
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml").train.node_range == nodes


@pytest.mark.parametrize("written", ["4:2", "0", "0:2", "2:", "two", "1:2:3", "-1", True])
def test_what_is_no_number_of_nodes_is_refused(written: Any) -> None:
    with pytest.raises(ValueError, match="nodes"):
        parse_nodes(written)


def test_a_layout_for_one_number_of_nodes_is_refused() -> None:
    nodes.check(load_config(None, ["train.nodes=2", "layout=shard4"]))
    nodes.check(load_config(None, ["train.nodes=2:4", "layout=auto"]))
    nodes.check(load_config(None, ["train.nodes=2:4", "layout=shard-1.tp2"]))
    with pytest.raises(UserError, match=r"train\.nodes is 2:4, and the layout shard4"):
        nodes.check(load_config(None, ["train.nodes=2:4", "layout=shard4"]))


def test_a_start_that_waits_for_nodes_to_return_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/g++")
    long = SimpleNamespace(per_token=1e15), SimpleNamespace(train=SimpleNamespace(tokens_per_row=64))

    def pays(on: int, *keys: str, device: str = "cpu") -> bool:
        world = World(size=2 * on, nodes=on, device=device)
        return compile_pays(load_config(None, keys), *cast(Any, long), world, 1000)

    assert [pays(on, "train.nodes=2:4") for on in (2, 3, 4)] == [False, False, True]
    assert pays(2, "train.nodes=2") and pays(1)
    assert pays(2, "train.nodes=2:4", "train.compile=true") and pays(2, "train.nodes=2:4", device="cuda:0")


def test_who_starts_the_ranks() -> None:
    a_node = World(rank=1, size=2, local_size=1)
    assert is_started_by_node(None, {}) and is_started_by_node(a_node, {"SLURM_PROCID": "1"})
    assert not is_started_by_node(a_node, {"RANK": "1"})
    with pytest.raises(UserError, match="srun has started 2 tasks on a node"):
        is_started_by_node(World(rank=1, size=4, local_rank=1, local_size=2), {})
    check_nodes((1, 2), World(size=4, nodes=2))
    with pytest.raises(UserError, match=r"train\.nodes is 3 to 4, and torchrun has started 2"):
        check_nodes((3, 4), World(size=4, nodes=2))
    assert [workers_of_node(kind="cuda", devices=8, nproc=n) for n in (None, 3)] == [8, 3]
    assert workers_of_node(kind="cpu", devices=0, nproc=None) == 2
    with pytest.raises(UserError, match="this machine has 2 GPUs"):
        workers_of_node(kind="cuda", devices=2, nproc=3)


# ---- ranks -----------------------------------------------------------------------------------------------------------


def test_nodes_may_have_different_numbers_of_workers(tmp_path: Path) -> None:
    ranks = met(1, A, B, C).ranks(3)
    assert ranks == NodeRanks(first=2, size=7, node=1, nodes=3, meets="a:1", round=7)
    assert met(2, A, B, C).ranks(2) is None
    env = worker_environment(1, 2, tmp_path, ranks)
    found = find_world("cpu", env)
    assert found is not None and (found.rank, found.local_rank, found.size, found.local_size) == (3, 1, 7, 2)
    assert (found.rendezvous, found.is_local, found.nodes, found.folder) == ("tcp://a:1", False, 3, str(tmp_path))
    assert found.round == 7


def choice(config: RunConfig, *members: Member, least: int = 1) -> dict[str, Any]:
    node = nodes._Node(
        config,
        cast(Any, None),
        cast(Any, None),
        least,
        lambda settled, size, local_size: settled,
        None,
        {},
        Memory(),
    )
    return cast(dict[str, Any], json.loads(node._choice(members)))


def test_a_node_whose_workers_would_import_first_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It joins once they start at once."""
    order = list[str]()

    def join(_: int) -> None:
        order.append("joins")
        raise UserError("enough")

    crew, meeting = SimpleNamespace(count=1, import_first=lambda: order.append("imports")), SimpleNamespace(join=join)
    node = nodes._Node(
        load_config(None, []), cast(Any, crew), cast(Any, meeting), 1, cast(Any, None), None, {}, Memory()
    )
    with pytest.raises(UserError, match="enough"):
        node.train()
    assert order == ["imports", "joins"]


def test_as_many_nodes_train_as_the_batch_allows(tmp_path: Path) -> None:
    keys = [f"run.dir={tmp_path}", "train.global_batch_size=8", "train.micro_batch_size=1", "train.nodes=1:4"]
    config = load_config(None, keys)
    both = choice(config, A, B)
    assert (both["nodes"], both["layout"], both["why"], both["kept"]["step"]) == (2, "", "", 0)
    fewer = choice(config, A, B, A)  # 6 ranks do not divide 8 rows
    assert fewer["nodes"] == 2 and "8" in fewer["why"]
    with pytest.raises(UserError, match="global_batch_size"):
        choice(config, A, B, A, least=3)


def test_a_difference_is_told_in_words() -> None:
    assert changed([A, B], [A, B]) == ""
    assert changed([A, B], [A]) == "2 → 1 nodes: without b (process 2)"
    assert changed([A, B], [B, C]) == "2 → 2 nodes: without a (process 1), with c (process 3)"
    assert changed([A, B], [A], {B: "left out: x", C: "y"}) == "2 → 1 nodes: without b (process 2): left out: x"


def test_the_page_of_a_run_marks_where_the_nodes_changed(tmp_path: Path) -> None:
    log = history.Log(tmp_path, print)
    log.write("start", 0, layout="shard-1", world=4, nodes=2)
    log.write("nodes", 7, what="2 → 1 nodes: without b (process 2); goes on from step 5", nodes=1)
    log.write("start", 5, layout="shard-1", world=2, nodes=1, resumed="x/step-000005")
    log.close()
    found = history.load(tmp_path)
    assert found.starts[0].how == "the nodes changed" and found.starts[0].last == 7
    marks = story.marks(found, [{"step": step} for step in range(1, 9)])
    assert [mark.kind for mark in marks] == ["nodes", "start"]
    assert "4 → 2 ranks; 2 → 1 nodes" in marks[1].what


# ---- the meeting -----------------------------------------------------------------------------------------------------


def state_in(folder: Path, name: str = "a-1", **options: Any) -> MeetingState:
    (folder / "state").touch(mode=0o600)
    if not (folder / "state").read_text():
        (folder / "state").write_text('{"round": 0}')
    return MeetingState(folder / "state", name, **{"lives": lambda _: True, **options})


def test_the_state_of_a_meeting_has_every_change(tmp_path: Path) -> None:
    states = [state_in(tmp_path, name) for name in ("a-1", "b-2")]

    def count(state: MeetingState) -> None:
        for _ in range(50):
            state.change(lambda tree: tree.update(round=tree["round"] + 1, members=["a-1"] * (tree["round"] % 3)))
            state.beat()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count, states * 2))
    for state in states:
        state.forget()
        assert state.look()["round"] == 200 and state.look()["beats"] == {"a-1": 100, "b-2": 100}


@pytest.mark.parametrize("text", ["", '{"round": 4, "memb'])
def test_a_damaged_state_is_an_error_in_words(text: str, tmp_path: Path) -> None:
    """One that was emptied, or written in part when the disk was full."""
    state = state_in(tmp_path)
    (tmp_path / "state").write_text(text)
    for act in (state.look, state.beat):
        with pytest.raises(Unreachable, match="is damaged: end the run on all nodes"):
            act()


def test_a_launcher_lives_as_long_as_it_holds_its_lock(tmp_path: Path) -> None:
    presence = _LauncherLocks(tmp_path / ".nodes", "here-1")
    other = _LauncherLocks(tmp_path / ".nodes", "there-1")
    assert presence.lives("there-1") and not presence.lives("there-2") and not presence.lives("elsewhere-1")
    other.release()
    assert not presence.lives("there-1") and presence.lives("here-1")
    assert presence.has_all({"here-1"}) and not presence.has_all({"there-1"})
    state = tmp_path / ".nodes" / "state"
    assert json.loads(state.read_text())["round"] == 0
    state.write_text('{"round": 41}\n')
    other = _LauncherLocks(tmp_path / ".nodes", "there-1")
    assert json.loads(state.read_text()) == {"round": 41}  # the first one is still there
    for each in (presence, other):
        each.release()
    _LauncherLocks(tmp_path / ".nodes", "here-1").release()
    assert json.loads(state.read_text())["round"] == 41
    take(tmp_path, 50)
    state.unlink()
    _LauncherLocks(tmp_path / ".nodes", "here-1").release()
    assert json.loads(state.read_text())["round"] == 50


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_state_that_others_can_write_is_not_read(mode: int, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"code")
    (tmp_path / "state").chmod(mode)
    with pytest.raises(UserError, match="others may write to it"):
        MeetingState(tmp_path / "state", "a-1", lambda _: True).look()
    (tmp_path / "link").symlink_to(tmp_path / "state")
    with pytest.raises(Exception, match="link"):
        MeetingState(tmp_path / "link", "a-1", lambda _: True).look()


def two_meetings(folder: Path, monkeypatch: pytest.MonkeyPatch, *, least: int, most: int = 3) -> list[Meeting]:
    """Those of two nodes, which are this process."""
    here = iter(["127.0.0.1", "127.0.0.2"])
    monkeypatch.setattr(launch_nodes, "address", lambda: next(here))
    return [Meeting(folder, least, most, timeout=60) for _ in range(2)]


class Hours:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_node_is_gone_when_its_lock_is_free_or_its_heartbeat_stays_out(tmp_path: Path) -> None:
    hours, living = Hours(), {"a-1", "b-2"}
    state, other = state_in(tmp_path, now=hours, lives=living.__contains__), state_in(tmp_path, "b-2")

    def members(seconds: float) -> list[str]:
        hours.seconds += seconds
        return list(state.look()["members"])

    def both(tree: dict[str, Any]) -> None:
        tree["members"] = ["a-1", "b-2"]

    other.change(both)
    other.beat()
    assert [members(1) for _ in range(10)][-1] == ["a-1", "b-2"]
    assert members(1) == ["a-1"]  # nothing new for 10 s
    other.beat()
    assert members(1) == members(3600) == ["a-1", "b-2"]  # this node stood still, which says nothing of the other
    living.remove("b-2")
    assert members(1) == ["a-1"]
    state.beat()
    assert json.loads((tmp_path / "state").read_text().partition("\n")[0])["members"] == ["a-1"]


def test_a_node_of_a_round_that_is_over_ends_nothing(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path, 1, 1, timeout=20)
    first = meeting.join(1)
    second = meeting.join(1)
    assert second.number > first.number and not second.missed
    assert not meeting.end(first) and not meeting.has_ended()
    assert meeting.end(second) and meeting.has_ended()
    meeting.close()


@pytest.mark.parametrize("gone", [0, 1])
def test_a_node_that_is_killed_as_a_round_begins_is_waited_for_by_nobody(
    gone: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when the round is complete, before it has said who it is."""
    meetings = two_meetings(tmp_path, monkeypatch, least=2)
    gather = meetings[gone]._gathered

    def killed() -> Any:
        gather()
        meetings[gone].close()
        raise KeyboardInterrupt

    monkeypatch.setattr(meetings[gone], "_gathered", killed)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(meetings[node].join, 1) for node in (gone, 1 - gone)]
        try:
            assert isinstance(ends[0].exception(30), KeyboardInterrupt)
            assert isinstance(ends[1].exception(30), NodesChanged)
        finally:
            meetings[1 - gone].close()  # ends what still waits


def test_nodes_meet_anew_when_one_comes_and_when_one_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = two_meetings(tmp_path, monkeypatch, least=1)
    alone = first.join(1)
    assert first.news() == "" and len(alone.members) == 1
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(other.join, 2)
        while not (news := first.news()):
            time.sleep(0.05)
        assert news == "came" and not waits.done()
        both = [first.join(1), waits.result(30)]
    assert [each.node for each in both] == [0, 1] and both[0].members == both[1].members
    assert both[0].number == both[1].number == alone.number + 1 and both[0].meets == both[1].meets
    assert first.news() == other.news() == ""
    other.close()
    first.has_news_within(5)
    assert first.news() == "gone"
    assert len(first.join(1).members) == 1
    first.close()


def test_a_node_for_which_there_is_no_place_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = two_meetings(tmp_path, monkeypatch, least=1, most=1)
    with ThreadPoolExecutor(1) as pool:
        current, waits = first.join(1), pool.submit(other.join, 1)
        while not first.spare and not waits.done():
            time.sleep(0.1)
            first.news()
        assert first.end(current)
        assert isinstance(waits.exception(30), nodes.Ended)
    first.close()
    other.close()


def test_a_disk_that_fails_for_a_moment_ends_no_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_nodes, "HEARTBEAT", 0.2)
    meeting = Meeting(tmp_path, 1, 1, timeout=20)
    meeting.join(1)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", lambda *_: os.read(-1, 1))
        time.sleep(0.8)
        assert meeting.news() == "" and not meeting.has_ended()
    before = (tmp_path / ".nodes" / "state").read_text()
    time.sleep(0.8)
    assert (tmp_path / ".nodes" / "state").read_text() != before
    meeting.close()


def test_nodes_share_their_run_folder_with_no_other_run(tmp_path: Path) -> None:
    with held(tmp_path), held(tmp_path), pytest.raises(UserError, match="another run writes to"):
        FolderLock(tmp_path)
    lock = FolderLock(tmp_path)
    with pytest.raises(UserError, match="another run writes to"), held(tmp_path):
        pass
    lock.release()


def test_nodes_that_were_started_differently_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "agreed").touch(mode=0o600)
    _agree(tmp_path / "agreed", {"train.seed": 1, "the version of torch": "2.11"})
    _agree(tmp_path / "agreed", {"train.seed": 1, "the version of torch": "2.11"})
    with pytest.raises(UserError, match=r"train\.seed is 1 on .*, which came first, and 2 on "):
        _agree(tmp_path / "agreed", {"train.seed": 2, "the version of torch": "2.11"})
    with pytest.raises(UserError, match=r"the version of torch is 2\.11 on .*, and not there on "):
        _agree(tmp_path / "agreed", {"train.seed": 1})
    with pytest.raises(UserError, match="the nodes cannot meet"):
        _agree(tmp_path / "gone" / "agreed", {})


def test_a_node_that_differs_ends_a_round_that_gathers_and_none_that_gathers_again(tmp_path: Path) -> None:
    """A run that has lost a node is in a round that is not complete, as before its first one."""
    (tmp_path / "agreed").touch(mode=0o600)
    for round_, is_closed in ((1, False), (0, True)):
        first = json.dumps({"round": 0, "complete": False})
        (tmp_path / "state").write_text(first)
        _agree(tmp_path / "agreed", {"seed": 1})
        (tmp_path / "state").write_text(json.dumps({"round": round_, "complete": False}))
        with pytest.raises(UserError) as refused:
            _agree(tmp_path / "agreed", {"seed": 2})
        assert "to change them, end all nodes first" in str(refused.value.fix)
        assert json.loads((tmp_path / "state").read_text()).get("closed", False) == is_closed


@pytest.mark.full
def test_nodes_that_differ_before_the_first_round_all_end_and_a_later_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same error: the first would wait for the other in vain."""
    here = iter([f"127.0.0.{number}" for number in range(1, 5)])
    monkeypatch.setattr(launch_nodes, "address", lambda: next(here))
    first = Meeting(tmp_path, 2, 2, timeout=60, about={"weights": {"a": 1, "b": 2}})
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(first.join, 1)
        with pytest.raises(UserError, match=r"weights: b is 2 on .*, which came first, and 3 on ") as other:
            Meeting(tmp_path, 2, 2, timeout=60, about={"weights": {"a": 1, "b": 3}})
        error = waits.exception(30)
    assert isinstance(error, UserError) and error.exit_code == 2 and str(error) == str(other.value)
    first.close()
    alone = Meeting(tmp_path, 1, 2, timeout=60, about={"seed": 1})
    alone.join(1)
    with pytest.raises(UserError, match="seed is 1 on "):
        Meeting(tmp_path, 1, 2, timeout=60, about={"seed": 2})
    assert not alone.has_ended()
    alone.close()


def test_a_run_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    meeting = Meeting(run, 1, 1, timeout=20)
    shutil.rmtree(run)
    with pytest.raises(UserError, match=f"the nodes cannot meet: the run folder {run} is gone"):
        meeting.join(1)
    meeting.close()


# ---- which nodes go on, with workers that are functions --------------------------------------------------------------


def workers(together: Callable[[], None] | None = None) -> Callable[[OtherNodes], None]:
    """Workers of a node: they do what `together` says beside those of another one, and are done once that has left."""
    has_met = threading.Event()

    def body(others: OtherNodes) -> None:
        if others.ranks.nodes > 1:
            has_met.set()
            if together:
                together()
        while others.ranks.nodes > 1 or not has_met.is_set():
            if news := others.news():
                raise NodesChanged(news)
            time.sleep(0.05)

    return body


def outcomes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *bodies: Callable[[OtherNodes], None], keys: Sequence[str] = ()
) -> list[str]:
    """How two nodes end, each by its type of error; a node's number is that of its body."""
    named = ("train.nodes=1:2", "train.max_restarts=1", "train.global_batch_size=8", "train.micro_batch_size=1")
    config = load_config(None, [f"run.dir={folder}", "run.name=run", *named, *keys])
    config.run_dir.mkdir()
    monkeypatch.setattr(nodes, "check_model", lambda *_, **__: None)
    monkeypatch.setattr(nodes, "start_workers", lambda crew, *_, logs, patience, others: crew.body(others))
    crews = [SimpleNamespace(count=1, body=body, import_first=lambda: None) for body in bodies]
    meetings = two_meetings(config.run_dir, monkeypatch, least=1)

    def train(crew: Any, meeting: Meeting) -> str:
        try:
            nodes._Node(config, crew, meeting, 1, lambda settled, *_: settled, None, {}, Memory()).train()
        except (UserError, nodes.Ended) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            meeting.close()
        return "done"

    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(train, crew, meeting) for crew, meeting in zip(crews, meetings, strict=True)]
        return [end.result(90) for end in ends]


def die() -> None:
    raise WorkerDied("rank 1 was killed by SIGSEGV")


@pytest.mark.full
def test_a_node_that_fails_again_and_again_leaves_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = outcomes(tmp_path, monkeypatch, workers(), workers(die))
    assert good == "done"
    assert bad.startswith("LeftOut: left out: rank 1 was killed by SIGSEGV, 2 times without a new checkpoint and on")
    events = history.load(tmp_path / "run").events
    assert [event.kind for event in events if event.kind == "left out"] == ["left out"]
    assert "without" in events[-1].what and "left out: rank 1 was killed" in events[-1].what


@pytest.mark.full
def test_deaths_of_all_nodes_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = outcomes(tmp_path, monkeypatch, workers(die), workers(die))
    assert [end.partition(":")[0] for end in ends] == ["WorkerDied"] * 2


@pytest.mark.full
@pytest.mark.parametrize("leaves", [True, False])
def test_the_node_of_a_rank_that_the_checks_name_leaves_if_the_user_says_so(
    leaves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise Suspected("rank 1 is wrong", ranks=[1])

    keys = [f"train.leave_out={str(leaves).lower()}"]
    ends = outcomes(tmp_path, monkeypatch, workers(fail), workers(fail), keys=keys)
    kinds = {end.partition(":")[0] for end in ends}
    assert kinds == ({"done", "LeftOut"} if leaves else {"Suspected"})


# ---- runs ------------------------------------------------------------------------------------------------------------


class Node(SimpleNamespace):
    """`fivefold train` on one of several nodes, as processes of this machine."""

    def __init__(self, file: Path, number: int) -> None:
        environment = os.environ | {"FIVEFOLD_CACHE": str(file.parent / "cache")}
        with (file.parent / f"node-{number}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "fivefold", "train", str(file), "--nproc", "1"],
                stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        super().__init__(process=process, log=Path(log.name))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the node at once."""
        for pid in list(with_descendants([self.process.pid])):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """End all processes of the node at once, as a loss of power does."""
        self.signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def started(tree: dict[str, Any], count: int) -> Iterator[tuple[list[Node], Callable[[], Node]]]:
    """Nodes that train, and a function that starts another one; all end with the block."""
    file = run_dir(tree).parent / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    all_nodes = [Node(file, number) for number in range(count)]

    def another() -> Node:
        all_nodes.append(Node(file, len(all_nodes)))
        return all_nodes[-1]

    try:
        yield list(all_nodes), another
    finally:
        for node in all_nodes:
            node.kill()
        with Memory():  # removes what those that were killed have left
            pass


def check_parity(tree: dict[str, Any], alone: dict[str, Any]) -> None:
    """Every step once, over the rows of the order (the ledger is checked at each), with the curve of a run left
    alone."""
    steps = column(alone, "step")
    assert column(tree, "step") == steps
    assert column(tree, "train/tokens_seen") == column(alone, "train/tokens_seen")
    assert column(tree, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-4)


def said_by_the_one_that_is_left(tree: Any) -> str:
    """Train on two nodes of which the second is killed after step 8."""
    with started(tree, 2) as (both, _):
        _wait(lambda: _last(run_dir(tree)) >= 8 or any(node.process.poll() is not None for node in both))
        both[1].kill()
        code = both[0].process.wait(60)
        said = both[0].log.read_text()
    assert code == 0, said
    return said


def file_of(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {"train__check_every": 1, "checkpoint__every": 5, "layout__dp_shard": -1}
    return run_file(folder, run__name=name, **keys | changes)


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_run_goes_on_without_a_node_that_was_killed(tmp_path: Path) -> None:
    steps = 40
    alone = file_of(tmp_path, "alone", train__max_steps=steps)
    tree = file_of(tmp_path, "run", train__max_steps=steps, train__nodes="1:2")
    said = said_by_the_one_that_is_left(tree)
    assert "node 1 of 2: rank 0 of 2" in said or "node 2 of 2: rank 1 of 2" in said
    assert "2 → 1 nodes: without" in said and "node 1 of 1: rank 0 of 1" in said
    assert "goes on from the checkpoint of step" in said and "in memory" not in said
    assert train(alone, 1).error is None
    check_parity(tree, alone)
    assert {event.kind for event in history.load(run_dir(tree)).events} == {"nodes"}


@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="a step is kept in /dev/shm")
def test_no_step_is_lost_where_the_other_nodes_hold_all_of_it(tmp_path: Path) -> None:
    """Nothing is saved before the end."""
    steps, replicas = 30, {"layout__dp_replicate": -1, "layout__dp_shard": 1, "checkpoint__every": 1000}
    alone = file_of(tmp_path, "alone", train__max_steps=steps)
    tree = file_of(tmp_path, "run", train__max_steps=steps, train__nodes="1:2", **replicas)
    said_by_the_one_that_is_left(tree)
    event = history.load(run_dir(tree)).events[-1]
    first, second = history.load(run_dir(tree)).starts[-2:]
    assert event.kind == "nodes" and f"goes on from step {second.step} in memory" in event.what
    assert second.step >= max(8, first.last or 0, event.step) and second.about["resumed"] == "memory"
    assert train(alone, 1).error is None
    check_parity(tree, alone)


@pytest.mark.campaign
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
@pytest.mark.parametrize("which", [0, 1], ids=["the first node", "the second node"])
def test_a_node_that_stands_still_writes_nothing_when_it_wakes(which: int, tmp_path: Path) -> None:
    """It stands for longer than its heartbeat may be missing, and wakes while the other one trains."""
    steps = 400
    alone = file_of(tmp_path, "alone", train__max_steps=steps)
    tree = file_of(tmp_path, "run", train__max_steps=steps, train__nodes="1:2")
    with started(tree, 2) as (both, _):
        _wait(lambda: _last(run_dir(tree)) >= 8 or any(node.process.poll() is not None for node in both))
        stopped = next(node for node in both if f"node {which + 1} of 2" in node.log.read_text())
        other = next(node for node in both if node is not stopped)
        begun = len(history.load(run_dir(tree)).starts)
        stopped.signal(signal.SIGSTOP)
        _wait(lambda: len(history.load(run_dir(tree)).starts) > begun or other.process.poll() is not None)
        before = _last(run_dir(tree))
        _wait(lambda: _last(run_dir(tree)) > before + 2 or other.process.poll() is not None)
        stopped.signal(signal.SIGCONT)
        codes = [node.process.wait(300) for node in (other, stopped)]
        said = [node.log.read_text() for node in (other, stopped)]
    assert codes == [0, 0], said
    assert "2 → 1 nodes: without" in said[0]
    assert train(alone, 1).error is None
    check_parity(tree, alone)
    worlds = [start.about["nodes"] for start in history.load(run_dir(tree)).starts]
    assert worlds[:2] == [2, 1] and worlds[-1] == 2 and "1 → 2 nodes: with" in said[0]
    assert "had gone on without this one; it takes part again" in said[1]
    numbers = [path.name for path in run_dir(tree).glob(".round-*")]
    assert len(numbers) == 1 and (run_dir(tree) / "checkpoints" / numbers[0]).is_dir()
