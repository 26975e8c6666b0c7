"""Tensor parallelism of a model, parameter by parameter: `fivefold doctor MODEL`."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core.heads import legal_degrees
from fivefold.core.units import GIB, human
from fivefold.models.anatomy import Anatomy
from fivefold.models.config_facts import facts_of_config
from fivefold.models.facts import Partition, Untrainable
from fivefold.parallel import legality
from fivefold.parallel.layout import Layout
from fivefold.parallel.limits import limits_of
from fivefold.parallel.shard_rules import shard_specs
from fivefold.parallel.sharding import ShardSpec
from fivefold.report.table import Report

if TYPE_CHECKING:
    from rich.console import Console

_BYTES = {"parameters": 4, "gradients": 4, "optimizer state": 8}  # per element: fp32 copies, AdamW's two moments
_NARROW = 100  # columns of a terminal, below which long names are folded


@dataclass(frozen=True)
class RoleRow:
    """One parameter, `*` for the layer: its role, the shard of the first tp rank (`512/4096 x 4096`: 512 of the 4096
    rows), and why."""

    parameter: str
    role: str
    shard: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RoleReport(Report[RoleRow]):
    """The roles. Detail `gib_per_rank`: memory between two steps, by kind, of the rank that has the most."""

    def show(self, console: "Console") -> None:
        """Print a table of short names; on a narrow terminal names and reasons are folded, numbers never."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.title, title_justify="left", title_style="bold", box=None, header_style="dim")
        table.add_column("parameter", overflow="fold", max_width=20 if console.width < _NARROW else None)
        table.add_column("role", no_wrap=True)
        table.add_column("shard", no_wrap=True)
        table.add_column("reason", overflow="fold")
        for name, row in zip(short_names([row.parameter for row in self.rows]), self.rows, strict=True):
            table.add_row(*map(Text, (name, row.role, row.shard, row.reason)))
        console.print(table if self.rows else Text(self.title, style="bold"))
        console.print(self.closing, highlight=False)


def short_names(names: Sequence[str]) -> list[str]:
    """The shortest unique suffixes of dotted names: `q_proj` of `layers.*.self_attn.q_proj.weight`."""
    parts = [name.removesuffix(".weight").split(".") for name in names]
    length = [min(len(own), 1 + (own[-1] == "bias")) for own in parts]
    while True:
        short = [".".join(own[-n:]) for own, n in zip(parts, length, strict=True)]
        seen = Counter(short)
        again = [i for i, name in enumerate(short) if seen[name] > 1 and length[i] < len(parts[i])]
        if not again:
            return short
        for i in again:
            length[i] += 1


def examine(model: str | Path, *, tp: int) -> RoleReport:
    """Report a model's roles (folder, config.json, built-in shape or hub id) under `tp` ranks, without its weights.

    `ok` is false if the model cannot be trained, or not under tensor parallelism. Raises `UserError` for a model that
    cannot be read.
    """
    try:
        facts = facts_of_config(model)
    except Untrainable as error:
        model_class, why = error.what.split(" ", 1)
        title = f"{model_class} under tp {tp}"
        return RoleReport(title=title, rows=(), ok=False, closing=f"it {why}", details={"gib_per_rank": {}})
    anatomy, partition = facts.anatomy, facts.partition
    title = f"{anatomy.model_class} under tp {tp}"
    layout = Layout(tp=tp, sequence_parallel=False)
    found = legality.violations(layout, limits_of(facts))
    refusal = str(found[0].error) if found else ""
    specs = {} if refusal else shard_specs(facts, layout)
    rows: dict[tuple[str, str], RoleRow] = {}
    sizes = {name: parameter.shape for name, parameter in facts.parameters.items()}
    for name, shape in sizes.items():
        role = partition.roles.get(name)
        kind, reason = (role.kind, role.reason) if role else ("replicated", "")
        short = re.sub(r"\.\d+\.", ".*.", name).removeprefix(f"{anatomy.base}.")
        reason = re.sub(r" \(plan: \w+\)", "", reason)
        rows.setdefault((short, kind), RoleRow(short, kind, _shard(specs.get(name), shape), reason))
    held = 0 if refusal else max(_elements(specs, sizes, rank) for rank in range(tp))
    gib = {} if refusal else {kind: size * held / GIB for kind, size in _BYTES.items()}
    closing = refusal or "\n".join((_closing(partition, anatomy), *_sizes(held, sizes, gib, tp)))
    details = {"gib_per_rank": gib}
    return RoleReport(title=title, rows=tuple(rows.values()), ok=not refusal, closing=closing, details=details)


def _elements(specs: Mapping[str, ShardSpec], sizes: Mapping[str, tuple[int, ...]], rank: int) -> int:
    """Number of parameters that a tp rank holds."""
    held = {name: spec.local_shape(rank % spec.parts) for name, spec in specs.items()}
    return sum(prod(held.get(name, shape)) for name, shape in sizes.items())


def _sizes(held: int, sizes: Mapping[str, tuple[int, ...]], gib: Mapping[str, float], tp: int) -> list[str]:
    whole = sum(map(prod, sizes.values()))
    parts = ", ".join(f"{kind} {value:.2f}" for kind, value in gib.items())
    return [
        f"a rank of {tp} holds {human(held)} of {human(whole)} parameters",
        f"GiB per rank: {parts}, sum {sum(gib.values()):.2f}",
        "(fp32 with AdamW; FSDP over d ranks divides these by d)",
        "not counted: activations, bf16 copies of the weights, buffers",
        f"next: fivefold train ... layout=tp{tp}",
    ]


def _shard(spec: ShardSpec | None, shape: tuple[int, ...]) -> str:
    if spec is None or not spec.splits:
        return f"{' x '.join(map(str, shape))}"
    held, cut = spec.local_shape(0), {split.dim for split in spec.splits}
    sizes = [f"{held[dim]}/{size}" if dim in cut else str(size) for dim, size in enumerate(shape)]
    pieces = prod(len(blocks) for blocks in spec.held[0])
    copies = f", on {spec.replicas} ranks" if spec.replicas > 1 else ""
    return f"{' x '.join(sizes)}{copies}{f', {pieces} pieces' if pieces > 1 else ''}"


def _closing(partition: Partition, anatomy: Anatomy) -> str:
    alone = partition.sequence_parallel_refusal
    lines = [
        f"{query} query heads, {kv} key/value heads: tp {', '.join(map(str, legal_degrees(query, kv)))}"
        for query, kv in partition.heads
    ]
    lines.append(f"sequence parallel: {f'refused, {alone}' if alone else 'yes'}")
    if partition.across:
        lines.append(f"{len(partition.across)} modules need all features of a projection: each costs two collectives")
    proof = "tested against transformers" if partition.is_proved else "tried before it is trusted"
    lines.append(f"the partition of {anatomy.model_class} is {proof}")
    return "\n".join(lines)
