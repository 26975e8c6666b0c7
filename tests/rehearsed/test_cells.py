"""`make rehearsal`: the real step under many layouts, with the stand-in for the driver, against a committed table.

Memory may not move by more than 3 %, or three steps of the allocator where these are more; kernels, host syncs and
compiles may only become fewer. Where a number has improved, `python -m tests.rehearsed.cells` writes it into the table.
"""

from collections.abc import Callable, Iterator

import pytest

from fivefold.rehearsal.stand_in import lacking
from tests.rehearsed.cells import CELLS, Cell, Row, more, rows, table

NEAR = 0.03
# In which a segment grows. Each stream has one, and Python's collector may free a tensor a little earlier or later:
# a model of the table (1 to 2 GB) reserves up to 60 MiB more in one run than in another.
STEP = 20 * 2**20
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(lacking()), reason="it needs a CUDA build of torch, and a C compiler"),
]


@pytest.fixture(scope="module")
def row_of() -> Iterator[Callable[[Cell], Row]]:
    with rows() as given:
        yield given


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell(cell: Cell, row_of: Callable[[Cell], Row]) -> None:
    expected = table().get(cell.name)
    assert expected, "the table lacks it: python -m tests.rehearsed.cells --new"
    measured = row_of(cell)
    assert not more(measured, expected)
    for what, least in (("allocated", 0), ("reserved", 3 * STEP)):
        if what in measured:
            assert measured[what] == pytest.approx(expected[what], rel=NEAR, abs=least), what
