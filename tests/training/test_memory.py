"""What is said of the memory of a GPU."""

import os

import pytest
import torch

from fivefold.core.errors import RunFailed
from fivefold.launch import world
from fivefold.launch.memory import out_of_gpu_memory
from fivefold.training.memory import PeakMemory

TORCH_SAYS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.19 GiB is free"
    ". Including non-PyTorch memory, this process has 77.91 GiB memory in use. Of the allocated memory 70.00 GiB is ..."
)


def test_want_of_gpu_memory_is_answered_with_what_helps_and_not_as_a_bug() -> None:
    said = out_of_gpu_memory(torch.OutOfMemoryError(TORCH_SAYS), 3)
    assert isinstance(said, RunFailed)
    assert said.what == (
        "rank 3: the memory of its GPU does not suffice: 2.50 GiB more were asked for, 1.19 GiB of 79.11 GiB were free"
    )
    for key in ("memory.recompute: full", "train.micro_batch_size", "layout.dp_shard"):
        assert key in str(said.fix)
    assert out_of_gpu_memory(RuntimeError("CUDA out of cheese"), 0) is None


def test_what_is_reserved_is_told_of_gpus_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PeakMemory(torch.device("cpu")).reserved_gib is None
    for name, value in (("max_memory_reserved", 3 * 2**30), ("max_memory_allocated", 2**30)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    peak = PeakMemory(torch.device("cuda"))
    assert (peak.gib, peak.reserved_gib) == (1, 3)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, None),
    ],
)
def test_segments_grow_unless_the_user_says_otherwise(said: dict[str, str], wanted: str | None) -> None:
    env = dict(said)
    world.set_for_cuda(env)
    assert env.get("PYTORCH_CUDA_ALLOC_CONF") == wanted
    assert env["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] == "false"


def test_it_is_set_before_cuda_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reads it once: when the device is set it must be there."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    seen = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: seen.append(os.environ.get("PYTORCH_CUDA_ALLOC_CONF")))
    monkeypatch.setattr(world, "_open_group", lambda *_: None)
    with world.join(world.World(device="cuda:0", backend="nccl")):
        pass
    assert seen == ["expandable_segments:True"]
