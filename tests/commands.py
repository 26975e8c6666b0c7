"""Commands in the process of the tests: what starts workers does its work on the ranks of the pool.

An interpreter imports torch and `transformers` for four seconds, and so does every worker that it starts.
"""

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.cli import main
from fivefold.launch import worker
from fivefold.launch.world import World
from tests.pool import run_ranks

STARTERS = ("fivefold.training.launch", "fivefold.generation.launch")


def fivefold(arguments: Sequence[str], folder: Path) -> str:
    """What the command prints, run in `folder`. It must end well."""
    screen = io.StringIO()
    with ExitStack() as stack:
        for module in STARTERS:
            stack.enter_context(patch(f"{module}.Workers", Crew))
            stack.enter_context(patch(f"{module}.start_workers", _on_the_pool))
        stack.enter_context(chdir(folder))
        stack.enter_context(redirect_stdout(screen))
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    assert ended.value.code == 0, screen.getvalue()
    return screen.getvalue()


@dataclass
class Crew(AbstractContextManager[Any]):
    """In the place of `Workers`: starts no process."""

    body: str
    count: int

    def __exit__(self, *_: object) -> None:
        pass


def _on_the_pool(crew: Crew, request: Mapping[str, Any], *, logs: Path, patience: float = 0) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    print(*run_ranks(crew.count, _on_rank, crew.body, request, Path.cwd(), dict(os.environ)))


def _on_rank(verb: str, request: Mapping[str, Any], folder: Path, environment: dict[str, str]) -> str:
    screen = io.StringIO()
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    with chdir(folder), redirect_stdout(screen), patch.dict(os.environ, environment):
        worker._body(verb)(request, world)
    return screen.getvalue()
