"""What a function of the user's own is given and what is refused of it, in one process without a model."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fivefold.config import ObjectiveSection
from fivefold.core.errors import UserError
from fivefold.data.batch import IGNORE
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.layout import Layout
from fivefold.parallel.loss.own import LossRow, TokenLoss
from fivefold.parallel.loss.runtime import Kernels
from fivefold.parallel.loss.spec import OWN_LOSS_COPIES, logit_bytes
from fivefold.parallel.loss.tasks import CrossEntropy, Head, OwnLoss
from fivefold.parallel.lower import lower
from fivefold.parallel.tensor.runtime import TensorParallel
from fivefold.verification.reference import ReferenceRun
from tests.parity import Case, reference_model, subject

TOKENS, VOCABULARY = 13, 29
ALONE = TensorParallel(None, 0, 1, False, ((0, VOCABULARY),))


def nll(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def mean(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    losses = nll(logits, labels, row)
    return losses / losses.mean()


def gradient_of_others(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    """Its values do not depend on other tokens, its gradient does."""
    shared = nll(logits, labels, row).sum()
    return nll(logits, labels, row) + shared - shared.detach()


def noisy(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    return nll(logits, labels, row) * (1 + torch.rand(len(labels)))


def beside_its_tokens(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    """`tokens` and columns as made below, in the type of the logits."""
    assert (row.input_ids == labels + 1).all() and row["weight"].dtype == logits.dtype == torch.float32
    return nll(logits, labels, row)


def wrong_line(logits: Tensor, labels: Tensor, row: Any) -> Tensor:
    wide = logits @ logits
    return wide[:, 0]


WRONG = wrong_line.__code__.co_firstlineno + 1


class Focal(torch.nn.Module):
    def forward(self, logits: Tensor, labels: Tensor, row: Any) -> Tensor:
        return nll(logits, labels, row) ** 2


def tokens() -> tuple[Tensor, LossRow]:
    labels = torch.arange(TOKENS) % VOCABULARY
    return labels, LossRow(labels + 1, torch.arange(TOKENS), {"weight": torch.ones(TOKENS).double()})


def check(function: Any) -> None:
    labels, row = tokens()
    TokenLoss(function).check(labels, row, VOCABULARY)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (mean, "depends on the other tokens"), (gradient_of_others, "depends on the other tokens"),
        (noisy, "other losses for the same tokens"),
        (wrong_line, f"test_own_loss.py:{WRONG} in wrong_line: RuntimeError"),
        (lambda logits, labels, row: logits.sum(), "it gave torch.float32 [] for 8 tokens"),
        (lambda logits, labels, row: F.cross_entropy(logits, labels), "it gave torch.float32 [] for 8 tokens"),
        (lambda logits, labels, row: 3.0, "it gave a float for 8 tokens"),
        (lambda logits, labels, row: logits.argmax(-1), "it gave torch.int64 [8]"),
        (lambda logits, labels, row: logits.detach()[:, 0], "have no gradient"),
        (lambda logits, labels, row: logits.mul_(2)[:, 0], "in-place"),
        (lambda logits, labels, row: row["sign"] * logits[:, 0], "no column 'sign'; it has: weight"),
        (lambda logits, labels: logits[:, 0], "takes 2 positional arguments"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused_with_its_place(function: Any, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check(function)
    assert said in refused.value.what and "test_own_loss.py:" in refused.value.what


@pytest.mark.parametrize(
    "function",
    [
        lambda logits, labels, row: logits.mul_(2)[:, 0],
        lambda logits, labels, row: F.cross_entropy(
            logits, labels, weight=torch.ones(VOCABULARY).double(), reduction="none"
        ),
    ],
    ids=["in place", "another type"],
)
def test_errors_of_tensors_say_how_the_logits_are(function: Any) -> None:
    with pytest.raises(UserError) as refused:
        check(function)
    assert "logits.clone()" in (refused.value.fix or "") and "weight.to(logits)" in (refused.value.fix or "")


@pytest.mark.full
def test_the_reference_of_a_proof_names_the_line_too(tmp_path: Path) -> None:
    lines = ["def fails(logits, labels, row):", "    return logits[0, 10**6]"]
    (tmp_path / "my_loss.py").write_text("\n".join(lines))
    case = Case("single", steps=1)
    objective = ObjectiveSection(name="python", path=f"{tmp_path / 'my_loss.py'}:fails")
    asked = replace(subject(case), objective=objective)
    with pytest.raises(UserError, match=r"my_loss.py:2 in fails: IndexError"):
        ReferenceRun(asked, "fp64", "cpu", model=reference_model(case, torch.float32)).run([])


@pytest.mark.parametrize(
    "function", [nll, beside_its_tokens, Focal(), lambda logits, labels, row: nll(logits, labels, row) * row["weight"]]
)
def test_what_is_right_passes(function: Any) -> None:
    check(function)


def test_tokens_without_a_target_are_left_out_and_have_no_gradient() -> None:
    """Also where a function is not finite at them."""
    labels, row = tokens()
    labels[::3] = IGNORE
    logits = torch.randn(1, TOKENS, VOCABULARY, dtype=torch.float64)

    def strict(logits: Tensor, labels: Tensor, row: LossRow) -> Tensor:
        assert (labels >= 0).all() and len(labels) == len(logits) == len(row.input_ids) == len(row["weight"])
        return nll(logits, labels, row)

    loss = TokenLoss(strict)
    losses, gradient = loss.of_chunk(labels, row, logits, torch.full((TOKENS,), 0.25).double(), fold=ALONE)
    leaf = logits[0].clone().requires_grad_()
    expected = 0.25 * F.cross_entropy(leaf, labels, reduction="sum", ignore_index=IGNORE)
    expected.backward()
    assert torch.allclose(0.25 * losses.sum(), expected.detach(), rtol=1e-14)
    assert leaf.grad is not None and torch.allclose(gradient[0], leaf.grad, rtol=0, atol=1e-15)
    assert (gradient[0, ::3] == 0).all()
    no_labels = torch.full_like(labels, IGNORE)
    nothing, zeros = loss.of_chunk(no_labels, row, logits, torch.zeros(TOKENS), overwrite=True, fold=ALONE)
    assert len(nothing) == 0 and (zeros == 0).all()


def test_cross_entropy_written_by_a_user_is_that_of_the_library() -> None:
    """With the same chunks, through the same head."""
    torch.manual_seed(0)
    hidden = torch.randn(1, TOKENS, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCABULARY, 7, dtype=torch.float64, requires_grad=True)
    labels, row = tokens()
    sizes = (5, 5, 3)
    head = Head(lambda h: F.linear(h, weight), hidden, [weight], VOCABULARY, 3, ALONE, Mock(cut=lambda x: x), Kernels())
    assert head.sizes(VOCABULARY) == sizes
    own, built_in = OwnLoss(TokenLoss(nll), labels[None], row)(head), CrossEntropy(labels[None])(head)
    for found, expected in zip(*(torch.autograd.grad(loss, [hidden, weight]) for loss in (own, built_in)), strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


def test_chunks_are_as_large_as_the_whole_vocabulary_allows() -> None:
    """Those of a plan, on each of two tensor parallel ranks that have half of it."""
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse("tp2"), 0)
    half, tokens = plan.vocabulary, 4096
    fold = TensorParallel(None, 0, 2, False, ((0, half), (half, 2 * half)))
    hidden, labels = torch.empty(1, tokens, plan.facts.hidden_size, device="meta"), torch.zeros(1, tokens).long()
    head = Head(lambda h: h, hidden, [], half, None, fold, Mock(), Mock())
    chunks = head.own_chunks(TokenLoss(nll), labels, LossRow(labels, labels))
    planned = plan.step_shape(1, tokens, 1, whole_logits=True)
    assert tuple(len(chunk.labels) for chunk in chunks) == planned.loss_chunks
    assert max(planned.loss_chunks) < max(plan.step_shape(1, tokens, 1).loss_chunks)
    more = logit_bytes(plan, planned) - logit_bytes(plan, replace(planned, whole_logits=False))
    assert more > (OWN_LOSS_COPIES - 1) * 4 * max(planned.loss_chunks) * 2 * half


def test_losses_that_are_not_finite_are_counted_and_named() -> None:
    labels, row = tokens()
    loss = TokenLoss(lambda logits, labels, row: (logits[:, 0] - logits[:, 0].detach()).log())
    loss.of_tokens(torch.randn(TOKENS, VOCABULARY, requires_grad=True), labels, row)
    assert "13 of 13 losses are not finite, and their logits are" in loss.why() and not loss.why()
    broken = torch.full((TOKENS, VOCABULARY), torch.nan, requires_grad=True)
    TokenLoss(nll).of_tokens(broken, labels, row)
    assert not TokenLoss(nll).why()  # the model's logits, not the function


class Living(TorchDispatchMode):
    """The most bytes of tensors that operators made and that are there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage.data_ptr() and storage.data_ptr() not in self.sizes:
                self.sizes[storage.data_ptr()] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage.data_ptr(), None)
        self.most = max(self.most, sum(self.sizes.values()))
        return out


def test_a_chunk_takes_the_memory_that_a_plan_counts() -> None:
    """Of cross entropy in bf16, in fp32 tensors of whole logits; those it was given are counted beside."""
    labels, size = torch.arange(256), (256, 2048)
    logits = torch.randn(1, *size, dtype=torch.bfloat16)
    fold = TensorParallel(None, 0, 1, False, ((0, size[1]),))
    with Living() as living:
        TokenLoss(nll).of_chunk(labels, LossRow(labels, labels), logits, torch.ones(256), overwrite=True, fold=fold)
    assert OWN_LOSS_COPIES - 1 < living.most / (4 * logits.numel()) <= OWN_LOSS_COPIES
