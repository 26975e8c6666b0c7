"""Optimizers of someone else's making, tried on small tensors before they update parts of large ones."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fivefold.core.errors import UserError
from fivefold.own_loop.optimizer import watch_optimizers
from fivefold.parallel.layout import Layout
from fivefold.parallel.parts import keeps_places
from fivefold.training.optimizers.trial import check_update, why_not
from tests.api.optimizers import Capped, Clipped, Compiled, Lamb, Late, Lion, Lookahead, Normed, Own, Prodigy, Spiked


class Scaled(torch.optim.Optimizer):
    """Each element by its gradient over a norm: of itself alone, of its row, of its column, or of the tensor."""

    def __init__(self, params: Any, lr: float = 0.1, over: str = "element") -> None:
        super().__init__(params, {"lr": lr, "over": over})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    dims: Any = {"element": None, "row": 1, "column": 0, "tensor": tuple(range(p.ndim))}[group["over"]]
                    norm = p.grad.abs() if dims is None else p.grad.norm(dim=dims, keepdim=True)
                    p.add_(p.grad / (norm + 1e-3), alpha=-group["lr"])


def parameters(**options: Any) -> list[nn.Parameter]:
    return list(nn.Linear(4, 4, **options).parameters())


def test_looking_at_operators_leaves_them_as_they_are() -> None:
    """DTensor finds its rules by the object: another one of the same operator has none."""
    before = [getattr(torch.ops.aten.mul, each) for each in torch.ops.aten.mul.overloads()]
    keeps_places.cache_clear()
    assert keeps_places(torch.ops.aten._foreach_mul_.Scalar)
    assert all(each is getattr(torch.ops.aten.mul, each._overloadname) for each in before)


@pytest.mark.parametrize("over", ["row", "column", "tensor"])
def test_what_looks_beyond_an_element_in_either_direction_is_found(over: str) -> None:
    """Rows are cut by FSDP, columns by tensor parallelism."""
    found = why_not(Scaled(parameters(bias=False), over=over), "parts")
    assert found and "depends on others of the tensor" in found[0] and "dp, pp" in found[1]


ELEMENTWISE = (
    torch.optim.AdamW, torch.optim.Adam, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.Rprop,
    torch.optim.SGD, Scaled, Lion, Lookahead,
    partial(torch.optim.AdamW, fused=True, weight_decay=0.1), partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1), partial(torch.optim.AdamW, eps=1e-15),
    partial(torch.optim.AdamW, capturable=True), partial(torch.optim.Adam, differentiable=True),
    partial(torch.optim.RMSprop, centered=True, momentum=0.9), partial(torch.optim.NAdam, decoupled_weight_decay=True),
)  # fmt: skip


@pytest.mark.parametrize("made", ELEMENTWISE)
def test_what_updates_each_element_by_its_own_gradient_passes(made: Any) -> None:
    assert why_not(made(parameters(), lr=0.1), "parts") is None


@pytest.mark.parametrize("rate", [10.0, 1e-6, 0.0])
def test_it_passes_at_any_rate(rate: float) -> None:
    assert why_not(torch.optim.AdamW(parameters(), lr=rate), "parts") is None


def test_what_is_compiled_inside_of_a_step_is_tried_too() -> None:
    assert why_not(Compiled(parameters()), "parts") is None


PER_TENSOR = (
    torch.optim.Adafactor, Lamb, Normed, partial(Normed, begins=60), partial(Normed, every=10),
    partial(Normed, least=128), Late,
)  # fmt: skip


@pytest.mark.parametrize("made", PER_TENSOR)
def test_what_looks_at_a_tensor_is_right_in_a_pipeline_alone(made: Any) -> None:
    """From the first step on, after a warm-up, every tenth step, of large tensors alone, and in a thousand steps."""
    found = why_not(made(parameters()), "parts")
    assert found and re.search("others of the tensor|takes linalg_vector_norm of", found[0]) and "dp, pp" in found[1]
    assert why_not(made(parameters()), "tensors") is None


@pytest.mark.parametrize(
    "by",
    [
        lambda grad: torch.quantile(grad.abs(), 0.9), lambda grad: grad.sort(-1).values, lambda grad: grad.cumsum(0),
        lambda grad: grad.softmax(-1), lambda grad: torch.fft.fft(grad).real, lambda grad: grad.roll(1),
        lambda grad: torch.nn.functional.normalize(grad, dim=-1), torch.max,
        lambda grad: torch._foreach_max([grad])[0],
    ],
)  # fmt: skip
def test_what_may_look_at_a_tensor_later_is_refused_too(by: Any) -> None:
    """In any way that gives a number of several others, of which there are more than anyone lists."""
    late = type("LateBy", (Late,), {"__init__": lambda self, params, lr=0.01: Late.__init__(self, params, lr, by)})
    found = why_not(late(parameters()), "parts")
    assert found and "which an update may depend on later" in found[0]


def test_what_looks_at_large_tensors_alone_is_seen_in_the_sizes_of_the_model() -> None:
    large = [nn.Parameter(torch.zeros(700, 600))]
    found = why_not(Normed(large, least=600), "parts")
    assert found and "takes linalg_vector_norm of" in found[0]
    assert why_not(Normed(large, least=601), "parts") is None
    assert why_not(Normed(large, least=600, begins=1), "parts") is not None  # a first step may only make its state
    assert why_not(Normed([{"params": parameters()}, {"params": large}], least=600), "parts") is not None


def test_what_looks_at_vectors_alone_is_seen() -> None:
    found = why_not(Late([nn.Parameter(torch.zeros(8))]), "parts")
    assert found and "takes linalg_vector_norm of" in found[0]


def test_what_torch_does_not_see_differs_on_parts() -> None:
    """Parts of a tensor have gradients of different sizes, or no element would be five times their mean."""
    found = why_not(Capped(parameters(), lr=1e-11), "parts")
    assert found and "depends on others of the tensor" in found[0]
    assert why_not(Capped(parameters()), "tensors") is None


def test_what_changes_no_small_tensor_cannot_be_tried() -> None:
    class Large(Own):
        def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
            if p.numel() > 100_000:
                p.sub_(grad)

    found = why_not(Large(parameters()), "tensors")
    assert found and "change nothing in small tensors" in found[0]


def test_muon_looks_at_matrices() -> None:
    found = why_not(torch.optim.Muon(parameters(bias=False)), "parts")
    assert found and "others of the tensor" in found[0] and "optimizer.name=muon" in found[1]


@pytest.mark.parametrize(
    "made",
    [Prodigy, partial(Clipped, clip=1.0), partial(Clipped, clip=1.0, waits=60), partial(Clipped, clip=100.0), Spiked],
)
@pytest.mark.parametrize("ranks_hold", ["tensors", "parts"])
def test_what_adds_up_over_all_parameters_is_right_in_copies_alone(made: Any, ranks_hold: Any) -> None:
    found = why_not(made(parameters()), ranks_hold)
    assert found and "depends on other tensors" in found[0] and "(dp)" in found[1] and "pp" not in found[1]


def test_a_warm_up_hides_nothing() -> None:
    """The first of its rates is nearly none, and the step of Prodigy would not grow."""
    optimizer = Prodigy(parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 1000)
    assert optimizer.param_groups[0]["lr"] == 0.0 and why_not(optimizer, "parts") is not None


def test_every_group_is_tried_with_its_own_options_and_all_together() -> None:
    first, second = parameters()
    groups = [{"params": [first], "over": "element"}, {"params": [second], "over": "tensor"}]
    assert why_not(Scaled(groups), "parts") is not None
    assert why_not(Prodigy([{"params": [first]}, {"params": [second]}]), "tensors") is not None


def test_a_trial_leaves_random_numbers_and_the_optimizer_as_they_were() -> None:
    class Counted(Own):
        def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
            group["taken"] += torch.rand(())
            p.sub_(grad)

    torch.manual_seed(3)
    before, optimizer = torch.get_rng_state(), Counted(parameters(), taken=torch.zeros(()))
    own = [p.clone() for p in optimizer.param_groups[0]["params"]]
    torch.set_rng_state(before)
    why_not(optimizer, "parts")
    assert torch.equal(torch.get_rng_state(), before) and not optimizer.state
    assert not optimizer.param_groups[0]["taken"]
    assert all(map(torch.equal, own, optimizer.param_groups[0]["params"]))


class FirstCounts(Own):
    """SGD with a warm-up, which counts in the state of the first of all parameters."""

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        head = self.param_groups[0]["params"][0]
        first = self.state[head]
        first["steps"] = first.get("steps", 0) + (p is head)
        p.sub_(grad, alpha=group["lr"] * (1 - 0.9 ** first["steps"]))


class Hidden(Own):
    """SGD by the norm of a tensor if an option says so, of which neither groups nor attributes have the name."""

    def __init__(self, params: Any, lr: float = 0.01, by: str = "element") -> None:
        super().__init__(params, lr)
        self.settings = {"of": by}

    def update(self, p: Any, grad: Any, state: Any, group: Any) -> None:
        p.sub_(grad / grad.norm() if self.settings["of"] == "tensor" else grad, alpha=group["lr"])


def test_a_count_of_the_first_parameter_is_one_of_other_tensors() -> None:
    """A rank goes on with the state of its own tensors, of which none may be the first."""
    found = why_not(FirstCounts(parameters()), "tensors")
    assert found and "depends on other tensors" in found[0]


def test_an_option_under_another_name_is_tried() -> None:
    assert why_not(Hidden(parameters()), "parts") is None
    found = why_not(Hidden(parameters(), by="tensor"), "parts")
    assert found and "others of the tensor" in found[0]


def test_layouts_say_what_ranks_hold() -> None:
    """Copies have all, pipelines some tensors, the others parts."""
    for layout, wrong in (("dp2", ()), ("pp2", (Prodigy,)), ("dp2.pp2", (Prodigy,)), ("tp2", (Prodigy, Lamb)),
                          ("shard2.pp2", (Prodigy, Lamb))):  # fmt: skip
        for made in (Prodigy, Lamb, torch.optim.SGD):
            model = nn.Linear(4, 4)
            watch_optimizers(model, Layout.parse(layout), before=[])
            optimizer = made(model.parameters())
            if made in wrong:
                with pytest.raises(UserError, match=f"{made.__name__} under {layout}"):
                    optimizer.step()
            else:
                optimizer.step()


def test_what_is_in_host_memory_is_updated_part_after_part() -> None:
    check_update(Lamb(parameters()), Layout.parse("dp2+offload_optimizer"))
    check_update(Prodigy(parameters()), Layout.parse("dp2"))
    for word in ("offload_optimizer", "offload_parameters"):
        with pytest.raises(UserError, match="some of the tensors are updated at a time"):
            check_update(Prodigy(parameters()), Layout.parse(f"single+{word}"))


class Together(torch.optim.SGD):
    """SGD of a whole group at once, which may be empty in a part."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            torch._foreach_add_(group["params"], [p.grad for p in group["params"]], alpha=-group["lr"])


def test_a_part_may_have_no_parameter_of_a_group() -> None:
    one, two = parameters()
    groups = [{"params": [one]}, {"params": [two]}]
    check_update(Together(groups), Layout.parse("shard2"))
    check_update(torch.optim.AdamW(groups, foreach=True), Layout.parse("single+offload_optimizer"))
    with pytest.raises(UserError, match="its step fails where a group has no parameters"):
        check_update(Together(groups), Layout.parse("single+offload_optimizer"))


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


@pytest.mark.parametrize("made", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_what_cannot_be_tried_is_refused(made: Any) -> None:
    found = why_not(made(parameters()), "parts")
    assert found and "cannot be tried" in found[0]


def test_an_optimizer_that_raises_without_a_word_is_refused_with_the_type_of_its_error() -> None:
    class Silent(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise NotImplementedError

    assert "NotImplementedError" in str(why_not(Silent(parameters(), lr=0.1), "parts"))
