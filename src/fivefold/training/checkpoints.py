"""The checkpoints of a run: which one it resumes from, what is saved with the tensors, how failures are reported."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fivefold import checkpoint
from fivefold.checkpoint.agreement import weights_beside
from fivefold.checkpoint.kept import complete, is_replicated, keep, unfinished_of
from fivefold.checkpoint.save import Write
from fivefold.config import RunConfig
from fivefold.core.best import STATE, Best
from fivefold.core.errors import UserError
from fivefold.core.kept_steps import MemoryOfNode
from fivefold.data.prepare import PreparedData
from fivefold.launch import rounds
from fivefold.launch.memory import free_bytes
from fivefold.parallel import plain
from fivefold.parallel.state import state_of
from fivefold.training import schedule
from fivefold.training.display import Line
from fivefold.training.keeping import HeldStep
from fivefold.training.part import Environment, LiveRun, Part, Resumed
from fivefold.training.run_log import RunLog
from fivefold.training.step import StepResult

IN_MEMORY = "memory"  # where a step is that no disk has


class CheckpointManager:
    """Resumes from the checkpoints of a run, writes new ones, and reports the results. Every rank has one and calls the
    same methods. `failed`: the error of a failed save for which the run is to stop."""

    def __init__(
        self, config: RunConfig, model: Any, optimizer: torch.optim.Optimizer, data: PreparedData, log: RunLog, *,
        write: Write | None = None, memory: MemoryOfNode | None = None,
    ) -> None:  # fmt: skip
        """`write`: see `Saver`. `memory`: of this node, where steps are kept when other nodes go."""
        self.memory = memory or MemoryOfNode()
        self._model, self._optimizer, self._data, self._log = model, optimizer, data, log
        self._directory, options = config.run_dir / "checkpoints", config.checkpoint
        self._remote = checkpoint.Remote(f"{options.remote.rstrip('/')}/{config.run.name}") if options.remote else None
        self._saver = checkpoint.Saver(
            self._directory,
            keep=options.keep,
            asynchronous=options.asynchronous,
            remote=self._remote,
            write=write,
            room=rounds.room(self._directory, log.folder.round),
        )
        self._weights = weights_beside(config)
        self._stops_on_failure = options.on_failure == "stop"
        self._under_way = 0  # the step of the pending save
        self._parameters = list(model.named_parameters())  # in a step, others stand in their places
        self.failed: UserError | None = None

    def resume(self, config: RunConfig) -> Resumed:
        """Load the newest valid checkpoint that agrees with this run. Raises `UserError`."""
        passed = self._fetched()
        while True:
            # Only one rank searches, since folders can differ between machines. It may download, which takes long.
            where, folder, passed = checkpoint.on_first_rank(
                partial(self._where_to_go_on, config, passed), self._saver.group
            )
            if folder is None:
                return Resumed(damages=_told(passed))
            if where == IN_MEMORY:
                folder = str(self.memory.step)
            opened = checkpoint.Checkpoint.described(Path(folder))
            try:
                checkpoint.restore(self._model, self._optimizer, opened)
            except checkpoint.CorruptCheckpoint as damage:  # on every rank
                passed[where] = damage.what
                continue
            warmup_steps = opened.agreement.get(checkpoint.WARMUP)
            unfinished = None
            if where == IN_MEMORY:
                unfinished = checkpoint.on_first_rank(partial(unfinished_of, Path(folder), self.memory.kept))
            self._log.folder.saved = opened.step if Path(folder).parent == self._directory else 0
            return Resumed(opened.step, opened.state, where, _told(passed), warmup_steps, unfinished)

    def _fetched(self) -> dict[str, str]:
        """Complete the step that the nodes keep in memory on each of them. Returns why it is passed over, if it is."""
        memory = self.memory
        if not memory.kept.step:
            return {IN_MEMORY: ""}
        room: int | None = None
        if memory.acts:
            memory.take()
            room = free_bytes(Path(memory.folder)) if memory.folder else 0
        names = state_of(self._model).placement.stored_shapes
        why = complete(memory.step, memory.kept, names, node=memory.node, room=room, group=self._saver.group)
        return {IN_MEMORY: why} if why else {}

    def forget(self) -> None:
        """Remove what is kept in memory, once all ranks have loaded it, or another step, and could keep it anew.
        Further steps are there of ranks that were one ahead: they will be done anew."""
        if not self.memory.kept.step:
            return
        plain.everywhere(None, self._saver.group)
        for step in checkpoint.steps(self.memory.here) if self.memory.acts and self.memory.folder else ():
            shutil.rmtree(self.memory.here / checkpoint.step_folder(step), ignore_errors=True)

    # ---- when other nodes go -----------------------------------------------------------------------------------------

    @property
    def can_keep(self) -> bool:
        """True if a step that this rank holds may survive it."""
        return bool(self.memory.folder) and is_replicated(self._model)

    def keep(self, config: RunConfig, held: HeldStep, *, ranks: int, after: "torch.cuda.Event | None") -> None:
        """Write a step that this rank holds to the memory of its node; no other rank need be there. `ranks`: of this
        node, which may do so at the same time. `after`: see `checkpoint.kept.keep`."""
        keep(
            self._model, self._optimizer, self._parameters,
            self._about(config, held.step, held.state, held.best), self.memory.here,
            room=free_bytes(Path(self.memory.folder)) // ranks, after=after,
            unfinished={"row": held.row, "owes": held.owes},
        )  # fmt: skip

    # ---- saves -------------------------------------------------------------------------------------------------------

    def save(self, config: RunConfig, step: int, state: Mapping[str, Any], best: Best) -> None:
        """Save after `step` steps, or start an asynchronous save. Waits for an earlier save first. `best`: the best
        validations so far; it becomes part of `state`."""
        self.report(step, wait=True)
        self._log.folder.look(self._log.display.note)
        self._saver.save(self._model, self._optimizer, self._about(config, step, state, best))
        self._under_way = step

    def _about(self, config: RunConfig, step: int, state: Mapping[str, Any], best: Best) -> checkpoint.Metadata:
        tokenizer, is_own = self._data.tokenizer, config.tokenizer.name_or_path == "auto"
        return checkpoint.Metadata(
            step=step, state={**state, STATE: best.to_json()}, agreement=self._agreement(config), config=config,
            tokenizer_dir=tokenizer.folder if is_own else tokenizer.saved,
            best=best.steps, keep_best=config.checkpoint.keep_best,
        )  # fmt: skip

    def try_memory(self, more: int) -> None:
        """Allocate the memory that a save copies weights and state to. `more`: bytes of state not yet allocated."""
        self._saver.try_memory(self._model, self._optimizer, more)

    def report(self, step: int, *, wait: bool = False) -> None:
        """Report the checkpoint published since the last call, or the failure of the pending save (`wait`: once it has
        ended). After a failure the older checkpoint stands; `checkpoint.on_failure` decides whether the run stops."""
        failure = self._saver.failure(wait=wait)
        if failure is None:
            self._tell_published()
            return
        self._under_way = 0
        if self._stops_on_failure:
            self.failed = failure
        self._log.display.note(f"step {step}: {failure.what}; training {'stops' if self.failed else 'goes on'}")
        self._log.happened("save failed", step, failure.what)

    def finish(self) -> None:
        """Wait for the last save and report it. Raises on every rank if it failed."""
        self._saver.wait()
        self._tell_published()

    def close(self) -> None:
        self._saver.close()

    def _tell_published(self) -> None:
        if self._under_way and not self._saver.is_pending:
            self._log.events.tell("save", self._directory / checkpoint.step_folder(self._under_way))
            self._log.folder.saved, self._under_way = self._under_way, 0

    def _where_to_go_on(self, config: RunConfig, passed: dict[str, str]) -> tuple[str, str | None, dict[str, str]]:
        """The newest checkpoint not in `passed`, checked against this run's configuration; None: start at step 0."""
        there = checkpoint.candidates(self._directory, self._remote)
        if IN_MEMORY not in passed and config.checkpoint.resume == "auto":
            kept = checkpoint.Checkpoint.described(self.memory.step)
            if not there or kept.step > there[0].step:
                checkpoint.check_agreement(kept.agreement, self._agreement(config), where=IN_MEMORY)
                return IN_MEMORY, str(self.memory.step), passed
        for candidate in there if config.checkpoint.resume == "auto" else ():
            if candidate.where in passed:
                continue
            try:
                checkpoint.check_agreement(
                    candidate.manifest().agreement, self._agreement(config), where=candidate.where
                )
                return candidate.where, str(candidate.folder()), passed
            except checkpoint.CorruptCheckpoint as damage:
                passed[candidate.where] = damage.what
        if of_disk := [why for where, why in passed.items() if where != IN_MEMORY]:
            raise checkpoint.CorruptCheckpoint(
                f"none of the checkpoints in {self._directory} is what was saved: {of_disk[0]}",
                fix="put back a copy of one, or take another run.name to start at step 0",
            )
        if there:
            steps = ", ".join(str(step) for step in sorted({candidate.step for candidate in there}))
            raise UserError(
                f"{there[0].where.rpartition('/')[0]} holds steps {steps}, and this run starts at step 0",
                fix="take another run.name, set checkpoint.resume: auto, or remove the folder",
            )
        return "", None, passed

    def _agreement(self, config: RunConfig) -> dict[str, Any]:
        model_config = json.loads(self._model.config.to_json_string())
        bos = bool(self._data.tokenizer.bos_token_ids)
        return checkpoint.agreement(config, self._data.fingerprint, model_config, bos=bos, weights=self._weights)


