"""What `benchmarks/thousands.py` says of thousands of ranks, beside two that are there; and what may not grow."""

from pathlib import Path

import pytest
import torch
from benchmarks.thousands import built, saved
from transformers import AutoModelForCausalLM, LlamaConfig

import fivefold as ff
from fivefold.checkpoint.manifest import NAME, read_manifest
from fivefold.checkpoint.size import check_manifest, manifest_bytes
from fivefold.core.errors import UserError
from fivefold.models.build import use_our_attention
from fivefold.models.config_facts import facts_of_config
from fivefold.models.discover import facts_of
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from tests.pool import run_ranks


def tiny() -> torch.nn.Module:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def save(layout: str, folder: Path) -> None:
    model = ff.parallelize(tiny(), layout)
    optimizer = torch.optim.AdamW(model.parameters())
    rows = torch.arange(64).view(4, 16)[model.data_rank :: model.data_ranks]
    ff.train_step(model, optimizer, {"input_ids": rows, "labels": rows.clone()})
    ff.save(model, optimizer, folder)


@pytest.mark.full
def test_a_checkpoint_has_the_slices_that_are_counted(tmp_path: Path, subtests: pytest.Subtests) -> None:
    with torch.device("meta"):
        model = tiny()
    use_our_attention(model)
    facts = facts_of(model)
    for layout in ("shard2", "tp2"):
        with subtests.test(msg=layout):
            folder = tmp_path / layout
            run_ranks(2, save, layout, folder)
            manifest, counted = read_manifest(folder), saved(facts, Layout.parse(layout))
            slices = [one for kind in manifest.tensors.values() for record in kind.values() for one in record.slices]
            assert counted["slices"] == len(slices)
            assert counted["files"] == len({one.file for one in slices})
            assert counted["manifest_bytes"] == pytest.approx(
                (folder / NAME).stat().st_size, rel=0.15
            )  # settings of the run, too
            tensors = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            assert counted["checkpoint_bytes"] == pytest.approx(tensors, rel=0.1)  # headers of small files


def test_a_manifest_that_nobody_could_read_is_refused() -> None:
    facts = facts_of_config("llama-3.1-70b")
    for layout in ("dp64.shard256", "dp2.shard8.tp8.pp4"):
        check_manifest(lower(facts, Layout.parse(layout), 0).placement, [*facts.parameters] * 2)
    placement = lower(facts, Layout(dp_shard=16_384), 0).placement
    with pytest.raises(UserError, match=r"shard16384 lists the slices of 16,384 ranks in .* GiB") as refused:
        check_manifest(placement, [*facts.parameters] * 2)
    assert "dp_replicate" in (refused.value.fix or "")
    own = lower(facts, Layout(dp_shard=64), 0)
    counted = saved(facts, own.layout)["manifest_bytes"]
    assert manifest_bytes(own.placement, [*facts.parameters] * 2) == pytest.approx(counted, rel=0.05)


@pytest.mark.full
def test_a_program_takes_as_long_among_thousands() -> None:
    few, many = (built("demo", Layout(dp_shard=world), 0) for world in (64, 16_384))
    assert many["build_seconds"] < 5 * few["build_seconds"] + 1  # 16,384 views of each parameter took a minute
    assert many["mib"] < few["mib"] + 30 and many["own_groups"] == few["own_groups"] == 1
