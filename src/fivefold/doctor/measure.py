"""Measurements of `fivefold doctor --nodes`: what one rank of an allocation is, computes and sends.

Every rank runs `on_rank`, in the same order. `nodes.py` judges what they found.
"""

import platform
import re
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, MixtralConfig

from fivefold.calibration.probes import Timer, issues
from fivefold.core.cache import key_of
from fivefold.core.integrity import file_checksum
from fivefold.core.system import cores, cpuinfo, version_of
from fivefold.launch.once import as_worker
from fivefold.launch.world import World
from fivefold.own_loop.functions import train_step
from fivefold.own_loop.model import ParallelModel, parallelize
from fivefold.parallel import plain
from fivefold.parallel.layout import MESH_AXES, Layout
from fivefold.parallel.state import state_of

PACKAGES = ("fivefold", "torch", "transformers", "safetensors", "numpy")
KINDS = ("all_reduce", "all_gather", "all_to_all")
WIDTH = {"cpu": 512, "cuda": 8192}  # of a square matmul
TRAFFIC = {"cpu": 2**24, "cuda": 2**30}  # bytes of an array
MESSAGE = {"cpu": 2**20, "cuda": 2**26}  # bytes of a collective, and of a send
REPEATS = 8  # the fastest counts
SECONDS = 0.02  # of one block of matmuls, of which the fastest counts
PINGS = 8  # between the first rank and each node, of which the fastest counts
MOST_ALL_PAIRS = 16  # ranks; beyond it, each has partners at distances of powers of two
ROOT = Path(__file__).parents[1]


def on_rank(request: Mapping[str, Any], world: World) -> Any:
    """Measure, and return what all ranks found, on the first rank; None on the others. `layout`: text; "" for one of
    this world. `files`: paths to compare."""
    device = torch.device(world.device)
    node = world.rank - world.local_rank
    nodes = sorted({*plain.everywhere(node)})
    mine: dict[str, Any] = {
        "rank": world.rank, "node": node, "host": socket.gethostname(), **_versions(world),
        "is_crowded": device.type == "cpu" and world.local_size > cores(),
        "files": {path: _digest(Path(path)) for path in request["files"]}, "clock": _clock(world.rank, nodes),
        **_alone(device),
    }  # fmt: skip
    pairs = _pairs(device, world)
    layout = _layout(request["layout"], world, nodes)
    model = _tiny_model(layout)
    mine |= {"message": MESSAGE[device.type], "pairs": pairs, "step": _step(model), "axes": dict(_axes(model, device))}
    found = plain.everywhere(mine)
    if not world.is_first:
        return None
    sizes = {"device": device.type, "size": world.size, "local_size": world.local_size}
    return {**sizes, "layout": str(layout), "ranks": found}


on_worker = as_worker(on_rank)


# ---- what it is ------------------------------------------------------------------------------------------------------


def _versions(world: World) -> dict[str, Any]:
    """Device, driver, clocks and software of this rank."""
    software = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
    software["fivefold's code"] = key_of([file.read_text(encoding="utf-8") for file in sorted(ROOT.rglob("*.py"))])[:12]
    if world.device == "cpu":
        name = next(iter(re.findall(r"model name\s*:\s*(.+)", cpuinfo())), platform.machine())
        clocks = [float(mhz) for mhz in re.findall(r"cpu MHz\s*:\s*([\d.]+)", cpuinfo())]
        return {"device": name, "software": software, "mhz": max(clocks, default=0.0)}
    chip = torch.cuda.get_device_properties(world.device)
    software |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}  # type: ignore[no-untyped-call]
    driver, clock = _of_driver(str(getattr(chip, "uuid", "")))
    return {"device": chip.name, "software": software | {"driver": driver}, "mhz": clock}


