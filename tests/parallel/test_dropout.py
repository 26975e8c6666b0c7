"""Dropout is a function of seed, step, row, position, feature and site: the same under every layout, and that of
`verification/by_hand.py` in the unmodified model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BioGptConfig, GPT2Config, LlamaConfig

import fivefold as ff
from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.parallel.adapters.peft_folder import config_of, lora_of
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.apply import parallelize
from fivefold.parallel.dropout.runtime import Dropout
from fivefold.parallel.layout import Layout
from fivefold.parallel.loss.tasks import CrossEntropy
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.passes import Inputs
from fivefold.parallel.state import state_of
from fivefold.training import step as training_step
from fivefold.training.optimizers import Weights, rule_of
from fivefold.verification.by_hand import Draws
from tests.parallel.test_adapter import as_here, of_peft
from tests.parallel.test_parity import run, truth
from tests.parity import (
    OPTIONS,
    Case,
    Outcome,
    assert_proved,
    cross_entropy,
    documents,
    gradient,
    on_rank,
    outcome,
    proof,
)
from tests.pool import run_ranks

pytestmark = pytest.mark.full
BIOGPT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101,
    "attention_probs_dropout_prob": 0.0, "scale_embedding": False,
}  # fmt: skip
STEPS = 3  # each drops others, and an update that differs shows in the next
RATES = (("resid_pdrop", 0.1), ("embd_pdrop", 0.1), ("attn_pdrop", 0.1))


def often_and_rarely(often: Sequence[Any], rarely: Sequence[Any]) -> list[Any]:
    """Cases of every full test run, and those of a campaign alone."""
    return [*often, *(pytest.param(case, marks=pytest.mark.campaign) for case in rarely)]


LAYOUTS = often_and_rarely(
    ["pp2+zb+full+mb2", "cp2+ring+mb4", "shard2.tp2+nosp+mb2+selective"],
    ["single+mb4", "single+full+mb4", "shard2+mb2", "tp2+nosp+mb4", "pp2+mb2", "cp2+ulysses+mb4", "cp2+allgather+mb4"],
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt2_drops_what_one_process_drops(layout: str) -> None:
    found, expected, per_rank = run(Case(f"{layout}+fp64", "gpt2", overrides=RATES, steps=STEPS))
    assert_proved(found, expected, per_rank)
    assert found.losses[0] != pytest.approx(truth(Case("single", "gpt2", steps=1)).losses[0], rel=1e-5)


OPT = (
    ("model_type", "opt"), ("ffn_dim", 53), ("word_embed_proj_dim", 32), ("activation_function", "gelu"),
    ("dropout", 0.1), ("attention_dropout", 0.2),
)  # fmt: skip
# Its layers call one nn.Dropout twice, after attention and after the MLP.
PHI = (
    ("model_type", "phi"), ("num_key_value_heads", 4), ("resid_pdrop", 0.1), ("embd_pdrop", 0.1),
    ("attention_dropout", 0.1),
)  # fmt: skip
STARCODER = (("residual_dropout", 0.1), ("embedding_dropout", 0.2), ("attention_dropout", 0.1))
OTHERS = often_and_rarely(
    [
        Case("tp2+mb4+fp64", "starcoder2", overrides=STARCODER),  # tokens are split over tp between layers
        Case("shard2.ep2+mb2+fp64", "mixtral", overrides=(("attention_dropout", 0.1), ("router_jitter_noise", 0.2))),
    ],
    [
        Case("pp2+mb2+full+fp64", "none", overrides=OPT),
        Case("pp2+zb+full+mb2+fp64", "none", overrides=PHI),
        Case("cp2.tp2+mb8+selective+fp64", "none", overrides=PHI),
        Case("tp2+nosp+mb4+fp64", "none", overrides=OPT),
        Case("cp2.tp2+full+mb8+fp64", "starcoder2", overrides=STARCODER),
        Case("cp2.tp2+full+mb8+fp64", "mixtral", overrides=(("router_jitter_noise", 0.2),)),
    ],
)


@pytest.mark.parametrize("case", OTHERS, ids=lambda case: f"{case.family}-{case.layout}")
def test_calls_of_dropout_and_split_tokens(case: Case) -> None:
    found, expected, per_rank = run(case)
    assert_proved(found, expected, per_rank)


# ---- NEFTune ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    often_and_rarely(["cp2.pp2+full+mb2"], ["shard2.tp2+mb2", "single+full+mb4", "tp2+nosp+mb4", "cp2+mb4+selective"]),
)
def test_noise_on_embeddings(layout: str) -> None:
    """Of documents of unlike lengths; tokens are split over tp, over cp, and in stages."""
    found, expected, per_rank = run(Case(f"{layout}+fp64", neftune=5.0))
    assert_proved(found, expected, per_rank)
    assert found.losses[0] != pytest.approx(truth(Case("single")).losses[0], rel=1e-5)


# ---- the input of an adapter -----------------------------------------------------------------------------------------


class OfPeft(Draws):
    """What `peft` drops, which has a module for it beside each linear."""

    def site(self, name: str, module: nn.Module) -> str:
        path, _, rest = name.partition(".lora_dropout.")
        return f"{path.removeprefix('base_model.model.')}/branch0" if rest else super().site(name, module)


@cache
def of_peft_with_dropout(case: Case) -> Outcome:
    """Steps of torch's own optimizer on the adapters of `peft`, document by document. The layout changes nothing."""
    model = of_peft(case)
    draws = OfPeft(model, 0)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    rule, rate = rule_of(case.optimizer), OPTIONS.learning_rate
    optimizers = rule.reference(Weights([], [*trained.values()], frozen[:1]), case.options, rate)
    losses, norms, gradients = list[float](), list[float](), dict[str, np.ndarray]()
    for step in range(case.steps):
        rows, summed = documents(case, step), 0.0
        targets = sum(len(document) - 1 for row in rows for document in row)
        model.zero_grad()
        with proof(case), draws.training(step):
            for number, row in enumerate(rows):
                for document, start in zip(row, np.cumsum([0, *map(len, row)]), strict=False):
                    draws.begin(number, int(start))
                    loss = cross_entropy(model, [document]) * (max(len(document) - 1, 0) / targets)
                    if len(document) > 1:
                        loss.backward()
                        summed += loss.item()
        if step == 0:
            gradients = {name: view(gradient(p)).numpy().copy() for name, view, p in as_here(model)}
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), case.max_grad_norm or np.inf)))
        losses.append(summed)
        for optimizer in optimizers:
            optimizer.step()
    last = {name: view(p.detach()).numpy().copy() for name, view, p in as_here(model)}
    return Outcome(losses, norms, gradients, last)


