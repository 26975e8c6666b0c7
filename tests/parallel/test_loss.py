"""The chunked loss against `torch`'s cross entropy on full logits, in one process and split by vocabulary.

Tolerances: fp64 is the proof. In fp32 and bf16 the plain twin, in the same precision, is compared with fp64 in the
same run; the chunked loss may be off by ten times (fp32) or twice (bf16) what the twin is.
"""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.models.forwards import head_only
from fivefold.parallel.collectives import CACHE_BYTES, MOST_BYTES, chunk_sizes
from fivefold.parallel.loss import runtime
from fivefold.parallel.loss.runtime import IGNORE, Kernels, SummedLoss, softmax_chunks
from fivefold.parallel.sharding import split_even
from fivefold.parallel.state import state_of
from fivefold.parallel.tensor.runtime import TensorParallel
from tests.parity import Case, batch_of, build, gradients
from tests.pool import run_ranks
from tests.tiers import put_off

TOKENS, HIDDEN, VOCABULARY = 29, 13, 101
SIZES = (1, 2, 3, 7, TOKENS, 64)  # chunks asked for: most do not divide 29
SCALE = 1 / 17
ALONE = TensorParallel(None, 0, 1, False, ((0, VOCABULARY),))
EAGER = Kernels()
TRACED = Kernels(lambda _, function: torch.compile(function, backend="aot_eager"))  # all but the C++
COMPILED = pytest.param(  # by Inductor, which starts processes that compile
    Kernels(lambda _, function: torch.compile(function)), id="compiled", marks=pytest.mark.full
)


@dataclass(frozen=True)
class Head:
    """A head with a bias, a logit scale and a soft cap: `cap * tanh(scale * (W h + b) / cap)`."""

    bias: bool = True
    cap: float | None = None
    logit_scale: float = 1.0

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raw = F.linear(hidden, weight, bias) * self.logit_scale
        return raw if self.cap is None else torch.tanh(raw / self.cap) * self.cap


PLAIN, CAPPED = Head(), Head(cap=1.7, logit_scale=2.3)


