"""Small models and clusters on which the planner is checked against itself."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from fivefold.hardware.cluster import Cluster
from fivefold.models.build import build_meta
from fivefold.models.discover import facts_of
from fivefold.models.facts import ModelFacts
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Workload
from fivefold.planner.price import PriceList
from fivefold.planner.space import Space
from tests.parity import Case, hf_config


@cache
def facts(family: str, layers: int) -> ModelFacts:
    return facts_of(build_meta(hf_config(Case("single", family, overrides=(("num_hidden_layers", layers),)))))


def prices(family: str, cluster: str, layers: int = 8) -> PriceList:
    return PriceList(facts(family, layers), Cluster.parse(cluster))


def layouts(space: Space) -> Iterator[Layout]:
    """All of a space."""
    for rows in space.rows:
        yield from (space.layout(rows, number) for number in range(len(rows)))


def sampled(
    family: str, cluster: str, count: int, *, layers: int = 8, batch: int = 64
) -> list[tuple[PriceList, Layout]]:
    """Some layouts of a model on a cluster, the same ones every time."""
    found = prices(family, cluster, layers)
    every = list(layouts(Space(found, Workload(2048, batch))))
    return [(found, layout) for layout in random.Random(family + cluster).sample(every, min(count, len(every)))]


def with_memory(of: PriceList, *, gib: float) -> PriceList:
    """The same on devices with other memory, whose runtime takes none of it."""
    chip = replace(of.cluster.chip, memory_gib=gib, context_gib=0.0, communicator_gib=0.0)
    return of.repriced(replace(of.cluster, chip=chip))
