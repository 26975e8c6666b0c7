"""One rank of 64 to 16,384: what its start, its groups and its checkpoints take, without the other ranks.

    python -m benchmarks.thousands                  all worlds; some minutes
    python -m benchmarks.thousands --quick          two worlds, printed alone
    python -m benchmarks.thousands --checkpoints    the second table alone, into the last result
    python -m benchmarks.thousands --write-docs     the last result into docs/evidence/thousands.md

A process of each kind of rank (the first, a middle and the last of a pipeline) builds its program in a world whose
process group sends nothing. No weight is drawn: pages of parameters are never touched, so that memory is what the
program itself takes. Seconds are of the CPU. The manifest of a checkpoint of all ranks is made from the placement that
saving asks, and read as a start does.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from benchmarks.common import RESULTS, machine
from transformers import AutoConfig

from fivefold.checkpoint import Manifest
from fivefold.checkpoint.cut import box, file_of, placed
from fivefold.checkpoint.records import FileRecord, Slice, TensorRecord
from fivefold.core.shapes import shape_folder
from fivefold.launch.world import World, join
from fivefold.models.build import build_meta
from fivefold.models.config_facts import facts_of_config
from fivefold.models.discover import facts_of
from fivefold.models.facts import ModelFacts
from fivefold.parallel import apply
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.placement import Placement
from fivefold.rehearsal.launch import kinds

PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "thousands.md"
RESULT = RESULTS / "thousands.json"
BEGIN, END = "<!-- tables: python -m benchmarks.thousands --write-docs -->", "<!-- end of tables -->"
WORLDS = (64, 256, 1024, 4096, 16384)
MODEL, MODELS = "llama-3.1-8b", ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3.1-70b")
KINDS = ("weight", "exp_avg", "exp_avg_sq")  # of a checkpoint
BYTES = 4  # of a number in fp32
CHECKSUM = "0" * 32


def layouts(world: int) -> dict[str, Layout]:
    """The layouts of a world: one FSDP group; replicas of 64 shards; and a pipeline of tp, with shards and replicas."""
    shards = min(8, world // 32)
    found = {
        "flat": Layout(dp_shard=world),
        "replicas": Layout(dp_replicate=world // 64, dp_shard=64),
        "pipeline": Layout(pp=4, tp=8, dp_shard=shards, dp_replicate=world // (32 * shards)),
    }
    return {kind: layout for kind, layout in found.items() if kind != "replicas" or layout.dp_replicate > 1}


# ---- a rank's program ------------------------------------------------------------------------------------------------


def built(model: str, layout: Layout, rank: int) -> dict[str, Any]:
    """Build the program of a rank in a fork of this process: seconds, memory, groups."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(_build(model, layout, rank)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        raise SystemExit(f"rank {rank} of {layout} ended without an answer")
    found: dict[str, Any] = json.loads(text)
    return found


def _build(model: str, layout: Layout, rank: int) -> dict[str, Any]:
    program = build_meta(AutoConfig.from_pretrained(shape_folder(model)))
    facts = facts_of_config(model)
    before, made = _resident(), Counter[str]()
    new_group = dist.new_group

    def counted(*args: Any, group_desc: str = "", **options: Any) -> Any:
        made[group_desc] += 1
        return new_group(*args, group_desc=group_desc, **options)

    with (
        join(World(rank=rank, size=layout.world, backend="fake")),
        patch.object(apply, "fill", lambda *_, **__: None),
        patch.object(apply.probe, "check", lambda *_, **__: None),  # a smaller model on real tensors
        patch.object(dist, "new_group", counted),
    ):
        began = time.process_time()
        lower(facts, layout, rank)
        planned = time.process_time()
        with patch.object(apply, "build_mesh", partial(_timed, apply.build_mesh, mesh := [])):
            apply.parallelize(program, layout, device="cpu")
        done = time.process_time()
        groups = program.fivefold.mesh.groups
        return {
            "plan_seconds": planned - began, "build_seconds": done - planned, "mesh_seconds": mesh[0],
            "mib": (_resident() - before) / 2**20, "own_groups": len({id(group) for group in groups.values()}),
            "made_groups": sum(made.values()),
        }  # fmt: skip


