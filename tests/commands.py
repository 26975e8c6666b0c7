"""Commands as processes, and in the process of the tests: what starts workers does its work on the ranks of the pool.

An interpreter imports torch and `transformers` for four seconds, and so does every worker that it starts.
"""

import io
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, chdir, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.cli import main
from fivefold.launch import worker
from fivefold.launch.world import World
from tests.pool import run_ranks
from tests.verification.mutation import planted

BIN = Path(sys.executable).parent
STARTERS = (
    "fivefold.training.launch",
    "fivefold.launch.once",
    "fivefold.verification",
)


def as_process(command: Sequence[str], folder: Path) -> str:
    """What a command prints as a process of its own; it is looked for in this environment first, and must end well."""
    env = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def fivefold(arguments: Sequence[str], folder: Path, *, code: int = 0, fault: str | None = None) -> str:
    """What the command prints, run in `folder`. It must end with `code`. `fault`: the workers have that bug."""
    with _here(folder, fault) as screen, pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == code, screen.getvalue()
    return screen.getvalue()


def python(text: str, folder: Path) -> str:
    """What a script prints, run in `folder`."""
    with _here(folder) as screen:
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return screen.getvalue()


@contextmanager
def _here(folder: Path, fault: str | None = None) -> Iterator[io.StringIO]:
    """Inside, `folder` is the current one, workers are those of the pool, and what is printed is kept."""
    with ExitStack() as stack:
        for module in STARTERS:
            stack.enter_context(patch(f"{module}.Workers", Crew))
            stack.enter_context(patch(f"{module}.start_workers", partial(_on_the_pool, fault)))
        stack.enter_context(chdir(folder))
        yield stack.enter_context(redirect_stdout(io.StringIO()))


@dataclass
class Crew(AbstractContextManager[Any]):
    """In the place of `Workers`: starts no process."""

    body: str
    count: int

    def __exit__(self, *_: object) -> None:
        pass


def _on_the_pool(fault: str | None, crew: Crew, request: Mapping[str, Any], *, logs: Path, patience: float = 0) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    # A proof leaves the world of the workers for worlds of its own.
    is_last = crew.body.startswith("fivefold.verification")
    said = run_ranks(crew.count, _on_rank, crew.body, request, Path.cwd(), dict(os.environ), fault, is_last=is_last)
    print(*said, end="", sep="")


def _on_rank(
    verb: str, request: Mapping[str, Any], folder: Path, environment: dict[str, str], fault: str | None
) -> str:
    screen = io.StringIO()
    rank, size = dist.get_rank(), dist.get_world_size()
    world = World(rank=rank, size=size, local_rank=rank, local_size=size)
    with ExitStack() as stack:
        stack.enter_context(chdir(folder))
        stack.enter_context(redirect_stdout(screen))
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(planted(fault) if fault else nullcontext())
        worker._body(verb)(request, world)
    return screen.getvalue() if world.is_first else ""
