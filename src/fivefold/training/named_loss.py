"""The loss of the user's own that a run file names."""

from fivefold.config import RunConfig
from fivefold.core.named_code import NamedCode
from fivefold.parallel.loss.own import TokenLoss


def own_loss(config: RunConfig) -> TokenLoss | None:
    """The function of `objective.path`, whose file is run; None for a built-in objective. Raises `UserError`."""
    return None if not config.objective.is_own else loss_at(config.objective.path)


def loss_at(text: str) -> TokenLoss:
    """The function at `PATH.py:NAME`, whose file is run. Raises `UserError`."""
    code = NamedCode.read(text, "objective.path")
    return TokenLoss(code.load(), code.digest)
