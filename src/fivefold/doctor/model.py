"""The plan of one rank of a model's layout, without torch: `fivefold doctor MODEL --layout TEXT --rank N`."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.core.errors import UserError
from fivefold.core.model_limits import legal_degrees
from fivefold.core.text import any_layer
from fivefold.core.units import human, human_bytes, many
from fivefold.models.config_facts import facts_of_config
from fivefold.models.facts import Partition
from fivefold.parallel.census import census
from fivefold.parallel.collectives import Call
from fivefold.parallel.features import calls, edits
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.memory import step_bytes
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.recompute.budget import within_budget
from fivefold.report.findings import Report

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
    model: str | Path,
    *,
    layout: str = "single",
    rank: int = 0,
    seq_length: int = 4096,
    global_batch_size: int | None = None,
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
    rows = [
        *_partition(plan.facts.partition),
        *_place(plan),
        *_computed(plan),
        *_shards(plan),
        *_done(todo),
        *_sent(sent),
    ]
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


def _partition(partition: Partition) -> list[PlanRow]:
    """How tensor parallelism may split the model."""
    refusal, across = partition.sequence_parallel_refusal, len(partition.across)
    says = [
        ("heads", f"{query} query heads, {kv} key/value heads: tp {', '.join(map(str, legal_degrees(query, kv)))}")
        for query, kv in partition.heads
    ]
    says.append(("sequence parallel", f"refused, {refusal}" if refusal else "yes"))
    if across:
        says.append(("modules", f"{across} need all features of a projection: each costs two collectives"))
    says.append(("partition", "tested against transformers" if partition.is_proved else "tried before it is trusted"))
    return [PlanRow("the model", *row) for row in says]


def _shards(plan: ParallelPlan) -> list[PlanRow]:
    """Gathered shape of every kind of parameter on this rank, its shard at rest, and its role."""
    found: dict[tuple[str, str, str], int] = Counter()
    for name in (name for name in plan.placement.shards if plan.placement.holds(name)):
        whole, gathered = plan.placement.shards[name].shape, plan.placement.gathered_shape(name)
        index = plan.placement.shard_index(name)
        says = f"{_shape(gathered)}{'' if gathered == whole else f' of {_shape(whole)}'}"
        says += f", shard {index.fsdp_rank} of {index.fsdp_size}" if index.fsdp_size > 1 else ""
        role = plan.facts.partition.roles.get(name)
        why = re.sub(r" \(plan: \w+\)", "", f"{role.kind}, {role.reason}") if role else "replicated"
        found[any_layer(name), says, why] += 1
    return [PlanRow("parameters", name, says, why + _times(count, ", ")) for (name, says, why), count in found.items()]


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