class Checkpoints(Part):
    """Resumes the run, and saves it: on time, at its end, and when a part asks for it."""

    def __init__(self, environment: Environment, memory: MemoryOfNode | None) -> None:
        """`memory`: of this node, where steps are kept when other nodes go."""
        self._environment, self._memory, self._tight = environment, memory, ""
        self.manager: CheckpointManager

    def build(self, run: LiveRun) -> None:
        """Load the newest checkpoint into the run, which is built."""
        self.manager = CheckpointManager(
            run.config, run.model, run.optimizer, run.data, run.log, write=self._environment.write, memory=self._memory
        )
        run.resumed = resumed = self._environment.resume(self.manager, run.config)
        run.progress.step = resumed.step
        run.config = schedule.settled(run.config, run.total_steps, before=resumed.warmup_steps)
        run.data.train.go_on(resumed.state)
        if resumed.where is None:
            return
        run.progress.load(resumed.state)
        of_parts = resumed.state.get("parts", {})
        for part in run.parts:
            if part.name in of_parts:
                part.load(of_parts[part.name])

    def begin(self, run: LiveRun) -> None:
        self._tight = checkpoint.on_first_rank(
            lambda: self._environment.check_disk(run.model, run.config, step=run.step, total_steps=run.total_steps)
        )

    def lines(self, run: LiveRun) -> Sequence[Line]:
        return [("DISK", self._tight)] if self._tight else []

    @contextmanager
    def running(self, run: LiveRun) -> Iterator[None]:
        self.manager.forget()
        try:
            yield
        finally:
            self.manager.close()

    def try_memory(self, run: LiveRun, more: int) -> None:
        self.manager.try_memory(more)

    def interrupts(self, run: LiveRun) -> bool:
        return self.manager.failed is not None

    def after_update(self, run: LiveRun, result: StepResult) -> None:
        self.manager.report(run.step)

    def after_step(self, run: LiveRun, row: dict[str, Any]) -> None:
        asked = [part.saves(run) for part in run.parts]  # of each: they may ask together
        if run.due(run.config.checkpoint.every) or run.is_over or any(asked):
            for part in run.parts:
                part.at_save(run)
            self.manager.save(run.config, run.step, run.state(), run.progress.best)

    def finish_step(self, run: LiveRun, row: dict[str, Any], *, owes: bool) -> None:
        self.after_step(run, row)

    def finish(self) -> None:
        self.manager.finish()
        if self.manager.failed:
            raise self.manager.failed

    def at_end(self, run: LiveRun) -> None:
        self.manager.finish()


def _told(passed: Mapping[str, str]) -> tuple[str, ...]:
    """Why checkpoints were passed over, in words."""
    return tuple(why for why in passed.values() if why)
