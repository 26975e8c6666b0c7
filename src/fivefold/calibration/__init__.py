"""`fivefold calibrate`: measure this machine and write a hardware file. Only the workers import torch (`probes`);
`fit` finds the fields of the file, `learn` corrects them by a run.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial

from pydantic import TypeAdapter

from fivefold.calibration.fit import Measurements, Sizes, errors, fitted
from fivefold.core import interrupts
from fivefold.core.errors import UserError
from fivefold.core.system import cores, versions
from fivefold.core.units import many
from fivefold.hardware.chip import chip_of_device
from fivefold.hardware.cluster import Cluster, nodes_of, to_toml
from fivefold.launch.once import run_once
from fivefold.launch.workers import gpus
from fivefold.launch.world import device_kind, find_world
from fivefold.parallel.layout import Layout
from fivefold.report.findings import Report

NOISY = 0.5  # above this median error, other work has disturbed the measurement: 0.1 to 0.3 are usual
MEASURE = "fivefold.calibration.probes"
PATIENCE = 120  # seconds that a worker may be silent


@dataclass(frozen=True)
class Measured:
    """A number of the hardware file, and the one of the planner's own table."""

    what: str
    measured: str
    table: str


def calibrate(
    *, device: str = "auto", nproc: int | None = None, chip: str | None = None, sizes: Sizes | None = None,
    nodes: bool = False,
) -> tuple[str, Report[Measured]] | None:  # fmt: skip
    """Measure this machine, or with `nodes` all ranks that torchrun or srun has started; return the text of its
    hardware file, and a comparison with the planner's table. None on the ranks that do not report.

    `device`: auto, cpu or cuda. `nproc`: workers that measure at once; by default one for each GPU, or for each core.
    `chip`: a chip whose table supplies what is not measured, if this device has none. Raises `UserError`.
    """
    here, kind = find_world(device), device_kind(device)
    if nodes != (here is not None):
        raise UserError(
            "--nodes measures ranks that torchrun or srun has started" if nodes else "calibrate starts its own workers",
            fix="srun fivefold calibrate --nodes; without --nodes, call it once on the machine",
        )
    if here is not None and nproc is not None:
        raise UserError("--nproc starts workers, and this process is one of several already", fix="leave --nproc out")
    count = here.size if here else nproc or (gpus() if kind == "cuda" else cores())
    known = _table(kind, count, chip)  # refused before anything is measured
    request = {"sizes": asdict(sizes or Sizes.of(kind))}
    with interrupts.sigterm_raises():
        told = run_once(
            MEASURE, request, layout=str(Layout(dp_shard=count)), device=device, what="calibrate", patience=PATIENCE
        )
    if told is None:
        return None
    found = TypeAdapter(list[Measurements]).validate_python(told["ranks"])
    return written(Cluster.parse(known.text, nodes_of(len(found), told["local_size"])), found)


def written(cluster: Cluster, found: Sequence[Measurements]) -> tuple[str, Report[Measured]]:
    """The file and the report of the workers' measurements. `cluster`: this machine in the planner's tables."""
    tables = {"cluster": cluster.text, **fitted(cluster, found)}
    about = f"Measured by fivefold calibrate on {date.today().isoformat()}: {_where(cluster)}.\n{_versions()}"
    text = to_toml(tables, about)
    of_matmuls, of_links = errors(Cluster.of_toml(text), found)
    closing = f"at the median, matmuls are {100 * of_matmuls:.0f} % off this, collectives {100 * of_links:.0f} %"
    if max(of_matmuls, of_links) > NOISY:
        closing += "\nthat is a lot: measure again while nothing else runs"
    rows = tuple(_rows(Cluster.of_toml(text), cluster))
    return text, Report(title=f"fivefold calibrate: {_where(cluster)}", rows=rows, ok=True, closing=closing)


def _table(kind: str, count: int, chip: str | None) -> Cluster:
    """This machine in the planner's tables."""
    if chip is None and kind == "cuda":
        from torch import cuda

        chip = chip_of_device(cuda.get_device_name(0), fix="name a chip like it: --chip H100").name
    return Cluster.parse(f"1x{count}x{chip or 'cpu'}")


def _where(cluster: Cluster) -> str:
    at = f", {many(cluster.nodes, 'node')}" if cluster.nodes > 1 else ""
    return f"{cluster.chip.name}, {many(cluster.world, 'worker')} at once{at}"


def _versions() -> str:
    return ", ".join(f"{package} {version}" for package, version in versions().items())


def _rows(mine: Cluster, table: Cluster) -> Iterator[Measured]:
    def row(what: str, of: Callable[[Cluster], float]) -> Measured:
        return Measured(what, *(f"{of(machine):.3g}" for machine in (mine, table)))

    for dtype in sorted({*mine.chip.peak_tflops} & {*table.chip.peak_tflops}):
        yield row(f"matmul {dtype}, TFLOP/s", partial(_tflops, dtype=dtype))
    yield Measured("tile of a matmul", *(_tile(machine) for machine in (mine, table)))
    yield row("attention, of the matmul rate", lambda fit: fit.chip.attention_fraction)
    yield row("memory, GB/s", lambda fit: fit.chip.memory_bytes_per_second / 1e9)
    yield row("host of one operation, us", lambda fit: fit.chip.launch_us)
    yield row("device memory, GiB", lambda fit: fit.chip.memory_gib)
    yield row("before anything is made, GiB", lambda fit: fit.chip.context_gib)
    yield row("links of a device, GB/s", lambda fit: fit.node.inside.bytes_per_second / 1e9)
    yield row("a hop, us", lambda fit: fit.node.inside.latency_us)
    yield row("until ranks have met, us", lambda fit: fit.node.inside.meet_us)
    if mine.nodes > 1:
        yield row("links between nodes, of a device, GB/s", lambda fit: fit.node.between.bytes_per_second / 1e9)
        yield row("of that, groups of one rank a node", lambda fit: fit.node.between.one_per_node)
        yield row("a hop between nodes, us", lambda fit: fit.node.between.latency_us)
        yield row("until ranks of all nodes have met, us", lambda fit: fit.node.between.meet_us)


def _tflops(cluster: Cluster, dtype: str) -> float:
    return (cluster.chip.flops_per_second(dtype) or 0.0) / 1e12


def _tile(cluster: Cluster) -> str:
    rows, columns = cluster.chip.tile
    return f"{rows} x {columns}, fills in {cluster.chip.tile_fill}"
