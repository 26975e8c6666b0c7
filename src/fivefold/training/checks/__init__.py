"""Standing checks: what must hold at any step of any run, and what a loss curve does not show when it breaks.

    replicas   what several ranks hold has the same bits on all of them
    finite     weights and moments are numbers
    moved      the optimizer's step changed what it had to change
    rates      the learning rates are those of the schedule, and the optimizer counts the updates that the run counts
    ledger     the ranks read the rows of the step, each its own

Every rank calls a check, together, and gets the same findings: none when all is well.
"""

from fivefold.training.checks.findings import Finding, fail_on
from fivefold.training.checks.ledger import ledger
from fivefold.training.checks.state import finite, replicas
from fivefold.training.checks.update import Update, moved, observing, rates

__all__ = ["Finding", "Update", "fail_on", "finite", "ledger", "moved", "observing", "rates", "replicas"]
