"""One process in bf16 with copies of its parameters, and tensor ranks alone: bit for bit what FSDP computes there, and
parameters in their places whatever happens."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fivefold as ff
from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.parallel import lower
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.apply import parallelize
from fivefold.parallel.dtensor import local
from fivefold.parallel.dtypes import master_dtype
from fivefold.parallel.fsdp import copies
from fivefold.parallel.fsdp import spec as fsdp_plan
from fivefold.parallel.fsdp.copies import Copies
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from fivefold.training.step import train_step
from tests.parity import OPTIONS, Case, batch_of, documents, hf_config, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off


@contextmanager
def by(which: str) -> Iterator[None]:
    """`copies`, or `fsdp`."""
    with patch.object(fsdp_plan, "COPIED_BYTES", fsdp_plan.COPIED_BYTES if which == "copies" else -1):
        yield


def trained(case: Case, which: str, backend: str = "") -> dict[str, Any]:
    """Losses, norms, and last gradients and weights of three steps of four micro batches each. `backend`: blocks are
    compiled, by that one."""
    case = replace(case, rows=4)
    with by(which), patch.object(torch, "compile", partial(torch.compile, backend=backend or "inductor")):
        model = parallelize(build_meta(hf_config(case)), case.parsed, compile_blocks=bool(backend))
    state = state_of(model)
    assert state.plan.feature(FsdpPlan).is_used == (which == "fsdp")
    stand_in = which != "fsdp" and (which != "rest" or case.parsed.world > 1)
    assert bool(state.plan.feature(FsdpPlan).stood_in_for) == stand_in
    optimizer = build_optimizer(model, OPTIONS)
    steps = []
    for step in range(3):
        batch = batch_of(documents(case, step), case.parsed, 0)
        assert len(batch) > 1
        with patch.object(copies, "overwrite_unseen", wraps=copies.overwrite_unseen) as made:
            steps.append(train_step(model, optimizer, batch, learning_rate=1e-3, max_grad_norm=0.1))
        assert made.call_count == (which == "copies"), "once a step"
    assert all(parameter.dtype is master_dtype(case.parsed.precision) for parameter in model.parameters())
    weights = {name: local(each).numpy() for name, each in model.named_parameters()}
    return {"loss": [each.loss for each in steps], "norm": [float(each.grad_norm) for each in steps], **weights}


CASES = [
    Case("single+mb1", "llama", kv_heads=1),
    Case("single+mb1+full", "qwen3", tied=True),
    put_off(Case("single+mb1+selective", "gemma2")),
    Case("single+mb1", "gpt2", tied=True),
    put_off(Case("single+mb1", "mixtral")),
    put_off(Case("single+mb1+zero1", "olmoe")),
    Case("single+mb1+offload", "llama"),
    Case("tp2+mb1", "llama"),
    Case("tp2+mb1+full+nosp", "qwen3", tied=True),
    Case("tp2.ep2+mb1", "mixtral"),
    Case("tp2+mb1+selective", "gemma2"),
]


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.layout}")
def test_copies_compute_what_fsdp_computes(case: Case) -> None:
    ranks = (run_ranks(case.parsed.world, trained, case, which) for which in ("copies", "fsdp"))
    for copied, sharded in zip(*ranks, strict=True):
        assert same(copied, sharded)
        assert copied["loss"][0] != copied["loss"][2] and len(copied) > 12


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two results of `trained` are equal to the last bit."""
    return one.keys() == other.keys() and all((np.asarray(one[name]) == other[name]).all() for name in one)


