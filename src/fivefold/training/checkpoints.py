"""The checkpoints of a run: which one it goes on from, what is saved beside the tensors, what is said of a failure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fivefold import checkpoint
from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.data.prepare import PreparedData


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
    """Goes on from the checkpoints of a run and writes new ones. Every rank has one and calls the same methods."""

    def __init__(self, config: RunConfig, model: Any, optimizer: torch.optim.Optimizer, data: PreparedData) -> None:
        self._config, self._model, self._optimizer, self._data = config, model, optimizer, data
        self.directory = config.run_dir / "checkpoints"
        options = config.checkpoint
        self._remote = checkpoint.Remote(f"{options.remote.rstrip('/')}/{config.run.name}") if options.remote else None
        self._saver = checkpoint.Saver(
            self.directory, keep=options.keep, asynchronous=options.asynchronous, remote=self._remote
        )

    def resume(self) -> Resumed:
        """Load the newest valid checkpoint that agrees with this run. Raises `UserError`."""
        passed: dict[str, str] = {}
        while True:
            # One rank looks: folders can differ between machines. It may fetch, which takes long.
            where, folder, passed = checkpoint.on_first_rank(partial(self._where_to_go_on, passed), self._saver.group)
            if folder is None:
                return Resumed()
            opened = checkpoint.Checkpoint.open(Path(folder))
            try:
                checkpoint.restore(self._model, self._optimizer, opened)
            except checkpoint.CorruptCheckpoint as damage:  # on every rank
                passed[where] = damage.what
                continue
            warmup_steps = opened.agreement.get(checkpoint.WARMUP)
            return Resumed(opened.step, opened.state, where, tuple(passed.values()), warmup_steps)

    def settle(self, config: RunConfig) -> None:
        """Save this config from now on: what was left open in it has been settled."""
        self._config = config

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Begin to save, or save, after `step` steps; an earlier save has ended and its failure was told."""
        about = checkpoint.Metadata(
            step=step, state=state, agreement=self._agreement(), config=self._config,
            tokenizer_dir=self._data.tokenizer_dir,
        )  # fmt: skip
        self._saver.save(self._model, self._optimizer, about)

    def failure(self, *, wait: bool = False) -> UserError | None:
        """Why the last save failed in the background, once; see `Saver.failure`."""
        return self._saver.failure(wait=wait)

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way, or has failed and nobody asked."""
        return self._saver.is_pending

    def wait(self) -> None:
        """Wait for the last save. Raises on every rank if it failed."""
        self._saver.wait()

    def close(self) -> None:
        """Let the save under way end."""
        self._saver.close()

    def _where_to_go_on(self, passed: dict[str, str]) -> tuple[str, str | None, dict[str, str]]:
        """The newest checkpoint but those `passed` over, after it has been compared with this run; None: step 0."""
        there = checkpoint.candidates(self.directory, self._remote)
        for each in there if self._config.checkpoint.resume == "auto" else ():
            if each.where in passed:
                continue
            try:
                checkpoint.check_agreement(each.manifest().agreement, self._agreement(), where=each.where)
                return each.where, str(each.folder()), passed
            except checkpoint.CorruptCheckpoint as damage:
                passed[each.where] = damage.what
        if passed:
            raise checkpoint.CorruptCheckpoint(
                f"none of the checkpoints in {self.directory} is what was saved: {next(iter(passed.values()))}",
                fix="put back a copy of one, or take another run.name to start at step 0",
            )
        if there:
            steps = ", ".join(str(step) for step in sorted({each.step for each in there}))
            raise UserError(
                f"{there[0].where.rpartition('/')[0]} holds steps {steps}, and this run starts at step 0",
                fix="take another run.name, set checkpoint.resume: auto, or remove the folder",
            )
        return "", None, passed

    def _agreement(self) -> dict[str, Any]:
        model_config = json.loads(self._model.config.to_json_string())
        bos = bool(self._data.bos_token_ids)
        return checkpoint.agreement(self._config, self._data.fingerprint, model_config, bos=bos)
