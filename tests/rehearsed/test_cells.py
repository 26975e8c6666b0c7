"""`make rehearsal`: the real step under many layouts, with the stand-in for the driver, against a committed table.

Memory may not move by more than 3 %; kernels, host syncs and compiles may only become fewer. Where a number has
improved, `python -m tests.rehearsed.cells` writes the table anew.
"""

import pytest

from fivefold.rehearsal.stand_in import lacking
from tests.rehearsed.cells import CELLS, Cell, numbers, seen, table

NEAR = 0.03
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(lacking()), reason="it needs a CUDA build of torch, and a C compiler"),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_a_cell(cell: Cell) -> None:
    found = seen(cell)
    assert found.ok, found.failed or found.out_of_memory or found.undeclared
    measured, expected = numbers(found), table()[cell.name]
    for what in ("allocated", "reserved"):
        assert measured[what] == pytest.approx(expected[what], rel=NEAR), what
    for what in ("launches", "syncs", "compiles"):
        assert measured[what] <= expected[what], what
