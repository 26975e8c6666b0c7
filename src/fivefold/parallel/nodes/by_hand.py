"""Gathers and reductions in eight bits in the reference: each weight as every rank has it, and each gradient as the sum
of what ranks send, by NumPy.

It shares only the length of a block with `levels.py`. Which rows' gradients are one sum before they are rounded comes
from the layout: `senders`.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fivefold.core.optimizers import block_length
from fivefold.models.facts import ModelFacts
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower

Senders = Mapping[str, Mapping[int, tuple[int, int]]]  # parameter -> row -> (sender, its reduction)


def sent(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a parameter, cast to `dtype`, as a gather does; or a gradient, as a reduction does."""
    cast = weight.to(dtype)
    length = block_length(weight.shape[-1]) if weight.ndim > 1 else 0
    if not length:
        return cast
    blocks = cast.cpu().to(torch.float64 if dtype == torch.float64 else torch.float32).numpy().reshape(-1, length)
    step = np.max(np.abs(blocks), axis=1, keepdims=True) / (127 + 2**-12)
    codes = np.rint(np.divide(blocks, step, out=np.zeros_like(blocks), where=step > 0))
    return torch.from_numpy(codes * step).view(weight.shape).to(dtype).to(weight.device)


def senders(facts: ModelFacts, layout: Layout, shared: Sequence[Sequence[Sequence[int]]]) -> Senders:
    """Who sends each row's part of the gradients that reductions round. `shared`: the rows of each micro batch of each
    data rank, [data rank][micro batch].

    Example: `shard4+hier2`, one row for each rank and micro batch. Rows 0 and 1 are one sum, of the first node, before
    they are rounded; rows 2 and 3 are one of the second.
    """
    found = dict[str, dict[int, tuple[int, int]]]()
    of_rows, of_stage = layout.cp * layout.tp, layout.world // layout.pp
    for pp in range(layout.pp if layout.reductions != "none" else 0):
        fsdp = lower(facts, layout, pp * of_stage).feature(FsdpPlan)
        for unit in filter(fsdp.reduces_coded, fsdp.sharded):
            together = fsdp.reduced_together(unit, len(shared[0]))
            when = {micro_batch: number for number, group in enumerate(together) for micro_batch in group}
            of_row = {
                row: (data_rank * of_rows // fsdp.summed_before(unit), when[micro_batch])
                for data_rank, batches in enumerate(shared) for micro_batch, rows in enumerate(batches) for row in rows
            }  # fmt: skip
            found |= {name: of_row for name in unit.parameters if name not in unit.frozen and fsdp.reduced_block(name)}
    return found


class Reductions:
    """Gradients of one batch in the reference, as `senders` send them."""

    def __init__(self, model: torch.nn.Module, senders: Senders) -> None:
        named = dict(model.named_parameters())
        self._of_rows = [(named[name], of_row) for name, of_row in senders.items()]
        self._names, self.unrounded = list(senders), dict[str, Tensor]()
        self._parts: list[dict[tuple[int, int], Tensor]] = [{} for _ in self._of_rows]

    def take(self, row: int) -> None:
        """Take what was added to the gradients since the last call for the part of a row."""
        for (parameter, of_row), parts in zip(self._of_rows, self._parts, strict=True):
            if parameter.grad is not None:
                own, sender = parameter.grad, of_row[row]
                parts[sender] = parts[sender] + own if sender in parts else own
                parameter.grad = None

    def end(self) -> None:
        """Round what each sender has, and add it up. `unrounded`: the sums without, by parameter."""
        for name, (parameter, _), parts in zip(self._names, self._of_rows, self._parts, strict=True):
            self.unrounded[name] = torch.stack([*parts.values()]).sum(0)
            for _, part in sorted(parts.items()):
                rounded = sent(part, part.dtype)
                parameter.grad = rounded if parameter.grad is None else parameter.grad + rounded
            parts.clear()
