"""`fivefold doctor MODEL`: the plan of a rank with the roles of its parameters, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, DeepseekV3Config, DogeConfig, MixtralConfig

from fivefold import cli
from fivefold.doctor.model import examine_layout
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.features import edits
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from tests.models.tiny import SIZES


def doctor(*arguments: str, capsys: Any) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *arguments])
    return int(ended.value.code or 0), capsys.readouterr().out


def rows(*arguments: str, capsys: Any) -> dict[str, dict[str, str]]:
    _, text = doctor(*arguments, "--json", "-", capsys=capsys)
    return {row["of"]: row for row in json.loads(text)["rows"] if row["part"] == "parameters"}


def test_a_built_in_shape(capsys: Any) -> None:
    found = rows("llama-3.1-8b", "--layout", "tp16", capsys=capsys)
    assert found["model.layers.*.self_attn.q_proj.weight"]["says"] == "256 x 4096 of 4096 x 4096"
    assert found["model.layers.*.self_attn.k_proj.weight"]["says"] == "128 x 4096 of 1024 x 4096"
    assert found["model.layers.*.mlp.down_proj.weight"]["says"] == "4096 x 896 of 4096 x 14336"
    assert found["model.norm.weight"]["why"].startswith("norm, ")
    code, text = doctor("llama-3.1-8b", capsys=capsys)
    assert code == 0 and "32 query heads, 8 key/value heads: tp 1, 2, 4, 8, 16, 32" in " ".join(text.split())
    assert "q_proj" in text and "(plan:" not in text


def test_it_fits_80_columns(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, text = doctor("llama-3.1-8b", "--layout", "tp8", capsys=capsys)
    assert code == 0 and max(len(line.rstrip()) for line in text.splitlines()) <= 80
    shown = {word for line in text.splitlines() for word in line.split()}
    assert {"residual:", "key/value", "heads", "outside"} <= shown  # whole words


def test_experts_and_routers_are_shown(tmp_path: Path, capsys: Any) -> None:
    MixtralConfig(**SIZES).save_pretrained(tmp_path)
    found = rows(str(tmp_path), capsys=capsys)
    assert found["model.layers.*.mlp.gate.weight"]["why"].startswith("router, ")
    assert found["model.layers.*.mlp.experts.down_proj"]["why"].startswith("experts, ")


def test_latents_are_shown(tmp_path: Path, capsys: Any) -> None:
    DeepseekV3Config(**{**SIZES, "num_key_value_heads": 6}, n_routed_experts=16).save_pretrained(tmp_path)
    found = rows(str(tmp_path), "--layout", "tp2", capsys=capsys)
    latent = found["model.layers.*.self_attn.kv_a_proj_with_mqa.weight"]
    assert latent["says"] == "576 x 48" and latent["why"].startswith("latent, ")
    assert found["model.layers.*.self_attn.kv_b_proj.weight"]["says"] == "768 x 512 of 1536 x 512"


def test_what_is_refused_is_said_with_the_reason(tmp_path: Path, capsys: Any) -> None:
    DogeConfig(**SIZES).save_pretrained(tmp_path / "doge")
    BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=101).save_pretrained(tmp_path / "own")
    for arguments, said in (
        ((str(tmp_path / "doge"),), "cannot be trained here"),
        ((str(tmp_path / "own"),), "cannot be trained here"),
        (("llama-3.1-8b", "--layout", "tp3"), "tp=3 does not fit num_attention_heads=32"),
    ):
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", *arguments])
        assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize(
    "layout", ["tp2+fp8_rowwise+selective", "shard2.ep2+fp8+full", "pp2+zb+offload", "cp2+fp8_delayed"]
)
def test_what_is_done_to_layers_is_one_row_however_many_they_are(tmp_path: Path, layout: str) -> None:
    """What is done to each layer names modules beside it, too."""

    def done(layers: int) -> int:
        config = MixtralConfig(**{**SIZES, "num_hidden_layers": layers}, num_local_experts=4, num_experts_per_tok=2)
        config.save_pretrained(tmp_path / str(layers))
        report = examine_layout(tmp_path / str(layers), layout=layout, seq_length=64)
        return sum(row.part == "done to modules, in order" for row in report.rows)

    assert done(8) == done(12)


def test_the_plan_of_one_rank(capsys: Any) -> None:
    code, text = doctor("llama-3.1-8b", "--layout", "shard4.tp2.pp2+full", "--rank", "9", capsys=capsys)
    assert code == 0 and "under shard4.tp2.pp2+full, rank 9 of 16" in text
    for said in (
        "tp 1, dp_shard 0, pp 1",
        "layers 17 to 31 of 32",
        "reduce_scatter over tp",
        "saved activations",
        "recompute",
    ):
        assert said in text, said
    _, text = doctor("llama-3.1-8b", "--layout", "shard4.tp2.pp2+full", "--rank", "9", "--json", "-", capsys=capsys)
    found = json.loads(text)
    held = {row["of"]: row["says"] for row in found["rows"] if row["part"] == "parameters"}
    assert held["model.layers.*.mlp.down_proj.weight"] == "4096 x 7168 of 4096 x 14336, shard 0 of 4"
    assert sum(call["times"] for call in found["calls"] if call["axis"] == "pp") == 8
    assert found["bytes"]["parameters"] == 4 * found["bytes"]["gradients"] // 4
    assert len(found["bytes"]["saved by layer"]) == 15
    plan = lower(facts_of_config("llama-3.1-8b"), Layout.parse("shard4.tp2.pp2+full"), 9, compiled=True)
    assert [each["path"] for each in found["edits"]] == [each.path for each in edits(plan)]
    assert {"path": "model.layers.31", "kind": "forward", "by": "compile", "why": "one graph"} in found["edits"]
    done = [row for row in found["rows"] if row["part"] == "done to modules, in order"]
    rows = {"of": "model.layers.*.self_attn.o_proj", "says": "forward (tp)"}
    assert any(row.items() >= rows.items() and row["why"].endswith("then the bias, 15 times") for row in done)
    assert [row["says"] for row in done if row["of"] == "model.layers.*"] == [
        "stub (pp)", "forward (recompute)", "forward (compile)", "shard (dp_shard)",
    ]  # fmt: skip


def test_a_budget_is_spent_before_a_plan_is_shown(capsys: Any) -> None:
    code, text = doctor("llama-3.1-8b", "--layout", "shard4.tp2+keep2GiB", capsys=capsys)
    assert code == 0 and "keep2GiB" not in text.split("recompute", 1)[1].splitlines()[0]


def test_a_plan_that_cannot_be_is_refused(capsys: Any) -> None:
    for layout, said in (("tp3", "tp=3 does not fit"), ("pp64", "32 layers"), ("shard-1", "a known number of ranks")):
        code, _ = doctor("llama-3.1-8b", "--layout", layout, capsys=capsys)
        assert code == 2, said
    assert doctor("llama-3.1-8b", "--layout", "tp2", "--rank", "2", capsys=capsys)[0] == 2
    assert doctor("--layout", "tp2", capsys=capsys) == (2, "")  # of no model


def test_a_plan_of_more_tokens_than_can_be_listed_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "demo", "--layout", "cp2", "--seq-length", "1000000000000"])
    assert ended.value.code == 2
    assert "1 row of 1,000,000,000,000 tokens is more than 2,147,483,648 tokens" in capsys.readouterr().err
