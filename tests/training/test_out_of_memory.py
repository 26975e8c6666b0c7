"""Want of memory in a run, at any moment of it, ends in one message: where, what was there, what would fit."""

import errno
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import fivefold
from fivefold.config import load_config
from fivefold.core.errors import RunFailed
from fivefold.hardware.cluster import Cluster
from fivefold.launch.failure import WorkerDied, is_want_of_memory
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.layout import Layout
from fivefold.planner.of_run import Relief, changed, changes, relief
from fivefold.training.memory import _PHASES, advise, asked_bytes
from tests.training import bodies
from tests.training.bodies import STARVED

GIB = 2**30


@pytest.mark.full
def test_memory_that_runs_out_is_answered_with_what_fits(tmp_path: Path) -> None:
    """A forward fails in the second step: it is the fifth, and a step has four micro batches. The runs share what is
    kept of their text and model."""
    for lacks in set(STARVED) - {"the memory of a save"}:  # of a trial: test_trial.py
        often = {"eval__every": int(lacks == "an evaluation"), "checkpoint__every": int(lacks == "a save")}
        tree = bodies.run_file(tmp_path, run__name=lacks, data__validation=0.2, train__max_steps=2, **often)
        error = bodies.train(tree, 1, lacks=lacks).error
        step = {"building the model": "before the first step", "forward": "step 2"}.get(lacks, "step 1")
        assert isinstance(error, RunFailed)
        assert error.what == (
            f"rank 0: memory ran out in {lacks}, {step}: 2.50 GiB more were asked for; 1.19 of 79.11 GiB were free"
        )
        _check_advice((error.fix or "").splitlines())


def test_every_phase_is_a_function_that_there_is() -> None:
    """One that has another name now would be told as the build."""
    package, autograd = Path(fivefold.__file__).parent, Path(torch.autograd.__file__).parent
    for file, function, _ in _PHASES:
        files = autograd.glob("*.py") if file == "torch/autograd/" else [package / file]
        assert any(f"def {function}(" in each.read_text(encoding="utf-8") for each in files), (file, function)


def _check_advice(lines: list[str]) -> None:
    for item in ("parameters", "gradients", "optimizer state", "all other tensors"):
        there, planned = next(map(float, _numbers(line)) for line in lines if line.strip().startswith(item))
        assert there >= 0 and planned >= 0
    outside = next(line for line in lines if "outside of torch" in line)
    assert _numbers(outside)[0] == "2.42"  # 79.11 less what is free, allocated, and kept
    assert lines[-1].startswith("nothing small makes it fit")  # almost all that this model needs is there without it


def _numbers(line: str) -> list[str]:
    return re.findall(r"\d+\.\d\d", line)[:2]


@pytest.mark.parametrize("needed", [0, 95 * GIB])
def test_the_fastest_changes_that_fit_come_first(needed: float) -> None:
    """Where a run needs more than was planned for it, they leave room for as much more."""
    cluster = Cluster.parse("8xH100")
    config = load_config(
        None, ["model.name_or_path=llama-3.1-8b", "layout=shard8+mb2", "data.seq_length=8192", "precision.compute=bf16"]
    )
    found = relief(config, cluster, facts_of_config("llama-3.1-8b"), rank=7, needed=needed)
    has, planned = cluster.chip.memory_bytes, found.planned.reserved
    assert planned > has and sum(found.items.values()) == planned
    assert all(each.estimate.reserved * max(1, needed / planned) <= has for each in found.changes)
    assert [each.estimate.step_seconds for each in found.changes] == sorted(
        each.estimate.step_seconds for each in found.changes
    )
    texts = [each.overrides for each in found.changes]
    assert len(texts) == 3 and "train.micro_batch_size=1" in texts
    assert re.fullmatch(r" +\d+\.\d of 79\.2 GiB, +[\d.]+ s a step:  \S+.*", str(found.changes[0]))


@pytest.mark.parametrize("fits", [True, False])
def test_what_fits_as_planned_is_said_to(fits: bool) -> None:
    planned = SimpleNamespace(fits=fits, step_seconds=2.0)
    lines = list(changes(cast(Relief, SimpleNamespace(planned=planned, changes=("train.micro_batch_size=1",)))))
    assert lines[0].startswith("as planned it fits") is fits and lines[-1] == "train.micro_batch_size=1"


def test_rows_become_shorter_where_no_layout_helps() -> None:
    """Of one device; a layout has no neighbour there, and every lever is pulled already."""
    config = load_config(
        None,
        [
            "model.name_or_path=llama-3.2-1b",
            "layout=single+full+offload+offload_optimizer+offload_parameters",
            "train.micro_batch_size=1",
            "precision.compute=bf16",
            "data.seq_length=131072",
        ],
    )
    found = relief(config, Cluster.parse("1xH100"), facts_of_config("llama-3.2-1b"), needed=90 * GIB)
    (change,) = found.changes
    assert re.fullmatch(r"data\.seq_length=\d+", change.overrides)


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("layout: shard8+mb4", "shard8+mb4", "shard8+mb2"),
        ("layout: shard8+mb4", "shard8+mb4", "shard4.tp2+mb4"),
        ("memory: {recompute: none}", "shard8", "shard8+full"),
        ("layout: {dp_replicate: 2, zero: 1}", "dp2.shard4+zero1", "shard8+zero2"),
        ("layout: {pp: 2, pp_schedule: zb, sequence_parallel: false}", "pp2.shard4+zb+nosp", "pp2.shard4"),
    ],
)  # fmt: skip
def test_a_change_can_be_pasted(file: str, before: str, after: str, tmp_path: Path) -> None:
    """Whatever form the run file has."""
    run = tmp_path / "run.yaml"
    run.write_text(file)
    one, other = Layout.parse(before), Layout.parse(after)
    assert load_config(run).layout.resolve(8) == one
    assert load_config(run, changed(one, other).split()).layout.resolve(8) == other


def test_of_a_rank_that_the_system_has_killed_the_launcher_says_what_would_fit() -> None:
    config = load_config(None, ["train.micro_batch_size=8", "layout=shard2"])
    death = WorkerDied("rank 1 was killed by SIGKILL: the system ran out of memory", fix="the workers held 15 GiB")
    advise(death, config, 2)
    lines = (death.fix or "").splitlines()
    assert lines[0] == "the workers held 15 GiB" and any(line.endswith(" memory.recompute=full") for line in lines)


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU", 2.5 * GIB),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes. Error code 12", 123),
        ("std::bad_alloc", 0),
    ],
)
def test_what_was_asked_for(said: str, size: float) -> None:
    assert asked_bytes(said) == size


def test_a_file_that_cannot_be_mapped_is_want_of_memory_and_a_full_disk_is_not() -> None:
    found = [is_want_of_memory(OSError(code, os.strerror(code))) for code in (errno.ENOMEM, errno.ENOSPC)]
    assert found == [True, False]
