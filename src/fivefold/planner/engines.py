"""What each trainer saves, gathers, overlaps and computes again, as one record of traits. No torch.

`estimate` has no branch for a trainer: it reads these. `fivefold` is this runtime. The others are what published
measurements were made with; `benchmarks/planner_accuracy.py` holds them against those.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The traits of a trainer.

    `saved_scale`: saved activations over those of the traced layer, which counts every number in the compute type.
    `traffic`: bytes of memory traffic beside matmuls and attention, forward and backward, for a saved byte.
    `logit_bytes`: traffic of the loss, forward and backward, for a logit.
    `host_seconds`: of Python and launches for a layer and micro batch, forward and backward.
    `overlaps_data`: FSDP's collectives run beside compute. `overlaps_tensor`: the part of tp's that does.
    `slack`: what the allocator reserves over what is allocated. `step_seconds`: of a step, whatever its size.
    """

    name: str
    saved_scale: float = 1.0
    traffic: float
    logit_bytes: float
    host_seconds: float
    overlaps_data: bool
    overlaps_tensor: float = 0.0
    slack: float
    step_seconds: float


ENGINES = {
    each.name: each
    for each in (
        # Rehearsals of the real step count launches, syncs and allocator peaks: an 8B under shard8 reserves 74.1 GiB
        # for 66.4 allocated, and takes 0.15 s of host time for 32 compiled layers. The others are judgement: compiled
        # element-wise work reads and writes each saved number about once, and FSDP runs beside compute.
        Engine(
            name="fivefold", traffic=3.5, logit_bytes=48, host_seconds=2.4e-3, overlaps_data=True, slack=1.12,
            step_seconds=2e-3,
        ),
    )
}  # fmt: skip
