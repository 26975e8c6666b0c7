"""`fivefold doctor MODEL`: the roles of a model as a table, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, DeepseekV3Config, DogeConfig, MixtralConfig, Phi3Config

from fivefold import cli
from tests.models.tiny import SIZES


def doctor(*arguments: str, capsys: Any) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def rows(*arguments: str, capsys: Any) -> dict[str, dict[str, str]]:
    _, text = doctor(*arguments, "--json", "-", capsys=capsys)
    return {row["parameter"]: row for row in json.loads(text)["rows"]}


def test_a_built_in_shape(capsys: Any) -> None:
    found = rows("llama-3.1-8b", "--tp", "16", capsys=capsys)
    assert found["layers.*.self_attn.q_proj.weight"]["shard"] == "256/4096 x 4096"
    assert found["layers.*.self_attn.k_proj.weight"]["shard"] == "128/1024 x 4096, on 2 ranks"
    assert found["layers.*.mlp.down_proj.weight"]["shard"] == "4096 x 896/14336"
    assert found["norm.weight"]["role"] == "norm"
    code, text = doctor("llama-3.1-8b", capsys=capsys)
    assert code == 0 and "32 query heads, 8 key/value heads: tp 1, 2, 4, 8, 16, 32" in text
    assert "layers.*.post_attention_layernorm.weight" in text  # names are never cut


def test_fused_projections_come_in_pieces(tmp_path: Path, capsys: Any) -> None:
    Phi3Config(**SIZES).save_pretrained(tmp_path)
    found = rows(str(tmp_path), capsys=capsys)
    assert found["layers.*.self_attn.qkv_proj.weight"]["shard"] == "40/80 x 48, 3 pieces"
    assert found["layers.*.mlp.gate_up_proj.weight"]["shard"] == "88/176 x 48, 2 pieces"


def test_experts_and_routers_are_shown(tmp_path: Path, capsys: Any) -> None:
    MixtralConfig(**SIZES).save_pretrained(tmp_path)
    found = rows(str(tmp_path), capsys=capsys)
    assert found["layers.*.mlp.gate.weight"]["role"] == "router"
    assert found["layers.*.mlp.experts.down_proj"]["role"] == "experts"


def test_latents_are_shown(tmp_path: Path, capsys: Any) -> None:
    DeepseekV3Config(**{**SIZES, "num_key_value_heads": 6}, n_routed_experts=16).save_pretrained(tmp_path)
    found = rows(str(tmp_path), capsys=capsys)
    latent = found["layers.*.self_attn.kv_a_proj_with_mqa.weight"]
    assert (latent["role"], latent["shard"]) == ("latent", "576 x 48")
    assert found["layers.*.self_attn.kv_b_proj.weight"]["shard"] == "768/1536 x 512"


def test_what_is_refused_is_said_with_the_reason(tmp_path: Path, capsys: Any) -> None:
    DogeConfig(**SIZES).save_pretrained(tmp_path / "doge")
    code, text = doctor(str(tmp_path / "doge"), capsys=capsys)
    assert code == 1 and "tp 2 is refused" in text and "neither column nor row" in text
    BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=101).save_pretrained(tmp_path / "own")
    code, text = doctor(str(tmp_path / "own"), capsys=capsys)
    assert code == 1 and "it cannot be trained here" in text
    code, text = doctor("llama-3.1-8b", "--tp", "3", capsys=capsys)
    assert code == 1 and "tp=3 does not fit num_attention_heads=32" in text