def inputs(dtype: torch.dtype, labels: str = "mixed") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden [1, T, D], weight, bias, labels [1, T]; values that `dtype` holds exactly."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).bfloat16().to(dtype)
        for shape in ((1, TOKENS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    )
    label = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
    if labels == "mixed":
        label[0, ::3] = IGNORE
    elif labels == "none":
        label[:] = IGNORE
    elif labels == "one":
        label[0, :11], label[0, 12:] = IGNORE, IGNORE
    elif labels == "first shard":
        label %= split_even(VOCABULARY, 4)[0][1]
    return hidden, weight, bias, label


def plain(dtype: torch.dtype, labels: str, head: Head) -> list[Tensor]:
    """Loss and gradients of hidden states, weight and bias, from full logits."""
    hidden, weight, bias, label = inputs(dtype, labels)
    leaves = [t.requires_grad_() for t in (hidden, weight, *([bias] if head.bias else []))]
    logits = head.logits(hidden, weight, bias if head.bias else None)
    precise = logits if dtype == torch.float64 else logits.float()
    loss = F.cross_entropy(precise[0], label[0], ignore_index=IGNORE, reduction="sum") * SCALE
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def chunked(
    dtype: torch.dtype, labels: str, head: Head, chunks: int, fold: TensorParallel = ALONE, kernels: Kernels = EAGER
) -> list[Tensor]:
    hidden, weight, bias, label = inputs(dtype, labels)
    rows = slice(*fold.vocabulary[fold.rank])
    weight, bias = weight[rows].clone(), bias[rows].clone()
    leaves = [t.requires_grad_() for t in (hidden, weight, *([bias] if head.bias else []))]
    sizes = chunk_sizes(TOKENS, len(weight), HIDDEN, chunks)
    scale = torch.tensor(SCALE, dtype=torch.float64)
    loss = summed(
        lambda h: head.logits(h, weight, bias if head.bias else None),
        hidden,
        label,
        leaves[1:],
        sizes,
        fold,
        scale,
        kernels=kernels,
    )
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def summed(
    logits_of: Any,
    hidden: Tensor,
    label: Tensor,
    parameters: list[Tensor],
    sizes: tuple[int, ...],
    fold: TensorParallel = ALONE,
    scale: Tensor | None = None,
    kernels: Kernels = EAGER,
) -> Tensor:
    """The summed cross entropy, as a task of the head computes it."""
    chunks = softmax_chunks(label.reshape(-1), None, None, sizes, fold, kernels)
    return SummedLoss.apply(logits_of, chunks, scale, torch.is_grad_enabled(), hidden, *parameters)


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Relative to the size of each: loss first, then gradients."""
    return [
        float((f.double() - t.double()).norm() / t.double().norm().clamp_min(1e-300))
        for f, t in zip(found, truth, strict=True)
    ]


def test_equals_full_logits(subtests: pytest.Subtests) -> None:
    heads = {"bias": PLAIN, "capped": CAPPED, "no bias": Head(bias=False)}
    both = {"eager": EAGER, "traced": TRACED}
    for chunks, (name, head), (how, kernels) in product(SIZES, heads.items(), both.items()):
        with subtests.test(chunks=chunks, head=name, kernels=how):
            found = chunked(torch.float64, "mixed", head, chunks, kernels=kernels)
            assert max(errors(found, plain(torch.float64, "mixed", head))) < 1e-13


@pytest.mark.parametrize("kernels", [pytest.param(EAGER, id="eager"), COMPILED])
@pytest.mark.parametrize("chunks", [3, put_off(1), put_off(7)])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 10), (torch.bfloat16, 2)])
def test_rounds_no_worse_than_full_logits(chunks: int, dtype: torch.dtype, factor: float, kernels: Kernels) -> None:
    truth = plain(torch.float64, "mixed", PLAIN)
    floors = errors(plain(dtype, "mixed", PLAIN), truth)
    epsilon = torch.finfo(dtype).eps  # the twin may be right by luck, in the loss above all
    off = errors(chunked(dtype, "mixed", PLAIN, chunks, kernels=kernels), truth)
    for found, floor in zip(off, floors, strict=True):
        assert found <= factor * max(floor, epsilon / 4)


def test_gradients_of_many_chunks_add_up_in_fp32() -> None:
    """In bf16, 1 more than 256 is 256."""
    sums: list[Tensor | None] = []
    for _ in range(300):
        sums = runtime._accumulate(sums, [torch.ones(1, dtype=torch.bfloat16), None])
    assert sums[1] is None and sums[0] is not None and sums[0].tolist() == [300.0]


def test_without_a_target_everything_is_zero(subtests: pytest.Subtests) -> None:
    for dtype, chunks in product([torch.float64, torch.float32, torch.bfloat16], [1, 3]):
        with subtests.test(dtype=dtype, chunks=chunks):
            for part in chunked(dtype, "none", PLAIN, chunks):
                assert (part == 0).all()


def test_one_target() -> None:
    """All chunks but one are empty; only that token has a gradient."""
    found = chunked(torch.float64, "one", PLAIN, 7)
    assert max(errors(found, plain(torch.float64, "one", PLAIN))) < 1e-13
    assert found[1][0].abs().sum(-1).nonzero().tolist() == [[11]]


def test_logits_far_from_zero_do_not_overflow() -> None:
    head = Head(logit_scale=1e4)
    found = chunked(torch.float32, "mixed", head, 3)
    assert all(part.isfinite().all() for part in found)
    assert errors(found, plain(torch.float64, "mixed", head))[0] < 1e-5


@pytest.mark.parametrize("kernels", [EAGER, TRACED], ids=["eager", "traced"])
@pytest.mark.parametrize("last", ["tanh", "slice of a tanh"])
def test_logits_that_backward_needs_are_not_overwritten(last: str, kernels: Kernels) -> None:
    """Logits become their own gradient in place, but not where the operation that made them saved them."""
    hidden, weight, bias, label = inputs(torch.float64)
    leaves = [t.requires_grad_() for t in (hidden, weight, bias)]
    cut = slice(None) if last == "tanh" else slice(0, VOCABULARY - 4)
    label[label >= VOCABULARY - 4] = IGNORE

    def logits_of(h: Tensor) -> Tensor:
        return torch.tanh(F.linear(h, weight, bias))[..., cut]

    truth = F.cross_entropy(logits_of(hidden)[0], label[0], ignore_index=IGNORE, reduction="sum")
    found = summed(logits_of, hidden, label, [weight, bias], (11, 18), kernels=kernels)
    both = [[loss.detach(), *torch.autograd.grad(loss, leaves)] for loss in (found, truth)]
    assert max(errors(*both)) < 1e-13


def test_without_gradients_only_the_sum_remains() -> None:
    hidden, weight, bias, label = inputs(torch.float64)
    with torch.no_grad():
        found = summed(lambda h: F.linear(h, weight, bias), hidden, label, [weight, bias], (11, 18))
    expected = F.cross_entropy(F.linear(hidden, weight, bias)[0], label[0], ignore_index=IGNORE, reduction="sum")
    assert float(found) == pytest.approx(float(expected), rel=1e-13) and not found.requires_grad


def test_automatic_chunks_cover_the_tokens_and_stay_small(subtests: pytest.Subtests) -> None:
    for tokens, vocabulary in [(29, 101), (1, 7), (8192, 128_256), (131_072, 257)]:
        with subtests.test(tokens=tokens, vocabulary=vocabulary):
            sizes = chunk_sizes(tokens, vocabulary, 64, None)
            assert sum(sizes) == tokens and max(sizes) * vocabulary * 4 <= MOST_BYTES
            enough = min(max(CACHE_BYTES, 4 * 64 * 4 * vocabulary), MOST_BYTES)
            assert len(sizes) == 1 or sum(sizes[:2]) * vocabulary * 4 > enough  # no more of them than needed


def test_chunks_that_are_asked_for(subtests: pytest.Subtests) -> None:
    for chunks in SIZES:
        with subtests.test(msg=str(chunks)):
            sizes = chunk_sizes(TOKENS, VOCABULARY, HIDDEN, chunks)
            assert sum(sizes) == TOKENS and len(sizes) <= chunks and len(set(sizes[:-1])) <= 1 and min(sizes) > 0


# ---- the model's own forward -----------------------------------------------------------------------------------------


class ToyBase(nn.Module):
    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        raise AssertionError("the base must not run for the logits")


class ToyCausal(nn.Module):
    """As Gemma and Granite do: a scale and a soft cap after the head, in the model's own `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = ToyBase(), nn.Linear(HIDDEN, VOCABULARY, dtype=torch.float64)

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        raw = self.out(self.body(inputs_embeds=inputs_embeds).last_hidden_state) * CAPPED.logit_scale
        return SimpleNamespace(logits=torch.tanh(raw / CAPPED.cap) * CAPPED.cap)


def test_soft_caps_and_scales_of_the_model_survive() -> None:
    model = ToyCausal()
    base = model.body
    hidden, weight, bias, label = inputs(torch.float64)
    with torch.no_grad():
        model.out.weight.copy_(weight), model.out.bias.copy_(bias)
    hidden.requires_grad_()
    with head_only(model, SimpleNamespace(base="body")) as logits_of:
        sizes = chunk_sizes(TOKENS, VOCABULARY, HIDDEN, 3)
        loss = summed(logits_of, hidden, label, list(model.out.parameters()), sizes, scale=torch.tensor(SCALE))
        found = [loss.detach(), *torch.autograd.grad(loss, [hidden, *model.out.parameters()])]
    assert max(errors(found, plain(torch.float64, "mixed", CAPPED))) < 1e-7  # `scale` is given in fp32 here
    assert errors(plain(torch.float64, "mixed", PLAIN), plain(torch.float64, "mixed", CAPPED))[0] > 1e-2
    assert model.body is base


# ---- split by vocabulary ---------------------------------------------------------------------------------------------


def on_rank(dtype: torch.dtype, labels: str, head: Head, chunks: int) -> list[Tensor]:
    size, rank = dist.get_world_size(), dist.get_rank()
    fold = TensorParallel(dist.group.WORLD, rank, size, True, split_even(VOCABULARY, size))
    return chunked(dtype, labels, head, chunks, fold)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "head"),
    [
        put_off(2, PLAIN),
        pytest.param(2, CAPPED, id="2-capped"),
        pytest.param(4, PLAIN, id="4-plain"),
        put_off(4, CAPPED),
    ],
)
@pytest.mark.parametrize("labels", ["mixed", "first shard", "one", "none"])
def test_split_by_vocabulary(world: int, head: Head, labels: str) -> None:
    """Prime vocabulary; with `first shard` and `one`, ranks whose rows no target names."""
    truth = plain(torch.float64, labels, head)
    per_rank = run_ranks(world, on_rank, torch.float64, labels, head, 3)
    assert len({float(result[0]) for result in per_rank}) == 1  # the same loss on every rank, to the last bit
    hidden_grad = sum(result[1] for result in per_rank)  # each covers its own rows; leaving the region adds them up
    found = [per_rank[0][0], hidden_grad, *(torch.cat([result[i] for result in per_rank]) for i in (2, 3))]
    if labels == "none":
        assert all((part == 0).all() for part in found)
    else:
        assert max(errors(found, truth)) < 1e-13