def as_they_rest(layout: str, by_fsdp: bool) -> dict[str, Any]:
    with patch.object(FsdpPlan, "is_used", True) if by_fsdp else nullcontext():
        return trained(Case(layout, "llama"), "fsdp" if by_fsdp else "rest")


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("single+mb1+fp32"), "tp2+mb1+fp32", put_off("tp2+mb1+fp64+nosp")])
def test_in_the_type_that_they_rest_in_fsdp_would_change_nothing(layout: str) -> None:
    ranks = (run_ranks(Case(layout).parsed.world, as_they_rest, layout, by_fsdp) for by_fsdp in (False, True))
    assert all(same(plain, sharded) for plain, sharded in zip(*ranks, strict=True))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [("tp2", True), ("tp2+etp", False), ("tp2.ep2", False), ("dp2", True), ("pp2", True), ("cp2", True)],
)
def test_who_needs_fsdp(layout: str, expected: bool) -> None:
    """Of a model with experts: tensor ranks that all have whole experts shard those."""
    lowered = lower.lower(facts_of(build_meta(hf_config(Case("single", "mixtral")))), Case(layout).parsed, 0)
    assert lowered.feature(FsdpPlan).is_used is expected and bool(lowered.feature(FsdpPlan).copied) is not expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("single+mb1", "aot_eager"), put_off("tp2+mb1", "aot_eager"),
        put_off("single+mb1", "inductor"), put_off("tp2+mb1", "inductor"),
    ],
)  # fmt: skip
def test_compiled_blocks_take_copies(layout: str, backend: str) -> None:
    case = Case(layout, "llama")
    ranks = (run_ranks(case.parsed.world, trained, case, which, backend) for which in ("copies", "fsdp"))
    for copied, sharded in zip(*ranks, strict=True):
        assert copied["loss"] == sharded["loss"] and copied["norm"] == sharded["norm"]


