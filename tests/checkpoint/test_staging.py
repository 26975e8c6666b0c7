"""The memory that a checkpoint is copied to: as much as is saved, and given back when it is not needed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fivefold.checkpoint.save import _floats
from fivefold.checkpoint.staging import Staging


def tensors() -> list[Tensor]:
    """33 MiB of fp32 in three pieces, and some bf16: no size is a power of two."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(3, 11, 2**18), (7,), (1000, 13)]
    return [*(torch.randn(size, generator=generator) for size in sizes), torch.ones(5, 3, dtype=torch.bfloat16)]


def test_copies_are_equal_and_training_does_not_touch_them() -> None:
    given = tensors()
    expected = [each.clone() for each in given]
    copies = Staging().copies(given)
    for each in given:
        each.zero_()
    for copy, wanted in zip(copies, expected, strict=True):
        assert torch.equal(copy, wanted) and copy.dtype == wanted.dtype


def test_memory_is_what_is_saved_and_is_used_again() -> None:
    staging, given = Staging(), tensors()
    first = staging.copies(given)
    assert staging.bytes == sum(each.nbytes for each in given)
    again = staging.copies(given)
    assert [each.data_ptr() for each in again] == [each.data_ptr() for each in first]
    staging.free()
    assert staging.bytes == 0


class _Runtime:
    """Notes what is page-locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.locked[pointer] = size
        return flags

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.locked[pointer]
        return 0


def test_for_a_gpu_it_is_page_locked_without_being_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = _Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    staging, given = Staging(), [_OnGpu(each) for each in tensors()]
    staging.copies(given)
    assert sum(runtime.locked.values()) == sum(each.nbytes for each in given)
    staging.free()
    assert not runtime.locked


class _OnGpu(Tensor):
    """A tensor that says that it is on a GPU."""

    @staticmethod
    def __new__(cls: type, tensor: Tensor) -> Any:
        return tensor.as_subclass(_OnGpu)

    @property
    def is_cuda(self) -> bool:
        return True


def test_numbers_of_the_optimizer_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a type in one read: on a GPU each is a wait for all that runs there."""
    read, plain = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: read.append(tensor.numel()) or plain(tensor))
    monkeypatch.setattr(torch.Tensor, "__float__", lambda _: pytest.fail("one number is read alone"))
    values = [torch.tensor(2.0), 3, torch.tensor(7), torch.tensor(4.5), 0.5]
    assert _floats(values) == [2.0, 3.0, 7.0, 4.5, 0.5]
    assert read == [2, 1]
