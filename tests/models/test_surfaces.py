"""What `models/surfaces.py` expects of `transformers`, per family: fails at once when a new minor moves something."""

import pytest
import torch
import transformers
from torch import nn

from fivefold.models import surfaces
from fivefold.models.attention import NAME
from fivefold.models.build import build_meta
from tests.models import tiny

PLANS = {
    "llama": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"},
    "qwen3": {
        "q_proj",
        "k_proj",
        "v_proj",
        "q_norm",
        "k_norm",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    },
}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_contract(family):
    model = build_meta(tiny.FAMILIES[family]())
    assert model.config._attn_implementation == NAME
    assert surfaces.base_prefix(model) == "model" and model.base_model is model.model
    assert surfaces.block_classes(model) == {type(model.model.layers[0]).__name__}
    plan = surfaces.tensor_parallel_plan(model)
    plan.pop("model.embed_tokens", None)  # some minors list it; its role is known without
    assert {key.rpartition(".")[2] for key in plan} == PLANS[family]
    assert {style for key, style in plan.items() if key != "lm_head"} <= set(surfaces.PLAN_STYLES)
    assert surfaces.tied_parameters(model) == (
        {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
    )
    assert surfaces.unexpected_keys_to_ignore(model) == set()
    assert {"hidden_size", "rope_parameters", "tie_word_embeddings"} <= surfaces.config_keys(type(model.config))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_model_initialises_itself_through_the_interceptable_functions(family):
    model = build_meta(tiny.FAMILIES[family]())
    calls = []
    with surfaces.intercepted_initialisers(lambda name, args, kwargs: calls.append(name)):
        surfaces.initialise_again(model)
    assert set(calls) == {"normal_", "ones_", "zeros_", "copy_"} - (
        {"zeros_"} if model.config.pad_token_id is None else set()
    )


def test_interception_reaches_every_initialiser_and_ends():
    for space in (transformers.initialization, nn.init):
        for name in surfaces.INITIALISERS:
            assert hasattr(space, name) or name == "copy_"
    before = transformers.initialization.normal_
    with pytest.raises(RuntimeError), surfaces.intercepted_initialisers(lambda *_: None):
        tensor = torch.ones(2)
        assert transformers.initialization.normal_(tensor) is tensor and torch.equal(tensor, torch.ones(2))
        raise RuntimeError
    assert transformers.initialization.normal_ is before


def test_no_other_file_reads_private_surfaces():
    private = (
        "_tp_plan",
        "_tied_weights_keys",
        "_no_split_modules",
        "_init_weights(",
        "_attn_implementation",
        "CONFIG_MAPPING",
    )
    folder = surfaces.Path(surfaces.__file__).parent.parent
    for path in folder.rglob("*.py"):
        if path.name != "surfaces.py":
            text = path.read_text(encoding="utf-8")
            assert not [word for word in private if word in text], path