def _timed(function: Any, seconds: list[float], *args: Any) -> Any:
    began = time.process_time()
    found = function(*args)
    seconds.append(time.process_time() - began)
    return found


def _resident() -> int:
    """The most bytes that this process has had."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])


# ---- a checkpoint ----------------------------------------------------------------------------------------------------


def saved(facts: ModelFacts, layout: Layout) -> dict[str, Any]:
    """What a checkpoint of all ranks is made of, and what all of them read of it."""
    placement = lower(facts, layout, 0).placement
    began = time.process_time()
    manifest = manifest_of(placement)
    text = manifest.to_json()
    written = time.process_time()
    read = Manifest.from_json(text, where="here")
    done = time.process_time()
    found = sum(1 for _ in looked_up(read, placement, layout.world // 2))
    asked = time.process_time()
    whole = placement.checkpoint_bytes([name for name in facts.parameters for _ in KINDS[1:]], BYTES)
    per_rank, size = whole * layout.dp_replicate / layout.world, len(text.encode())
    return {
        "slices": slices(read),
        "files": len(read.files), "manifest_bytes": size, "checkpoint_bytes": whole,
        "writing": written - began, "reading": done - written, "looking_up": asked - done, "found": found,
        "read_bytes_a_rank": (alone := whole / layout.world + per_rank + size), "read_bytes": alone * layout.world,
    }  # fmt: skip


def manifest_of(placement: Placement) -> Manifest:
    """The manifest of a checkpoint with two moments in fp32."""
    layout, tensors = placement.layout, dict[str, TensorRecord]()
    of_stage = layout.world // layout.pp
    for name, spec in placement.shards.items():
        cut, first = placed(placement, name, placement.pp_ranks[name][0] * of_stage)
        tensors[name] = TensorRecord(shape=spec.shape, dtype="float32", cut=cut, rank=first)
    writers = {rank for record in tensors.values() for ranks in record.ranks for rank in ranks}
    files = {file_of(kind, rank): FileRecord(2**20, CHECKSUM) for kind in KINDS[:2] for rank in sorted(writers)}
    return Manifest(
        step=1, layout=str(layout), versions={}, agreement={}, state={}, files=files,
        scalars={name: {"step": 1.0} for name in tensors}, tensors=dict.fromkeys(KINDS, tensors),
    )  # fmt: skip


def slices(manifest: Manifest) -> int:
    """The slices of all tensors, each kind of cut counted once."""
    alike = Counter((one.shape, one.cut) for records in manifest.tensors.values() for one in records.values())
    return sum(
        times * sum(1 for _ in TensorRecord(shape=shape, dtype="", cut=cut).slices)
        for (shape, cut), times in alike.items()
    )


def looked_up(manifest: Manifest, placement: Placement, rank: int) -> Iterator[Slice]:
    """The slices in which a rank that resumes finds what it holds, of all kinds."""
    for records in manifest.tensors.values():
        for name, record in records.items():
            for region, _ in placement.regions(name, rank):
                yield from record.overlapping(box(region))


# ---- results ---------------------------------------------------------------------------------------------------------


def measure(worlds: Sequence[int], models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each world and kind of layout, then for each model."""
    cases = [(MODEL, world, kind, layout) for world in worlds for kind, layout in layouts(world).items()]
    cases += [(model, 1024, "pipeline", layouts(1024)["pipeline"]) for model in models if model != MODEL]
    for model in dict.fromkeys(model for model, *_ in cases):  # traced once, and kept for every start
        facts_of(build_meta(AutoConfig.from_pretrained(shape_folder(model))))
    for model, world, kind, layout in cases:
        facts = facts_of_config(model)
        row: dict[str, Any] = {"model": model, "world": world, "kind": kind, "layout": str(layout)}
        row |= {"parameters": sum(parameter.size for parameter in facts.parameters.values())}
        row |= saved(facts, layout)
        ranks = [built(model, layout, rank) for rank in kinds(layout)]
        row |= {key: max(rank[key] for rank in ranks) for key in ranks[0]}
        print(json.dumps(row), flush=True)
        yield row


