"""What `models/hf_internals.py` expects of `transformers`, per family: fails at once when a new minor moves
something."""

import re
from itertools import product

import pytest
import torch
from torch import nn

from fivefold.models import attention, hf_internals
from fivefold.models.attention import NAME
from fivefold.models.build import build_meta
from fivefold.models.discover import anatomy_of, trace
from fivefold.models.partition import PROVED, derive
from fivefold.models.recipe import buffer_values, check_drawable, read_recipe
from tests.families import TINY
from tests.parity import FAMILIES, Case, hf_config

# Styles of plans that say nothing about a role: they gather or cut what a module is given, in models whose parallel
# layers are not built in the usual pairs. The partition is derived from the forward and needs no plan.
UNUSED_STYLES = {"colwise_gather_output", "rowwise_split_input", "packed_colwise", "moe_tp_experts"}


def test_contract(subtests):
    """Names and registries: where the parts are, and what the model says of them."""
    for family in FAMILIES:
        with subtests.test(msg=family):
            model = build_meta(hf_config(Case("single", family)))
            anatomy = anatomy_of(model)
            assert model.config._attn_implementation == NAME
            assert getattr(model, hf_internals.base_prefix(model)) is model.base_model is not model
            assert len(anatomy.layers) == model.config.num_hidden_layers == 3
            blocks = {type(model.get_submodule(name)).__name__ for name in anatomy.layers}
            assert blocks == hf_internals.block_classes(model)
            assert {"hidden_size", "vocab_size", "tie_word_embeddings"} <= hf_internals.config_keys(type(model.config))
            for key in hf_internals.unexpected_keys_to_ignore(model):
                assert re.search(key, "a name") is None, "would pass over anything"


def test_contract_plan(subtests):
    """The plan of every family speaks of modules that are there, in words that are known, and the partition agrees."""
    for family in FAMILIES:
        with subtests.test(msg=family):
            model = build_meta(hf_config(Case("single", family)))
            plan, modules = hf_internals.tensor_parallel_plan(model), dict(model.named_modules())
            assert set(plan.values()) <= set(hf_internals.PLAN_STYLES) | UNUSED_STYLES
            places = {*modules, *dict(model.named_parameters())}
            for key in plan:
                assert any(key.replace("*", str(layer)) in places for layer in range(3)), key
            anatomy = anatomy_of(model)
            partition = derive(model, anatomy, trace(model, anatomy))
            assert partition.refusal is None and partition.is_proved
            ((query, kv),) = partition.heads
            assert query == model.config.num_attention_heads and kv in (2, query)
            said = {key: style for key, style in plan.items() if style in ("colwise", "rowwise")}
            for key, style in said.items():
                names = [f"{key.replace('*', str(layer))}.weight" for layer in range(3)]
                role = next((partition.roles[name] for name in names if name in partition.roles), None)
                assert (
                    key in (anatomy.head, anatomy.embedding)
                    or ".experts." in key
                    or role.kind == hf_internals.PLAN_STYLES[style]
                ), key


def test_contract_ties(subtests):
    for family, tied in product(FAMILIES, [False, True]):
        with subtests.test(family=family, tied=tied):
            model = build_meta(hf_config(Case("single", family, tied=tied)))
            anatomy = anatomy_of(model)
            pair = {f"{anatomy.head}.weight": anatomy.embedding_weight}
            assert anatomy.tied is tied
            assert hf_internals.tied_parameters(model) == (pair if tied else {})
            named = dict(model.named_parameters())
            assert (f"{anatomy.head}.weight" in named) is not tied and anatomy.embedding_weight in named


@pytest.mark.parametrize("family", FAMILIES)
def test_contract_attention(family, monkeypatch):
    """Every layer calls the attention that is registered, once, with the bounds of packed documents; layers that drop
    the bounds are those that the trace knows (they are handed on from outside)."""
    calls = []

    def spied(module, query, key, value, attention_mask=None, **kwargs):
        calls.append((kwargs.pop("cu_seqlens", None), attention_mask))
        return attention.attention_forward(module, query, key, value, attention_mask, cu_seqlens=cu_seqlens, **kwargs)

    model = build_meta(hf_config(Case("single", family)))
    forgetful = {layer for layer, _ in trace(model, anatomy_of(model)).forgetful}
    values = buffer_values(model)
    hf_internals.register_attention("spied", spied, attention.mask_asked_for)
    hf_internals.select_attention(model, "spied")
    assert model.config._attn_implementation == "spied"
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            tensor.copy_(values[name] if name in values else torch.full_like(tensor, 0.01))
    cu_seqlens = torch.tensor([0, 5, 17], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(12)])[None]
    out = model(input_ids=torch.arange(17)[None], position_ids=positions, cu_seqlens=cu_seqlens, use_cache=False)
    assert out.logits.isfinite().all() and out.logits.shape == (1, 17, model.config.vocab_size)
    assert len(calls) == 3 and all(isinstance(mask, attention.Mask) for _, mask in calls)
    assert sum(given is cu_seqlens for given, _ in calls) == 3 - len(forgetful)


def test_contract_initialisation(subtests):
    """The model initialises every parameter and buffer through functions that can be intercepted and drawn."""
    for family in FAMILIES:
        with subtests.test(msg=family):
            model = build_meta(hf_config(Case("single", family)))
            calls = set()
            with hf_internals.intercepted_initialisers(lambda name, _, calls=calls: calls.add(name)):
                hf_internals.initialise_again(model)
            assert {"normal_"} < calls
            recipe = read_recipe(model)
            check_drawable(recipe, recipe)


def test_every_proved_class_has_a_small_model():
    """And every family of the tests is of a class that is proved: neither list has what the other lacks."""
    assert {type(build_meta(hf_config(Case("single", family)))).__name__ for family in TINY} == PROVED


def test_interception_reaches_every_initialiser_and_ends():
    for space in (hf_internals.hf_initialization, nn.init):
        for name in hf_internals.INITIALISERS:
            assert hasattr(space, name) or name == "copy_"
    before = hf_internals.hf_initialization.normal_
    with pytest.raises(RuntimeError), hf_internals.intercepted_initialisers(lambda *_: None):
        tensor = torch.ones(2)
        assert hf_internals.hf_initialization.normal_(tensor) is tensor and torch.equal(tensor, torch.ones(2))
        raise RuntimeError
    assert hf_internals.hf_initialization.normal_ is before


def test_no_other_file_reads_private_surfaces():
    private = (
        "_tp_plan",
        "_tied_weights_keys",
        "_no_split_modules",
        "_init_weights(",
        "_attn_implementation",
        "CONFIG_MAPPING",
    )
    folder = hf_internals.Path(hf_internals.__file__).parent.parent
    for path in folder.rglob("*.py"):
        if path.name != "hf_internals.py":
            text = path.read_text(encoding="utf-8")
            assert not [word for word in private if word in text], path