LORA = Lora(rank=3, alpha=7.0, dropout=0.05)


@pytest.mark.parametrize(
    "layout",
    often_and_rarely(["pp2+zb+mb2", "shard2.tp2+mb2"], ["single+mb4", "shard2+mb2", "tp2+mb4+full", "cp2+mb4"]),
)
def test_lora_drops_what_peft_drops(layout: str) -> None:
    alone = Case("single+fp64", adapter=LORA, steps=STEPS)
    case, expected = alone.with_layout(f"{layout}+fp64"), of_peft_with_dropout(alone)
    per_rank = run_ranks(case.parsed.world, on_rank, case)
    found = outcome(case, per_rank, {name: values.shape for name, values in expected.weights.items()})
    assert_proved(found, expected, per_rank)
    without = of_peft_with_dropout(replace(alone, adapter=replace(LORA, dropout=0.0), steps=1))
    assert found.losses[0] != pytest.approx(without.losses[0], rel=1e-5)


def test_adapters_that_drop_save_inputs_of_their_own() -> None:
    """Planned as what autograd saves: q, k and v have three inputs in place of one, gate and up two, and the input of
    o is no longer the saved output of attention."""
    ((plain, of_plain),) = run_ranks(1, saved_and_planned, Lora(rank=4))
    ((dropping, of_dropping),) = run_ranks(1, saved_and_planned, Lora(rank=4, dropout=0.1))
    assert dropping - plain == of_dropping - of_plain > 0


