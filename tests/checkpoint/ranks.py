"""What the ranks of the checkpoint tests do: train a little, save, load under another layout, report their pieces."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from fivefold.checkpoint import Checkpoint, Metadata, Saver, restore, save, shard, step_folder
from fivefold.core import files
from fivefold.models.build import build_meta
from fivefold.parallel.apply import parallelize
from fivefold.parallel.dtensor import local
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.optimizers.states import restored_state
from fivefold.training.step import train_step
from tests.parity import Case, batch_of, documents, hf_config, on_rank, pieces, reference_model  # noqa: F401


@dataclass
class State:
    """One rank's pieces of every kind, its step counts, and the losses of the steps it trained."""

    pieces: dict[str, list[tuple[str, Any, np.ndarray]]]
    steps: set[float]
    losses: list[float]


def train_and_save(case: Case, directory: Path, steps: int, also: int = 0) -> State:
    """Train `steps`, save, and train `also` more; the state is that of the save, the losses those of the last ones."""
    model, optimizer = _fresh(case)
    _train(model, optimizer, case, 0, steps)
    about = Metadata(step=steps, state={"tokens_seen": 7})
    save(model, optimizer, directory / step_folder(steps), about, keep=3)
    state = _state(model, optimizer)
    state.losses = _train(model, optimizer, case, steps, also)
    return state


def load_and_train(case: Case, folders: list[Path], also: int = 0) -> list[State]:
    """Load each folder into a model that holds something else, then train `also` steps."""
    model, optimizer = _fresh(case, seed=99)
    found = []
    for folder in folders:
        checkpoint = Checkpoint.open(folder)
        restore(model, optimizer, checkpoint)
        state = _state(model, optimizer)
        state.losses = _train(model, optimizer, case, checkpoint.step, also)
        found.append(state)
    return found


def load_and_save(case: Case, folder: Path, directory: Path, also: int = 0) -> State:
    """Load `folder` into a model that holds something else, save it again, and train `also` steps."""
    model, optimizer = _fresh(case, seed=99)
    checkpoint = Checkpoint.open(folder)
    restore(model, optimizer, checkpoint)
    save(model, optimizer, directory / step_folder(checkpoint.step), _about(checkpoint.step), keep=3)
    state = _state(model, optimizer)
    state.losses = _train(model, optimizer, case, checkpoint.step, also)
    return state


