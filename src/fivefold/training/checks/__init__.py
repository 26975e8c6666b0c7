"""Standing checks: invariants of any step of any run whose violation a loss curve does not show.

    replicas   tensors replicated over ranks have the same bits on all of them
    finite     weights and moments are finite
    moved      the optimizer's step changed every parameter that it had to change
    rates      the learning rates are those of the schedule, and the optimizer's count of updates is the run's
    ledger     the ranks read the rows of the step, each its own
    pace       no rank computes much more slowly than the others: it is named, which ends no run

All ranks call a check together and get the same findings: none if all is well.
"""

from fivefold.training.checks.findings import Finding, fail_on
from fivefold.training.checks.ledger import ledger
from fivefold.training.checks.state import finite, replicas
from fivefold.training.checks.update import Update, moved, observing, rates

__all__ = [
    "Finding",
    "Update",
    "fail_on",
    "finite",
    "ledger",
    "moved",
    "observing",
    "rates",
    "replicas",
]
