"""Bugs of optimizer state in bf16 and in 8 bits."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fivefold.training.optimizers import states
from tests.verification.faults.fault import Model, fault


@fault(
    "second moments in bf16 are rounded to the nearest: what a step adds is lost",
    known="bf16 second moments without stochastic rounding stall where beta2 is near 1",
    layout="single+bf16_states",
    expects=[("second moment", r"_proj|embed|lm_head")],
)
def second_moment_to_the_nearest() -> Any:
    return patch.object(states, "_rounded", lambda values, at_random: values)


@fault(
    "each rank draws as if its rows were the first of the parameter",
    known="a random state for each rank: copies and layouts part",
    layout="shard2+bf16_states",
    expects=[("second moment", r"_proj|embed|lm_head")],
)
def random_numbers_by_rank() -> Any:
    plain = states._places

    def places(regions: Any, own: Any, whole: Any, device: torch.device) -> tuple[Tensor, Tensor]:
        here = [(place, place) for _, place in regions]
        return plain(here, own, own, device)

    return patch.object(states, "_places", places)


@fault(
    "the momentum of a block has the scale of the block before it",
    known="scales laid out along the other dimension",
    layout="tp2+8bit_states",
    expects=[("first moment|momentum", r"_proj|embed")],
    model=Model(optimizer="muon"),
)
def scale_of_another_block() -> Any:
    plain = states.KeptState.read

    def read(self: Any, state: Any, kind: str, rows: slice, dtype: torch.dtype) -> Tensor:
        scales = kind + states.SCALE
        moved = {**state, scales: states.local(state[scales]).roll(1, -1)} if scales in state else state
        return plain(self, moved, kind, rows, dtype)

    return patch.object(states.KeptState, "read", read)


@fault(
    "a second moment that is nearly zero becomes zero in 8 bits",
    known="the zero of a quantised second moment is divided by (arXiv:2309.01507, section 4)",
    layout="single+8bit_states",
    expects=[("second moment|weight, last step|losses of .*", r"")],
)
def second_moment_becomes_zero() -> Any:
    plain = states._codes
    return patch.object(states, "_codes", lambda parts, at_random: plain(parts, at_random) * (parts > 1e-4))