class Taking(nn.Module):
    """Notes the types of all that it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        self.types = [each.dtype for each in tree_leaves((args, kwargs))]


def test_all_inputs_of_a_layer_are_cast() -> None:
    """Those by name as well, and within tuples, lists and dicts, as FSDP does; whole numbers stay as they are."""
    model, x, ids = nn.Sequential(nn.Linear(2, 2), Taking()), torch.ones(2), torch.arange(2)
    Copies(model, ["0.weight", "0.bias"], torch.bfloat16).before_layer(model[1])
    model[1](x, (x, [x]), named=x, pair=(x, x), more={"inner": [x], "ids": ids})
    assert model[1].types == [torch.bfloat16] * 7 + [torch.int64]


def test_held_copies_stay_until_they_are_put_back() -> None:
    """Also over a backward: micro batches of a step share them."""
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    own = Copies(model, ["0.weight", "0.bias"], torch.bfloat16)
    own.around_model(model, [])
    own.before_layer(model[0])
    own.hold()
    for put_back, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        if put_back:
            own.put_back()
        model(x).sum().backward()
        assert model[0].weight.dtype is dtype


# ---- a user's own loop -----------------------------------------------------------------------------------------------


def own_model(layout: str) -> tuple[Any, torch.Tensor]:
    torch.manual_seed(3)
    model = ff.parallelize(reference_model(Case("single"), torch.float32), layout, precision="bf16")
    assert model.fivefold.plan.feature(FsdpPlan).stood_in_for
    return model, torch.randint(0, 101, (2, 19))


def gradients_of(model: Any) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert all(each is not None for each in found)
    return found


def in_place(model: Any) -> bool:
    """Looked for in the modules: `model.parameters()` puts the parameters back where they are not."""
    held = [each for module in model.modules() for each in module._parameters.values() if each is not None]
    return all(type(each) is torch.nn.Parameter and each.dtype is torch.float32 for each in held)


def own_loop(layout: str) -> None:
    model, ids = own_model(layout)
    before = list(model.parameters())
    ff.generate(model, ids[0], max_new_tokens=2, temperature=0, eos_token_ids=())  # holds the copies until it is done
    assert in_place(model)
    model(input_ids=ids, labels=ids).loss.backward()
    assert in_place(model) and all(one is other for one, other in zip(before, model.parameters(), strict=True))
    once = gradients_of(model)
    assert (model(input_ids=ids).past_key_values is None) == ("+" in layout)  # what runs again appends to no cache
    model.fivefold.live(Copies).put_back()

    # Two forwards, then their backwards: the second finds its copies again.
    first, second = (model(input_ids=ids, labels=ids).loss for _ in range(2))
    second.backward()
    first.backward()
    assert in_place(model)
    assert all(torch.equal(2 * one, both) for one, both in zip(once, gradients_of(model), strict=True))

    # An update between two forwards without a backward is seen.
    with torch.no_grad():
        assert model(input_ids=ids, use_cache=True).past_key_values is not None
        loss = model(input_ids=ids, labels=ids).loss
        for parameter in model.parameters():
            parameter.mul_(1.5)
        assert model(input_ids=ids, labels=ids).loss != loss
        for parameter in model.parameters():
            parameter.div_(1.5)

    # A forward that is never followed by a backward, then an update through `.data`, which no version counter sees.
    model(input_ids=ids, labels=ids)
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    assert model(input_ids=ids, labels=ids).loss != loss

    # What is frozen later has no gradient; all hooks of the parameter are called, once each backward.
    called = list[torch.nn.Parameter]()
    norm, head = model.get_parameter("model.norm.weight"), model.get_parameter("lm_head.weight")
    norm.requires_grad_(False)
    for _ in range(2):
        head.register_post_accumulate_grad_hook(called.append)
    model(input_ids=ids, labels=ids).loss.backward()
    assert norm.grad is None and head.grad is not None and list(map(id, called)) == [id(head)] * 2


@pytest.mark.full
@pytest.mark.parametrize("layout", [*map(put_off, ("single", "single+full")), "single+selective"])
def test_an_own_loop_with_backwards_of_its_own(layout: str) -> None:
    run_ranks(1, own_loop, layout)


def other_losses(layout: str) -> None:
    """Logits beside a loss that is asked for as well: the backward of either finds the copies, as they are now."""
    model, ids = own_model(layout)
    model(input_ids=ids).logits.float().square().mean().backward()
    right = gradients_of(model)
    out = model(input_ids=ids, labels=ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
        model(input_ids=ids)  # the copies have these values
        for parameter in model.parameters():
            parameter.div_(2)
    out.logits.float().square().mean().backward()
    assert in_place(model)
    assert all(torch.equal(one, other) for one, other in zip(right, gradients_of(model), strict=True))


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("single"), "single+full"])
def test_a_loss_of_ones_own_finds_the_copies(layout: str) -> None:
    run_ranks(1, other_losses, layout)


def by_the_library(which: str) -> tuple[float, torch.Tensor, torch.Tensor]:
    """What is computed without gradients, by the library and by a call."""
    with by(which):
        model = ff.parallelize(reference_model(Case("single"), torch.float32), "single", precision="bf16")
    ids = torch.arange(38).view(2, 19)
    with torch.no_grad():
        called = model(input_ids=ids).logits
    return ff.evaluate(model, {"input_ids": ids, "labels": ids}), ff.logits(model, {"input_ids": ids}), called


@pytest.mark.full
def test_evaluation_and_logits_are_computed_with_copies() -> None:
    (copied,), (sharded,) = (run_ranks(1, by_the_library, which) for which in ("copies", "fsdp"))
    assert copied[0] == sharded[0]
    assert all(each.dtype is torch.bfloat16 and torch.equal(each, sharded[1]) for each in (*copied[1:], sharded[2]))


def hooked() -> None:
    """Hooks of a parameter see its gradient in its type, and what they return takes its place, one after the other."""
    model, ids = own_model("single")
    seen = list[torch.Tensor]()
    norm, head = model.get_parameter("model.norm.weight"), model.get_parameter("lm_head.weight")
    model(input_ids=ids, labels=ids).loss.backward()
    right = {each: each.grad.clone() for each in (norm, head)}
    model.zero_grad()
    norm.register_hook(seen.append)
    norm.register_hook(lambda gradient: gradient * 2)
    norm.register_hook(lambda gradient: gradient + 1)
    head.register_hook(torch.zeros_like).remove()
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
    assert all(torch.equal(each, right[norm]) and each.dtype is torch.float32 for each in seen) and len(seen) == 2
    assert torch.allclose(norm.grad, 2 * (2 * right[norm] + 1)) and torch.equal(head.grad, 2 * right[head])


@pytest.mark.full
def test_hooks_of_a_parameter_are_called() -> None:
    run_ranks(1, hooked)


def raising() -> None:
    model, ids = own_model("single")
    layer = model.model.layers[1]

    def interrupt(*_: Any) -> None:
        raise RuntimeError("planted")

    hook = layer.register_forward_hook(interrupt)
    with pytest.raises(RuntimeError, match="planted"):
        model(input_ids=ids, labels=ids)
    hook.remove()
    assert in_place(model)
    hook = layer.register_full_backward_hook(interrupt)
    loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="planted"):
        loss.backward()
    hook.remove()
    assert {each.dtype for _, each in model.named_parameters()} == {torch.float32}
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    assert in_place(model)
    gradients_of(model)


@pytest.mark.full
def test_a_pass_that_raises_leaves_the_parameters_in_their_places() -> None:
    run_ranks(1, raising)


def changed_in_its_place() -> None:
    """A backward raises, and its copies are left in their places; a parameter is changed by its module's attribute."""
    model = ff.parallelize(reference_model(Case("single"), torch.float32), "single", precision="bf16")
    ids = torch.randint(0, 101, (2, 19))
    held, before = list(model.parameters()), model.lm_head.weight.clone()

    def interrupt(*_: Any) -> None:
        raise RuntimeError("planted")

    def listen(_: nn.Module, args: Any, out: torch.Tensor) -> None:
        out.register_hook(interrupt)

    hook = model.model.layers[1].register_forward_hook(listen)
    with pytest.raises(RuntimeError, match="planted"):
        model(input_ids=ids, labels=ids).loss.backward()
    hook.remove()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    with pytest.raises(UserError, match=r"lm_head.weight was changed while a copy in bfloat16 .* is lost"):
        model(input_ids=ids)
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert torch.equal(model.lm_head.weight, before)
    loss = model(input_ids=ids, labels=ids).loss
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert not torch.equal(loss, model(input_ids=ids, labels=ids).loss)


