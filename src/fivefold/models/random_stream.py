"""Random numbers with random access: element i of a parameter depends on (seed, parameter name, i) and nothing else.

Any region of a parameter can be drawn without drawing the rest, so initial weights are bit-equal for every layout and
no process draws more than it keeps. The generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011): counter j gives the four 32-bit words of elements 4j to 4j+3. Normals come in pairs from two words
(Box and Muller, 1958). All arithmetic between the words and the final rounding to fp32 is in fp64, so that a last-bit
difference between the math libraries of two machines changes about one element in 10^8. As many threads as torch has
draw a region: numpy releases the GIL while it computes.

Numbers are always drawn in blocks of one size: a vector unit may round the tail of an array differently from its body,
and with full blocks there is no tail.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Words = npt.NDArray[np.uint64]
Values = npt.NDArray[np.float32]
Region = tuple[slice, ...]  # one slice of step 1 per dim

_BLOCK = 1 << 14  # counters at a time: 12 arrays of 128 KiB, which stay in the second-level cache
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_DOUBT = 2.0**-48  # relative difference of two fp64 cosines: each is right within an ulp or two, 2**-52


def whole(shape: Sequence[int]) -> Region:
    return tuple(slice(0, size) for size in shape)


@dataclass(frozen=True)
class Normal:
    """Normal numbers of `mean` and standard deviation `std`."""

    mean: float
    std: float

    def __call__(self, words: Words) -> Values:
        """Map words [4, n] to values [4, n]: numpy's to the last bit of fp32, four times as fast by torch's cosine."""
        values = np.empty(words.shape, dtype=np.float32)
        for first in (0, 2):
            radius = np.sqrt(-2.0 * np.log(_open_unit(words[first]))) * self.std
            angle = words[first + 1] * (2.0 * math.pi / 2**32)
            for into, exact, fast in ((first, np.cos, torch.cos), (first + 1, np.sin, torch.sin)):
                near = radius * fast(torch.from_numpy(angle)).numpy()
                # Rounding is monotonic: if both bounds round to the same number, so does every value between them.
                values[into] = near * (1.0 - _DOUBT) + self.mean
                if (values[into] != (near * (1.0 + _DOUBT) + self.mean).astype(np.float32)).any():
                    values[into] = radius * exact(angle) + self.mean
        return values


@dataclass(frozen=True)
class Uniform:
    """Uniform numbers between `low` and `high`."""

    low: float
    high: float

    def __call__(self, words: Words) -> npt.NDArray[np.float64]:
        """Map words [4, n] to values [4, n]."""
        return _open_unit(words) * (self.high - self.low) + self.low


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal numbers of `mean` and `std`, none outside [`low`, `high`] (absolute, as in `torch.nn.init`)."""

    mean: float
    std: float
    low: float
    high: float

    def __call__(self, words: Words) -> npt.NDArray[np.float64]:
        """Map words [4, n] to values [4, n], by the inverse of the cumulative distribution."""
        first, last = (math.erf((edge - self.mean) / self.std / math.sqrt(2.0)) for edge in (self.low, self.high))
        erf = torch.from_numpy(_open_unit(words) * (last - first) + first)
        values = torch.erfinv(erf).numpy() * (self.std * math.sqrt(2.0)) + self.mean
        return np.clip(values, self.low, self.high)


Distribution = Normal | Uniform | TruncatedNormal


