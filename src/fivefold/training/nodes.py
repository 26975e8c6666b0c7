"""Training on several nodes with a launcher on each, `train.nodes`: rounds of the nodes that are there.

A round lasts until the run is done, a node is gone or another one comes. Then the workers of all nodes end, the nodes
meet anew, the first one derives the layout for their number, and the run goes on from its newest checkpoint. The rows
of a step and their order depend on no layout, so the curve is that of a run whose nodes never changed.

A node whose workers die too often, and alone, leaves, if the others suffice. A node that stood still until the others
had gone on changes nothing any more (`launch/rounds.py`), and joins again.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fivefold.config import RunConfig
from fivefold.core import history
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.kept_steps import kept_in, newest_kept
from fivefold.core.text import say
from fivefold.core.units import many
from fivefold.data.prepare import PreparedData
from fivefold.launch.events import Listener, following
from fivefold.launch.failure import Suspected, WorkerDied, failures
from fivefold.launch.folder import held, last_logged_step, last_saved_step, open_folder
from fivefold.launch.meeting import OthersGone
from fivefold.launch.memory import Memory
from fivefold.launch.model import check_model
from fivefold.launch.nodes import Ended, Meeting, Member, NodeRound, changed
from fivefold.launch.processes import Workers, private_folder
from fivefold.launch.rounds import clear_logs, last_round, logs_of
from fivefold.launch.workers import GONE, NodesChanged, OtherNodes, start_workers
from fivefold.launch.world import device_kind
from fivefold.parallel.layout import Layout
from fivefold.training.preflight import agreed_fields, agreed_files, begins_anew, has_first_weights

Settle = Callable[[RunConfig, int, int], RunConfig]  # (config, ranks, ranks of a node): with a layout, if it was auto
_CONSEQUENCE = 1.5  # seconds to learn that a worker died because a node is gone
_PAUSE = 0.2  # seconds between two looks of a node without ranks


class LeftOut(RunFailed):
    """This node leaves, and the others go on."""


def check(config: RunConfig) -> None:
    """Raise `UserError` if the run cannot go on with another number of nodes."""
    least, most = config.train.node_range or (1, 1)
    if least < most and not config.is_automatic and not config.written_layout.rest:
        raise UserError(
            f"train.nodes is {config.train.nodes}, and the layout {config.written_layout} is for one number of nodes",
            fix="set layout.dp_shard: -1 or layout.dp_replicate: -1, or layout: auto",
            more="fivefold docs howto/elastic",
        )


def train(
    config: RunConfig, crew: Workers, listener: Listener | None, *, data: PreparedData, settle: Settle,
    prove: Callable[[RunConfig, Layout], object] | None,
) -> None:  # fmt: skip
    """Train with the other nodes until the run is done.

    Raises what `start_workers` raises, `RunFailed` if the run failed while this node waited, `LeftOut` if it goes on
    without this node, and `UserError` if this node was started with other keys, data or versions than the others.
    """
    least, most = config.train.node_range or (1, 1)
    open_folder(config, is_shared=True)
    begins = begins_anew(config) or has_first_weights(config)
    about = agreed_fields(config, data, agreed_files(config, data, begins=begins))
    say(f"waiting for nodes ({config.train.nodes}) in {config.run_dir} ...")
    with (
        held(config.run_dir),
        closing(Meeting(config.run_dir, least, most, timeout=config.launch.timeout, about=about)) as meeting,
        private_folder() as own,
        following(listener, own) as told,
        Memory() as memory,
    ):
        node = _Node(config, crew, meeting, least, settle, prove, told, memory)
        try:
            node.train()
        except Ended:
            how = [start.how for start in history.load(config.run_dir).starts][-1:]
            if how != ["finished"]:
                why = f": {how[0]}" if how and how[0] else ""
                raise RunFailed(f"the run has ended on the other nodes{why}", fix="look at what they say") from None
            say(f"the run is finished: {config.run_dir}")


class _Node:
    """This node: what it knows of the rounds so far, and how often its workers died."""

    def __init__(
        self, config: RunConfig, crew: Workers, meeting: Meeting, least: int, settle: Settle,
        prove: Callable[[RunConfig, Layout], object] | None, told: Mapping[str, str], memory: Memory,
    ) -> None:  # fmt: skip
        self._config, self._crew, self._meeting, self._least = config, crew, meeting, least
        self._settle, self._prove, self._told, self._memory = settle, prove, told, memory
        self._before: NodeRound | None = None
        self._restarts, self._saved = 0, -1

    def train(self) -> None:
        """Go from round to round until the run is done. Raises `Ended` if it was done without this node."""
        death: WorkerDied | None = None
        self._crew.import_first()  # the others train on meanwhile
        while True:
            current = None
            try:
                current = self._meeting.join(self._crew.count)
                self._train_in(current, death)
                self._meeting.end(current)
                return
            except NodesChanged:
                death = None
            except UserError as error:
                if current is None:
                    raise
                death = self._survived(error, current)

    def _survived(self, error: UserError, current: NodeRound) -> WorkerDied | None:
        """Return if this node joins the next round: with the death that it had, or None if it had none. Otherwise raise
        `error`, for which the run ends, or `LeftOut`."""
        if isinstance(error, WorkerDied):
            if error.is_own:
                current.blame(error.what)
            elif self._meeting.has_news_within(_CONSEQUENCE):
                return None
            if self._may_go_on(error):
                return error
            if error.is_own and self._suffices_without(current, 1) and self._failed_alone(current):
                times = f" {many(self._restarts, 'time')} without a new checkpoint" * (self._restarts > 1)
                self._leave(current, f"left out: {error.what},{times} and on this node alone", error)
        if isinstance(error, OthersGone) and self._meeting.has_news_within(_CONSEQUENCE):
            return None
        self._memory.forget()  # what is wrong may be in it
        if isinstance(error, Suspected) and self._config.train.leave_out:
            named = {current.node_of(rank) for rank in error.ranks}
            if self._suffices_without(current, len(named)):
                if current.node in named:
                    self._leave(current, f"left out: {error.what}", error)
                return None
        if self._meeting.end(current):
            raise error
        return None  # the others have gone on: it was an error of their past

    def _suffices_without(self, current: NodeRound, nodes: int) -> bool:
        return len(current.members) - nodes + self._meeting.spare >= self._least

    def _failed_alone(self, current: NodeRound) -> bool:
        time.sleep(_CONSEQUENCE)  # for the others to find their own failures
        return len(current.blamed()) == 1

    def _leave(self, current: NodeRound, why: str, error: UserError) -> NoReturn:
        current.leave(why)
        with closing(history.Log(self._config.run_dir, say)) as log:
            log.write("left out", last_logged_step(self._config), what=f"{current.members[current.node]}: {why}")
        left = LeftOut(
            why, fix=f"mend this node and start it again; {error.fix}" if error.fix else None, more=error.more
        )
        raise left from error

    def _train_in(self, current: NodeRound, death: WorkerDied | None) -> None:
        kept = current.told_by_all("kept", kept_in(self._memory.folder))
        chosen = json.loads(current.agreed(partial(self._choice, kept=kept)))
        self._memory.forget(but=chosen["before"] if chosen["kept"]["step"] else 0)
        self._tell(current, death, chosen["kept"])
        ranks = current.ranks(chosen["nodes"])
        if ranks is None:
            say(f"node {current.node + 1} of {len(current.members)} waits: {chosen['why']}")
            self._memory.forget()
            while not self._meeting.news():
                if self._meeting.has_ended():
                    raise Ended
                time.sleep(_PAUSE)
            raise NodesChanged
        config = self._config.with_layout(Layout.parse(chosen["layout"])) if chosen["layout"] else self._config
        if self._prove and ranks.node == 0:
            self._prove(config, config.layout.resolve(ranks.size))
        last = ranks.first + self._crew.count - 1
        place = f"rank {ranks.first}" if last == ranks.first else f"ranks {ranks.first} to {last}"
        told = "" if ranks.node == 0 else f"; {current.members[0].host} shows the run"
        say(f"node {ranks.node + 1} of {ranks.nodes}: {place} of {ranks.size}{told}")
        folder, number = str(self._memory.folder or ""), current.number
        memory = {"folder": folder, "node": current.node, "before": chosen["before"], "kept": chosen["kept"]}
        request = {
            "config": config.to_yaml(), "device": device_kind(config.train.device), "may_be_unseen": True,
            "memory": memory,
        }  # fmt: skip
        logs, patience = logs_of(config.run_dir, number), config.train.collective_timeout
        others = OtherNodes(ranks, lambda: self._news(logs), partial(self._memory.is_awaited, number))
        start_workers(self._crew, {**request, **self._told}, logs=logs, patience=patience, others=others)

    def _news(self, logs: Path) -> str:
        """The news of the meeting. After a run that is done rank 0 may still write; after a failure all are gone."""
        if self._meeting.has_ended():
            return GONE if failures(logs) else ""
        return self._meeting.news()

    def _choice(self, members: Sequence[Member], kept: Sequence[str] = ()) -> str:
        """As the first node, choose the layout: for all nodes, or for the most with which it is legal; and of the steps
        that nodes have `kept` in memory the newest whole one, if no disk has it."""
        clear_logs(self._config.run_dir)
        before, saved = last_round(self._config.run_dir), last_saved_step(self._config)
        why: UserError | None = None
        for used in range(len(members), self._least - 1, -1):
            size = sum(member.workers for member in members[:used])
            try:
                config = self._settle(self._config, size, members[0].workers)
                check_model(config, layout=config.layout.resolve(size), weights=False)
            except UserError as error:
                why = why or error
                continue
            layout = str(config.layout) if self._config.is_automatic else ""
            step = newest_kept(kept[:used], round=before, newer_than=saved)
            said = {"nodes": used, "layout": layout, "why": why.what if why else ""}
            return json.dumps({**said, "before": before, "kept": asdict(step)})
        assert why is not None
        raise why

    def _tell(self, current: NodeRound, death: WorkerDied | None, kept: Mapping[str, Any]) -> None:
        """Say how this round differs from the one before, here and, by one node that was in both, in the history.
        `kept`: the step that it goes on from in memory, or why from none."""
        before, self._before = self._before, current
        if not before:
            return
        if current.missed:
            say("the other nodes had gone on without this one; it takes part again")
        saved = last_saved_step(self._config)
        origin = f"goes on from the checkpoint of step {saved}" if saved else "starts again"
        if kept["step"] or kept["why"]:
            origin = f"goes on from step {kept['step']} in memory" if kept["step"] else f"{origin}, as {kept['why']}"
        difference = changed(before.members, current.members, before.left())
        what = difference or (f"{death.what}; restart {self._restarts}" if death else "")
        if not what:
            return
        say(f"{what}; {origin}")
        stayed = [node for node, member in enumerate(current.members) if member in before.members]
        blamed = [current.members.index(member) for member in before.blamed() if member in current.members]
        if current.node == (stayed if difference or not blamed else blamed)[0]:
            with closing(history.Log(self._config.run_dir, say)) as log:
                event = "nodes" if difference else "died"
                log.write(event, last_logged_step(self._config), what=f"{what}; {origin}", nodes=len(current.members))

    def _may_go_on(self, death: WorkerDied) -> bool:
        """Count a death. False if it is certain to recur, or if there were too many without a new checkpoint."""
        newest, most = last_saved_step(self._config), self._config.train.max_restarts
        self._restarts, self._saved = (self._restarts if newest <= self._saved else 0) + 1, newest
        return not death.comes_again and self._restarts <= most
