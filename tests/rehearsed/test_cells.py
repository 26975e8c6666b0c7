"""`make rehearsal`: the real step under many layouts, with the stand-in for the driver, against a committed table.

Memory may not move by more than 3 %, or three steps of the allocator where these are more; kernels, host syncs and
compiles may only become fewer. Where a number has improved, `python -m tests.rehearsed.cells` writes it into the table.
"""

from collections.abc import Callable, Iterator

import pytest

from fivefold.launch.processes import private_folder
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.launch import stage
from fivefold.rehearsal.stand_in import lacking
from tests.rehearsed.cells import CELLS, CLUSTER, Cell, Row, more, request, rows, table

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


def exposed(layout: str) -> dict[str, tuple[int | None, int]]:
    """Of each kind of collective but sums of all: those that no kernel stands beside, and all."""
    environment = stand_in.environment(CLUSTER.chip, CLUSTER.devices_per_node)
    with private_folder("rehearsal") as folder, stage(environment, folder) as play:
        found = play(request(Cell("llama", layout), folder, "order"))
    return {each.kind: (each.exposed, each.count) for each in found.sent if each.kind != "all_reduce"}


def test_fsdp_gathers_and_reduces_beside_compute() -> None:
    """In the order of the streams a kernel stands between the beginning of a collective and who waits for it. In each
    of the four micro batches, one gather and two reductions of a model whose embedding is not tied have none."""
    assert exposed("shard8") == {"all_gather": (4, 44), "reduce_scatter": (8, 24)}


def test_backward_gathers_again_beside_compute() -> None:
    """All 36 gathers and 36 reductions of the forwards of four layers, an embedding and a head have no kernel beside
    them, in four micro batches. Of the 68 gathers and 36 reductions of the backwards, 20 and 4 have none."""
    assert exposed("tp8") == {"all_gather": (36 + 20, 36 + 68), "reduce_scatter": (36 + 4, 36 + 36)}
