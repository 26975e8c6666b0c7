"""Delayed scaling of fp8: the largest values ("amax") of the last steps, of which those of the next step are scaled.

The scale of a tensor follows from the largest value that it had in the last `steps` steps, and is one number through a
step: for all micro batches, in a forward that recompute repeats, and in evaluation. So ranks need not agree before
each product. They agree once a step, on the largest values of all linears of the model in one all-reduce over the
world: whatever the layout, every rank has the same history, and any checkpoint of it continues under any other.

Example, 2 linears and 16 steps: `history` is [16, 2, 3], for inputs, weights and gradients of outputs. An input that
was at most 3.0 in these steps is multiplied by 448 / 3 and rounded; what is larger than 3.0 now is cut to 448.

Until a first step has ended there is no history, and every tensor is scaled by itself, as in `tensorwise`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.fp8 import KINDS, Operand


class AmaxHistory:
    """Of the linears `names` of the whole model, in fp64 on `device`. Without names it does nothing."""

    def __init__(self, names: Sequence[str], steps: int, device: torch.device) -> None:
        self.names, self.steps, self.device = tuple(names), steps, device
        self.history = torch.zeros(0, len(self.names), len(KINDS), dtype=torch.float64, device=device)
        self.is_first = True  # whether the gradients computed last were computed without a history
        self._now = self.history.new_zeros(len(self.names), len(KINDS))  # of the step under way
        self._is_open = False
        self._largest: Tensor | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, the gradients of a step are computed, of all its micro batches; afterwards ranks agree."""
        if not self.names:
            yield
            return
        self._now.zero_()
        self._is_open, self.is_first = True, self._largest is None
        try:
            yield
        finally:
            self._is_open = False
        self._now.nan_to_num_(nan=0.0, posinf=0.0)  # says nothing of the next step
        dist.all_reduce(self._now, dist.ReduceOp.MAX)

    def note(self, rows: Sequence[int], operand: Operand, largest: Tensor) -> None:
        """The largest value of an operand in this micro batch: of the linears `rows`, by their places in `names`."""
        if self._is_open:
            own = self._now[rows[0] : rows[-1] + 1, KINDS.index(operand)]
            own.copy_(torch.maximum(own, largest.to(own.dtype)))

    def of_weights(self, largest: Tensor) -> Tensor | None:
        """Of all weights at once, by the values [len(names)] of those that are here, which are noted: the largest of
        the last steps; None while there is no history. NaN where that of now is not finite: a cast would hide it."""
        if self._is_open:
            self._now[:, KINDS.index("weight")].copy_(torch.maximum(self._now[:, KINDS.index("weight")], largest))
        return None if self._largest is None else self._largest[:, KINDS.index("weight")] + 0.0 * largest

    def largest(self, row: int, operand: Operand) -> Tensor | None:
        """Of the last steps, a scalar; None while there is no history. Of a tensor that was all zeros, 1."""
        return None if self._largest is None else self._largest[row, KINDS.index(operand)]

    def end_step(self) -> None:
        """The values of the step become part of the history: when the weights have been updated. A step that is skipped
        leaves it as it was."""
        if self.names:
            self._keep(torch.cat([self.history, self._now[None]])[-self.steps :])

    def _keep(self, history: Tensor) -> None:
        self.history = history
        largest = history.amax(dim=0)
        self._largest = torch.where(largest > 0, largest, 1.0)

    # ---- in checkpoints ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: linear -> [steps, 3]. Empty without a history."""
        return dict(zip(self.names, self.history.transpose(0, 1).tolist(), strict=True)) if len(self.history) else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what a checkpoint keeps. One that has none of a linear (it did not train in fp8, or in fewer
        layers) leaves no history: the next step begins one."""
        self.history, self._largest = self.history[:0], None
        if self.names and all(name in state for name in self.names):
            each = [state[name][-self.steps :] for name in self.names]
            self._keep(torch.tensor(each, dtype=torch.float64, device=self._now.device).transpose(0, 1).contiguous())
