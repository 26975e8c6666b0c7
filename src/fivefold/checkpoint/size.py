"""Size of a checkpoint's manifest, before anything is saved. No torch.

A manifest lists every slice of every tensor. A layout that shards over thousands of ranks cuts each parameter into as
many slices, and readers accept `MOST_BYTES` of manifest at most.
"""

from collections.abc import Iterable

from fivefold.checkpoint.manifest import MOST_BYTES
from fivefold.core.errors import UserError
from fivefold.core.units import human_bytes
from fivefold.parallel.outer.keys import KEPT
from fivefold.parallel.placement import Placement

SLICE_BYTES = 152  # of a slice in JSON, beside its tensor's name (docs/evidence/thousands.md)
FEW = 256  # ranks among which no model that exists comes near the limit


def check_manifest(placement: Placement, kept: Iterable[str]) -> None:
    """Raise `UserError` if the manifest of a checkpoint would be too large to be read. `kept`: the parameter of each
    tensor of the optimizer's state."""
    ranks = placement.world // placement.layout.dp_replicate * placement.layout.copies_apart
    if ranks <= FEW:
        return
    size = manifest_bytes(placement, kept)
    if size > MOST_BYTES:
        raise UserError(
            f"a checkpoint of {placement.layout} lists the slices of {ranks:,} ranks in {human_bytes(size)}, of which "
            f"{human_bytes(MOST_BYTES)} can be read back",
            fix="shard over fewer ranks, and add replicas: layout.dp_replicate",
            more="docs/evidence/thousands.md",
        )


def manifest_bytes(placement: Placement, kept: Iterable[str]) -> int:
    """Estimate the bytes of a manifest. Parameters that are cut alike are counted once. Replicas that train apart save
    their own, besides what they have in common."""
    found, size = dict[object, int](), 0
    copies, names = placement.layout.copies_apart, [*placement.shards]
    in_common = names * KEPT if copies > 1 else []
    for name in [*[*names, *kept] * copies, *in_common]:
        spec = placement.shards[name]
        alike = spec.shape, spec.splits, spec.over
        if alike not in found:
            found[alike] = _slices(placement, name)
        size += found[alike] * (SLICE_BYTES + len(name))
    return size


def _slices(placement: Placement, name: str) -> int:
    """Slices of a parameter that the ranks of its first stage write, in one copy."""
    of_stage = placement.world // placement.layout.pp
    first = placement.pp_ranks[name][0] * of_stage
    ranks = range(first, first + of_stage // placement.layout.dp_replicate)
    owners = [rank for rank in ranks if placement.shards[name].is_owner(placement.shard_index(name, rank).part)]
    return sum(all(part.stop > part.start for part in own) for r in owners for own, _ in placement.regions(name, r))
