"""What `benchmarks/thousands.py` says of thousands of ranks, beside two that are there; and what may not grow."""

from pathlib import Path

import pytest
import torch
from benchmarks.thousands import built, saved
from transformers import AutoModelForCausalLM, LlamaConfig

import fivefold as ff
from fivefold.checkpoint.manifest import NAME, read_manifest
from fivefold.models.build import use_our_attention
from fivefold.models.discover import facts_of
from fivefold.parallel.layout import Layout
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
    for layout in ("shard2", "tp2", "pp2", "dp2"):
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


@pytest.mark.full
def test_a_program_takes_as_long_among_thousands() -> None:
    few, many = (built("demo", Layout(dp_shard=world), 0) for world in (64, 16_384))
    assert many["build_seconds"] < 5 * few["build_seconds"] + 1  # 16,384 views of each parameter took a minute
    assert many["mib"] < few["mib"] + 30 and many["own_groups"] == few["own_groups"] == 1