def _fresh(case: Case, seed: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    model = parallelize(build_meta(hf_config(case)), case.parsed, seed=seed)
    return model, build_optimizer(model, case.options)


def _train(model: Any, optimizer: torch.optim.Optimizer, case: Case, first: int, steps: int) -> list[float]:
    rank = state_of(model).placement.data_rank
    return [
        train_step(
            model, optimizer, batch_of(documents(case, step), case.parsed, rank), learning_rate=3e-3, max_grad_norm=0.5
        ).loss
        for step in range(first, first + steps)
    ]


def _state(model: Any, optimizer: torch.optim.Optimizer) -> State:
    parameters = dict(model.named_parameters())
    kinds = {"weight": pieces(model, parameters)}
    states = {name: restored_state(optimizer, p) for name, p in parameters.items()}
    for kind in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        kinds[kind] = pieces(model, {name: state[kind] for name, state in states.items() if kind in state})
    return State(kinds, {float(state["step"]) for state in states.values() if "step" in state}, [])


def elements_read(case: Case, folder: Path) -> tuple[int, int]:
    """(elements that loading reads on this rank, elements that this rank keeps), weights and moments."""
    model, optimizer = _fresh(case)
    checkpoint = Checkpoint.open(folder)
    read = 0

    class Counting(Checkpoint):
        def source(self, kind: str = "weight") -> Any:
            source = super().source(kind)
            plain = source.read

            def counted(name: str, region: Any) -> torch.Tensor:
                nonlocal read
                values = plain(name, region)
                read += values.numel()
                return values

            source.read = counted  # type: ignore[method-assign]
            return source

    restore(model, optimizer, Counting(checkpoint.path, checkpoint.manifest))
    kept = sum(local(p).numel() for p in model.parameters())
    return read, kept * 3


def save_twice(case: Case, directory: Path) -> str:
    """The error of saving a step that is published already."""
    model, optimizer = _fresh(case)
    save(model, optimizer, directory / step_folder(0), _about(0), keep=3)
    try:
        save(model, optimizer, directory / step_folder(0), _about(0), keep=3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def save_steps(case: Case, directory: Path, steps: list[int], keep: int) -> list[str]:
    """Save at each of `steps`; returns what is in the folder after each."""
    model, optimizer = _fresh(case)
    found = []
    for step in steps:
        save(model, optimizer, directory / step_folder(step), _about(step), keep=keep)
        found.append(" ".join(sorted(path.name for path in directory.iterdir())))
        dist.barrier()
    return found


def save_on_bad_disk(case: Case, directory: Path, kind: str) -> str:
    """Rank 1 cannot write, or what it writes is another thing on the disk; the error that this rank raises."""
    model, optimizer = _fresh(case)
    try:
        with (full_disk if kind == "full" else wrong_disk)(rank=1):
            save(model, optimizer, directory / step_folder(9), _about(9), keep=3)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def full_disk(rank: int) -> Any:
    """Inside, this rank cannot write a file."""

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    return patch.object(files, "write", full) if dist.get_rank() == rank else nullcontext()


def wrong_disk(rank: int) -> Any:
    """Inside, one bit of each file of this rank is flipped on its way."""
    plain = files.write

    def write(path: Path, pieces: Any) -> int:
        size = plain(path, pieces)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        return size

    return patch.object(files, "write", write) if dist.get_rank() == rank else nullcontext()


def restore_error(case: Case, folder: Path) -> str:
    """The error of loading `folder` into the model of `case`, whose weights must stay as they were."""
    model, optimizer = _fresh(case)
    before = [local(p).clone() for p in model.parameters()]
    try:
        restore(model, optimizer, Checkpoint.open(folder))
    except Exception as error:
        assert all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True))
        return f"{type(error).__name__}: {error}"
    return ""


def save_behind(case: Case, directory: Path) -> tuple[State, State]:
    """Save in the background, and let the writer begin only after more training; the states before and after it."""
    model, optimizer = _fresh(case)
    _train(model, optimizer, case, 0, 2)
    before, trained, plain = _state(model, optimizer), Event(), shard.write

    def late(*args: Any) -> Any:
        assert trained.wait(60)
        return plain(*args)

    saver = Saver(directory, keep=3, asynchronous=True)
    with patch.object(shard, "write", late):
        saver.save(model, optimizer, _about(2))
        before.losses = _train(model, optimizer, case, 2, 2)
        after = _state(model, optimizer)
        assert not list(directory.glob("step-*"))
        trained.set()
        saver.close()  # as at the end of a run: it waits
    saver.wait()
    return before, after


def fail_behind(case: Case, directory: Path) -> tuple[str, list[str], list[str], str]:
    """A background save fails on rank 1, then one succeeds: the error told at the next step, the folders after each,
    and what is told the second time."""
    model, optimizer = _fresh(case)
    saver = Saver(directory, keep=3, asynchronous=True)
    with full_disk(rank=1):
        saver.save(model, optimizer, _about(1))
        told = saver.failure(wait=True)
    names = sorted(path.name for path in directory.iterdir())
    assert saver.failure(wait=True) is None  # told once
    _train(model, optimizer, case, 0, 1)
    saver.save(model, optimizer, _about(2))
    again = saver.failure(wait=True)
    dist.barrier()
    later = sorted(path.name for path in directory.iterdir())
    saver.close()
    return f"{type(told).__name__}: {told}", names, later, str(again)


def save_over(case: Case, directory: Path) -> list[str]:
    """Three background saves without a pause, then the folders that are there."""
    model, optimizer = _fresh(case)
    saver = Saver(directory, keep=2, asynchronous=True)
    for step in (1, 2, 3):
        _train(model, optimizer, case, step, 1)
        saver.save(model, optimizer, _about(step))
    saver.wait()
    saver.close()
    return sorted(path.name for path in directory.iterdir())


def _about(step: int) -> Metadata:
    return Metadata(step=step, state={})
