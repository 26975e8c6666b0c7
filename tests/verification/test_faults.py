"""Every bug of the catalogue is found by `fivefold verify`, or by the standing checks of a run, and rightly named.

`benchmarks/faults.py` runs the same catalogue for more steps and writes docs/evidence/faults.md.
"""

from pathlib import Path

import pytest

from tests.tiers import covering
from tests.verification.core import core
from tests.verification.faults import FAULTS, Fault, Model
from tests.verification.mutation import prove, prove_fault

STEPS = 2
SETTINGS = sorted({(fault.kind, fault.model, fault.layout) for fault in FAULTS.values()}, key=str)
# The few that together have most of the mechanisms (files of the catalogue) and of the measures that find one first.
# All others in a campaign. Their control is the core (test_core.py), which has every kind of proof, and a capacity.
TIERED = covering(FAULTS.values(), lambda fault: (fault.plant.__module__, fault.expects[0][0]), 0.8)
LEAST, LEAST_NAMED = 40, 0.9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the subjects lie: one for every model."""
    return tmp_path_factory.mktemp("subjects")


@pytest.mark.campaign
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: "-".join(map(str, each)))
def test_without_a_fault_nothing_is_wrong(setting: tuple[str, Model, str], folder: Path) -> None:
    """The control, for every kind of proof, model and layout that a fault is planted in."""
    outcome = prove(*setting, folder, steps=STEPS)
    assert not outcome.is_killed, outcome.row or outcome.found.refused
    assert outcome.found.rows


@pytest.mark.full
@pytest.mark.parametrize("fault", TIERED, ids=lambda each: each.name)
def test_a_planted_fault_is_found_and_named(fault: Fault, folder: Path) -> None:
    outcome = prove_fault(fault, folder, steps=STEPS, whole=False)
    assert outcome.is_killed
    assert outcome.row is not None, f"it was refused, and should have been silent: {outcome.found.refused}"
    if fault.name not in NAMED_OTHERWISE:
        assert fault.names(outcome.row), outcome.row


# Found, but the first comparison that fails names another place, each with the reason.
NAMED_OTHERWISE: dict[str, str] = {}


def test_the_core_is_a_control_of_every_kind() -> None:
    kinds = {(kind, model.capacity is not None) for kind, model, _ in SETTINGS}
    assert {(case.kind, case.model.capacity is not None) for case in core()} >= kinds


def test_the_catalogue_is_large_and_mostly_named() -> None:
    assert len(FAULTS) >= LEAST
    assert set(NAMED_OTHERWISE) <= set(FAULTS)
    assert len(NAMED_OTHERWISE) <= (1 - LEAST_NAMED) * len(FAULTS)


def test_every_fault_says_what_it_is() -> None:
    for fault in FAULTS.values():
        assert fault.bug and fault.known and fault.expects, fault.name


def test_every_fault_fits_the_program() -> None:
    """Those that only a campaign plants too: what they replace is there under its name."""
    for fault in FAULTS.values():
        with fault.plant():
            pass
