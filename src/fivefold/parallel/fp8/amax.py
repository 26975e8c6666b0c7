"""Delayed scaling of fp8: the largest values ("amax") of the last steps give the scales of the next one.

A tensor's scale follows from the largest value that it had in the last `steps` steps. It is one number through a step:
for all micro batches, in a forward that recompute repeats, and in evaluation. So ranks need not agree before each
product. They agree once a step, on the largest values of all linears of the model in one all-reduce over the world.
Every rank has the same history under any layout, so a checkpoint of it continues under any other.

Example, 2 linears and 16 steps: `history` is [16, 2, 3], for inputs, weights and gradients of outputs. An input that
was at most 3.0 in these steps is multiplied by 448 / 3 and rounded; values above 3.0 now are cut to 448.

Until a first step has ended there is no history, and every tensor is scaled by itself, as in `tensorwise`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.parallel.fp8.recipes import KINDS, Operand


class AmaxHistory:
    """History of the linears `names` of the whole model, in fp64 on `device`. Without names it does nothing."""

    def __init__(self, names: Sequence[str], steps: int, device: torch.device) -> None:
        self.names, self.steps, self.device = tuple(names), steps, device
        self.history = torch.zeros(0, len(self.names), len(KINDS), dtype=torch.float64, device=device)
        self.is_first = True  # the last gradients were computed without a history
        self._now = self.history.new_zeros(len(self.names), len(KINDS))  # of the current step
        self._is_open = False
        self._largest: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the gradients of a step in this context, over all its micro batches; afterwards ranks agree."""
        if not self.names:
            yield
            return
        self._now.zero_()
        self._is_open, self.is_first = True, self._largest is None
        try:
            yield
        finally:
            self._is_open = False
        self._now.nan_to_num_(nan=0.0, posinf=0.0)  # such values say nothing about the next step
        dist.all_reduce(self._now, dist.ReduceOp.MAX)

    def note(self, rows: Sequence[int], operand: Operand, largest: Tensor) -> None:
        """Note an operand's largest value in this micro batch, for the linears `rows`, by their places in `names`."""
        if self._is_open:
            own = self._now[rows[0] : rows[-1] + 1, KINDS.index(operand)]
            own.copy_(torch.maximum(own, largest.to(own.dtype)))

    def of_weights(self, largest: Tensor) -> Tensor | None:
        """Return the largest values of all weights in the last steps; None without a history. Notes the values of now,
        [len(names)], of the weights that are here. NaN if the value of now is not finite: a cast would hide it."""
        if self._is_open:
            self._now[:, KINDS.index("weight")].copy_(torch.maximum(self._now[:, KINDS.index("weight")], largest))
        return None if self._largest is None else self._largest[:, KINDS.index("weight")] + 0.0 * largest

    def largest(self, row: int, operand: Operand) -> Tensor | None:
        """Largest value of the last steps, a scalar; None without a history; 1 for a tensor that was all zeros."""
        return None if self._largest is None else self._largest[row, KINDS.index(operand)]

    def end_step(self) -> None:
        """Add the values of the step to the history, when the weights have been updated. A skipped step leaves it as it
        was."""
        if self.names:
            self._keep(torch.cat([self.history, self._now[None]])[-self.steps :])

    def _keep(self, history: Tensor) -> None:
        self.history = history
        largest = history.amax(dim=0)
        self._largest = torch.where(largest > 0, largest, 1.0)

    # ---- in checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: linear -> [steps, 3]. Empty without a history."""
        return dict(zip(self.names, self.history.transpose(0, 1).tolist(), strict=True)) if len(self.history) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint. If it lacks a linear (it did not train in fp8, or in fewer layers), no history is
        left: the next step begins one."""
        self.history, self._largest = self.history[:0], None
        if self.names and all(name in state for name in self.names):
            each = [state[name][-self.steps :] for name in self.names]
            self._keep(torch.tensor(each, dtype=torch.float64, device=self._now.device).transpose(0, 1).contiguous())
