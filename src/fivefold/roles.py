"""What tensor parallelism makes of a model, parameter by parameter: `fivefold doctor MODEL`."""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from fivefold.errors import UserError
from fivefold.heads import legal_degrees
from fivefold.models.anatomy import Anatomy
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.partition import Partition, derive
from fivefold.models.trace import Untraceable, trace
from fivefold.parallel.sharding import ShardSpec
from fivefold.parallel.tensor import shard_specs
from fivefold.report import Report


@dataclass(frozen=True)
class RoleRow:
    """One parameter, `*` for the layer: its role, what the first tp rank holds of it (`512/4096 x 4096`: 512 of the
    4096 rows), and why."""

    parameter: str
    role: str
    shard: str
    reason: str


def examine(model: str | Path, *, tp: int) -> Report[RoleRow]:
    """The roles of a model (a folder, a config.json, a built-in shape, a hub id) under `tp` ranks; no weights are read.

    `ok` is false where the model cannot be trained, or not under tensor parallelism. Raises `UserError` for a model
    that cannot be read.
    """
    built = build_meta(load_model_config(model))
    anatomy = Anatomy.of(built)
    title = f"{anatomy.model_class} under tp {tp}"
    try:
        partition = derive(built, anatomy, trace(built, anatomy))
    except Untraceable as error:
        return Report(title=title, rows=(), ok=False, closing=f"it cannot be trained here: {error}")
    try:
        specs = shard_specs(built, partition, tp)
    except UserError as error:
        specs, refusal = {}, str(error)
    else:
        refusal = ""
    rows: dict[tuple[str, str], RoleRow] = {}
    for name, parameter in built.named_parameters():
        role = partition.roles.get(name)
        kind, reason = (role.kind, role.reason) if role else ("replicated", "")
        short = re.sub(r"\.\d+\.", ".*.", name).removeprefix(f"{anatomy.base}.")
        shape = tuple(parameter.shape)
        rows.setdefault((short, kind), RoleRow(short, kind, _shard(specs.get(name), shape), reason))
    return Report(
        title=title, rows=tuple(rows.values()), ok=not refusal, closing=refusal or _closing(partition, anatomy, tp)
    )


def _shard(spec: ShardSpec | None, shape: tuple[int, ...]) -> str:
    if spec is None or not spec.splits:
        return f"{' x '.join(map(str, shape))}"
    held, cut = spec.local_shape(0), {split.dim for split in spec.splits}
    sizes = [f"{held[dim]}/{size}" if dim in cut else str(size) for dim, size in enumerate(shape)]
    pieces = prod(len(blocks) for blocks in spec.held[0])
    copies = f", on {spec.replicas} ranks" if spec.replicas > 1 else ""
    return f"{' x '.join(sizes)}{copies}{f', {pieces} pieces' if pieces > 1 else ''}"


def _closing(partition: Partition, anatomy: Anatomy, tp: int) -> str:
    alone = partition.sequence_parallel_refusal
    degrees = ", ".join(map(str, legal_degrees(partition.query, partition.kv)))
    lines = [
        f"{partition.query} query heads, {partition.kv} key/value heads: tp {degrees}",
        f"sequence parallel: {f'refused, {alone}' if alone else 'yes'}",
    ]
    if partition.across:
        lines.append(f"{len(partition.across)} modules need all features of a projection: each costs two collectives")
    proof = "is held against transformers by the tests" if partition.is_proved else "is tried before it is trusted"
    lines.append(f"the partition of {anatomy.model_class} {proof}; next: fivefold train ... layout=tp{tp}")
    return "\n".join(lines)
