"""Who says an error where many ranks may have met it: each error is said, and as a rule once."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from fivefold.core.errors import UserError
from fivefold.launch.world import World

PATIENCE = timedelta(seconds=3)  # how long other ranks wait for rank 0 to meet the same error


@contextmanager
def one_voice(world: World | None) -> Iterator[None]:
    """Before the ranks are joined: rank 0 speaks, and one rank of every other machine, which may be the only one."""
    try:
        yield
    except UserError as error:
        if world is None or world.is_first:
            raise
        if world.local_rank == 0:
            raise _from_elsewhere(error, world) from error
        raise SystemExit(error.exit_code) from None


@contextmanager
def said_once(world: World) -> Iterator[None]:
    """Among joined ranks: rank 0 speaks if it met an error, else the first of those that did."""
    try:
        yield
    except UserError as error:
        from fivefold.torch_internals import default_store

        if not speaks(world, default_store()):
            raise SystemExit(error.exit_code) from None
        if world.is_first:
            raise
        raise _from_elsewhere(error, world) from error


def speaks(world: World, store: Any, *, patience: timedelta = PATIENCE) -> bool:
    """Whether this rank, which met an error, is the one to say it. `store` is shared by all ranks."""
    if world.is_first:
        store.set("fivefold/rank-0-speaks", "1")
        return True
    try:
        store.wait(["fivefold/rank-0-speaks"], patience)
    except RuntimeError:  # it met none, or it has ended and taken the store with it
        try:
            return bool(store.add("fivefold/others-speak", 1) == 1)
        except RuntimeError:
            return False
    return False


def _from_elsewhere(error: UserError, world: World) -> UserError:
    where = f"{socket.gethostname()}, rank {world.rank}"
    return type(error)(f"{where}: {error.what}", fix=error.fix, more=error.more)