def _of_driver(uuid: str) -> tuple[str, float]:
    """Driver, and the highest clock that it lets the GPU run at now, in MHz; 0 if it does not say."""
    asked = ["nvidia-smi", "--query-gpu=uuid,driver_version,clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown", 0.0
    rows = [[cell.strip() for cell in line.split(",")] for line in told.splitlines()]
    row = next((row for row in rows if uuid and uuid in row[0]), rows[0])
    return row[1], float(row[2]) if row[2].replace(".", "").isdigit() else 0.0


def _digest(path: Path) -> str:
    """Digest of a file, or of the names and sizes in a folder; `missing` if there is neither."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return key_of([(str(file.relative_to(path)), file.stat().st_size) for file in files])[:12]
    try:
        return file_checksum(path)[:12]
    except OSError:
        return "missing"


def _clock(rank: int, nodes: Sequence[int]) -> tuple[float, float] | None:
    """Seconds that the clock of this rank's node is ahead of rank 0's, and how far off that is at most; None on other
    ranks than the first of a node. As NTP does: half of the fastest round trip is the doubt."""
    group = dist.new_group(backend="gloo") if dist.get_backend() == "nccl" else None
    offset = (0.0, 0.0) if rank == 0 else None
    told = torch.zeros(1, dtype=torch.float64)
    for node in nodes[1:]:
        if rank not in (0, node):
            continue
        answers = []
        for _ in range(PINGS):
            if rank == 0:
                dist.recv(told, node, group=group)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), node, group=group)
                continue
            began, sent = time.perf_counter(), time.time()
            dist.send(told, 0, group=group)
            dist.recv(told, 0, group=group)
            took = time.perf_counter() - began
            answers.append((took / 2, sent + took / 2 - float(told)))
        if rank == node:
            doubt, ahead = min(answers)
            offset = ahead, doubt
    return offset


# ---- what it computes ------------------------------------------------------------------------------------------------


def _alone(device: torch.device) -> dict[str, float]:
    """FLOP/s of a large matmul and bytes a second of an addition, while all ranks do the same."""
    timer, width = Timer(device, SECONDS), WIDTH[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
    a, b = (torch.zeros(TRAFFIC[device.type] // 4, device=device) for _ in range(2))
    dist.barrier()
    product = timer.seconds(lambda: F.linear(x, weight), pick=min)
    dist.barrier()
    addition = timer.seconds(lambda: torch.add(a, b, out=a), pick=min)
    return {"flops": 2 * width**3 / product, "traffic": 3 * TRAFFIC[device.type] / addition}


# ---- what it sends ---------------------------------------------------------------------------------------------------


def partners(rank: int, size: int) -> Iterator[int | None]:
    """Partner of `rank` in each round, None in one without; a round pairs every rank at most once."""
    if size <= MOST_ALL_PAIRS:  # a tournament: the last place stands still, the others turn
        places = size + size % 2
        for turn in range(places - 1):
            ring = places - 1
            other = turn if rank == ring else ring if rank == turn else (2 * turn - rank) % ring
            yield other if other < size else None
        return
    distance = 1
    while distance < size:
        other = rank ^ distance
        yield other if other < size else None
        distance *= 2


def _pairs(device: torch.device, world: World) -> dict[str, float]:
    """Seconds of one message between this rank and each partner."""
    found, message = {}, torch.zeros(MESSAGE[device.type] // 4, device=device)
    for other in partners(world.rank, world.size):
        dist.barrier()
        if other is not None:
            found[str(other)] = _fastest(device, partial(_to_and_fro, message, other)) / 2
    return found


def _to_and_fro(message: torch.Tensor, other: int) -> None:
    first, second = (dist.send, dist.recv) if dist.get_rank() < other else (dist.recv, dist.send)
    first(message, other)
    second(message, other)


def _fastest(device: torch.device, work: Callable[[], object]) -> float:
    timer = Timer(device, 0.0)
    return min(timer.block(work, 1) for _ in range(1 + REPEATS))


def _axes(model: ParallelModel, device: torch.device) -> Iterator[tuple[str, dict[str, tuple[int, float]]]]:
    """(axis, kind -> (bytes as `Call` counts them, seconds)) over the groups that training uses."""
    groups = state_of(model).mesh.groups
    warnings.simplefilter("ignore", FutureWarning)  # torch renames a collective
    for axis in MESH_AXES:
        if axis not in groups or (size := groups[axis].size()) == 1:
            continue
        found = {}
        for kind, whole, issue in issues(device, MESSAGE[device.type], size, groups[axis]):
            if kind in KINDS:
                dist.barrier()
                found[kind] = (whole, _fastest(device, issue))
        yield axis, found


# ---- a step ----------------------------------------------------------------------------------------------------------


def _layout(text: str, world: World, nodes: Sequence[int]) -> Layout:
    """The layout asked for, or shards inside nodes and replicas between them."""
    if text:
        return Layout.parse(text).resolve(world.size)
    if 1 < len(nodes) < world.size and world.size == len(nodes) * world.local_size:
        return Layout(dp_replicate=len(nodes), dp_shard=world.local_size)
    return Layout(dp_shard=world.size)


def _tiny_model(layout: Layout) -> ParallelModel:
    """A model with experts that is small, and large enough for every degree of the layout."""
    heads = max(4, layout.tp * layout.cp)
    sizes = {
        "hidden_size": 16 * heads, "intermediate_size": 32 * heads, "num_attention_heads": heads,
        "num_key_value_heads": heads, "num_hidden_layers": 2 * layout.pp * layout.pp_virtual, "vocab_size": 64 * heads,
    }  # fmt: skip
    config = MixtralConfig(**sizes, num_local_experts=2 * layout.ep, num_experts_per_tok=1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return parallelize(model, layout)


def _step(model: ParallelModel) -> dict[str, float]:
    """Loss of the last of three steps, and seconds of the faster of the last two."""
    layout, config = model.layout, model.config
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    fewest, multiple = layout.micro_batch_unit
    tokens = 32 * layout.tp * layout.cp
    draw = torch.Generator().manual_seed(model.data_rank)
    batch = []
    for _ in range(max(fewest, multiple)):
        rows = torch.randint(0, config.vocab_size, (layout.micro_batch_size, tokens), generator=draw)
        batch.append({"input_ids": rows, "labels": rows.clone()})
    took = []
    for _ in range(3):
        began = time.perf_counter()
        loss = train_step(model, optimizer, batch).loss
        took.append(time.perf_counter() - began)
    return {"seconds": min(took[1:]), "loss": float(loss)}
