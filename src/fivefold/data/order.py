"""The order of the rows: one endless sequence fixed by the seed, entered anywhere at the cost of one permutation."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_WORD = 2**64


def permutation(rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of epoch `epoch`, int64 [rows].

    Sorted words of Philox: numpy promises never to change that stream, unlike that of `Generator.permutation`.
    """
    words = np.random.Philox(key=np.array([seed % _WORD, epoch], np.uint64)).random_raw(rows)
    return np.argsort(words, kind="stable")


class RowOrder:
    """Epoch after epoch, each a permutation of all rows; a batch may straddle two (or many, when rows are few)."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed
        # The current epoch and the next one: 8 bytes a row each.
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(rows, seed, epoch))

    def __getitem__(self, place: int) -> int:
        """The row at `place` (0, 1, ...) of the endless order."""
        epoch, within = divmod(place, self.rows)
        return int(self._epoch(epoch)[within])
