"""A capacity drops under every layout what it drops in one process, in fp64 to 1e-10; a large one drops nothing."""

import math
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.models.experts import routed
from fivefold.parallel.balance.runtime import Balance, BalanceOptions, Shares, _before, capacity, configure
from fivefold.parallel.ranks import row_blocks
from tests.parallel.test_balance import balanced
from tests.parity import Case, assert_proved, documents, outcome, reference
from tests.pool import run_ranks
from tests.tiers import put_off

BITES = 0.9


class Plain:
    """The unmodified model, row by row and token by token: a pick of an expert that is full weighs nothing."""

    def __init__(self, case: Case, factor: float) -> None:
        self.case, self.factor = case, factor
        self.used: dict[str, list[int]] = {}
        self.tokens = 0
        self.dropped: list[int] = []  # by step

    def take(self, name: str, logits: Tensor, weights: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What a router gives, with no weight for what is dropped."""
        experts, picks = logits.shape[-1], index.shape[-1]
        most = math.ceil(Fraction(str(self.factor)) * picks * self.tokens / experts)
        used = self.used.setdefault(name, [0] * experts)
        kept = torch.ones_like(weights)
        for token, chosen in enumerate(index.tolist()):
            for pick, expert in enumerate(chosen):
                used[expert] += 1
                kept[token, pick] = used[expert] <= most
        self.dropped[-1] += int((kept == 0).sum())
        return logits, weights * kept, index

    def loss(self, model: nn.Module, _: list[np.ndarray]) -> Tensor:
        """In place of the loss of `tests.parity`."""
        gates = {n: m for n, m in model.named_modules() if n.endswith(("mlp.gate", "mlp.router"))}
        hooks = [m.register_forward_hook(lambda m, a, out, n=n: self.take(n, *out)) for n, m in gates.items()]
        rows = documents(self.case, len(self.dropped))
        self.dropped.append(0)
        summed, targets = torch.zeros(()).double(), 0
        for row in rows:
            self.used, self.tokens = {}, sum(map(len, row))
            for doc in row:  # one of a single token has no target, but takes its place
                ids = torch.from_numpy(doc)[None]
                logits = model(input_ids=ids).logits[0, :-1]
                summed = summed + nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
                targets += len(doc) - 1
        for hook in hooks:
            hook.remove()
        return summed / targets


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("shard2.ep2+mb2+fp64", "mixtral"),
        put_off("tp2.ep2+mb4+fp64", "gpt_oss"),
        put_off("tp2.ep2+nosp+mb4+fp64+full", "qwen3_moe"),
        put_off("cp2.ep2+mb2+fp64+full", "deepseek_v3"),
        put_off("cp2.tp2.ep4+mb4+fp64+zero1", "mixtral"),
        put_off("shard2.tp2.ep2+etp+mb4+fp64", "deepseek_v3"),
        ("cp2.tp2.ep2+etp+nosp+mb4+fp64+full", "mixtral"),
        put_off("cp2.pp2.ep2+mb2+fp64+full", "qwen3_moe"),
    ],
)
def test_the_same_picks_are_dropped_as_in_one_process(text: str, family: str) -> None:
    case = Case(text, family, rows=8, steps=2)
    plain = Plain(case, BITES)
    expected = reference(case, loss=plain.loss)
    per_rank = run_ranks(case.parsed.world, balanced, case, BalanceOptions(capacity_factor=BITES))
    found = outcome(case, per_rank, {n: g.shape for n, g in expected.gradients.items()})
    assert_proved(found, expected, per_rank)
    for each in per_rank:
        assert [result.dropped for result in each["balance"]] == plain.dropped
    assert min(plain.dropped) > 50


@pytest.mark.full
def test_a_large_factor_changes_no_bit() -> None:
    case = Case("shard2.ep2+mb2+fp32", "mixtral", steps=2)
    never, none = (run_ranks(2, balanced, case, BalanceOptions(capacity_factor=factor)) for factor in (1000.0, None))
    for one, other in zip(never, none, strict=True):
        assert one["losses"] == other["losses"] and one["norms"] == other["norms"]
        for (name, _, values), (_, _, others) in zip(one["weights"], other["weights"], strict=True):
            assert np.array_equal(values, others), name
        assert [each.dropped for each in one["balance"]] == [0, 0]
        assert "moe/dropped" in one["balance"][0].metrics() and "moe/dropped" not in other["balance"][0].metrics()


@pytest.mark.parametrize(("cp", "tp", "length"), [(1, 3, 36), (2, 1, 36), (2, 3, 36), (3, 2, 36)])
def test_ranks_that_share_rows_count_on_from_each_other(cp: int, tp: int, length: int) -> None:
    """Also where a part of a row lies in two of its blocks."""
    torch.manual_seed(0)
    whole_BLE = (torch.rand(2, length, 5) < 0.4).long()
    expected = whole_BLE.cumsum(1) - whole_BLE
    everyone = tuple(row_blocks(length, cp, c, tp, t) for c in range(cp) for t in range(tp))
    slots = max(map(len, everyone))

    def counts(ranks: Any) -> Tensor:
        padded = [[*everyone[rank], *[(0, 0)] * (slots - len(everyone[rank]))] for rank in ranks]
        return torch.stack([whole_BLE[:, slice(*block)].sum(1) for blocks in padded for block in blocks], 1)

    for rank, own in enumerate(everyone):
        first = rank // tp * tp
        gathers = {"tp": counts(range(first, first + tp)), "cp": counts(range(cp * tp))}

        def gather(mine: Tensor, group: Any, gathers: Any = gathers, rank: int = rank) -> Tensor:
            expected = counts([rank]) if group == "tp" or tp == 1 else gathers["tp"]
            assert torch.equal(mine, expected)
            return gathers[group]

        shared = [axis for axis, size in (("tp", tp), ("cp", cp)) if size > 1]
        mine = torch.cat([whole_BLE[:, slice(*block)] for block in own], 1)
        with patch("fivefold.parallel.balance.runtime.gather", gather):
            found = _before(mine, Shares(own, everyone, tuple(shared)))  # type: ignore[arg-type]
        assert torch.equal(found, torch.cat([expected[:, slice(*block)] for block in own], 1))


def test_a_capacity_is_exact_of_the_factor_as_written() -> None:
    tokens = torch.tensor([100, 2, 1, 0])
    assert capacity(1.1, 1, 10, tokens).tolist() == [11, 1, 1, 0]  # 1.1 * 100 is more than 110 in floats
    assert capacity(0.9, 3, 11, tokens).tolist() == [25, 1, 1, 0]


def test_a_dropped_pick_adds_nothing_and_has_no_gradient() -> None:
    torch.manual_seed(0)
    hidden, weights = torch.randn(3, 4, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    index = torch.tensor([[0, 1], [2, 1], [2, 2]])  # of two experts: 2 is none
    seen: list[list[int]] = []

    def compute(rows: Tensor, counts: Tensor) -> Tensor:
        seen.append([len(rows), *counts.tolist()])
        return rows[: int(counts.sum())] * 3  # those that are dropped stand last

    out = routed(hidden, index, weights, 2, compute)
    assert seen == [[6, 1, 2]]
    kept = torch.tensor([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    assert torch.allclose(out, 3 * hidden * (weights * kept).sum(1, keepdim=True))
    out.sum().backward()
    assert weights.grad is not None and not weights.grad[kept == 0].any() and weights.grad[kept == 1].all()
    assert hidden.grad is not None and not hidden.grad[2].any()


def test_routers_that_are_not_known_have_no_capacity() -> None:
    with pytest.raises(UserError, match="no routers that give logits"):
        configure(nn.Module(), Balance((), 1, *[None] * 3), BalanceOptions(capacity_factor=1.0), ())  # type: ignore[arg-type]
