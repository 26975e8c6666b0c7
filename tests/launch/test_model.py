"""What the launcher finds out about a model before it starts anything."""

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.data.tokenizer import find_tokenizer
from fivefold.launch.model import check_data, check_model
from fivefold.models.build import weights_folder

CONFIG = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 128, "model_type": "llama"}


def folder(tmp_path: Path, *files: str, **changes: Any) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | changes))
    for name in files:
        (tmp_path / "model" / name).touch()
    return tmp_path / "model"


def check(path: Path | str, *overrides: str) -> None:
    check_model(load_config(None, [f"model.name_or_path={path}", "model.init=pretrained", *overrides]))


def refusal(path: Path | str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        check(path, "data.seq_length=128", *overrides)
    assert caught.value.fix and caught.value.more
    return caught.value


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_what_fits_passes(tmp_path: Path, tp: int) -> None:
    check(folder(tmp_path, "a.safetensors"), "data.seq_length=128", f"layout.tp={tp}")


def test_heads_are_counted_as_the_model_is_cut(tmp_path: Path) -> None:
    path = folder(tmp_path, "a.safetensors")
    assert refusal(path, "layout.tp=6").what.startswith(
        "tp=6 does not fit num_attention_heads=12, num_key_value_heads=4"
    )
    check(path, "data.seq_length=128", "layout.tp=6", "model.overrides.num_key_value_heads=6")


def test_heads_are_dealt_out_to_the_ranks_of_a_context(tmp_path: Path) -> None:
    path = folder(tmp_path, "a.safetensors")
    for fits in ("cp8", "cp4+ulysses", "cp12+ulysses", "cp6+3x2", "cp2.tp2+ulysses"):
        check(path, "data.seq_length=128", f"layout={fits}")
    error = refusal(path, "layout=cp8+ulysses")
    assert error.what.startswith("cp_method ulysses deals 12 query and 4 key/value heads of a rank out to 8")
    assert error.fix == "use auto, ring, or 8x1 or 4x2 or 2x4"
    assert "6 query and 2 key/value heads" in refusal(path, "layout=cp4.tp2+ulysses").what


def test_rows_are_no_longer_than_the_positions(tmp_path: Path) -> None:
    assert "max_position_embeddings 128" in refusal(folder(tmp_path, "a.safetensors"), "data.seq_length=129").what


def test_weights_are_safetensors(tmp_path: Path) -> None:
    path = folder(tmp_path)
    assert refusal(path).what == f"{path} holds no *.safetensors"
    (path / "pytorch_model.bin").touch()
    error = refusal(path)
    assert "holds no *.safetensors; pytorch_model.bin is a pickle" in error.what and "convert" in str(error.fix)
    check(path, "data.seq_length=128", "model.init=random")
    assert "config without weights" in refusal(path / "config.json").what


def test_a_name_that_is_nothing_is_said(tmp_path: Path) -> None:
    nowhere = refusal(tmp_path / "nowhere")
    assert "neither a folder nor a hub id" in nowhere.what
    assert "those of a run to the folder that it was started in: give the command there" in str(nowhere.fix)
    assert "holds no config.json" in refusal(tmp_path).what


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.Q4_1.gguf").touch()
    (tmp_path / "model-q4").write_bytes(b"GGUF\x03\0\0\0")
    for name in (tmp_path, tmp_path / "model.Q4_1.gguf", tmp_path / "model-q4"):
        assert f"{name} holds quantised weights as GGUF" in (error := refusal(name)).what and error.fix
        with pytest.raises(UserError, match="GGUF"):  # where `generate` and `evaluate` look first
            weights_folder(name)
    with pytest.raises(UserError, match="GGUF"):
        find_tokenizer(str(tmp_path / "model-q4"), model="demo", corpus=[], root=tmp_path)
    (tmp_path / "config.json").write_bytes(b"GGUF\x03\0\0\0")
    assert "config.json holds quantised weights as GGUF" in refusal(tmp_path).what
    (tmp_path / "config.json").write_text("{}")  # what else lies beside a model is nothing of it
    assert weights_folder(tmp_path) == tmp_path


@pytest.mark.full
def test_it_costs_no_torch() -> None:
    code = (
        "import sys; from fivefold.config import load_config; from fivefold.launch.model import check_model; "
        "check_model(load_config(None)); assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_no_model_may_ask_for_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, "a.safetensors", attention_dropout=0.1, router_jitter_noise=0.1, layerdrop=0.1)
    error = refusal(path)
    assert error.what.startswith(f"{path} has layerdrop 0.1, which is not built")
    assert error.fix == "set model.overrides.layerdrop: 0"
    check(path, "data.seq_length=128", "model.overrides.layerdrop=0")
    (path / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoConfig": "evil.C"}}))
    assert "no code from a model folder is executed" in refusal(path).what


def test_noise_of_a_part_that_is_not_trained_is_left_to_who_knows_the_parts(tmp_path: Path) -> None:
    parts = {"vision_config": {"model_type": "siglip_vision_model", "layerdrop": 0.1}}
    check(folder(tmp_path, "a.safetensors", **parts), "data.seq_length=128")
    (tmp_path / "model" / "config.json").write_text(json.dumps(parts | {"text_config": CONFIG | {"layerdrop": 0.2}}))
    assert "layerdrop 0.2" in refusal(tmp_path / "model").what


@pytest.mark.parametrize(
    ("changes", "overrides", "is_refused"),
    [
        ({"vocab_size": 100}, [], True),
        ({"vocab_size": 100}, ["model.init=random"], True),
        ({"vocab_size": 100}, ["model.init=random", "tokenizer.name_or_path=byte"], False),
        ({"vocab_size": 100}, ["tokenizer.name_or_path=byte"], True),
        ({"vocab_size": 100}, ["model.overrides.vocab_size=101"], False),
        ({"vocab_size": 101}, [], False),  # as many as the texts hold
        ({"vocab_size": 100, "text_config": {}}, [], False),
        ({}, [], False),
    ],
)
def test_tokens_of_the_data_that_the_model_lacks(
    changes: dict[str, Any], overrides: list[str], is_refused: bool, tmp_path: Path
) -> None:
    path = folder(tmp_path, **changes)
    given = [f"model.name_or_path={path}", "model.init=pretrained", "tokenizer.name_or_path=auto"]
    config = load_config(None, [*given, *overrides])
    data: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(vocab_size=259), train=SimpleNamespace(largest_token=100), validation=None
    )
    with pytest.raises(UserError, match="259 tokens, the model's vocabulary 100") if is_refused else nullcontext():
        check_data(config, data)