# ---- full logits never exist -----------------------------------------------------------------------------------------


class _Largest(TorchDispatchMode):
    """The largest number of elements of any tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def largest_tensor(case: Case) -> tuple[int, int, int]:
    """(elements of the largest tensor of forward and backward, tokens, vocabulary)."""
    import numpy as np

    model = build(case)
    rows = [[np.arange(23)] for _ in range(case.rows)]
    (batch,) = batch_of(rows, case.parsed, state_of(model).placement.data_rank)
    scale = torch.tensor(0.1, dtype=torch.float64)
    gradients(model, [batch], scale)  # FSDP's first step allocates more
    model.zero_grad()
    with _Largest() as largest:
        gradients(model, [batch], scale)
    return largest.numel, batch.input_ids.size, model.config.vocab_size


def wide(layout: str, chunks: int | None) -> Case:
    return Case(layout, rows=16, loss_chunks=chunks, overrides=(("vocab_size", 1009), ("num_hidden_layers", 1)))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [*map(put_off, ("single+mb16+fp32", "tp2+mb16+fp32+nosp")), "shard2+mb8+fp32", "tp2+mb16+fp32"]
)
def test_full_logits_never_exist(layout: str) -> None:
    case = wide(layout, 7)
    for numel, tokens, vocabulary in run_ranks(case.parsed.world, largest_tensor, case):
        assert numel < tokens * vocabulary / 4


@pytest.mark.full
def test_the_probe_sees_full_logits() -> None:
    ((numel, tokens, vocabulary),) = run_ranks(1, largest_tensor, wide("single+mb16+fp32", 1))
    assert numel >= tokens * vocabulary
    for numel, tokens, vocabulary in run_ranks(2, largest_tensor, wide("tp2+mb16+fp32", 1)):
        assert tokens * (vocabulary // 2) <= numel < tokens * vocabulary  # one rank's rows, never all of them
