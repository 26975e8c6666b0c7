"""Positions behind the padding token, as the models themselves count them; and the decoder among several towers."""

import pytest
import torch
from transformers import Gemma3Config, RobertaConfig
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.discover import anatomy_of, trace
from fivefold.models.forwards import behind_padding, count_behind_padding
from fivefold.models.record import Untraceable
from tests.models import tiny

PADDING = 7
DOCUMENTS = [[4, 7, 7, 1, 9], [7], [5, 6], [7, 3, 3, 7, 2, 8]]
ROBERTA = {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def roberta(**values):
    return RobertaConfig(**{**tiny.SIZES, **ROBERTA, **values})


def counted(ids, past=0):
    return RobertaEmbeddings.create_position_ids_from_input_ids(torch.tensor([ids]), PADDING, past)


def test_tokens_of_packed_documents_stand_where_each_alone_would():
    places = torch.cat([torch.arange(len(document)) for document in DOCUMENTS])[None]
    found = behind_padding(torch.cat([torch.tensor(document) for document in DOCUMENTS])[None], places, PADDING)
    assert torch.equal(found, torch.cat([counted(document) for document in DOCUMENTS], 1))


def test_tokens_that_join_a_cache_go_on_from_it():
    ids = [4, 7, 9]
    found = behind_padding(torch.tensor([ids]), torch.arange(11, 14)[None], PADDING)
    assert torch.equal(found, counted(ids, past=11))


def test_a_trace_finds_the_padding_token():
    model = build_meta(roberta())
    assert trace(model, anatomy_of(model)).padding == PADDING


def test_positions_of_no_known_rule_are_refused(monkeypatch):
    plain = RobertaEmbeddings.create_position_ids_from_input_ids
    elsewhere = staticmethod(lambda *args: plain(*args) + 1)
    monkeypatch.setattr(RobertaEmbeddings, "create_position_ids_from_input_ids", elsewhere)
    model = build_meta(roberta())
    with pytest.raises(Untraceable, match="positions that it counts"):
        trace(model, anatomy_of(model))


def test_a_document_that_is_too_long_for_the_places_is_refused():
    model = tiny.filled(roberta(max_position_embeddings=16))
    count_behind_padding(model.base_model, PADDING)
    assert model(input_ids=torch.full((1, 8), 9)).logits.isfinite().all()
    with pytest.raises(UserError, match="its 16 leave 8 for a document, and one has 9 tokens"):
        model(input_ids=torch.full((1, 9), 9))


def test_of_two_towers_the_one_that_tokens_reach_is_the_decoder():
    text = {**tiny.SIZES, "head_dim": 12}
    vision = {"hidden_size": 32, "intermediate_size": 53, "num_attention_heads": 4, "image_size": 16, "patch_size": 16}
    config = Gemma3Config(text_config=text, vision_config=vision | {"num_hidden_layers": text["num_hidden_layers"]})
    model = build_meta(config)
    anatomy = anatomy_of(model)
    assert anatomy.layers == tuple(f"model.language_model.layers.{at}" for at in range(3))
    assert len(trace(model, anatomy).blocks) == 3
