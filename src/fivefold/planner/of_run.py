"""What the planner says of a run that has been trained, from what lies in its folder: for `fivefold report`."""

from collections.abc import Mapping
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.layout import Layout
from fivefold.planner.auto import facts_of_run, workload_of
from fivefold.planner.chips import chip_of_device
from fivefold.planner.cluster import Cluster, nodes_of
from fivefold.planner.engines import ENGINES
from fivefold.planner.estimate import estimate
from fivefold.planner.price import PriceList
from fivefold.planner.report import guessed
from fivefold.report.story import Expected

RESIDENT = "planned memory is of tensors, measured of all that a CPU process has taken since its start"


def expected(config: RunConfig, layout: str, device: str, about: Mapping[str, Any]) -> Expected:
    """A step of a run under `layout`. `device`: cpu or cuda:0; `about`: what the history says of its newest start.

    Raises `UserError` where the planner cannot price it.
    """
    own = Layout.parse(layout)
    cluster = cluster_of(own.world, device, about, config.hardware)
    facts = facts_of_run(config, vocabulary_of(about))
    found = estimate(PriceList(facts, cluster, ENGINES["fivefold"]), own, workload_of(config))
    told = filter(None, (cluster.text, guessed(cluster.chip), RESIDENT if device == "cpu" else ""))
    return Expected(found.step_seconds, found.memory_gib, "; ".join(told), found.step_interval)


def cluster_of(world: int, device: str, about: Mapping[str, Any], hardware: str = "") -> Cluster:
    """The devices that a start ran on. One that does not say its nodes (an earlier version, damage) was on one."""
    said = about.get("devices_per_node")
    size = nodes_of(world, said if isinstance(said, int) and 1 <= said <= world else world)
    if hardware or device == "cpu":
        return Cluster.parse(hardware or "1xcpu", size)
    known = chip_of_device(str(about.get("device")), fix="name a file of fivefold calibrate: layout.hardware")
    return Cluster.parse(f"1x{known.name}", size)


def vocabulary_of(about: Mapping[str, Any]) -> int | None:
    """Tokens of a run's tokenizer, as its newest start says; None where it does not."""
    found = (about.get("data") or {}).get("vocabulary")
    return found if isinstance(found, int) else None