def measure_checkpoints() -> None:
    """The checkpoints of the last result, anew."""
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    for row in found["rows"]:
        row |= saved(facts_of_config(row["model"]), layouts(row["world"])[row["kind"]])
        row.pop("manifest", None)
        print(json.dumps(row), flush=True)
    RESULT.write_text(json.dumps(found | {"checkpoints": machine()}, indent=1) + "\n", encoding="utf-8")


PROGRAM = "model | parameters | ranks | layout | plan, ms | build, s | groups, s | MiB | own groups | made"
MANIFEST = "files | slices | manifest, MB | write, s | read, s | look up, s"
CHECKPOINT = f"model | ranks | layout | {MANIFEST} | a rank reads, MB | all, GB"


def page(found: dict[str, Any]) -> str:
    """The tables of the page."""
    rows = found["rows"]
    lines = [_where(found["machine"]), "", f"| {PROGRAM} |", "| --- | ---: | ---: | --- " + "| ---: " * 6 + "|"]
    lines += [f"| {' | '.join(_program(row))} |" for row in rows]
    lines += ["", _where(found.get("checkpoints", found["machine"]))]
    lines += ["", f"| {CHECKPOINT} |", "| --- | ---: | --- " + "| ---: " * 8 + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(_checkpoint(row))} |" for row in rows)])


def _where(about: dict[str, Any]) -> str:
    return f"{about['date'][:10]}, commit {about['commit']}, {about['cpu']}, torch {about['torch']}:"


def _program(row: dict[str, Any]) -> list[str]:
    times = [f"{1e3 * row['plan_seconds']:.0f}", f"{row['build_seconds']:.2f}", f"{row['mesh_seconds']:.3f}"]
    groups = [f"{row['mib']:.0f}", f"{row['own_groups']}", f"{row['made_groups']:,}"]
    return [row["model"], f"{row['parameters'] / 1e9:.1f}B", f"{row['world']:,}", f"`{row['layout']}`", *times, *groups]


def _checkpoint(row: dict[str, Any]) -> list[str]:
    times = [f"{row[key]:.2f}" for key in ("writing", "reading", "looking_up")]
    read = [f"{row['read_bytes_a_rank'] / 1e6:,.0f}", f"{row['read_bytes'] / 1e9:,.0f}"]
    sizes = [f"{row['files']:,}", f"{row['slices']:,}", f"{row['manifest_bytes'] / 1e6:,.2f}"]
    return [row["model"], f"{row['world']:,}", f"`{row['layout']}`", *sizes, *times, *read]


def write_docs() -> None:
    """Put the last result into the page."""
    text = PAGE.read_text(encoding="utf-8")
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    PAGE.write_text(f"{text[:start]}\n\n{page(found)}\n\n{text[end:]}", encoding="utf-8")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two worlds, printed alone")
    parser.add_argument("--checkpoints", action="store_true", help="the second table alone, into the last result")
    parser.add_argument("--write-docs", action="store_true", help="the last result into docs/evidence/thousands.md")
    args = parser.parse_args()
    if args.write_docs:
        write_docs()
        return 0
    if args.checkpoints:
        measure_checkpoints()
        return 0
    worlds, models = (WORLDS[:2], ()) if args.quick else (WORLDS, MODELS)
    rows = list(measure(worlds, models))
    if not args.quick:
        RESULT.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
