"""Muon over the matrices of the blocks, AdamW over everything else (embeddings, head, norms, biases).

The momentum of a matrix is orthogonalised as a whole by five steps of a Newton-Schulz iteration (Jordan 2024,
https://kellerjordan.github.io/posts/muon). It is scaled so that the update has the size of AdamW's (0.2 times the root
of the longer side: "Muon is Scalable for LLM Training", arXiv:2502.16982): one learning rate and one weight decay serve
both. The matrix is the Hugging Face parameter, whatever the layout. Momentum is sharded like the parameter, and
gathered for the iteration on one rank (`parallel/matrices/runtime.py`). The formulas are those of `torch.optim.Muon`,
with which the tests compare; its iteration is always in bf16, this one in the model's compute dtype.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.config import OptimizerSection
from fivefold.core.optimizers import OPTIMIZERS
from fivefold.parallel.dtensor import local
from fivefold.parallel.dtypes import COMPUTE_DTYPES
from fivefold.parallel.matrices.runtime import FullMatrices
from fivefold.parallel.offload.runtime import Offload
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import UNTOUCHED, Unmoved, UpdateRule, Weights, adamw
from fivefold.training.optimizers.states import kept_states, rows_of

QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at zero: singular values end between 0.7 and 1.2
MOMENTUM = "momentum_buffer"  # its kind of state
EPS = 1e-7  # lower bound of the norm in the division


class _MuonRule(UpdateRule):
    facts = OPTIMIZERS["muon"]

    def build(self, model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
        assert options.momentum is not None and options.ns_steps is not None, "the run file sets them"
        names = state_of(model).placement.block_matrices
        return Muon(
            model, names, adamw.RULE.build(model, options, but=names), learning_rate=options.learning_rate,
            weight_decay=options.weight_decay, momentum=options.momentum, ns_steps=options.ns_steps,
        )  # fmt: skip

    def reference(self, weights: Weights, options: OptimizerSection, rate: float) -> list[torch.optim.Optimizer]:
        muon = torch.optim.Muon(
            weights.blocks, lr=rate, weight_decay=options.weight_decay, momentum=options.momentum or 0.95,
            nesterov=True, ns_steps=options.ns_steps or 5, adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        return [muon, *adamw.RULE.reference(replace(weights, blocks=()), options, rate)]

    def overdue(self, part: Unmoved) -> str | None:
        if "ns_steps" not in part.group:
            return adamw.RULE.overdue(part)
        return UNTOUCHED if _shows(part) else None


RULE = _MuonRule()


class Muon(torch.optim.Optimizer):
    """Muon over the parameters `names` of `model` and `adamw` over the others, as one optimizer.

    All ranks call `step` together. State of a matrix: `momentum_buffer`, in its shape. If states are offloaded to host
    memory, they are moved matrix by matrix.
    """

    walks_its_states = True

    def __init__(
        self, model: nn.Module, names: Sequence[str], adamw: torch.optim.AdamW, *, learning_rate: float,
        weight_decay: float, momentum: float, ns_steps: int,
    ) -> None:  # fmt: skip
        parameters = dict(model.named_parameters())
        self._matrices = {name: parameters[name] for name in names if name in parameters}  # on this pipeline rank
        options = {"lr": learning_rate, "weight_decay": weight_decay, "momentum": momentum, "ns_steps": ns_steps}
        super().__init__([{"params": list(self._matrices.values())}], options)
        self._adamw, self._own = adamw, self.param_groups[0]
        self.param_groups.extend(adamw.param_groups)  # the same dicts: a learning rate set here is set there
        self.state = adamw.state
        state = state_of(model)
        self._device = next(model.parameters()).device
        self._dtype = COMPUTE_DTYPES[state.plan.layout.precision]
        self._whole = FullMatrices(state.plan, names)
        self._states = state.live(Offload).states
        self.kept = kept_states(model)
        self._shapes = {name: state.placement.shards[name].shape for name in names}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._states.update(self._adamw)
        own = (self._matrices[name] for name in self._whole.names if name in self._matrices)
        self._there = self._states.walk(self, ([matrix] for matrix in own))
        rate, decay = self._own["lr"], self._own["weight_decay"]
        work = partial(orthogonal, steps=self._own["ns_steps"])
        for name, update in self._whole.map(self._advance, work):
            parameter = self._matrices.get(name)
            if parameter is not None and parameter.grad is not None:
                with self._states.there(parameter) as weight:
                    weight.mul_(1 - rate * decay)
                    weight.add_(update, alpha=-rate * 0.2 * max(self._shapes[name]) ** 0.5)
        next(self._there, None)  # moves the last momentum back

    def _advance(self, name: str) -> Tensor:
        """Update the momentum, and return this rank's part of the matrix to orthogonalise (Nesterov's look-ahead)."""
        parameter, momentum = self._matrices.get(name), self._own["momentum"]
        if parameter is None:  # another pipeline rank's
            return torch.empty(0, dtype=self._dtype, device=self._device)
        next(self._there)  # moves its momentum to the device
        if parameter.grad is None:
            return torch.zeros_like(local(parameter), dtype=self._dtype)
        state, kept = self.state[parameter], self.kept[parameter]
        if MOMENTUM not in state:
            state |= kept.new(parameter, MOMENTUM)
        gradient = rows_of(local(parameter.grad))
        update = torch.empty_like(gradient, dtype=self._dtype)
        for rows in kept.pieces(parameter):
            buffer = kept.read(state, MOMENTUM, rows, gradient.dtype)
            buffer.lerp_(gradient[rows], 1 - momentum)
            update[rows] = gradient[rows].lerp(buffer, momentum)
            kept.write(state, MOMENTUM, rows, buffer)
        return update.view_as(local(parameter))


def orthogonal(matrix: Tensor, *, steps: int) -> Tensor:
    """Bring the singular values of `matrix` near 1, computing in its own dtype."""
    a, b, c = QUINTIC
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _shows(part: Unmoved) -> bool:
    """True if the update of a matrix exceeds the rounding of this rank's weights in its largest element.

    The norm of an orthogonalised matrix is at least 1/2 (its largest singular value ends near 1), so its root mean
    square is at least 1/2 over the root of the number of elements.
    """
    at_least = 0.2 * sqrt(max(part.shape)) * 0.5 / sqrt(prod(part.shape))
    smallest = 16 * torch.finfo(part.weight.dtype).eps * float(part.weight.abs().max())
    return float(part.group["lr"]) * at_least > smallest
