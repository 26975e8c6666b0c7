"""The losses and the bias that keep experts busy, against a plain computation from the unmodified model's routers."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from fivefold.checkpoint.live import gathered
from fivefold.config import BalanceSection, RunConfig
from fivefold.core.model_limits import CPMethod
from fivefold.data.batch import IGNORE
from fivefold.parallel.balance.runtime import BIAS, Balance, BalanceOptions, configure
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.state import state_of
from fivefold.parallel.tensor.runtime import TensorParallel
from fivefold.training.model import balance_options
from tests import parity
from tests.parity import Case, build, documents, gradient_error, outcome, reference
from tests.pool import run_ranks
from tests.tiers import put_off

LOSSES = BalanceOptions(load=0.7, z=0.05)
BIASES = BalanceOptions(load=0.3, bias_rate=0.02)


def balanced(case: Case, options: BalanceOptions) -> dict[str, Any]:
    """`on_rank` with these options, and what the steps said of the routers."""
    models: list[Any] = []
    results: list[Any] = []
    step = parity.training_step.train_step

    def build_with(each: Case) -> Any:
        models.append(build(each))
        state = state_of(models[0])
        configure(models[0], state.live(Balance), options, state.placement.buffers)
        return models[0]

    def train_step(*args: Any, **kwargs: Any) -> Any:
        results.append(step(*args, **kwargs))
        return results[-1]

    with patch.object(parity, "build", build_with), patch.object(parity.training_step, "train_step", train_step):
        found = parity.on_rank(case)
    own = state_of(models[0]).plan.placement.buffers
    buffers = {n: each.double().numpy().copy() for n, each in models[0].named_buffers() if n in own}
    return found | {"balance": [each.balance for each in results], "buffers": buffers}


class Plain:
    """The reference's loss with both terms written out, one row and one router at a time."""

    def __init__(self, case: Case, options: BalanceOptions) -> None:
        self.case, self.options = case, options
        self.cross_entropy: list[float] = []
        self.terms: list[tuple[float, float]] = []
        self.rows: list[list[list[int]]] = []
        self.buffers: dict[str, np.ndarray] = {}
        self.cross = parity.cross_entropy
        self.model: nn.Module | None = None

    def loss(self, model: nn.Module, docs: list[np.ndarray]) -> Tensor:
        self.move_biases()
        self.model = model
        gates = {n: m for n, m in model.named_modules() if n.endswith(("mlp.gate", "mlp.router")) and n}
        per_row = iter([len(row) for row in documents(self.case, 0)])
        load, z, counts = torch.zeros(()).double(), torch.zeros(()).double(), {n: 0 for n in gates}
        at, rows = 0, len(documents(self.case, 0))
        for count in per_row:
            seen: dict[str, list[tuple[Tensor, Tensor]]] = {n: [] for n in gates}
            hooks = [
                m.register_forward_hook(lambda _, a, out, into=seen[n]: into.append((out[0], out[2])))
                for n, m in gates.items()
            ]
            for doc in docs[at : at + count]:
                model(input_ids=torch.from_numpy(doc)[None])
            for hook in hooks:
                hook.remove()
            at += count
            for name, parts in seen.items():
                logits, index = (torch.cat(each).flatten(0, -2) for each in zip(*parts, strict=True))
                experts = logits.shape[-1]
                has_bias = hasattr(gates[name], BIAS)
                scores = logits.sigmoid() if has_bias else logits.softmax(-1)
                f = torch.stack([(index == e).sum() for e in range(experts)])
                p = (scores / scores.sum(-1, keepdim=True)).mean(0)
                load = load + experts * (f.double() / len(logits) * p).sum()
                z = z + logits.logsumexp(-1).square().mean()
                counts[name] = counts[name] + f
        load, z = load / rows / len(gates), z / rows / len(gates)
        cross = self.cross(model, docs)
        self.cross_entropy.append(cross.item())
        self.terms.append((load.item(), z.item()))
        self.rows.append([counts[n].tolist() for n in gates])  # type: ignore[attr-defined]
        return cross + self.options.load * load + self.options.z * z

    def move_biases(self) -> None:
        """What the step before left to do."""
        gates = [] if self.model is None else [m for _, m in self.model.named_modules() if hasattr(m, BIAS)]
        for gate, counts in zip(gates, self.rows[-1] if self.rows else [], strict=False):
            load = torch.tensor(counts).double()
            gate.e_score_correction_bias += self.options.bias_rate * torch.sign(load.mean() - load)


