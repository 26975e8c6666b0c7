"""Optimizers of someone else's making, tried on small tensors before they update parts of large ones."""

from typing import Any

import pytest
import torch
from torch import nn

from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.own_loop.optimizer import watch_optimizers, why_not_elementwise


class Scaled(torch.optim.Optimizer):
    """Each element by its gradient over a norm: of itself alone, of its row, of its column, or of the tensor."""

    def __init__(self, params: Any, lr: float = 0.1, over: str = "element") -> None:
        super().__init__(params, {"lr": lr, "over": over})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            dims = {"element": None, "row": 1, "column": 0, "tensor": (0, 1)}[group["over"]]
            for p in group["params"]:
                if p.grad is not None:
                    norm = p.grad.abs() if dims is None else p.grad.norm(dim=dims, keepdim=True)
                    p.add_(p.grad / (norm + 1e-3), alpha=-group["lr"])


@pytest.mark.parametrize("over", ["row", "column", "tensor"])
def test_what_looks_beyond_an_element_in_either_direction_is_found(over: str) -> None:
    """Rows are cut by FSDP, columns by tensor parallelism."""
    assert "depends on others" in str(why_not_elementwise(Scaled(nn.Linear(4, 4).parameters(), over=over)))


@pytest.mark.parametrize(
    "made",
    [
        torch.optim.AdamW, torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
        torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Rprop, torch.optim.SGD, Scaled,
    ],
)  # fmt: skip
def test_what_updates_each_element_by_its_own_gradient_passes(made: Any) -> None:
    assert why_not_elementwise(made(nn.Linear(4, 4).parameters(), lr=0.1)) is None


def test_every_group_is_tried_with_its_own_options() -> None:
    first, second = nn.Linear(4, 4).parameters()
    groups = [{"params": [first], "over": "element"}, {"params": [second], "over": "row"}]
    assert why_not_elementwise(Scaled(groups)) is not None


def test_a_group_that_is_added_later_is_tried_before_the_next_step() -> None:
    model = nn.Linear(4, 4)
    watch_optimizers(model, Layout.parse("tp2"), before=[])
    optimizer = Scaled([model.weight])
    optimizer.step()
    optimizer.add_param_group({"params": [model.bias], "over": "tensor"})
    with pytest.raises(UserError, match="depends on others of the tensor"):
        optimizer.step()


def test_parameters_that_were_replaced_are_refused_and_strangers_left_alone() -> None:
    before, model, stranger = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    watch_optimizers(model, Layout.parse("tp2"), before=[*before.parameters(), model.bias])
    with pytest.raises(UserError, match="build it after the model"):
        torch.optim.SGD([model.weight, before.weight]).step()
    Scaled(stranger.parameters(), over="tensor").step()
    torch.optim.SGD(model.parameters()).step()


def test_an_optimizer_that_raises_without_a_word_is_refused_with_the_type_of_its_error() -> None:
    class Silent(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise NotImplementedError

    assert "NotImplementedError" in str(why_not_elementwise(Silent(nn.Linear(4, 4).parameters(), lr=0.1)))
