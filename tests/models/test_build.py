"""From a name and overrides to a config and a model on meta, and what is refused on the way."""

import json

import pytest
import torch
from transformers import CLIPConfig

from fivefold.core.errors import UserError
from fivefold.core.shapes import shape_names
from fivefold.models.build import build_meta, load_model_config, weights_folder
from tests.models import tiny

OLD_LLAMA = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "rope_theta": 5e5,
    "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    tiny.llama().save_pretrained(tmp_path)
    return tmp_path


def write(folder, values):
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_a_folder_and_its_config_file_give_the_same(folder):
    config = load_model_config(folder, {})
    of_file = load_model_config(folder / "config.json", {})
    assert config.to_dict() | {"_name_or_path": of_file.name_or_path} == of_file.to_dict()
    assert config.rope_parameters == tiny.LLAMA3_ROPE and config.num_key_value_heads == 2


def test_overrides_patch_the_file_before_the_class_derives_values(tmp_path):
    config = load_model_config(write(tmp_path, OLD_LLAMA), {"hidden_size": 96, "rope_scaling": {"factor": 4.0}})
    assert config.head_dim == 16  # derived from the override
    assert config.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}


def test_rope_in_its_old_words_patches_a_new_file(folder):
    assert load_model_config(folder, {"rope_theta": 123.0}).rope_parameters == {**tiny.LLAMA3_ROPE, "rope_theta": 123.0}


def test_the_type_of_the_weights_is_remembered_and_the_model_is_in_fp32(tmp_path):
    """An export goes back to it."""
    for dtype in (torch.bfloat16, torch.float16, None):
        values = OLD_LLAMA | {"torch_dtype": dtype and str(dtype).removeprefix("torch.")}
        model = build_meta(load_model_config(write(tmp_path, values)))
        assert model.config.dtype == dtype and {each.dtype for each in model.parameters()} == {torch.float32}


def test_fewer_layers_cut_the_list_of_layer_types(tmp_path):
    tiny.qwen3().save_pretrained(tmp_path)
    assert len(load_model_config(tmp_path, {"num_hidden_layers": 2}).layer_types) == 2
    assert len(load_model_config(tmp_path, {"num_hidden_layers": 5}).layer_types) == 5


def test_an_unknown_override_names_the_likely_one(folder):
    with pytest.raises(UserError, match=r"model\.overrides\.hiden_size is not a key") as error:
        load_model_config(folder, {"hiden_size": 8})
    assert error.value.fix == "did you mean model.overrides.hidden_size?"


def test_an_invalid_override_says_why(folder):
    with pytest.raises(UserError, match="not valid"):
        load_model_config(folder, {"hidden_size": "wide"})


def test_code_from_a_model_folder_is_never_run(tmp_path):
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    values = {**OLD_LLAMA, "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    with pytest.raises(UserError, match="no code from a model folder is executed"):
        load_model_config(write(tmp_path, values), {})


@pytest.mark.parametrize("values", [{"model_type": "no-such"}, {}], ids=["unknown type", "no type"])
def test_a_model_type_that_is_not_in_transformers(tmp_path, values):
    with pytest.raises(UserError, match="no model type"):
        load_model_config(write(tmp_path, values), {})


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        load_model_config(tmp_path, {})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError):
        load_model_config(tmp_path, {})


def test_a_name_that_is_nothing():
    with pytest.raises(UserError, match="neither a folder nor a hub id"):
        load_model_config("no/such/model/at-all", {})


def test_a_model_that_is_no_causal_language_model():
    with pytest.raises(UserError, match="no causal language model"):
        build_meta(CLIPConfig())


def test_a_folder_of_weights_is_itself(tmp_path):
    assert weights_folder(tmp_path) == tmp_path
    write(tmp_path, OLD_LLAMA)
    with pytest.raises(UserError, match="without weights"):
        weights_folder(tmp_path / "config.json")


def test_a_built_in_shape_builds_and_holds_no_weights(subtests):
    for name in shape_names():
        with subtests.test(msg=name):
            assert build_meta(load_model_config(name, {})).num_parameters() > 0
            with pytest.raises(UserError, match="without weights"):
                weights_folder(name)
