"""The surroundings of a training run that a rehearsal replaces: first weights, earlier checkpoints, the disk, and the
numbers that all ranks have summed."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fivefold.checkpoint.save import Write, write_together
from fivefold.models.sources import TensorSource
from fivefold.training import agreed, preflight, record
from fivefold.training.model import load_source
from fivefold.training.part import Resumed


@dataclass(frozen=True)
class Environment:
    """Functions with which a run reaches its surroundings. The defaults are those of a real run."""

    files: Callable[..., Mapping[str, Any]] = agreed.files  # to compare
    load_source: Callable[..., TensorSource | None] = load_source
    resume: Callable[..., Resumed] = lambda manager, config: manager.resume(config)
    write: Write = write_together  # a checkpoint
    check_disk: Callable[..., str] = preflight.check_disk
    timing: Callable[..., AbstractContextManager[None]] = record.timing  # of the slots of a pipeline
    read: Callable[[Tensor], list[float]] = Tensor.tolist  # the summed loss and squared norm of a step
