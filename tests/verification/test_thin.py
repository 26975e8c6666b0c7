"""A thin model keeps what makes a model what it is."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from fivefold.config import load_config
from fivefold.errors import UserError
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.families import families
from fivefold.models.shapes import shape_names
from fivefold.verification.thin import fewer_layers, make_folder, narrow
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


@pytest.mark.parametrize("family", [each.name for each in families()])
def test_every_family_keeps_its_kinds_of_layers(family: str) -> None:
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
    size = 300 * sum(p.numel() for p in build_meta(load_model_config("demo")).parameters())
    whole = make_folder(config, tmp_path / "a", thin=False, memory=size, vocabulary=19, seed=1)
    assert whole.cuts == ()
    cut = make_folder(config, tmp_path / "b", thin=False, memory=size - 1, vocabulary=19, seed=1)
    assert cut.cuts == ("layers 2 of 4",)
    with pytest.raises(UserError, match=r"needs .* GiB to be proved"):
        make_folder(config, tmp_path / "c", thin=False, memory=1000, vocabulary=19, seed=1)