@pytest.mark.full
@pytest.mark.parametrize(
    ("text", "family", "options"),
    [
        put_off("shard2.ep2+mb2+fp64", "mixtral", LOSSES),
        put_off("shard2.tp2.ep2+mb2+fp64+full", "qwen3_moe", LOSSES),
        put_off("tp2.ep2+nosp+mb4+fp64", "gpt_oss", LOSSES),
        ("shard2.tp2.ep2+etp+mb2+fp64", "gpt_oss", LOSSES),
        ("shard4.ep2+mb1+fp64+zero1", "deepseek_v3", BIASES),
        put_off("cp2.ep2+mb2+fp64+full+ring", "qwen3_moe", LOSSES),
        put_off("cp2.tp2.ep4+mb2+fp64", "mixtral", LOSSES),
        put_off("tp2.pp2.ep2+mb2+fp64+full", "qwen3_moe", LOSSES),
        put_off("cp2.pp2.ep2+mb2+fp64+allgather", "deepseek_v3", BIASES),
    ],
)
def test_losses_and_biases_are_those_of_one_process(text: str, family: str, options: BalanceOptions) -> None:
    case = Case(text, family, rows=8)
    plain = Plain(case, options)
    expected = reference(case, loss=plain.loss)
    plain.move_biases()
    per_rank = run_ranks(case.parsed.world, balanced, case, options)
    found = outcome(case, per_rank, {n: g.shape for n, g in expected.gradients.items()})
    error, worst = gradient_error(found, expected)
    assert error <= 1e-10, worst
    np.testing.assert_allclose(found.losses, plain.cross_entropy, rtol=1e-10)  # the cross entropy alone
    np.testing.assert_allclose(found.norms, expected.norms, rtol=1e-10)
    for name, weights in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=0, atol=1e-10, err_msg=name)
    for each in per_rank:
        for result, terms, rows in zip(each["balance"], plain.terms, plain.rows, strict=True):
            np.testing.assert_allclose((result.load, result.z), terms, rtol=1e-10)
            assert [list(layer) for layer in result.tokens_per_expert] == rows
    assert plain.model is not None
    held = [(name, values) for each in per_rank for name, values in each["buffers"].items()]
    for name, values in held:
        assert all(np.array_equal(values, other) for again, other in held if again == name)
        np.testing.assert_allclose(values, plain.model.get_buffer(name).double(), atol=1e-12)
    assert len({name for name, _ in held}) == (2 if family == "deepseek_v3" else 0)
    assert not parity.differing([each["ran"] for each in per_rank], [each["declared"] for each in per_rank])


def biases_of(
    case: Case, options: BalanceOptions, targets: bool
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """What the routers keep, whole, before and after a step."""
    model = build(case)
    state = state_of(model)
    configure(model, state.live(Balance), options, state.placement.buffers)
    for name, buffer in model.named_buffers():
        if name in state.placement.buffers:
            buffer.copy_(torch.arange(buffer.numel()) + 0.25)
    batch = parity.batch_of(documents(case, 0), case.parsed, state.placement.data_rank)
    if not targets:
        batch = [replace(each, labels=np.full_like(each.labels, IGNORE), targets=0) for each in batch]
    found = []
    for _ in range(2):
        found.append(
            {name: values.numpy() for name, values in gathered(model).items() if name in state.placement.buffers}
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        parity.training_step.train_step(model, optimizer, batch, learning_rate=None, max_grad_norm=1.0)
    return found[0], found[1]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "targets"),
    [("dp2", True), *(put_off(*each) for each in (("tp2", True), ("dp2", False), ("tp2", False)))],
)
def test_biases_are_gathered_as_they_are_and_a_step_that_is_skipped_leaves_them(layout: str, targets: bool) -> None:
    """Copies of them are on both ranks: none is counted twice."""
    for before, after in run_ranks(2, biases_of, Case(f"{layout}+mb2+fp64", "deepseek_v3", rows=4), BIASES, targets):
        assert len(before) == 2
        for name, values in before.items():
            assert np.array_equal(values, np.arange(values.size) + 0.25)
            moved = np.abs(after[name] - values)
            assert moved.max() == pytest.approx(BIASES.bias_rate if targets else 0)


@pytest.mark.parametrize(
    ("values", "load"),
    [
        ({"model_type": "mixtral", "router_aux_loss_coef": 0.03}, 0.03),
        ({"model_type": "jetmoe", "aux_loss_coef": 0.04}, 0.04),
        ({"model_type": "dbrx", "ffn_config": {"moe_loss_weight": 0.05}}, 0.05),
        ({"model_type": "llama"}, 0.0),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_auto_follows_the_config_under_whatever_name(values: dict[str, Any], load: float) -> None:
    own = AutoConfig.for_model(**values)
    assert balance_options(RunConfig.model_construct(balance=BalanceSection()), own).load == 0.0
    own.output_router_logits = True
    assert balance_options(RunConfig.model_construct(balance=BalanceSection()), own).load == load


def test_only_ranks_with_other_tokens_of_a_row_are_asked_for_them() -> None:
    """With `+nosp` all tp ranks have the same tokens: summed over them, each would count twice."""
    group: Any = object()
    for given, splits, expected in ((group, True, [group]), (group, False, []), (None, False, [])):
        size = 1 if given is None else 2
        assert TensorParallel(given, 0, size, splits, vocabulary=()).row_groups == expected
    assert ContextParallel(group, 0, 2, CPMethod(2, 1), None, None).row_groups == [group]
    assert ContextParallel(None, 0, 1, CPMethod(1, 1), None, None, is_on=False).row_groups == []
