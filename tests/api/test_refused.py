"""What cannot be right is refused, with the line to write instead, and leaves the model as it was."""

import pytest
from torch import nn

import fivefold as ff
from tests.api import refused
from tests.api.loop import build
from tests.pool import run_ranks
from tests.tiers import put_off


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        put_off("shard2", "llama"),
        put_off("dp2", "llama"),
        ("tp2", "llama"),
        put_off("cp2", "llama"),
        ("pp2", "llama"),
        ("shard2.ep2", "moe"),
    ],
)
def test_a_plain_backward_is_refused_and_the_next_step_is_right(layout: str, name: str) -> None:
    for found, copies in run_ranks(2, refused.plain_calls, layout, name):
        assert found == pytest.approx(refused.expected_step(name, copies), rel=1e-10)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [("shard2", 2), ("tp2", 2), *(put_off(*each) for each in (("dp2", 2), ("cp2", 2), ("pp2", 2), ("dp2.shard2", 4)))],
)
def test_a_number_of_a_part_is_refused(layout: str, ranks: int) -> None:
    assert all(run_ranks(ranks, refused.numbers, layout))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shard2", "pp2", *map(put_off, ("dp2", "tp2", "cp2"))])
def test_a_change_by_hand_is_that_of_the_whole_or_refused(layout: str) -> None:
    assert all(run_ranks(2, refused.edits, layout))


@pytest.mark.full
def test_methods_that_would_give_parts_for_wholes_are_refused() -> None:
    assert all(run_ranks(2, refused.methods, "tp2"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "precision"), [("single", "bf16"), put_off("shard2", "fp32"), ("tp2", "fp32"), put_off("dp2", "bf16")]
)
def test_what_takes_the_place_of_a_parameter_is_refused(layout: str, precision: str) -> None:
    assert all(run_ranks(1 if layout == "single" else 2, refused.other_parameters, layout, precision))


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("shard2"), "tp2"])
def test_wrong_batches_are_refused_on_every_rank(layout: str) -> None:
    assert all(run_ranks(2, refused.batches, layout))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["shard2", "tp2", put_off("dp2")])
def test_optimizers_that_would_be_wrong_are_refused(layout: str) -> None:
    assert all(run_ranks(2, refused.optimizers, layout))


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp2", put_off("tp2")])
def test_ranks_that_built_different_models_are_told(layout: str) -> None:
    assert all(run_ranks(2, refused.other_weights, layout))


@pytest.mark.full
def test_a_budget_of_recompute_is_told_the_step() -> None:
    assert all(run_ranks(2, refused.budgets))


@pytest.mark.full
def test_one_process_needs_none_of_it() -> None:
    assert all(run_ranks(1, refused.one_process))


@pytest.mark.full
def test_what_is_called_around_the_whole_model_is_not_left_out() -> None:
    assert all(run_ranks(1, refused.called_around))


@pytest.mark.full
@pytest.mark.parametrize("layout", [*map(put_off, ("single", "dp2", "pp2")), "shard2", "tp2", "cp2"])
def test_what_takes_a_ranks_tokens_for_all_is_refused(layout: str) -> None:
    assert all(run_ranks(1 if layout == "single" else 2, refused.inside, layout))


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_gradient_hook_that_would_be_lost_is_refused(register: str) -> None:
    model = build("llama")
    getattr(model.get_parameter("model.norm.weight"), register)(lambda _: None)
    with pytest.raises(ff.UserError, match=r"model\.norm\.weight has a hook for its gradient, which would be lost"):
        ff.parallelize(model, "single")


def test_what_is_no_model_is_refused_before_a_group_is_made() -> None:
    model = build("llama")
    with pytest.raises(ff.UserError, match="no wrapper around it"):
        ff.parallelize(nn.Sequential(model), "single")
    with pytest.raises(ff.UserError, match="names a precision"):
        ff.parallelize(model, "single+fp32", precision="bf16")
    model.gradient_checkpointing_enable()
    with pytest.raises(ff.UserError, match=r"\+full"):
        ff.parallelize(model, "single")


@pytest.mark.full
def test_a_loss_of_uneven_experts_that_would_be_left_out_is_refused() -> None:
    """JetMoE has another name for its coefficient, and its routers give too little."""
    assert run_ranks(1, refused.jetmoe) == [True]
