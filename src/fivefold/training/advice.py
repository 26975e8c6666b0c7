"""Everything that training asks of the planner: a layout, the memory of a run, and changes that would make it fit.

No other file of the floor that trains imports a tool. A run that asks for none of these never loads the planner.
"""

from collections.abc import Mapping

from fivefold.config import RunConfig
from fivefold.hardware.cluster import Cluster
from fivefold.models.facts import ModelFacts


def chosen(config: RunConfig, cluster: Cluster) -> tuple[RunConfig, list[str]]:
    """Return the run with `layout: auto` replaced by the planner's choice, and lines that say which one and why.

    Raises `UserError` if no layout can run or none fits.
    """
    from fivefold.planner.of_run import chosen

    return chosen(config, cluster)


def planned_gib(config: RunConfig, cluster: Cluster, facts: ModelFacts) -> float:
    """Return GiB of tensors of the fullest rank. Raises `UserError` if the planner cannot price the run."""
    from fivefold.planner.of_run import planned

    return planned(config, cluster, facts).estimate().memory_gib


def to_fit(
    config: RunConfig,
    cluster: Cluster,
    facts: ModelFacts | None = None,
    *,
    rank: int = 0,
    needed: float = 0,
    measured: Mapping[str, float] | None = None,
) -> list[str]:
    """Return lines for a run out of memory: planned GiB by item beside those `measured`, and changes that would fit.

    `facts`: None to read them from the run's config. `needed`: bytes that global rank `rank` had or asked for; 0 if
    unknown. Raises `UserError` if the planner cannot price the run.
    """
    from fivefold.planner.of_run import changes, facts_of_run, relief, table

    told = relief(config, cluster, facts or facts_of_run(config), rank=rank, needed=needed)
    return [*table(told, measured or {}), *changes(told)]
