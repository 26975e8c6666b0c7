"""Weights in four bits: the bits of bitsandbytes, and pieces that agree with the whole."""

import pytest
import torch

from fivefold.parallel.adapters.by_hand import in_nf4
from fivefold.parallel.adapters.nf4 import Nf4, put, quantise, restored, round_trip
from fivefold.parallel.adapters.settings import nf4_bytes, nf4_numbers


def weight_of(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    weight = torch.randn(shape) * torch.randn(shape[0], 1).exp() / 50
    weight[0, :64] = 0.0
    return weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(256, 320), (1024, 1024), (7, 64), (13, 192)])
def test_the_bits_are_those_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    theirs = pytest.importorskip("bitsandbytes.functional")
    for seed in range(4):
        weight = weight_of(shape, seed).to(dtype)
        packed, state = theirs.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=False)
        own = quantise(weight)
        half = shape[1] // 2
        assert torch.equal(own[:, :half].reshape(-1), packed.view(-1))
        assert torch.equal(own[:, half:].contiguous().view(torch.float32).view(-1), state.absmax)
        assert torch.equal(restored(own, dtype), theirs.dequantize_4bit(packed, state))


def test_it_is_what_the_levels_say() -> None:
    weight = weight_of((17, 256))[1:]
    assert torch.equal(round_trip(weight), in_nf4(weight))
    assert quantise(weight).nbytes * 8 == 4.5 * weight.numel()
    assert nf4_numbers(nf4_bytes(256)) == 256
    assert torch.equal(round_trip(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_pieces_of_whole_blocks_are_parts_of_the_whole() -> None:
    weight = weight_of((13, 192))
    whole, filled = quantise(weight), torch.zeros(13, nf4_bytes(192), dtype=torch.uint8)
    for rows in (slice(0, 5), slice(5, 13)):
        assert torch.equal(quantise(weight[rows]), whole[rows])
        for columns in (slice(64, 192), slice(0, 64)):
            put(filled[rows], columns, weight[rows, columns])
    assert torch.equal(filled, whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_products(dtype: torch.dtype) -> None:
    """Large enough to be restored in several pieces."""
    from unittest.mock import patch

    from fivefold.parallel.adapters import nf4

    weight, x, grad = weight_of((33, 128)), torch.randn(2, 5, 128).to(dtype), torch.randn(2, 5, 33).to(dtype)
    with patch.object(nf4, "_AT_ONCE", 4 * 128):
        (out,), kept = Nf4().outputs(x, [quantise(weight)])
        back, _ = Nf4().gradients([grad], [quantise(weight)], kept, wants_input=True)
    plain = in_nf4(weight).to(dtype)
    assert back is not None
    assert torch.equal(out, x @ plain.T) and torch.equal(back, grad @ plain)
