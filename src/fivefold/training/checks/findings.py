"""Findings of a check, the same on every rank, and the error that ends a run for them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core import text
from fivefold.core.errors import RunFailed
from fivefold.launch.failure import Suspected
from fivefold.parallel import plain
from fivefold.training.step import all_reduce_sum

SHOWN = 3  # findings in an error, after the first

Key = TypeVar("Key", bound=tuple[Any, ...])
Value = TypeVar("Value")


@dataclass(frozen=True)
class Finding:
    """One violation. `what`: the check; `where`: the parameter, rank or row; `detail`: how, and on which ranks.
    `suspects`: the ranks that are wrong, if the check can tell them from those that are right."""

    what: str
    where: str
    detail: str
    suspects: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.where} {self.detail}"


def fail_on(findings: Sequence[Finding], *, step: int, passed: int | None, came_in: bool = False) -> None:
    """Raise `RunFailed` for findings at `step`, if any; `Suspected` if each of them tells which ranks are wrong.
    `passed`: the last step of this start that passed, if any. `came_in`: no step of this start was taken yet."""
    if not findings:
        return
    first, *others = findings
    more = [*map(str, others[:SHOWN]), *([f"{len(others) - SHOWN} more"] if others[SHOWN:] else [])]
    suspect = "since this start" if passed is None else f"after step {passed}"
    trained = f"what was trained {suspect} is wrong: remove its checkpoints, and prove the layout with fivefold verify"
    error = RunFailed(
        f"standing check {'before the first step' if came_in else f'at step {step}'}: {first}",
        fix="nothing was trained yet, and copies came in so: compare the files that the nodes read"
        if came_in
        else trained,
        more=(f"also: {'; '.join(more)}; " if more else "") + "see fivefold docs explain/checkpoints, Standing checks",
    )
    if all(finding.suspects for finding in findings):
        suspects = sorted({rank for finding in findings for rank in finding.suspects})
        raise Suspected(error.what, fix=error.fix, more=error.more, ranks=suspects)
    raise error


def seen_anywhere(mine: Mapping[Key, Value], device: torch.device) -> dict[Key, dict[int, Value]]:
    """Share what any rank saw: key -> rank -> value, sorted by key, on every rank. If empty, only one all-reduce."""
    if not all_reduce_sum(torch.tensor(len(mine), device=device)):
        return {}
    found: list[dict[Any, Any]] = [  # JSON has turned the tuples into lists
        {tuple(key): value for key, value in pairs} for pairs in plain.everywhere(list(mine.items()))
    ]
    keys = sorted({key for named in found for key in named})
    return {key: {rank: named[key] for rank, named in enumerate(found) if key in named} for key in keys}


def gather(mine: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """All-gather tensors of equal length: [ranks, elements]."""
    gathered = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(gathered), mine, group=group)
    return gathered


def listed(what: str, numbers: Iterable[int]) -> str:
    """A text such as "rank 0" or "ranks 0, 2", with at most eight numbers; "" for none."""
    given = list(numbers)
    return f"{what}{'s' if len(given) > 1 else ''} {text.listed(given, 8)}" if given else ""


def ranks_text(ranks: Iterable[int]) -> str:
    """A text such as "ranks 0, 2"."""
    return listed("rank", ranks)
