"""The reference's losses that balance experts, by hand."""

from math import log

import pytest
import torch
from torch import Tensor, nn

from fivefold.verification.reference import BalanceLosses


class Router(nn.Module):
    """Gives back the logits and the picks that it is told."""

    def forward(self, logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return logits, torch.ones_like(index, dtype=logits.dtype), index


def test_losses_of_a_row_of_two_documents() -> None:
    """Of two rows of 4 tokens the first: 3 tokens with p = 1/2, 1/2 pick expert 0, then 1 with 3/4, 1/4 picks expert 1.
    So the load is 2 (3/4 (3/2 + 3/4) + 1/4 (3/2 + 1/4)) / 4 = 1.0625; z is (3 log(2)^2 + log(4)^2) / 4. Half of both,
    as there are two rows."""
    model = nn.Sequential(Router())
    documents = [
        (torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.long)),
        (torch.tensor([[log(3), 0.0]]), torch.ones(1, 1, dtype=torch.long)),
    ]
    losses = BalanceLosses(model, ["0"], load=0.1, z=0.01)
    losses.begin([4, 4])
    with torch.no_grad():
        for document in documents:
            model[0](*document)
    added = 0.0
    for document in documents:
        model[0](*document)
        added += float(losses.of_document())
    load, z = 1.0625 / 2, 7 * log(2) ** 2 / 4 / 2
    assert losses.values.tolist() == pytest.approx([load, z])
    assert added == pytest.approx(0.1 * load + 0.01 * z)
    assert losses.of_document() == 0.0