@pytest.mark.full
def test_a_change_to_a_copy_is_not_lost_in_silence() -> None:
    run_ranks(1, changed_in_its_place)


def interrupted(which: str, error: type[BaseException]) -> None:
    """The parameters are in their places at once, and what they are then is what the next forward computes with."""
    with by(which):
        model = ff.parallelize(reference_model(Case("single"), torch.float32), "single", precision="bf16")
    ids = torch.randint(0, 101, (2, 19))
    held = list(model.parameters())

    def interrupt(*_: Any) -> None:
        raise error("planted")

    hook = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(error, match="planted"):
        model(input_ids=ids)
    hook.remove()
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    with pytest.raises(error, match="planted"), model.model.layers[1].register_forward_hook(interrupt):
        model(input_ids=ids)
    for parameter in held:
        parameter.data.mul_(1.5)
    found = model(input_ids=ids).logits
    list(model.parameters())
    assert torch.equal(found, model(input_ids=ids).logits)


@pytest.mark.full
@pytest.mark.parametrize("error", [put_off(RuntimeError), KeyboardInterrupt])
@pytest.mark.parametrize("which", ["copies", "fsdp"])
def test_a_forward_that_was_interrupted_leaves_nothing_old(which: str, error: type[BaseException]) -> None:
    run_ranks(1, interrupted, which, error)


class Planted(Exception):
    pass


def ended_half_way(which: str, layout: str, call: str, at: int, library: bool) -> list[float]:
    """Loss and norm of a step after one that raised in the first or second `call` of a layer; none where `at` is 0."""
    with by(which):
        model = ff.parallelize(reference_model(Case("single"), torch.float32), layout, precision="bf16")
    held, optimizer = list(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(38).view(2, 19)
    batch = {"input_ids": ids, "labels": ids}
    called = list[None]()

    def interrupt(*_: Any) -> None:
        called.append(None)
        if len(called) == at:
            raise Planted

    vars(interrupt).update(is_elementwise=True)
    layer = model.model.layers[1]
    register = layer.register_forward_hook if call == "forward" else layer.register_full_backward_hook
    if at:
        with pytest.raises(Planted), register(interrupt):
            ff.train_step(model, optimizer, [batch, batch])
    for parameter in held:
        parameter.grad = None
        parameter.data.mul_(1.5)
    if library:
        result = ff.train_step(model, optimizer, [batch, batch])
        return [result.loss, result.grad_norm]
    loss = model(**batch).loss
    loss.backward()
    return [float(loss), *(float(local(each.grad).norm()) for each in held)]


@pytest.mark.full
@pytest.mark.parametrize(("call", "at"), [put_off("forward", 2), put_off("backward", 1), ("backward", 2)])
@pytest.mark.parametrize(
    ("which", "layout", "library"),
    [
        ("copies", "single", True), put_off("copies", "single", False), put_off("fsdp", "single", True),
        put_off("fsdp", "single", False), put_off("fsdp", "single+zero1", True), ("fsdp", "single+zero1", False),
        ("fsdp", "single+zero2", True), put_off("fsdp", "single+zero2", False),
    ],
)  # fmt: skip
def test_a_step_that_ended_half_way_leaves_nothing(which: str, layout: str, call: str, at: int, library: bool) -> None:
    (found,) = run_ranks(1, ended_half_way, which, layout, call, at, library)
    assert found == never_ended(which, layout, library)


@cache
def never_ended(which: str, layout: str, library: bool) -> list[float]:
    """The same step after none that raised."""
    (right,) = run_ranks(1, ended_half_way, which, layout, "forward", 0, library)
    return right


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("shard2"), put_off("dp2"), "tp2"])
def test_a_step_that_ended_half_way_leaves_nothing_on_two_ranks(layout: str) -> None:
    found, right = (run_ranks(2, ended_half_way, "copies", layout, "backward", end, True) for end in (2, 0))
    assert found == right