@dataclass(frozen=True)
class RandomStream:
    """The numbers of one parameter of `shape` (the global shape), reached by region."""

    seed: int
    name: str
    shape: tuple[int, ...]

    def draw(self, region: Region, distribution: Distribution) -> Tensor:
        """The fp32 values of `region` (one slice of step 1 per dim), in blocks: temporaries stay below 64 MiB."""
        bounds = [piece.indices(size)[:2] for piece, size in zip(region, self.shape, strict=True)]
        result = np.empty([max(stop - start, 0) for start, stop in bounds], dtype=np.float32)
        if result.size:
            starts, run = _runs(bounds, self.shape)
            self._fill(result.reshape(-1, run), starts, distribution)
        return torch.from_numpy(result)

    def _fill(self, out: Values, starts: npt.NDArray[np.uint64], distribution: Distribution) -> None:
        """Fill out [rows, run]: row r gets the elements from `starts[r]` on."""
        generate = _generator(_key(self.seed, self.name), distribution)
        rows, columns = max(1, 4 * _BLOCK // out.shape[1]), 64 * _BLOCK

        def fill(place: tuple[int, int]) -> None:
            row, column = place
            piece = out[row : row + rows, column : column + columns]
            _fill_piece(piece, starts[row : row + rows] + np.uint64(column), generate)

        places = list(product(range(0, out.shape[0], rows), range(0, out.shape[1], columns)))
        if len(places) == 1:  # a small draw finishes before a thread would start
            return fill(places[0])
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            for _ in threads.map(fill, places):
                pass


def _fill_piece(out: Values, starts: npt.NDArray[np.uint64], generate: Callable[[Words], Values]) -> None:
    """Draw the counters that cover each row, then cut each row out of the drawn values."""
    first, skip = starts >> np.uint64(2), (starts & np.uint64(3)).astype(np.intp)
    width = out.shape[1]
    counters = -(-(width + int(skip.max())) // 4)
    values = generate((first[:, None] + np.arange(counters, dtype=np.uint64)).reshape(-1)).reshape(len(out), -1)
    if (skip == skip[0]).all():
        out[:] = values[:, skip[0] : skip[0] + width]
    else:
        out[:] = np.take_along_axis(values, skip[:, None] + np.arange(width), axis=1)


def _generator(key: tuple[int, int], distribution: Distribution) -> Callable[[Words], Values]:
    """A function from counters [n] to their values [n, 4], blocks of `_BLOCK` counters at a time."""

    def generate(counters: Words) -> Values:
        values = np.empty((len(counters), 4), dtype=np.float32)
        block = np.zeros(_BLOCK, dtype=np.uint64)
        for start in range(0, len(counters), _BLOCK):
            piece = counters[start : start + _BLOCK]
            block[: len(piece)] = piece
            values[start : start + _BLOCK] = distribution(philox(block, key)).T[: len(piece)]
        return values

    return generate


def philox(counters: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 of 64-bit counters [n] -> 32-bit words [4, n], held in 64 bits."""
    word = np.zeros((4, len(counters)), dtype=np.uint64)
    np.bitwise_and(counters, _LOW, out=word[0])
    np.right_shift(counters, _32, out=word[1])
    products = np.empty((2, len(counters)), dtype=np.uint64)
    for turn in range(10):
        np.multiply(word[0], _MULTIPLIERS[0], out=products[0])
        np.multiply(word[2], _MULTIPLIERS[1], out=products[1])
        for side, (into, carried) in enumerate(((2, 3), (0, 1))):
            turned = np.uint64((key[1 - side] + turn * _WEYL[1 - side]) & 0xFFFFFFFF)
            np.right_shift(products[side], _32, out=word[into])
            np.bitwise_xor(word[into], word[carried], out=word[into])
            np.bitwise_xor(word[into], turned, out=word[into])
            np.bitwise_and(products[side], _LOW, out=word[carried])
    return word


def _open_unit(words: Words) -> npt.NDArray[np.float64]:
    """32-bit words as numbers strictly between 0 and 1."""
    return (words.astype(np.float64) + 0.5) * 2.0**-32


def _key(seed: int, name: str) -> tuple[int, int]:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _runs(bounds: Sequence[tuple[int, int]], shape: Sequence[int]) -> tuple[npt.NDArray[np.uint64], int]:
    """Split a region into runs of consecutive elements: their starts in the flat parameter, and their common length.

    Example: rows 1 and 2 of [4, 5], columns 0 to 4, are one run of 10 from 5 on; columns 3 and 4 alone are two runs of
    2, from 8 and from 13 on.
    """
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    cut = [dim for dim, size in enumerate(shape) if bounds[dim] != (0, size)]
    last = max(cut, default=0)  # a run continues through the later dims, which are whole
    starts = np.array([sum(start * stride for (start, _), stride in zip(bounds[last:], strides[last:], strict=True))])
    starts = starts.astype(np.uint64)
    for dim in reversed(range(last)):
        rows = np.arange(*bounds[dim], dtype=np.uint64) * np.uint64(strides[dim])
        starts = np.add.outer(rows, starts).reshape(-1)
    return starts, math.prod(stop - start for start, stop in bounds[last:])
