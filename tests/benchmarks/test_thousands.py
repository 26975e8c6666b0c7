"""What `benchmarks/thousands.py` says of thousands of ranks, beside two that are there; and what may not grow."""

import time
from pathlib import Path

import pytest
import torch
from benchmarks.thousands import built, looked_up, manifest_of, saved
from transformers import AutoModelForCausalLM, LlamaConfig

import fivefold as ff
from fivefold.checkpoint import Manifest
from fivefold.checkpoint.manifest import MANIFEST, read_manifest
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
            assert counted["files"] == len([*folder.glob("*.safetensors")])
            assert not any(record.instead for kind in manifest.tensors.values() for record in kind.values())
            assert 0 < (folder / MANIFEST).stat().st_size - counted["manifest_bytes"] < 2000  # settings, and model/
            tensors = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            assert counted["checkpoint_bytes"] == pytest.approx(tensors, rel=0.1)  # headers of small files


def test_a_manifest_grows_with_files_alone() -> None:
    """35 bytes a file of 32,768 and a line a tensor; millions of slices of it are neither written, read nor walked."""
    facts = facts_of_config("llama-3.1-8b")
    few, many = (manifest_of(lower(facts, Layout(dp_shard=shards), 0).placement) for shards in (64, 16_384))
    small, large = few.to_json(), many.to_json()
    assert len(large) - len(small) < 36 * 2 * (16_384 - 64) and len(large) < 1.4e6
    began = time.process_time()
    read = Manifest.from_json(large, where="here")
    found = list(looked_up(read, lower(facts, Layout(dp_shard=8192), 0).placement, 1))
    assert time.process_time() - began < 5  # 85 s when each slice was listed
    assert 0 <= len(found) - 3 * len(facts.parameters) <= 3 * len(facts.parameters)  # one or two slices of each tensor


@pytest.mark.full
def test_a_program_takes_as_long_among_thousands() -> None:
    few, many = (built("demo", Layout(dp_shard=world), 0) for world in (64, 16_384))
    assert many["build_seconds"] < 5 * few["build_seconds"] + 1  # 16,384 views of each parameter took a minute
    assert many["mib"] < few["mib"] + 30 and many["own_groups"] == few["own_groups"] == 1
