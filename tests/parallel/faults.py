"""Bugs of `tests/verification/faults`, planted around the measures of `tests/parity.py`, which must see them too."""

from typing import Any

from tests.parity import Case, on_rank
from tests.verification.mutation import planted


def on_faulty_rank(case: Case, fault: str | None) -> dict[str, Any]:
    """Run the case on this rank with a fault planted."""
    with planted(fault):
        return on_rank(case)
