"""Layouts with context parallelism compute what the unmodified model computes in one process (see test_parity.py)."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fivefold.models.build import build_meta
from fivefold.models.sources import ModelTensors
from fivefold.parallel.apply import parallelize
from fivefold.parallel.state import state_of
from tests.generation.ranks import continue_greedily
from tests.generation.test_decode import hf_greedy
from tests.models.test_partition import LLAMA4
from tests.parallel.test_parity import case_id, run
from tests.parallel.test_properties import largest_difference, one_changed, whole
from tests.parity import (
    VOCABULARY,
    Case,
    assert_proved,
    batch_of,
    build,
    documents,
    gathered,
    gradients,
    hf_config,
    pieces,
    reference_model,
)
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training import bodies

pytestmark = pytest.mark.full

# Counts its positions from behind the padding token, which stands inside of documents.
ROBERTA = {
    "model_type": "roberta", "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 12, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Attends within chunks of 7 tokens of a document.
OF_CHUNKS = {name: value for name, value in LLAMA4.items() if name != "moe_layers"} | {
    "model_type": "llama4_text", "num_hidden_layers": 2, "interleave_moe_layer_step": 9, "attention_chunk_size": 7,
}  # fmt: skip
# Windows, soft caps, learnt positions and rows of one document; all else is in the matrix (test_matrix.py). What a ring
# sends follows from the documents, which differ between rows, micro batches and data ranks: the last four.
CASES = [
    Case("cp2+mb2+fp64", "none", tied=True, overrides=tuple(ROBERTA.items()), steps=1),
    Case("cp2+ulysses+zero2+full+mb4+fp64", "gemma3", steps=1),
    Case("shard2.cp2+ring+zero2+full+mb2+fp64", "mistral", packing=False, steps=1),
    put_off(Case("dp2.cp2+allgather+full+mb2+fp64", "gemma2", steps=1)),
    put_off(Case("cp2.tp2+ring+nosp+mb2+fp64", "gpt2", steps=1)),
    put_off(Case("cp4+ring+mb2+fp64", "gemma3", steps=1)),
    Case("cp4+2x2+full+mb4+fp64", "mistral", steps=1),
    put_off(Case("pp2.cp2+ring+mb2+fp64", steps=1)),
    Case("cp2+ring+mb2+fp64", "none", overrides=tuple(OF_CHUNKS.items()), steps=1),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layout_equals_one_process(case: Case) -> None:
    found, expected, per_rank = run(case)
    assert_proved(found, expected, per_rank)


# ---- what must not matter --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", ["cp2+ring", "cp2+allgather", "cp2+ulysses", *map(put_off, ("cp4+2x2", "cp2.tp2+ring"))]
)
def test_no_document_reaches_the_next(layout: str) -> None:
    rows = [row for place in (0, 5, 10) for row in one_changed(place)]
    results = whole(Case(f"{layout}+fp64"), [[row] for row in rows])
    for (loss, gradient), (other_loss, other_gradient) in zip(results[::2], results[1::2], strict=True):
        assert loss == other_loss > 0
        assert largest_difference(gradient, other_gradient) == 0.0


# ---- outside of the training step ------------------------------------------------------------------------------------


def called(case: Case) -> tuple[list[np.ndarray], list[Any]]:
    """Logits of whole rows from plain calls of the model, and gradients of a loss over the last ones."""
    model, found = build(case), []
    ids = torch.from_numpy(np.stack([row[0] for row in documents(case, 0)[:1]]))[:, :16]
    for given in (
        {"input_ids": ids},
        {"inputs_embeds": reference_model(case).get_input_embeddings()(ids).detach()},
    ):
        with torch.no_grad():
            found.append(model(**given).logits.numpy())
    model(input_ids=ids).logits.square().sum().backward()
    return found, pieces(model, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("layout", ["cp2+fp64", put_off("cp2.tp2+nosp+ulysses+fp64")])
def test_a_plain_call_gives_the_logits_of_whole_rows_and_their_gradient(layout: str) -> None:
    case = Case(layout)
    model = reference_model(case)
    ids = torch.from_numpy(np.stack([row[0] for row in documents(case, 0)[:1]]))[:, :16]
    expected = model(input_ids=ids).logits
    expected.square().sum().backward()
    results = run_ranks(case.parsed.world, called, case)
    for logits, _ in results:
        for each in logits:
            np.testing.assert_allclose(each, expected.detach().numpy(), rtol=0, atol=1e-12)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, gradient in gathered([each for _, each in results], shapes).items():
        np.testing.assert_allclose(gradient, model.get_parameter(name).grad.numpy(), rtol=0, atol=1e-9, err_msg=name)


def compiled(case: Case) -> tuple[float, list[Any], dict[str, int]]:
    """Loss and gradients with compiled blocks, and the graph breaks."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain = torch.compile
    with patch.object(torch, "compile", lambda forward, **_: plain(forward, backend="aot_eager")):
        source = ModelTensors(reference_model(case, torch.float32))
        model = parallelize(build_meta(hf_config(case)), case.parsed, source=source, compile_blocks=True)
        batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
        loss = gradients(model, batch, torch.tensor(1.0, dtype=torch.float64))
    found = pieces(model, {name: p.grad for name, p in model.named_parameters()})
    return float(loss), found, dict(counters["graph_break"])