def updated_after_backward(layout: str) -> None:
    """A backward of the user's own, after a step of the library's that left FSDP to keep what is gathered."""
    with by("fsdp"):
        model = ff.parallelize(reference_model(Case("single"), torch.float32), layout, precision="bf16")
    optimizer, ids = torch.optim.SGD(model.parameters(), lr=0.1), torch.arange(38).view(2, 19)
    ff.train_step(model, optimizer, {"input_ids": ids, "labels": ids})
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    found = model(input_ids=ids).logits
    list(model.parameters())
    assert torch.equal(found, model(input_ids=ids).logits)


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("single"), put_off("single+zero1"), "single+zero2"])
def test_an_update_after_a_backward_is_seen(layout: str) -> None:
    run_ranks(1, updated_after_backward, layout)


def frozen_since() -> None:
    model, ids = own_model("single")
    loss = model(input_ids=ids, labels=ids).loss
    norm = model.get_parameter("model.norm.weight").requires_grad_(False)
    loss.backward()
    assert norm.grad is None and model.get_parameter("lm_head.weight").grad is not None


@pytest.mark.full
def test_what_is_frozen_between_forward_and_backward_has_no_gradient() -> None:
    run_ranks(1, frozen_since)


def given_embeddings(which: str) -> list[torch.Tensor]:
    """GPT-2 adds its positions before the first layer."""
    with by(which):
        model = ff.parallelize(reference_model(Case("single", "gpt2"), torch.float32), "single", precision="bf16")
    embedded = torch.randn(2, 19, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
    out = model(inputs_embeds=embedded, labels=torch.zeros(2, 19, dtype=torch.long))
    out.loss.backward()
    return [out.logits.detach(), embedded.grad]


@pytest.mark.full
def test_inputs_of_the_model_are_cast() -> None:
    (copied,), (sharded,) = (run_ranks(1, given_embeddings, which) for which in ("copies", "fsdp"))
    assert all(map(torch.equal, copied, sharded))


def partly_frozen(which: str, part: str) -> list[torch.Tensor]:
    plain = reference_model(Case("single", "gpt2", tied=True), torch.float32)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(part not in name)
    with by(which):
        model = ff.parallelize(plain, "single", precision="bf16")
    ids = torch.arange(38).view(2, 19)
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    assert bool(model.fivefold.plan.feature(FsdpPlan).stood_in_for) == (which != "fsdp")
    assert any(not parameter.requires_grad for parameter in model.parameters())
    gradients = [local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    return [out.logits.detach(), *gradients]


@pytest.mark.full
@pytest.mark.parametrize("part", ["wte", *map(put_off, (".h.0.", "ln_"))])
def test_what_is_frozen_is_computed_with_in_copies_too(part: str) -> None:
    """Where nothing is beside it: it rests in fp32."""
    (copied,), (sharded,) = (run_ranks(1, partly_frozen, which, part) for which in ("copies", "fsdp"))
    assert len(copied) == len(sharded) and all(map(torch.equal, copied, sharded))


def test_large_copies_are_left_to_fsdp() -> None:
    """Copies are of what rests in another type, and stay from the first forward to the update."""
    facts, layout = facts_of(build_meta(hf_config(Case("single")))), Case("single").parsed
    head = replace(facts.parameters["lm_head.weight"], is_trained=False)
    frozen = replace(facts, parameters={**facts.parameters, "lm_head.weight": head})
    for each in (facts, frozen, adapted(facts, Lora(rank=2))):
        copied = {name: own for name, own in each.parameters.items() if own.is_trained or not each.has_adapter}
        size = 2 * sum(own.size for own in copied.values())
        for most, expected in ((size, True), (size - 1, False)):
            with patch.object(fsdp_plan, "COPIED_BYTES", most):
                assert fsdp_plan.computes_in_copies(each, layout) is expected
        lowered = lower.lower(each, layout, 0)
        assert set(lowered.feature(FsdpPlan).copied) == copied.keys()
        moments = step_bytes(lowered, lowered.step_shape(1, 64, 1)).moments
        assert {found["gathered parameters"] for found in moments.values()} == {size}
