"""Small real runs: their files, `fivefold.training.run.train` on the ranks of the pool, and what it left on disk.

What goes wrong in real runs is put in on purpose: a run that stops at a step, losses and gradients that are no numbers.
"""

import io
import json
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch
import torch.distributed as dist

from fivefold.checkpoint import Checkpoint, step_folder
from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.launch.world import World
from fivefold.parallel.dtensor import local
from fivefold.parallel.loss.tasks import CrossEntropy
from fivefold.training import evaluation
from fivefold.training import run as run_module
from fivefold.training import step as step_module
from tests.pool import run_ranks

MODEL = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 29,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 64, "vocab_size": 263, "tie_word_embeddings": False,
}  # fmt: skip
SEQ = 61  # prime
saving = sys.modules["fivefold.checkpoint.save"]  # `fivefold.checkpoint.save` is the function


class Stopped(Exception):
    """Where a killed process would have ended."""


@dataclass(frozen=True)
class Ran:
    """What a run left on one rank: what it printed, and the error it ended with."""

    screen: str
    error: Exception | None


def run_file(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run file's tree: a tiny Llama on a tiny text, bytes as tokens; `changes` by dotted key (`train__max_steps`)."""
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps(MODEL))
        write_corpus(folder / "corpus.txt", characters=4001)
    tree: dict[str, Any] = {
        "model": {"name_or_path": str(folder / "config.json"), "init": "random"},
        "tokenizer": {"name_or_path": "byte"},
        "data": {"train": str(folder / "corpus.txt"), "validation": 0, "seq_length": SEQ},
        "train": {"max_steps": 6, "global_batch_size": 8, "micro_batch_size": 2, "seed": 7},
        "optimizer": {"learning_rate": 1e-2},
        "scheduler": {"warmup_steps": 2},
        "precision": {"compute": "fp32"},
        "checkpoint": {"every": 0, "keep": 9},
        "run": {"name": "run", "dir": str(folder)},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return tree


def write_corpus(path: Path, characters: int, seed: int = 3) -> None:
    """A text of few words, so that something can be learnt."""
    rng = np.random.default_rng(seed)
    words = ["der", "kleine", "Häwelmann", "fährt", "mit", "dem", "Rollenbett", "\n"]
    path.write_text(" ".join(rng.choice(words, characters // 4))[:characters], encoding="utf-8")


def train(tree: Mapping[str, Any], world: int = 2, **options: Any) -> Ran:
    """Train on `world` ranks; what rank 0 saw. Errors must be the same on every rank."""
    results = run_ranks(world, partial(on_rank, tree, **options))
    assert len({(type(r.error), str(r.error)) for r in results}) == 1
    return results[0]


def train_alone(tree: Mapping[str, Any], **options: Any) -> Ran:
    """Train on one rank, where a test is not about several: half of the cost."""
    return train(tree, 1, **options)


def on_rank(
    tree: Mapping[str, Any], *, stop_at: int = 0, nan_loss: Collection[int] = (), inf_gradient: Collection[int] = (),
    lacks: str = "", evaluated: Sequence[float] = (), unsaved: tuple[int, type[Exception]] | None = None,
) -> Ran:  # fmt: skip
    """Train on this rank. `stop_at`: the call of `train_step` that never happens; faults by call as well, from 1.
    `lacks`: what the memory of a GPU does not suffice for, of `STARVED`. `evaluated`: the losses that evaluations find,
    in order. `unsaved`: the step whose save ends before it is published, and by which error."""
    config = RunConfig.model_validate(tree)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    screen, error = io.StringIO(), None
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"FIVEFOLD_CACHE": str(Path(config.run.dir) / "cache")}))
        stack.enter_context(redirect_stdout(screen))
        stack.enter_context(_stopping(stop_at))
        stack.enter_context(_poisoned(nan_loss, inf_gradient))
        if evaluated:
            stack.enter_context(patch.object(evaluation, "mean_loss", Mock(side_effect=evaluated)))
        if unsaved:
            stack.enter_context(_unsaved(*unsaved))
        if lacks:
            stack.enter_context(patch(STARVED[lacks], _starved(lacks)))
        try:
            run_module.train(config, World(rank=dist.get_rank(), size=dist.get_world_size()))
        except (Stopped, UserError) as caught:
            error = caught
    return Ran(screen.getvalue(), error)


# What a run is at -> the function that cannot have its memory.
STARVED = {
    "building the model": "fivefold.parallel.apply.fill",
    "forward": "fivefold.parallel.loss.tasks.CrossEntropy.__call__",
    "backward": "fivefold.parallel.loss.tasks.CrossEntropy.__call__",
    "the optimizer": "fivefold.training.step.clip_",
    "an evaluation": "fivefold.parallel.passes.loss",
    "a save": "fivefold.checkpoint.save._snapshot",
    "the memory of a save": "fivefold.parallel.offload.host_memory.allocate",
}
TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.19 GiB is free"
    ". Including non-PyTorch memory, this process has 77.91 GiB memory in use. Of the allocated memory 70.00 GiB is "
    "allocated by PyTorch, and 5.50 GiB is reserved by PyTorch but unallocated. If reserved but ..."
)


def _starved(lacks: str) -> Any:
    """A function that fails as torch does: at once, in backward, or in the fifth forward."""
    calls, whole = 0, CrossEntropy.__call__

    def starved(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if lacks == "backward":
            return _Starved.apply(whole(*args, **options))
        if lacks == "forward" and calls < 5:
            return whole(*args, **options)
        raise torch.OutOfMemoryError(TORCH_SAYS)

    return starved


class _Starved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(TORCH_SAYS)


@contextmanager
def _stopping(stop_at: int) -> Iterator[None]:
    plain, calls = run_module.train_step, 0

    def train_step(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise Stopped
        return plain(*args, **options)

    with patch.object(run_module, "train_step", train_step):
        yield


@contextmanager
def _unsaved(step: int, error: type[Exception]) -> Iterator[None]:
    plain = saving._publish

    def publish(snapshot: Any, *rest: Any) -> None:
        if snapshot.about.step == step:
            raise error(f"step {step} is not saved")
        plain(snapshot, *rest)

    with patch.object(saving, "_publish", publish):
        yield


@contextmanager
def _poisoned(nan_loss: Collection[int], inf_gradient: Collection[int]) -> Iterator[None]:
    """On the last rank alone: the others must learn of it."""
    plain, calls, last = step_module._end, 0, dist.get_rank() == dist.get_world_size() - 1

    def end(model: Any, begun: Any, loss: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        if last and calls in inf_gradient:
            local(model.lm_head.weight.grad)[-1, -1] = inf
        return plain(model, begun, loss * nan if last and calls in nan_loss else loss)

    with patch.object(step_module, "_end", end):
        yield


# ---- what is on disk ---------------------------------------------------------------------------------------------


def run_dir(tree: Mapping[str, Any]) -> Path:
    return Path(tree["run"]["dir"]) / tree["run"]["name"]


def metrics(tree: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir(tree) / "metrics.jsonl").read_text().splitlines()]


def column(tree: Mapping[str, Any], name: str) -> list[Any]:
    return [row.get(name) for row in metrics(tree)]


def state(tree: Mapping[str, Any], step: int) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint of a step, weights and moments, as `kind/name`."""
    opened = Checkpoint.open(run_dir(tree) / "checkpoints" / step_folder(step))
    sources = {kind: opened.source(kind) for kind in opened.kinds}
    return {f"{kind}/{name}": source.whole(name) for kind, source in sources.items() for name in source.names()}


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