def test_compiled_blocks_attend_eagerly_and_compute_the_same() -> None:
    case = Case("cp2+ring+full+mb8+fp64", overrides=(("num_hidden_layers", 1),))
    expected = run_ranks(2, uncompiled, case)
    for (loss, found, breaks), (other, plain) in zip(run_ranks(2, compiled, case), expected, strict=True):
        assert len(breaks) == 1 and "ContextParallel.attend" in next(iter(breaks))
        assert loss == pytest.approx(other, rel=1e-13)
        for (name, _, a), (_, _, b) in zip(found, plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-11, err_msg=name)


def uncompiled(case: Case) -> tuple[float, list[Any]]:
    model = build(case)
    batch = batch_of(documents(case, 0), case.parsed, state_of(model).placement.data_rank)
    loss = gradients(model, batch, torch.tensor(1.0, dtype=torch.float64))
    return float(loss), pieces(model, {name: p.grad for name, p in model.named_parameters()})


def of_length(case: Case, length: int) -> str:
    model = build(case)
    try:
        model(input_ids=torch.arange(length)[None] % VOCABULARY)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_rows_that_cannot_be_cut_are_refused() -> None:
    for error in run_ranks(2, of_length, Case("cp2+fp64"), 18):
        assert error.startswith("UserError: context parallelism cuts a row into 4 chunks: 2 x cp 2 does not divide 18")
        assert "pad the rows to 20 tokens" in error


def test_a_rotary_table_that_follows_the_length_is_refused_where_it_would_change() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    case = Case("cp2+fp64", overrides=(("rope_parameters", rope), ("max_position_embeddings", 16)))
    assert run_ranks(2, of_length, case, 16) == [""] * 2
    for error in run_ranks(2, of_length, case, 20):
        assert "rope type dynamic takes other frequencies for documents longer than 16 tokens" in error


def test_a_model_that_counts_a_row_is_refused_rows_in_which_it_would_tell() -> None:
    """Llama 4 scales queries by their place in the row, which is cut here, from `floor_scale` tokens on."""
    sizes = LLAMA4 | {"model_type": "llama4_text", "floor_scale": 3000}
    case = Case("cp2+fp64", "none", overrides=tuple(sizes.items()))
    assert run_ranks(2, of_length, case, 2400) == [""] * 2
    for error in run_ranks(2, of_length, case, 3200):
        assert error.startswith("UserError: model.layers.3.self_attn of Llama4TextModel counts the tokens of a row")


def test_generation_says_what_transformers_says() -> None:
    case = Case("cp2.tp2+fp32")
    assert run_ranks(4, continue_greedily, case, 8) == [hf_greedy(case, 8)] * 4


def test_a_run_evaluates_and_samples_as_on_one_process(tmp_path: Path) -> None:
    bodies.write_corpus(tmp_path / "more.txt", characters=1009, seed=8)
    columns = {}
    for name, world, layout in (("one", 1, {}), ("cp", 2, {"cp": 2})):
        tree = bodies.run_file(
            tmp_path, run__name=name, train__max_steps=3, train__check_every=1, eval__every=2,
            data__validation=str(tmp_path / "more.txt"), sample__every=2, sample__prompts=["der"],
        ) | {"layout": layout}  # fmt: skip
        assert bodies.train(tree, world).error is None
        keys = ("train/loss", "train/grad_norm", "train/tokens_seen", "eval/loss")
        columns[name] = [row[key] for row in bodies.metrics(tree) for key in keys if key in row]
    assert len(columns["one"]) == 11
    assert columns["cp"] == pytest.approx(columns["one"], rel=2e-6)
