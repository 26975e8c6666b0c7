"""A thin model keeps what makes a model what it is."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.core.shapes import shape_names
from fivefold.models import hf_internals
from fivefold.models.build import build_meta, load_model_config
from fivefold.verification.reduced_model import fewer_layers, make_folder, narrow
from tests.families import TINY
from tests.parity import Case, hf_config


@pytest.mark.parametrize("name", sorted(shape_names()))
def test_every_built_in_shape_becomes_thin(name: str) -> None:
    try:
        config = load_model_config(name)
    except UserError:
        pytest.skip("not a model of this version of transformers")
    small = narrow(fewer_layers(config), 35)
    assert small is not None
    assert small.num_attention_heads == config.num_attention_heads
    assert getattr(small, "num_key_value_heads", None) == getattr(config, "num_key_value_heads", None)
    assert type(build_meta(small)) is type(build_meta(config))
    assert sum(p.numel() for p in build_meta(small).parameters()) < 30e6
    with torch.device("cpu"), torch.no_grad():
        logits = hf_internals.unmodified_model(small, torch.float32)(input_ids=torch.arange(1, 6)[None]).logits
    assert logits.shape == (1, 5, small.get_text_config().vocab_size) and logits.isfinite().all()


def test_every_family_keeps_its_kinds_of_layers(subtests: pytest.Subtests) -> None:
    for family in TINY:
        with subtests.test(msg=family):
            config = hf_config(Case("single", family=family))
            small = fewer_layers(config)
            assert set(getattr(small, "layer_types", None) or []) == set(getattr(config, "layer_types", None) or [])
            assert small.num_hidden_layers >= 2
            build_meta(small)


def test_nothing_is_zero_and_the_folder_is_plain(tmp_path: Path) -> None:
    hf_config(Case("single")).save_pretrained(tmp_path / "asked")
    config = load_config(None, [f"model.name_or_path={tmp_path / 'asked'}", "model.init=random", "data.seq_length=61"])
    made = make_folder(config, tmp_path / "made", thin=True, memory=2**40, vocabulary=19, seed=1)
    from safetensors.torch import load_file

    values = load_file(made.folder / "model.safetensors")
    assert all(tensor.abs().min() > 0 for tensor in values.values())
    assert AutoConfig.from_pretrained(made.folder).vocab_size == made.vocabulary == 101
    assert any("layers" in cut for cut in made.cuts)


def test_a_model_that_is_too_large_is_cut_and_then_refused(tmp_path: Path) -> None:
    config = load_config(None, ["model.name_or_path=demo", "model.init=random"])
    asked = load_model_config("demo", config.model.overrides)
    size = 325 * sum(p.numel() for p in build_meta(asked).parameters())
    whole = make_folder(config, tmp_path / "a", thin=False, memory=size, vocabulary=19, seed=1)
    assert whole.cuts == ()
    cut = make_folder(config, tmp_path / "b", thin=False, memory=size - 1, vocabulary=19, seed=1)
    assert cut.cuts == ("layers 2 of 4",)
    with pytest.raises(UserError, match=r"needs .* GiB to be proved"):
        make_folder(config, tmp_path / "c", thin=False, memory=1000, vocabulary=19, seed=1)


PER_LAYER = {
    "cohere2_moe": ["mlp_layer_types"], "exaone_moe": ["mlp_layer_types"], "glm4_moe_lite": ["mlp_layer_types"],
    "granite_swa": ["layer_rope_theta"], "hy_v3": ["mlp_layer_types"], "mellum": ["mlp_layer_types"],
    "laguna": ["mlp_layer_types", "num_attention_heads_per_layer"], "mimo_v2_flash": ["mlp_layer_types"],
    "minimax_m3_vl_text": ["mlp_layer_types"], "llama4_text": ["no_rope_layers"], "gemma4_text": [],
}  # fmt: skip


def test_every_list_with_an_entry_per_layer_is_cut_with_the_layers(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """And the config can be read again: transformers refuses lists of another length."""
    for number, kind in enumerate(PER_LAYER):
        with subtests.test(msg=kind):
            folder = tmp_path / str(number)
            folder.mkdir()
            config = AutoConfig.for_model(kind)
            small = narrow(fewer_layers(config), 35)
            assert small is not None
            layers = small.num_hidden_layers
            assert 2 <= layers <= 4 < config.num_hidden_layers
            for key in ("layer_types", *PER_LAYER[kind]) if hasattr(config, "layer_types") else PER_LAYER[kind]:
                assert len(getattr(small, key)) == layers
                assert set(getattr(small, key)) == set(getattr(config, key)), key
            small.save_pretrained(folder)
            again = build_meta(load_model_config(folder))
            assert len(again.model.layers) == layers
            assert sum(p.numel() for p in again.parameters()) < 4e7


def test_lists_of_layer_numbers_count_anew() -> None:
    config = AutoConfig.for_model("qwen2_moe", num_hidden_layers=6, mlp_only_layers=[1, 4])
    assert fewer_layers(config).mlp_only_layers == [1]
    assert fewer_layers(config, 5).mlp_only_layers == [1, 4]
    late = AutoConfig.for_model("qwen2_moe", num_hidden_layers=6, mlp_only_layers=[3, 5])
    assert fewer_layers(late).mlp_only_layers == [1]  # of the layers 0 and 3
    config = AutoConfig.for_model("qwen2_moe", num_hidden_layers=6, mlp_only_layers=[0, 1, 5])
    small = fewer_layers(config)
    assert (small.num_hidden_layers, small.mlp_only_layers) == (2, [0])


def test_values_of_single_layers_are_kept_with_them() -> None:
    config = AutoConfig.for_model("gemma4_text")
    small = fewer_layers(config)
    assert small.layer_types == ["sliding_attention", "full_attention"]
    assert [small.per_layer_config[layer].head_dim for layer in range(2)] == [256, 512]
