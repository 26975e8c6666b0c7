"""Reasons why a layout cannot run, with arithmetic and nearest values that fit: the rules of all features. No torch.

The command line checks before it starts a process, `parallelize` once it has seen the model. A search for a layout can
check each candidate. The rules are in the `keys.py` of each feature; a rule is a generator of `Violation`s.
"""

from fivefold.core.errors import Violation
from fivefold.core.model_limits import UNKNOWN, ModelLimits
from fivefold.parallel.layout import Layout


def violations(
    layout: Layout, limits: ModelLimits = UNKNOWN, *, world: int | None = None, batch: int | None = None,
    micro_batches: int | None = None,
) -> list[Violation]:  # fmt: skip
    """List all that keeps `layout` from running a model, the most basic first; empty if it can run.

    `world`: devices. `batch`: rows of an optimizer step, over all devices. `micro_batches`: of a data rank in a step,
    if `batch` is not known. A degree of -1 counts as not known yet.
    """
    found = [*layout.violations()]
    if world is not None:
        found += layout.against_world(world)
    if batch is not None and not layout.rest:
        uneven = list(layout.against_batch(batch))
        found += uneven
        micro_batches = None if uneven else batch // (layout.micro_batch_size * layout.data_ranks)
    if micro_batches is not None:
        found += layout.step_violations(micro_batches)
    return [*found, *layout.model_violations(limits, world)]
