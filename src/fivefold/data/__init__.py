"""Documents -> token store -> packed rows in one order fixed by the seed -> a data rank's micro batches. No torch."""

from fivefold.core.cache import Progress, cache_root
from fivefold.data.batch import IGNORE, MicroBatch
from fivefold.data.counts import DataCounts, RowCounts
from fivefold.data.prepare import PreparedData, prepare
from fivefold.data.rows import PackedRows

__all__ = [
    "IGNORE",
    "DataCounts",
    "MicroBatch",
    "PackedRows",
    "PreparedData",
    "Progress",
    "RowCounts",
    "cache_root",
    "prepare",
]
