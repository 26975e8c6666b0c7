"""Planner's prediction for a run that has been trained, from the files of its folder: for `fivefold report`."""

from collections.abc import Mapping
from typing import Any

from fivefold.config import RunConfig
from fivefold.hardware.chip import chip_of_device
from fivefold.hardware.cluster import Cluster, nodes_of
from fivefold.parallel.layout import Layout
from fivefold.planner.auto import facts_of_run, workload_of
from fivefold.planner.estimate import estimate
from fivefold.planner.price import PriceList
from fivefold.planner.report import guessed
from fivefold.report.story import Expected

RESIDENT = "planned memory counts tensors; measured memory is the whole process, since its start"


def expected(config: RunConfig, layout: str, device: str, about: Mapping[str, Any]) -> Expected:
    """Predict a step of a run under `layout`. `device`: cpu or cuda:0; `about`: the history's record of its last start.

    Raises `UserError` if the planner cannot price it.
    """
    own = Layout.parse(layout)
    cluster = cluster_of(own.world, device, about, config.hardware)
    facts = facts_of_run(config, vocabulary_of(about))
    found = estimate(PriceList(facts, cluster, config.objective.is_own), own, workload_of(config))
    told = filter(None, (cluster.text, guessed(cluster.chip), RESIDENT if device == "cpu" else ""))
    return Expected(found.step_seconds, found.memory_gib, "; ".join(told), found.step_interval)


def cluster_of(world: int, device: str, about: Mapping[str, Any], hardware: str = "") -> Cluster:
    """Devices that a start ran on. A start without its nodes on record (an earlier version, damage) was on one."""
    said = about.get("devices_per_node")
    size = nodes_of(world, said if isinstance(said, int) and 1 <= said <= world else world)
    if hardware or device == "cpu":
        return Cluster.parse(hardware or "1xcpu", size)
    known = chip_of_device(str(about.get("device")), fix="name a file of fivefold calibrate: layout.hardware")
    return Cluster.parse(f"1x{known.name}", size)


def vocabulary_of(about: Mapping[str, Any]) -> int | None:
    """Tokens of a run's tokenizer, as recorded at its newest start; None if they are not."""
    found = (about.get("data") or {}).get("vocabulary")
    return found if isinstance(found, int) else None
