"""A model under a layout, without torch: the plan of one rank (`fivefold doctor MODEL --layout TEXT --rank N`), and the
tensor parallelism of each parameter (`fivefold doctor MODEL`)."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core.errors import UserError
from fivefold.core.model_limits import legal_degrees
from fivefold.core.text import any_layer
from fivefold.core.units import GIB, human, human_bytes, many
from fivefold.models.anatomy import Anatomy
from fivefold.models.config_facts import facts_of_config
from fivefold.models.facts import Partition, Untrainable
from fivefold.parallel import legality
from fivefold.parallel.census import census
from fivefold.parallel.collectives import Call
from fivefold.parallel.edits import Edit
from fivefold.parallel.features import calls, edits
from fivefold.parallel.layout import Layout
from fivefold.parallel.limits import limits_of
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.recompute.budget import within_budget
from fivefold.parallel.shard_rules import shard_specs
from fivefold.parallel.sharding import ShardSpec
from fivefold.report.table import Report

if TYPE_CHECKING:
    from rich.console import Console

MOST_TOKENS = 2**31  # of a micro batch: its loss is computed in chunks, which are listed one by one


@dataclass(frozen=True)
class PlanRow:
    """One line of a plan: its part, its subject, what the plan says, and why."""

    part: str
    of: str
    says: str
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanReport(Report[PlanRow]):
    """The plan, with equal lines of several layers merged; JSON also has every call and every edit, one by one."""

    def show(self, console: "Console") -> None:
        """Print a table for each part of the plan."""
        from rich.table import Table
        from rich.text import Text

        console.print(Text(self.title, style="bold"))
        for part, rows in ((part, list(rows)) for part, rows in groupby(self.rows, key=lambda row: row.part)):
            table = Table(title=part, title_justify="left", title_style="dim", box=None, show_header=False)
            longest = max(len(row.of) for row in rows)
            first = min(longest, console.width * 6 // 10)
            table.add_column("of", overflow="fold", width=first)
            table.add_column("says", overflow="fold", max_width=console.width - first - 4)
            for row in rows:
                table.add_row(row.of, Text.assemble(row.says, (f"  {row.why}" if row.why else "", "dim")))
            console.print(table)
        console.print(self.closing, highlight=False)


def examine_layout(
    model: str | Path, *, layout: str, rank: int = 0, seq_length: int = 4096, global_batch_size: int | None = None
) -> PlanReport:
    """Report the plan of `layout` for one rank, and the needs of a step of rows of `seq_length` tokens.

    Layers are compiled, as they are on GPUs. Without `global_batch_size`, a step has the fewest micro batches that fill
    the pipeline. Raises `UserError` for a model that cannot be read, or a layout that does not fit it.
    """
    parsed = Layout.parse(layout)
    if parsed.rest:
        raise UserError("a plan is of a known number of ranks", fix="write dp_shard in the layout, such as shard8.tp2")
    parsed = parsed.resolve(parsed.world)
    if not 0 <= rank < parsed.world:
        raise UserError(f"rank {rank} is not of {parsed}", fix=f"a rank of 0 to {parsed.world - 1}")
    plan = lower(facts_of_config(model), parsed, rank, compiled=True)
    micro_batches = parsed.accumulation(global_batch_size) if global_batch_size else _fewest(parsed)
    tokens = parsed.padded(seq_length)
    if tokens * parsed.micro_batch_size > MOST_TOKENS:
        rows_of = f"{many(parsed.micro_batch_size, 'row')} of {tokens:,} tokens"
        raise UserError(
            f"a micro batch of {rows_of} is more than {MOST_TOKENS:,} tokens", fix="lower --seq-length, or write +mb1"
        )
    plan = within_budget(plan, (tokens, micro_batches))
    shape = plan.step_shape(parsed.micro_batch_size, tokens, micro_batches)
    sent, needs = calls(plan, shape), step_bytes(plan, shape)
    todo = edits(plan)
    rows = [*_place(plan), *_computed(plan), *_shards(plan), *_done(todo), *_sent(sent)]
    rows += [PlanRow("bytes of a step", kind, human_bytes(size)) for kind, size in needs.by_kind.items()]
    details = {
        "bytes": {**needs.by_kind, "saved by layer": dict(needs.saved)},
        "calls": [asdict(row) for row in sent],
        "edits": [{"path": edit.path, "kind": edit.kind, "by": edit.by, "why": edit.why} for edit in todo],
    }
    closing = (
        f"sum {human_bytes(needs.total)}; a step of {micro_batches} micro batches of {parsed.micro_batch_size} x "
        f"{tokens} tokens\nnext: fivefold train ... layout={parsed}"
    )
    title = f"{plan.facts.model_class} under {parsed}, rank {rank} of {parsed.world}"
    return PlanReport(title=title, rows=tuple(rows), ok=True, closing=closing, details=details)


def _fewest(layout: Layout) -> int:
    """The fewest micro batches that a schedule takes, and that fill its pipeline."""
    least, unit = layout.micro_batch_unit
    wanted = max(least, 2 * layout.pp if layout.pp > 1 else 1)
    return -(-wanted // unit) * unit


def _place(plan: ParallelPlan) -> list[PlanRow]:
    axes = plan.layout.coordinates(plan.placement.rank)
    rows = [PlanRow("this rank", "place", ", ".join(f"{axis} {at}" for axis, at in axes.items()) or "alone")]
    rows.append(
        PlanRow("this rank", "rows of the data", f"share {plan.placement.data_rank} of {plan.layout.data_ranks}")
    )
    if plan.layout.pp > 1:
        names = plan.anatomy.layers
        for stage in plan.placement.own_stages:
            first, last = plan.placement.stages.splits[stage]
            says = f"layers {first} to {last - 1} of {len(names)}"
            rows.append(PlanRow("this rank", f"stage {stage} of {plan.placement.stages.count}", says))
    if plan.layout.recompute != "none":
        rows.append(PlanRow("this rank", "recompute", str(plan.recompute)))
    held = sum(plan.placement.held_bytes(name, 1) for name in plan.placement.shards if plan.placement.holds(name))
    rows.append(PlanRow("this rank", "parameters", f"{human(held)} of {human(plan.facts.size)}"))
    return rows


def _computed(plan: ParallelPlan) -> list[PlanRow]:
    """Types in which the whole model is computed and kept."""
    found, high = census(plan), plan.layout.precision
    percent, wide = sum(part.weights for part in found) / 100, "fp64" if high == "fp64" else "fp32"
    parts = [(part, f"{part.weights / percent:.2g} % of the matmuls' FLOPs") for part in found]
    says = [(row.what, f"{row.dtype}  {part}", row.why) for row, part in parts]
    says += [("attention, norms, embeddings", high, ""), ("the loss", wide, ""), ("weights at rest", wide, "")]
    says.append(("optimizer state", wide if plan.layout.state_dtype == "fp32" else plan.layout.state_dtype, ""))
    return [PlanRow("computes in", *row) for row in says]


def _shards(plan: ParallelPlan) -> list[PlanRow]:
    """Gathered shape of every kind of parameter on this rank, and its shard at rest."""
    found: dict[tuple[str, str], int] = Counter()
    for name in (name for name in plan.placement.shards if plan.placement.holds(name)):
        whole, gathered = plan.placement.shards[name].shape, plan.placement.gathered_shape(name)
        index = plan.placement.shard_index(name)
        says = f"{_shape(gathered)}{'' if gathered == whole else f' of {_shape(whole)}'}"
        says += f", shard {index.fsdp_rank} of {index.fsdp_size}" if index.fsdp_size > 1 else ""
        found[any_layer(name), says] += 1
    return [PlanRow("parameters", name, says, _times(count)) for (name, says), count in found.items()]


def _done(edits: Iterable[Edit]) -> list[PlanRow]:
    """Edits of modules, with those of several layers merged."""
    found = Counter((any_layer(edit.path), edit.kind, edit.by, any_layer(edit.why)) for edit in edits)
    return [
        PlanRow("done to modules, in order", name or "the model", f"{kind} ({by})", why + _times(count, ", "))
        for (name, kind, by, why), count in found.items()
    ]


def _sent(calls: Iterable[Call]) -> list[PlanRow]:
    """Collectives by axis, kind, phase and size."""
    found: Counter[tuple[str, str, str, int, bool]] = Counter()
    for call in calls:
        found[call.axis, call.kind, call.phase, call.bytes, call.overlaps] += call.times
    return [
        PlanRow(
            "sent in a step", f"{kind} over {axis}", f"{count:,} x {human_bytes(size)}",
            f"{phase}{', beside compute' if overlaps else ''}",
        )
        for (axis, kind, phase, size, overlaps), count in sorted(found.items())
    ]  # fmt: skip


def _times(count: int, before: str = "") -> str:
    return f"{before}{count} times" if count > 1 else ""


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


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


def examine_model(model: str | Path, *, tp: int) -> RoleReport:
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
