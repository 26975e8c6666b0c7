"""The checkpoints of a run: which one it goes on from, what is saved beside the tensors, what is said of a failure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fivefold import checkpoint
from fivefold.checkpoint.base import weights_beside
from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.data.prepare import PreparedData
from fivefold.training.run_log import RunLog


@dataclass(frozen=True)
class Resumed:
    """Where a run begins: after `step` steps, with what was counted until then. `where` it was found; None: afresh.

    `warmup_steps`: of the schedule that it was trained with until then. `damages` says what is wrong with the newer
    checkpoints that were passed over.
    """

    step: int = 0
    state: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None
    damages: tuple[str, ...] = ()
    warmup_steps: int | None = None


class CheckpointManager:
    """Goes on from the checkpoints of a run, writes new ones, and tells how that went. Every rank has one and calls the
    same methods. `failed`: why a save failed that the run is to stop for."""

    def __init__(
        self, config: RunConfig, model: Any, optimizer: torch.optim.Optimizer, data: PreparedData, log: RunLog
    ) -> None:
        self._model, self._optimizer, self._data, self._log = model, optimizer, data, log
        self._directory, options = config.run_dir / "checkpoints", config.checkpoint
        self._remote = checkpoint.Remote(f"{options.remote.rstrip('/')}/{config.run.name}") if options.remote else None
        self._saver = checkpoint.Saver(
            self._directory, keep=options.keep, asynchronous=options.asynchronous, remote=self._remote
        )
        self._weights = weights_beside(config)
        self._stops_on_failure = options.on_failure == "stop"
        self._under_way = 0  # the step that is being saved
        self.failed: UserError | None = None

    def resume(self, config: RunConfig) -> Resumed:
        """Load the newest valid checkpoint that agrees with this run. Raises `UserError`."""
        passed: dict[str, str] = {}
        while True:
            # One rank looks: folders can differ between machines. It may fetch, which takes long.
            where, folder, passed = checkpoint.on_first_rank(
                partial(self._where_to_go_on, config, passed), self._saver.group
            )
            if folder is None:
                return Resumed()
            opened = checkpoint.Checkpoint.open(Path(folder))
            try:
                checkpoint.restore(self._model, self._optimizer, opened)
            except checkpoint.CorruptCheckpoint as damage:  # on every rank
                passed[where] = damage.what
                continue
            warmup_steps = opened.agreement.get(checkpoint.WARMUP)
            self._log.folder.saved = opened.step if Path(folder).parent == self._directory else 0
            return Resumed(opened.step, opened.state, where, tuple(passed.values()), warmup_steps)

    def save(self, config: RunConfig, step: int, state: Mapping[str, Any]) -> None:
        """Begin to save, or save, after `step` steps; an earlier save is waited for."""
        self.report(step, wait=True)
        self._log.folder.look(self._log.display.note)
        tokenizer, is_own = self._data.tokenizer, config.tokenizer.name_or_path == "auto"
        about = checkpoint.Metadata(
            step=step, state=state, agreement=self._agreement(config), config=config,
            tokenizer_dir=tokenizer.folder if is_own else tokenizer.saved,
        )  # fmt: skip
        self._saver.save(self._model, self._optimizer, about)
        self._under_way = step

    def try_memory(self, more: int) -> None:
        """Take the memory that a save will copy to, for weights and state; `more`: bytes of state that is not there
        yet."""
        self._saver.try_memory(self._model, self._optimizer, more)

    def report(self, step: int, *, wait: bool = False) -> None:
        """After `step` steps, tell of a checkpoint that is published since, or that the save under way has failed
        (`wait`: when it has ended): the older one stands, and the run goes on or stops, as asked."""
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
        """Wait for the last save, and tell of it. Raises on every rank if it failed."""
        self._saver.wait()
        self._tell_published()

    def close(self) -> None:
        """Let the save under way end."""
        self._saver.close()

    def _tell_published(self) -> None:
        if self._under_way and not self._saver.is_pending:
            self._log.events.tell("save", self._directory / checkpoint.step_folder(self._under_way))
            self._log.folder.saved, self._under_way = self._under_way, 0

    def _where_to_go_on(self, config: RunConfig, passed: dict[str, str]) -> tuple[str, str | None, dict[str, str]]:
        """The newest checkpoint but those `passed` over, after it has been compared with this run; None: step 0."""
        there = checkpoint.candidates(self._directory, self._remote)
        for each in there if config.checkpoint.resume == "auto" else ():
            if each.where in passed:
                continue
            try:
                checkpoint.check_agreement(each.manifest().agreement, self._agreement(config), where=each.where)
                return each.where, str(each.folder()), passed
            except checkpoint.CorruptCheckpoint as damage:
                passed[each.where] = damage.what
        if passed:
            raise checkpoint.CorruptCheckpoint(
                f"none of the checkpoints in {self._directory} is what was saved: {next(iter(passed.values()))}",
                fix="put back a copy of one, or take another run.name to start at step 0",
            )
        if there:
            steps = ", ".join(str(step) for step in sorted({each.step for each in there}))
            raise UserError(
                f"{there[0].where.rpartition('/')[0]} holds steps {steps}, and this run starts at step 0",
                fix="take another run.name, set checkpoint.resume: auto, or remove the folder",
            )
        return "", None, passed

    def _agreement(self, config: RunConfig) -> dict[str, Any]:
        model_config = json.loads(self._model.config.to_json_string())
        bos = bool(self._data.tokenizer.bos_token_ids)
        return checkpoint.agreement(config, self._data.fingerprint, model_config, bos=bos, weights=self._weights)
