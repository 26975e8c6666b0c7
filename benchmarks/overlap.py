"""How much of the collectives of a step runs beside compute, told from a profiler's trace of a GPU."""

import json
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


def profile_step(step: Callable[[], Any], axis_of: Callable[[str], str]) -> list[dict[str, Any]]:
    """Run `step` once under the profiler. `axis_of`: name of a process group -> mesh axis (`Mesh.axis_of`)."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return [asdict(each) for each in overlaps(events, axis_of)]


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