def saved_and_planned(lora: Lora) -> tuple[int, int]:
    """Bytes that a forward saves, and those that the plan says of its layers."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=101,
    )  # fmt: skip
    model = parallelize(build_meta(config), Layout.parse("single+fp32"), adapter=lora)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = dict[int, Tensor]()

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in parameters:
            saved.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    ids = torch.zeros(2, 64, dtype=torch.int64)
    inputs = Inputs(ids, ids, CrossEntropy(ids))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.run_stage(inputs, 0, None)
    shape = training_step.step_shape(model, 2, 64, 1)
    planned = step_bytes(state_of(model).plan, shape).saved
    return sum(x.untyped_storage().nbytes() for x in saved.values()), sum(planned.values())


# ---- what is refused, and a loop of one's own ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "layout", "compiled", "said"),
    [
        (
            BioGptConfig(**BIOGPT, hidden_dropout_prob=0.0, activation_dropout=0.1),
            "tp2+nosp",
            False,
            "drops 53 features, which tp 2 splits",
        ),
        (
            BioGptConfig(**BIOGPT, hidden_dropout_prob=0.1),
            "single",
            True,
            "which a compiled layer would draw by itself",
        ),
    ],
    ids=["features that tp splits", "calls in a compiled layer"],
)
def test_sites_that_are_refused(config: Any, layout: str, compiled: bool, said: str) -> None:
    facts, parsed = facts_of(build_meta(config)), Layout.parse(layout)
    with pytest.raises(UserError, match=said):
        lower(facts, parsed, 0, compiled=compiled)
    assert lower(facts, Layout.parse("single"), 0).facts.dropouts


def test_plain_forwards_drop_anew_and_evaluation_drops_nothing(tmp_path: Path) -> None:
    """Each data rank drops other elements of the same rows, and so does each micro batch, also of other sizes."""
    first, second = run_ranks(2, plain_forwards, tmp_path)
    assert len({*first.dropped, *second.dropped}) == 4
    assert first.evaluated == first.eager == second.evaluated
    assert (first.rows, second.rows) == ([0, 6], [3, 8])
    assert first.together != first.again  # each call of `gradients` is a step
    assert first.step == second.step > 0


@dataclass
class Plain:
    dropped: list[float]
    eager: float
    evaluated: float
    rows: list[int]
    together: float
    again: float
    step: int


def plain_forwards(folder: Path) -> Plain:
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=101, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model, ids = AutoModelForCausalLM.from_config(config), torch.arange(12).view(2, 6)
    expected = model.eval()(input_ids=ids, labels=ids).loss.item()
    parallel = ff.parallelize(model, "shard2+fp32", neftune_noise_alpha=5.0).train()
    losses = [parallel(input_ids=ids, labels=ids).loss.item() for _ in range(2)]
    rows = list[int]()
    begin = parallel.fivefold.live(Dropout).begin_rows
    with patch.object(
        Dropout, "begin_rows", lambda _, shape, at, *cut, **more: (rows.append(at[0]), begin(shape, at, *cut, **more))
    ):
        three = {"input_ids": torch.arange(18).view(3, 6), "labels": torch.arange(18).view(3, 6)}
        batch = [three, {"input_ids": ids, "labels": ids}]
        together, again = (ff.gradients(parallel, batch).item() for _ in range(2))
    dropout, saved = parallel.fivefold.live(Dropout), ff.save(parallel, None, folder / "saved")
    before, dropout.step = dropout.step, -1
    ff.load(parallel, None, saved)  # the next step drops what it would have dropped
    with torch.no_grad():
        evaluated = parallel.eval()(input_ids=ids, labels=ids).loss.item()
    return Plain(
        losses,
        round(expected, 4),
        round(evaluated, 4),
        [*dict.fromkeys(rows)],
        together,
        again,
        dropout.step * (dropout.step == before),
    )


def test_the_config_of_peft_is_written_and_read(tmp_path: Path) -> None:
    config = config_of(LORA, ["q_proj"], [], base="a/b", is_transposed=False)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert config["lora_dropout"] == 0.05 and lora_of(tmp_path).dropout == 0.05
    lora = load_config(None, ["adapter.name=lora", "adapter.dropout=0.05"]).adapter.lora
    assert lora is not None and lora.dropout == 0.05
