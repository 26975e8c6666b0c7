"""Blocks under `torch.compile`: one compiled function for all that are alike, and a word when Dynamo gives one up.

Dynamo compiles a function anew whenever something that it guards on has changed. After a number of versions it runs
what else comes uncompiled, and only its log says so: a run would go on at half of its speed and nobody would know.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo

VERSIONS = 64  # of one function; torch's 8 are used up by a model with several kinds of layers
_LOGGER = logging.getLogger("torch._dynamo.convert_frame")
_SAYS = "torch._dynamo hit config."  # so begins what Dynamo logs when it gives a function up


@dataclass
class Compiled:
    """The compiled blocks of one model. `given_up`: those at which Dynamo stopped compiling, and its reason."""

    given_up: dict[str, str] = field(default_factory=dict)
    _told: int = 0

    def block(self, name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` of block `name`, compiled."""
        torch._dynamo.config.recompile_limit = max(VERSIONS, torch._dynamo.config.recompile_limit)
        compiled = torch.compile(forward)

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._heard(name):
                return compiled(*args, **kwargs)

        return run

    def news(self) -> list[str]:
        """What is to be said of the blocks that were given up since this was last asked."""
        new = list(self.given_up.items())[self._told :]
        self._told = len(self.given_up)
        return [said(name, reason) for name, reason in new]

    @contextmanager
    def _heard(self, name: str) -> Iterator[None]:
        def note(record: logging.LogRecord) -> bool:
            if str(record.msg).startswith(_SAYS) and name not in self.given_up:
                self.given_up[name] = str(record.args[-2]) if isinstance(record.args, tuple) else ""
                warnings.warn(said(name, self.given_up[name]), stacklevel=2)
            return True

        _LOGGER.addFilter(note)
        try:
            yield
        finally:
            _LOGGER.removeFilter(note)


def said(name: str, reason: str) -> str:
    """For the user: what happened at block `name`, and what to do."""
    versions = torch._dynamo.config.recompile_limit
    return (
        f"torch.compile gave up at {name} after {versions} versions of it: from here on it runs uncompiled, and "
        f"slower; train.compile: false does without compiling (Dynamo's reason: {reason})"
    )
