"""Overlap, memory and host time of this runtime beyond what a layout's plan says, on a GPU or a CPU. No torch.

Rehearsals of the real step count launches, syncs and allocator peaks: an 8B takes 0.15 s of host time for 32 compiled
layers; `slack` and `kept_back` are least squares of the cells of docs/evidence/planned_memory.md. Logits in bf16 are
written, read three times and overwritten by their gradient (`parallel/loss/runtime.py`). The others are judgement:
compiled element-wise work reads and writes each saved number about once, and FSDP overlaps compute.

On a CPU, uncompiled: CPU seconds of one thread, over Llamas that differ in width, layers, micro batches and tokens
(torch 2.13). Operations of a layer and micro batch, FSDP's hooks included; operations of the model's ends; bytes of
memory traffic per byte saved by a layer, gathered (copied in and out), or reduced (copied twice, reduced, added up),
and per logit.
"""

from dataclasses import dataclass, replace
from typing import Self

from fivefold.hardware.chip import Chip

LAUNCHES, LAUNCHES_OF_ENDS = 1100, 2400
EAGER_TRAFFIC, GATHER_TRAFFIC, REDUCE_TRAFFIC, EAGER_LOGIT_BYTES = 7.0, 5.5, 13.0, 48.0


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Traits of a runtime; the defaults are those of this one on a GPU.

    `compiled`: layers are compiled, so fused kernels save what the traced layer's fused form does (`LayerCost.fused`).
    `overlaps`: collectives that can overlap compute do.
    `slack`: reserved over allocated bytes. `kept_back`: the part of the largest buffers of unreduced gradients that the
    allocator reserves in addition, since no other tensor has their sizes.
    `traffic`: bytes of memory traffic outside matmuls and attention, forward and backward, per byte that the traced
    layer saves. `logit_bytes`: traffic of the loss per logit, forward and backward. `gather_traffic`,
    `reduce_traffic`: bytes of memory traffic per byte that FSDP gathers or reduces. `cast_bytes`: traffic per number
    that is cast for a matmul of another dtype.
    `host_seconds`: Python and launches of a layer and micro batch, forward and backward. `host_of_ends`: the same of
    the model's ends. `meet`: sharpness of the smooth maximum of device and host time; 1 adds them up.
    `step_seconds`: fixed seconds of a step.
    """

    compiled: bool = True
    overlaps: bool = True
    slack: float = 1.03
    kept_back: float = 0.49
    traffic: float = 3.5
    logit_bytes: float = 10
    gather_traffic: float = 0.0
    reduce_traffic: float = 0.0
    cast_bytes: float = 5.0
    host_seconds: float = 2.4e-3
    host_of_ends: float = 0.0
    meet: float = 8.0
    step_seconds: float = 2e-3

    def on(self, chip: Chip) -> Self:
        """The same on a chip. On a CPU operations are not compiled, and nothing overlaps."""
        own = replace(self, slack=chip.slack or self.slack, host_seconds=self.host_seconds * chip.host_scale)
        if not chip.is_host:
            return own
        launch = chip.launch_us * 1e-6 * chip.host_scale
        return replace(
            own, compiled=False, overlaps=False, traffic=EAGER_TRAFFIC, logit_bytes=EAGER_LOGIT_BYTES,
            gather_traffic=GATHER_TRAFFIC, reduce_traffic=REDUCE_TRAFFIC, host_seconds=LAUNCHES * launch,
            host_of_ends=LAUNCHES_OF_ENDS * launch, meet=1.0,
        )  # fmt: skip
