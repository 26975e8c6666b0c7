"""Where the time of a step goes, and how much of its collectives runs beside compute: a profiler's trace of a GPU."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Span = tuple[float, float]  # start, end


@dataclass
class Overlap:
    """The kernels of one kind of collective over one mesh axis, in a step of one rank: `covered` is the part of their
    time (ms) during which a compute kernel ran on the same GPU."""

    axis: str
    kind: str
    count: int = 0
    milliseconds: float = 0.0
    covered: float = 0.0


@dataclass
class Step:
    """A step of one rank by its trace. `milliseconds`: of the GPU, by item, which add up to the step: compute by what
    its kernels do, collectives of each mesh axis as far as no compute kernel runs beside them (`exposed AXIS`), and
    `idle`, in which nothing runs. `launches`, `syncs`: calls of the host that launch a kernel or wait for the GPU."""

    milliseconds: dict[str, float]
    launches: int
    syncs: int
    collectives: list[Overlap]


# Parts of the names of kernels, in this order: FlashAttention 3 is made of CUTLASS, and so are many matmuls.
KERNELS = (
    ("attention", re.compile("flash|fmha|attention", re.IGNORECASE)),
    ("matmuls", re.compile("gemm|nvjet|cutlass|xmma|cublas|splitk|grouped_mm", re.IGNORECASE)),
    ("optimizer", re.compile("multi_tensor_apply|adam", re.IGNORECASE)),
)
OTHERS = "element-wise"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events on the GPU
LAUNCH = re.compile(r"cu(da)?Launch(Cooperative)?Kernel")
SYNC = re.compile(r"cu(da)?(Device|Stream|Event|Ctx)Synchronize")


def profile_step(step: Callable[[], Any], axis_of: Callable[[str], str]) -> dict[str, Any] | None:
    """Run `step` once under the profiler. `axis_of`: name of a process group -> mesh axis (`Mesh.axis_of`). None where
    the profiler sees no kernel, for want of CUPTI or of the right to use it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = of_step(events, axis_of)
    return found and asdict(found)


def of_step(events: Sequence[dict[str, Any]], axis_of: Callable[[str], str]) -> Step | None:
    """Of the events of a Chrome trace of one step (times in microseconds)."""
    device = [event for event in events if event.get("ph") == "X" and event.get("cat") in DEVICE]
    if not any(event["cat"] == "kernel" for event in device):
        return None
    host = [event for event in events if event.get("ph") == "X" and event.get("cat") in ("cuda_runtime", "cuda_driver")]
    spent: dict[str, float] = {}
    done: list[Span] = []  # when an item before has run: what two kernels share is counted once
    for item, spans in _by_item(device, axis_of).items():
        before, done = done, joined([*done, *spans])
        spent[item] = _milliseconds(done) - _milliseconds(before)
    first = min(_span(event)[0] for event in (*host, *device))
    last = max(_span(event)[1] for event in device)
    spent["idle"] = _milliseconds([(first, last)]) - _milliseconds(done)
    return Step(
        spent,
        launches=sum(bool(LAUNCH.match(str(event["name"]))) for event in host),
        syncs=sum(bool(SYNC.match(str(event["name"]))) for event in host),
        collectives=overlaps(events, axis_of),
    )


def _by_item(device: Sequence[dict[str, Any]], axis_of: Callable[[str], str]) -> dict[str, list[Span]]:
    """When kernels of each item ran: those of compute first, so that collectives have what is left."""
    found: dict[str, list[Span]] = {"matmuls": [], "attention": [], OTHERS: [], "optimizer": []}
    for event in device:
        if _is_collective(event):
            axis = axis_of(str(event.get("args", {}).get("Process Group Name", "")))
            found.setdefault(f"exposed {axis}", []).append(_span(event))
        else:
            found[item_of(str(event["name"]))].append(_span(event))
    return found


def _milliseconds(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans) * 1e-3


def item_of(kernel: str) -> str:
    """What a kernel of compute does, by its name. Inductor's kernels are named after all that they come from; its
    matmuls are templates."""
    if kernel.startswith("triton_"):
        return "matmuls" if kernel.startswith("triton_tem") else OTHERS
    return next((item for item, name in KERNELS if name.search(kernel)), OTHERS)


def overlaps(events: Iterable[dict[str, Any]], axis_of: Callable[[str], str]) -> list[Overlap]:
    """Of the events of a Chrome trace (times in microseconds): each kind of collective, the longest first."""
    kernels = [event for event in events if event.get("ph") == "X" and event.get("cat") == "kernel"]
    compute = joined([_span(event) for event in kernels if not _is_collective(event)])
    found: dict[tuple[str, str], Overlap] = {}
    for event in kernels:
        if not _is_collective(event):
            continue
        said = event.get("args", {})
        axis = axis_of(str(said.get("Process Group Name", "")))
        kind = str(said.get("Collective name") or event["name"].partition("_")[2].partition("_")[0])
        each = found.setdefault((axis, kind), Overlap(axis, kind))
        each.count += 1
        each.milliseconds += float(event["dur"]) * 1e-3
        each.covered += covered(_span(event), compute) * 1e-3
    return sorted(found.values(), key=lambda each: -each.milliseconds)


def _is_collective(event: dict[str, Any]) -> bool:
    return str(event["name"]).startswith("nccl")


def _span(event: dict[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def joined(spans: Sequence[Span]) -> list[Span]:
    """The same time as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def covered(span: Span, others: Sequence[Span]) -> float:
    """How much of `span` lies in `others`, which do not touch each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)
