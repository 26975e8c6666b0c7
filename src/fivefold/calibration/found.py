"""Sizes to measure, and a worker's results. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

CPU_ROWS, CPU_WIDTHS = (64, 256, 1024), (128, 256, 512, 1024, 2048)
GPU_ROWS, GPU_WIDTHS = (512, 2048, 8192), (1024, 2048, 4096, 8192)

Matmul = tuple[str, int, int, int, float]  # dtype, rows, inputs, outputs, seconds
Attention = tuple[str, float, float]  # dtype, FLOPs of the computed half, seconds
Collective = tuple[str, int, float]  # kind, bytes as `Call` counts them, seconds


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure. `rows`, `widths`: of matmuls. `lengths`: of rows under attention. `traffic`: bytes of an array.
    `messages`: bytes of collectives. `seconds`: of one block of repeats."""

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    traffic: int
    messages: tuple[int, ...]
    seconds: float

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> "Sizes":
        fields: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in values.items()}
        return Sizes(**fields)

    @staticmethod
    def of(device: str) -> "Sizes":
        """Sizes for `cpu` or `cuda`: in all about a minute."""
        if device == "cpu":
            return Sizes(CPU_ROWS, CPU_WIDTHS, (256, 1024), 2**26, tuple(4**power for power in range(6, 13)), 0.05)
        return Sizes(GPU_ROWS, GPU_WIDTHS, (2048, 8192), 2**30, tuple(4**power for power in range(6, 15)), 0.03)


@dataclass(frozen=True)
class Found:
    """Measurements of one worker, or of all together. `traffic`: bytes a second of element-wise work. `launch`: host
    seconds of an operation. `memory`, `context`: bytes of the device, and those taken before anything is allocated.
    `host`: bytes a second to host memory, each way; 0 on a CPU. `meeting`: additional seconds of a collective between
    computations, compared with one right after another, on a CPU. `collectives` are those of a node's ranks;
    `between` and `meeting_between` those of all ranks of several nodes; `one_per_node` are those of groups of one
    rank of each node, all at once."""

    matmuls: list[Matmul]
    attention: list[Attention]
    traffic: float
    launch: float
    collectives: list[Collective]
    memory: int
    context: int
    host: float
    meeting: float = 0.0
    between: list[Collective] = field(default_factory=list)
    meeting_between: float = 0.0
    one_per_node: list[Collective] = field(default_factory=list)

    @staticmethod
    def of_json(values: Mapping[str, Any]) -> "Found":
        """Read a worker's report."""
        lists = {key: [tuple(row) for row in rows] for key, rows in values.items() if isinstance(rows, list)}
        return Found(**{**values, **lists})
