"""A save stands still before each of its system calls, while a later round of nodes takes the folder and saves.

When it wakes, nothing that it does reaches a checkpoint: no step is published, replaced or removed by it.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.checkpoint import Checkpoint, newest
from fivefold.checkpoint.load import is_valid
from fivefold.core import files
from fivefold.core.errors import UserError
from fivefold.core.run_folder import step_folder, steps
from fivefold.launch.rounds import room, take
from tests.checkpoint.test_killed_save import CALLS, NAMES, content
from tests.tiers import put_off

saving = sys.modules["fivefold.checkpoint.save"]


class Still:
    """`os`, but `meanwhile` happens right before the call number `at`."""

    def __init__(self, at: int, meanwhile: Callable[[], None]) -> None:
        self.at, self.meanwhile, self.calls = at, meanwhile, 0

    def __getattr__(self, name: str) -> Any:
        plain = getattr(os, name)

        def call(*args: Any) -> Any:
            self.calls += 1
            if self.calls == self.at + 1:
                files.os = os  # type: ignore[attr-defined]
                self.meanwhile()
                files.os = self  # type: ignore[attr-defined,assignment]
            return plain(*args)

        return call if name in CALLS else plain


def save(directory: Path, number: int, step: int, value: float) -> None:
    """What `Saver` does in round `number`, for one rank."""
    published, place = directory / step_folder(step), room(directory, number)
    beside = place / f".tmp-{published.name}"
    slices = [saving.OwnedSlice("weight", name, (4, 6), (0, 0), torch.full((4, 6), value)) for name in NAMES]
    snapshot = saving.Snapshot(
        about=saving.Metadata(step=step, state={"value": value}), layout="single", names=NAMES, slices=slices,
        scalars={}, texts={"run.yaml": b"x"},
    )  # fmt: skip
    saving._start(beside, published)
    told = saving._told(beside, snapshot, 0)
    saving._publish(snapshot, [told], beside, published, 1)


@pytest.mark.full
@pytest.mark.parametrize("every", [3, put_off(1)])
def test_a_save_that_stood_still_while_a_later_round_saved_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(files, "os", os)
    counted = Still(10**6, lambda: None)
    take(tmp_path / "whole", 1)
    files.os = counted  # type: ignore[attr-defined,assignment]
    save(tmp_path / "whole", 1, 2, 1.0)
    assert counted.calls > 25
    ends = set()
    for at in range(0, counted.calls, every):
        directory = tmp_path / f"{at}"
        files.os = os  # type: ignore[attr-defined]
        take(directory, 1)
        save(directory, 1, 1, 1.0)

        def meanwhile(directory: Path = directory) -> None:
            take(directory, 2)
            save(directory, 2, max(steps(directory)) + 1, 2.0)  # it goes on from the newest

        files.os = Still(at, meanwhile)  # type: ignore[attr-defined,assignment]
        with suppress(OSError, UserError):
            save(directory, 1, 2, 1.0)
        files.os = os  # type: ignore[attr-defined]
        folder = newest(directory)
        assert folder is not None and content(folder) == {2.0}, at
        assert all(is_valid(path) for path in directory.glob("step-*"))
        ends.add(Checkpoint.open(folder).step)
        save(directory, 2, Checkpoint.open(folder).step + 1, 2.0)
        assert not list(directory.glob(".tmp-*")) and not list(room(directory, 2).iterdir())
    assert ends == {2, 3}
