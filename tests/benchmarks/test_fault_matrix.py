"""Which few cases the fault matrix chooses, what it takes for reached, and which tier kills a fault."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TWO, OTHER_TWO, FOUR, ALL_OF_FOUR = "step tp2 llama", "step shard2 llama", "step shard2.tp2 llama", "step tp4 llama"


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("fault_matrix")


def chosen(matrix: Any, rows: dict[str, str]) -> list[str]:
    """What is chosen of rows that have a letter for each of the faults a, b, c..."""
    cells = {line: dict(zip("abcdef"[: len(row)], row, strict=True)) for line, row in rows.items()}
    return [str(each.case) for each in matrix.cover(cells)]


def test_a_rank_that_sees_more_comes_first(matrix: Any) -> None:
    assert chosen(matrix, {TWO: "nn.", OTHER_TWO: "..k", FOUR: "nnn"}) == [
        TWO,
        OTHER_TWO,
    ]  # 1, then 1/2 a rank; not 3/4
    assert chosen(matrix, {TWO: "n...", OTHER_TWO: ".n..", FOUR: "nnnn"}) == [FOUR]
    assert chosen(matrix, {TWO: "nl-", OTHER_TWO: ". l"}) == [TWO]  # one that raises or was not planted is not seen


def test_a_case_that_later_ones_make_needless_goes(matrix: Any) -> None:
    """The first sees most; the others, each needed for one fault of its own, see all of it."""
    assert chosen(matrix, {TWO: "nnnn..", OTHER_TWO: "nn..n.", "step pp2 llama": "..nn.n"}) == [
        OTHER_TWO,
        "step pp2 llama",
    ]


def test_there_are_only_so_many_of_four_ranks(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "MOST_OF_FOUR", 1)
    assert chosen(matrix, {FOUR: "n..", ALL_OF_FOUR: ".n.", TWO: "..n"}) == [TWO, FOUR]


def test_what_a_fault_replaces(matrix: Any) -> None:
    """The function that is patched, also below a cache; None where it is something else."""
    from fivefold.parallel import shard_rules
    from fivefold.parallel.adapters import nf4

    assert matrix.replaced(matrix.FAULTS["wrong_key_value_heads"]) == {matrix.place(shard_rules._blocks)}
    assert matrix.place(nf4._pairs) == matrix.place(nf4._pairs.__wrapped__) is not None
    assert matrix.place(3) is None


def test_functions_that_run_are_noted(matrix: Any) -> None:
    ran = set[Any]()
    with matrix.watched(ran):
        matrix.words(matrix.ProvedCase.parse(TWO))
    assert matrix.place(matrix.words) in ran and matrix.place(matrix.cover) not in ran


def test_the_tier_that_kills_a_fault(matrix: Any) -> None:
    names = [*matrix.FAULTS]
    rows = {line: dict.fromkeys(names, ".") for line in (TWO, OTHER_TWO)}
    rows[TWO][names[0]], rows[OTHER_TWO][names[1]] = "k", "n"
    found = matrix.tiers(rows, [TWO])
    assert found[names[0]]["tier"] == "make test" and found[names[0]]["case"] == TWO
    assert found[names[1]]["tier"] != "make test" and found[names[1]]["named in"] == OTHER_TWO
    planted = {each.name for each in matrix.TIERED if isinstance(each, matrix.Fault)}
    assert all(
        (each["tier"] == "make test-all") == (name in planted) for name, each in found.items() if name != names[0]
    )
